"""The report of a run: made from its files alone, and looked at through a real browser."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rlsys.telemetry.jsonl import JsonlWriter
from rlsys.telemetry.page import page
from rlsys.telemetry.report import RunReport, thinned
from tests.unit.telemetry.browser import Browser

EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>"


def record(step: int) -> dict[str, Any]:
    validation = {"val-core/gsm8k/acc/mean@1": step / 40, "timing_s/testing": 3.0} if step % 4 == 0 else {}
    return {
        "step": step,
        "critic/score/mean": step / 20,
        "response_length/mean": 100.0 + step,
        "actor/entropy": 1.0 / step,
        "actor/ppo_kl": 0.0,
        "actor/grad_norm": math.nan if step == 5 else 1.0,
        "perf/throughput": 1000.0,
        "perf/time_per_step": 8.0,
        "perf/total_num_tokens": 500.0,
        "timing_s/source": 5.0,
        "timing_s/gen": 8.0,
        "timing_s/reward": 2.0,
        "timing_s/update_actor": 3.0,
        "timing_s/step": 8.0,
        EVIL: 1.0,
        **validation,
    }


def write_metrics(folder: Path, steps: int = 12) -> None:
    writer = JsonlWriter(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        writer.write(record(step))
    writer.close()


def embedded(path: Path) -> dict[str, Any]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert data
    return json.loads(data[1], parse_constant=lambda name: pytest.fail(name))


def test_long_runs_are_thinned_to_means() -> None:
    records = [{"step": s, "a": float(s), **({"rare": 5.0} if s == 4 else {}), "b": math.inf} for s in range(1, 11)]
    steps, columns, every = thinned(records, max_points=4)
    assert (steps, every) == ([3, 6, 9, 10], 3)
    assert columns == {"a": [2.0, 5.0, 8.0, 10.0], "rare": [None, 5.0, None, None]}
    assert thinned(records[:4], max_points=4) == (
        [1, 2, 3, 4],
        {"a": [1.0, 2.0, 3.0, 4.0], "rare": [None] * 3 + [5.0]},
        1,
    )
    assert thinned([]) == ([], {}, 1)


def test_report_links_the_files_that_exist(tmp_path: Path) -> None:
    folder, rollouts = tmp_path / "my run", tmp_path / "dumps"
    for path in (folder, rollouts):
        path.mkdir()
    (rollouts / "index.html").touch()
    (folder / "memory.txt").touch()
    (folder / "train.log").touch()
    write_metrics(folder)
    path = RunReport(
        folder, links={"rollouts": str(rollouts / "index.html"), "validation": "nowhere/index.html"}
    ).write()
    data = embedded(path)
    assert data["title"] == "my run"
    assert dict(data["links"]) == {
        "rollouts": (rollouts / "index.html").as_uri(),
        "metrics": "metrics.jsonl",
        "memory": "memory.txt",
        "log": "train.log",
    }
    assert data["columns"]["actor/grad_norm"][3:6] == [1.0, None, 1.0]


def test_report_of_a_run_without_steps_and_of_a_half_written_file(tmp_path: Path) -> None:
    assert embedded(RunReport(tmp_path).write())["steps"] == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a')
    assert embedded(RunReport(tmp_path).write())["columns"] == {"a": [2.0]}


def test_a_running_report_is_rewritten_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    report = RunReport(tmp_path, title="run", total_steps=20)
    report.update()
    write_metrics(tmp_path, 3)
    for _ in range(50):
        report.update()
    assert (embedded(tmp_path / "index.html")["steps"], embedded(tmp_path / "index.html")["running"]) == ([], True)
    report.write()
    assert (embedded(tmp_path / "index.html")["steps"], embedded(tmp_path / "index.html")["running"]) == (
        [1, 2, 3],
        False,
    )
    assert not list(tmp_path.glob("*.tmp"))


def test_page_is_self_contained_and_never_writes_markup() -> None:
    text = page("report")
    assert "SCRIPT_HASH" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert danger not in text


@pytest.fixture
def report(browser: Browser, tmp_path: Path) -> Browser:
    write_metrics(tmp_path)
    path = RunReport(tmp_path, "mine " + EVIL, 20).write(running=True)
    browser.console.clear()
    browser.open(path.as_uri())
    browser.wait_for("document.querySelectorAll('.card').length")
    return browser


def titles(page: Browser) -> list[str]:
    return page.run("[...document.querySelectorAll('.card .head button')].map(e => e.textContent)")


def legend(page: Browser, title: str) -> str:
    cards = f"[...document.querySelectorAll('.card')].find(c => c.querySelector('button').textContent === {title!r})"
    return page.run(f"{cards}.querySelector('.legend').innerText")


def test_report_shows_the_curves_that_the_run_has(report: Browser) -> None:
    assert titles(report) == [
        *("Reward", "Validation", "Response length", "Entropy", "Gradient norm"),
        *("Time by stage", "Throughput"),
    ]
    text = report.run("document.body.innerText")
    for part in ("step 12 of 20", "0.05 →0.6", "best 0.3 at step 12", "0 in all steps: kl", "1:04 min left"):
        assert part in text
    assert report.run("document.querySelectorAll('.card polyline.line').length") == 6
    assert report.run("window.pwned") is None
    assert report.console == []


def test_time_by_stage_counts_no_second_twice(report: Browser) -> None:
    """Of the 10 s of gen and reward 5 are validation; what belongs to the step's source is split as 8 to 2."""
    assert legend(report, "Time by stage").split() == ["gen", "4", "update_actor", "3", "reward", "1", "testing", "3"]


def test_a_second_run_is_laid_over_the_first(report: Browser) -> None:
    lines = "\n".join(json.dumps({"step": s, "critic/score/mean": 0.5}) for s in (1, 2, 3)) + '\n{"step": 4, "cri'
    drop = f"const t = new DataTransfer(); t.items.add(new File([{json.dumps(lines)}], 'metrics.jsonl'));"
    report.run(f"(() => {{ {drop} document.dispatchEvent(new DragEvent('drop', {{ dataTransfer: t }})); }})()")
    report.wait_for("document.querySelector('#runs input')?.value === 'metrics.jsonl'")
    report.run(
        "(e => { e.value = 'lr 1e-5'; e.dispatchEvent(new Event('change')); })(document.querySelector('#runs input'))"
    )
    assert report.run("document.querySelector('#runs input').value") == "lr 1e-5"
    assert "lr 1e-5" in report.run("document.querySelector('th:last-child').textContent")
    assert legend(report, "Reward").split() == ["score", "0.6", "0.5"]
    assert legend(report, "Entropy").split() == ["entropy", "0.08333"]
    report.run("document.querySelector('#runs button').click()")
    assert legend(report, "Reward").split() == ["score", "0.6"]


def test_keys_choose_axis_smoothing_and_metric(report: Browser) -> None:
    report.press("x")
    assert "axis=tokens" in report.run("location.hash")
    report.press("s")
    assert report.run("document.querySelectorAll('.card polyline.raw').length") > 0
    report.run("(e => { e.value = 'response_'; e.dispatchEvent(new Event('input')); })(q)")
    assert titles(report) == ["response_length/mean"]
    report.run("document.getElementById('q').blur()")
    report.press("Escape")
    assert "Reward" in titles(report)


def test_an_evaluation_is_a_table(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps({"val-core/gsm8k/acc/mean@1": 0.25, "val-aux/x": 3.0}))
    browser.open(RunReport(tmp_path, "evaluation").write().as_uri())
    browser.wait_for("document.querySelectorAll('table').length")
    assert browser.run("document.querySelector('table').innerText").split() == [
        *("metric", "evaluation", "gsm8k/acc/mean@1", "0.25")
    ]
