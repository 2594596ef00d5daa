"""The documents name files, links, settings and functions that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / name for name in ("concepts.md", "debug.md", "oom.md"))]
SECTIONS = "data|actor_rollout_ref|critic|algorithm|reward|trainer"


def code_spans(text: str) -> list[str]:
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    return [*blocks, *re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_point_at_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_telemetry_names_exist(document: Path) -> None:
    spans = " ".join(code_spans(document.read_text()))
    for module, name in re.findall(r"(rlsys\.telemetry\.\w+)\.(\w+)", spans):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for module, names in re.findall(r"from (rlsys\.telemetry\.\w+) import ([\w, ]+)", spans):
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module}.{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_settings_exist(document: Path) -> None:
    keys = pytest.importorskip("rlsys.config.introspect")
    schema = importlib.import_module("rlsys.config").PPOConfig
    known = {*keys.leaves(schema), *keys.sections(schema)}
    text = "\n".join(code_spans(document.read_text()))
    named = set(re.findall(rf"(?<![\w./])((?:{SECTIONS})(?:\.[a-z_]+)+)(?=[=\s`,)]|$)", text, re.MULTILINE))
    modules = {"trainer.main_ppo", "data.batch"}
    assert not {key for key in named - modules if key not in known}
