"""The gates every commit passes: size, parameters, docstrings, names, words, import layers and circles, lint, types.

tests/structure.py measures; tests/structure.toml holds the limits, which only fall.
"""

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests import structure
from tests.structure import ROOT, limits


def test_the_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\n" + structure.figures())


def test_no_room_has_more_code_lines_than_its_limit() -> None:
    rooms, slack = limits()["rooms"], limits()["slack_code_lines"]
    over = {
        room: f"{lines} code lines, limit {rooms.get(room, {}).get('code', 0)}"
        for room, lines in structure.code_lines_by_room().items()
        if lines > rooms.get(room, {}).get("code", 0) + slack
    }
    assert not over, "move or remove code, or move the limit from another room in tests/structure.toml"


def test_all_rooms_together_stay_within_the_budget() -> None:
    assert sum(structure.code_lines_by_room().values()) <= limits()["total_code_lines"]


def test_no_file_is_longer_than_the_limit() -> None:
    long = {s.path: n for s in structure.library() if (n := len(s.lines)) > structure.MAX_FILE_LINES}
    assert not long


def test_no_function_is_longer_than_the_limit() -> None:
    long = {
        f"{source.path}:{function.name}": lines
        for source in structure.library()
        for function in structure.functions(source)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > structure.MAX_FUNCTION_LINES
    }
    assert not long


def test_no_function_has_more_parameters_than_the_limit() -> None:
    assert not set(structure.wide_functions()) - set(limits()["wide_functions"])


def test_public_functions_have_docstrings() -> None:
    assert not set(structure.functions_without_docstring()) - set(limits()["without_docstring"])


def test_a_class_name_has_one_meaning() -> None:
    repeated = {name: files for name, files in structure.classes_by_name().items() if len(files) > 1}
    assert not repeated.keys() - set(limits()["classes_defined_twice"]), repeated


def test_few_files_share_a_name() -> None:
    allowed = limits()["files_of_one_name"]
    repeated = {name: files for name, files in structure.files_by_name().items() if len(files) > allowed.get(name, 2)}
    assert not repeated


def test_words_we_do_not_use() -> None:
    rooms, slack = limits()["rooms"], limits()["slack_words"]
    over = {
        room: uses
        for room, uses in structure.words_by_room().items()
        if len(uses) > rooms.get(room, {}).get("words", 0) + slack
    }
    message = "\n".join(use for uses in over.values() for use in uses)
    assert not over, f"words that CONTRIBUTING.md asks not to use, more than tests/structure.toml allows:\n{message}"


def test_any_is_used_less_and_less() -> None:
    lines = structure.any_lines_by_room()
    assert lines.total() <= limits()["any_lines"], f"say what the value is, or object where it is passed on: {lines}"


def test_test_names_are_short_sentences() -> None:
    tests = [s.text for s in structure.sources() if s.path.startswith("tests/")]
    names = [name for text in tests for name in re.findall(r"def (test_\w+)", text)]
    assert not [name for name in names if len(name) > structure.MAX_TEST_NAME]


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
def test_tool_passes(command: list[str]) -> None:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
