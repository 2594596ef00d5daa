"""The documentation as a reader gets it: the site builds without a warning, figures and example are current."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import docs_figures, grpo_by_hand
from tests.e2e.conftest import Toy

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    pages = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 25
    assert not any("https://fonts." in page or "cdn." in page for page in pages)


def test_the_architecture_figure_shows_the_layers_of_today() -> None:
    assert (ROOT / "docs" / "figures" / "architecture.svg").read_text() == docs_figures.architecture()


def test_the_step_figure_has_a_box_for_each_call_of_the_second_step(tmp_path: Path) -> None:
    def span(process: int, name: str, start: int, duration: int) -> dict[str, object]:
        return {"name": name, "ph": "X", "ts": start, "dur": duration, "pid": process, "tid": 1}

    names = [
        {"name": "process_name", "ph": "M", "pid": number, "tid": 1, "args": {"name": f"{name} @ here"}}
        for number, name in enumerate(["controller", "actor 0"])
    ]
    first = [span(0, "step", 0, 10), span(0, "warm_up_only", 1, 5)]
    second = [span(0, "step", 20, 10), span(0, "update_actor", 21, 5), span(1, "update_actor", 22, 2)]
    (tmp_path / "timeline.json").write_text(json.dumps([*names, *first, *second]))
    picture = docs_figures.step(tmp_path / "timeline.json")
    assert picture.count(">update_actor<") == 2
    assert "warm_up_only" not in picture
    assert docs_figures.timeline(tmp_path / "timeline.json").count("<rect") == 1 + 5


def test_the_picture_of_the_terminal_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("rlsys: done\n")
    picture = docs_figures.terminal(tmp_path / "out.txt")
    assert "rlsys:" in picture
    assert "font-face" not in picture
    assert "cdn" not in picture


def test_grpo_by_hand_trains_and_exports(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(
        sys, "argv", ["grpo_by_hand.py", "--model", str(toy.model), "--steps", "2", "--out", str(tmp_path / "m")]
    )
    grpo_by_hand.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    assert all("reward" in line and "grad_norm" in line for line in lines)
    assert (tmp_path / "m" / "config.json").is_file()
