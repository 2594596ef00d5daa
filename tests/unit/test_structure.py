"""The gates every commit passes: file and function size, import layers and circles, lint, format, types."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = [p for top in ("rlsys", "workers", "trainer", "scripts") for p in sorted((ROOT / top).rglob("*.py"))]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def test_no_file_is_longer_than_the_limit() -> None:
    long = {str(p.relative_to(ROOT)): n for p in PRODUCT if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long


def test_no_function_is_longer_than_the_limit() -> None:
    long = {}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert not long


def test_no_modules_import_each_other_not_even_inside_functions() -> None:
    graph = grimp.build_graph("rlsys", "workers", "trainer", exclude_type_checking_imports=True)
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["lint-imports", "--no-cache"],
        ["pyrefly", "check"],
    ],
    ids=["lint", "format", "layers", "types"],
)
def test_tool_is_content(command: list[str]) -> None:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
