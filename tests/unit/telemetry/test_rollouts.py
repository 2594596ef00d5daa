"""Rollout dumps in verl's format, and the page looked at through a real browser."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.telemetry.rollouts import browser_page, dump_rollouts, ragged, token_texts_of, token_texts_of_rows
from tests.unit.telemetry.browser import Browser

EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>\u2028 ${window.pwned=1} \ud800"
OUTPUTS = ["The answer is 6.\nDone", "It is 7", EVIL, ""]


def dump(directory: Path, step: int, **changed: Any) -> Path:
    pieces = [["The answer", " is", " 6", ".\n", "Done"], ["It", " is", " 7"], [EVIL], []]
    columns: dict[str, Any] = {
        "inputs": ["2*3?", "2*3?", "1+1?", "1+1?"],
        "outputs": OUTPUTS,
        "gts": ["6", "6", "2", "2"],
        "scores": [1.0, 0.1, 0.1, -1.0],
        "extras": {"acc": [1, 0, 0, 0], "format_reward": [0.1, 0.1, 0.1, 0.0], EVIL: ["a", "b", EVIL, None]},
        "token_texts": pieces,
        "token_values": {
            "token_ids": [[i + 5 for i in range(len(p))] for p in pieces],
            "log_probs": [[-0.01 * 10**i for i in range(len(p))] for p in pieces],
            "advantages": [[0.5] * 5, [-0.5, 0.0, -1.0], [-0.25], []],
        },
    }
    return dump_rollouts(directory, step=step, **{**columns, **changed})


def test_jsonl_has_verls_fields_and_the_tokens(tmp_path: Path) -> None:
    path = dump(tmp_path, 7)
    assert path == tmp_path / "7.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["output"] for row in rows] == OUTPUTS
    assert {k: rows[1][k] for k in ("input", "output", "gts", "score", "step", "acc", "format_reward")} == {
        "input": "2*3?",
        "output": "It is 7",
        "gts": "6",
        "score": 0.1,
        "step": 7,
        "acc": 0,
        "format_reward": 0.1,
    }
    assert rows[1]["token_ids"] == [5, 6, 7]
    assert rows[1]["log_probs"] == [-0.01, -0.1, -1.0]


def test_plain_dump_needs_no_tokens(tmp_path: Path) -> None:
    path = dump_rollouts(tmp_path, step=1, inputs=["q"], outputs=["a"], gts=[{"x": [1]}], scores=[math.nan])
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row == {
        "input": "q",
        "output": "a",
        "gts": {"x": [1]},
        "score": None,
        "step": 1,
        "_non_finite": {"score": "nan"},
    }


@pytest.mark.parametrize("column", ["outputs", "scores", "extras", "token_values"])
def test_columns_of_unequal_length_are_refused(tmp_path: Path, column: str) -> None:
    changed: Any = {"x": [[]]} if column in ("extras", "token_values") else [[]]
    with pytest.raises(ValueError, match="has 1 values for 4 samples"):
        dump(tmp_path, 1, **{column: changed})
    assert not list(tmp_path.iterdir())


def read_script(path: Path) -> Any:
    """The data of a `rlsysRollouts.x(...)` file; it must be one ASCII call and nothing else."""
    script = re.fullmatch(rb"rlsysRollouts\.(?:step|steps)\((.*)\);\n", path.read_bytes(), re.DOTALL)
    assert script
    assert script[1].isascii()
    return json.loads(script[1], parse_constant=lambda name: pytest.fail(name))


def test_page_data_lists_each_step_once_in_order_and_limits_the_samples(tmp_path: Path) -> None:
    for step in (3, 10, 2, 10):
        dump(tmp_path, step, max_browsable_rows=2)
    steps = read_script(tmp_path / "browser" / "steps.js")
    assert [s["step"] for s in steps] == [2, 3, 10]
    assert steps[0] == {"step": 2, "file": "browser/2.js", "rows": 4, "mean": 0.05, "min": -1.0, "max": 1.0}
    assert len(read_script(tmp_path / "browser" / "2.js")["rows"]) == 2
    assert len((tmp_path / "2.jsonl").read_bytes().splitlines()) == 4
    assert not list(tmp_path.rglob("*.tmp"))


def test_page_is_self_contained_and_never_writes_markup() -> None:
    page = browser_page()
    assert "SCRIPT_HASH" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert danger not in page
    assert not re.search(r"<[^>]+\son\w+=", page.split("<script>")[0])


def test_ragged_cuts_padding() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert ragged(values, torch.tensor([2, 0])) == [[1.0, 2.0], []]


def test_token_texts_join_to_the_whole_text() -> None:
    text = "naïve 日本 🎉 done"
    data = list(text.encode())

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    pieces = token_texts_of(data, decode)
    assert len(pieces) == len(data)
    assert "".join(pieces) == text
    assert pieces[2:4] == ["", "ï"]
    assert token_texts_of([], decode) == []
    assert "".join(token_texts_of([*data, 0xF0, 0x9F], decode)) == text + "\ufffd"


def test_token_texts_keep_the_space_a_tokenizer_strips_at_the_start() -> None:
    words = ["▁The", "▁end", "s", "▁."]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert token_texts_of([0, 1, 2, 3], decode) == ["The", " end", "s", " ."]


def test_rows_share_what_was_decoded() -> None:
    calls = []

    def decode(ids: list[int]) -> str:
        calls.append(ids)
        return "".join(f" w{i}" for i in ids)

    rows = [[1, 2, 3], [1, 2, 4], [9]]
    assert token_texts_of_rows(rows, decode, max_rows=2) == [[" w1", " w2", " w3"], [" w1", " w2", " w4"]]
    assert len(calls) == len({tuple(ids) for ids in calls})


def test_samples_beyond_the_token_texts_are_shown_plain(tmp_path: Path) -> None:
    dump(tmp_path, 1, token_texts=[["The answer is 6.\nDone"]])
    assert [row["tokens"] is None for row in read_script(tmp_path / "browser" / "1.js")["rows"]] == [False, *[True] * 3]


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    for step in (1, 2, 3):
        dump(tmp_path, step, scores=[1.0, step / 10, 0.1, -1.0])
    browser.console.clear()
    browser.open((tmp_path / "index.html").as_uri())
    browser.wait_for("document.querySelectorAll('#rows li').length")
    return browser


def scores(page: Browser) -> list[str]:
    return page.run("[...document.querySelectorAll('#rows .score')].map(e => e.textContent)")


def test_page_opens_on_the_last_step_and_shows_a_sample(page: Browser) -> None:
    assert page.run("document.getElementById('step').value") == "3"
    assert scores(page) == ["1", "0.3", "0.1", "-1"]
    assert page.run("document.getElementById('prompt').textContent") == "2*3?"
    assert page.run("document.getElementById('output').textContent") == OUTPUTS[0]
    aside = page.run("document.querySelector('aside').innerText")
    for part in ("format_reward", "acc", "their mean score\n0.65"):
        assert part in aside
    assert page.run("document.querySelectorAll('#trend circle').length") == 1
    assert page.console == []


def test_tokens_are_coloured_by_log_prob_or_advantage(page: Browser) -> None:
    background = "[...document.querySelectorAll('#output span')].map(e => e.style.background)"
    surprise = page.run(background)
    assert surprise[0] == ""
    assert surprise[3].startswith("rgba(var(--warm)")
    page.press("c")
    assert "advantages" in page.run("location.hash")
    assert all(c.startswith("rgba(var(--good)") for c in page.run(background))
    page.press("j")
    colours = page.run(background)
    assert colours[0].startswith("rgba(var(--bad)")
    assert colours[1] == ""
    page.press("c")
    assert set(page.run(background)) == {""}
    page.run("document.querySelector('#output span').dispatchEvent(new MouseEvent('mouseenter'))")
    assert page.run("document.getElementById('token').textContent") == (
        '"It"   position 0   id 5   log-prob -0.01   advantage -0.5'
    )


def test_keys_and_filters_choose_samples(page: Browser) -> None:
    page.press("ArrowLeft")
    page.wait_for("document.getElementById('step').value === '2' && location.hash.includes('step=2')")
    page.wait_for("document.querySelector('#rows li:nth-child(2) .score').textContent === '0.2'")

    def enter(field: str, text: str) -> None:
        page.run(f"(e => {{ e.value = {json.dumps(text)}; e.dispatchEvent(new Event('input')); }})({field})")

    enter("low", "0.15")
    assert scores(page) == ["1", "0.2"]
    enter("q", "it IS")
    assert scores(page) == ["0.2"]
    enter("q", "nowhere")
    assert "no sample matches" in page.run("document.getElementById('detail').textContent")
    enter("q", "")
    enter("low", "")
    enter("sort", "worst")
    assert scores(page) == ["-1", "0.1", "0.2", "1"]


def test_what_the_model_wrote_never_runs(page: Browser) -> None:
    page.press("j")
    page.press("j")
    page.wait_for("location.hash.includes('row=2')")
    shown = page.run("document.getElementById('output').textContent")
    assert shown.startswith("</script><script>window.pwned=1</script><img")
    assert page.run("window.pwned") is None
    assert page.run("document.images.length") == 0
    assert page.run("document.querySelectorAll('main script').length") == 0
    assert page.console == []


def test_even_injected_markup_could_neither_run_nor_call_home(page: Browser) -> None:
    page.run("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.pwned=1'>`)")
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.pwned=1'}))")
    page.run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/stolen'}))")
    page.wait_for("true")
    assert page.run("window.pwned") is None
    console = " ".join(page.console)
    assert "Executing inline script violates" in console
    assert re.search(r"http://127\.0\.0\.1:9/stolen.{0,40}violates", console)
