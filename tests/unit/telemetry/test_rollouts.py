"""Rollout dumps in verl's format, and the page looked at through a real browser."""

import base64
import io
import json
import math
import random
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlsys.telemetry.page import page as page_of
from rlsys.telemetry.rollouts import dump_rollouts, sampled_order, token_texts_of
from tests.timing import scaled_s
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
    path = dump(tmp_path / "a new" / "folder", 7)
    assert path == tmp_path / "a new" / "folder" / "7.jsonl"
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


def read_texts(path: Path) -> Any:
    """The texts of a `rlsysRollouts.texts(step, packed)` file."""
    script = re.fullmatch(rb'rlsysRollouts\.texts\(\d+, "([A-Za-z0-9+/=]+)"\);\n', path.read_bytes())
    assert script
    return json.loads(zlib.decompress(base64.b64decode(script[1])), parse_constant=lambda name: pytest.fail(name))


def test_page_data_lists_each_step_once_in_order(tmp_path: Path) -> None:
    for step in (3, 10, 2, 10):
        dump(tmp_path, step, about={"finish_reason": ["stop", "stop", "length", "abort"]})
    steps = read_script(tmp_path / "browser" / "steps.js")
    assert [s["step"] for s in steps] == [2, 3, 10]
    assert steps[0] == {"step": 2, "rows": 4, "kept": 4, "mean": 0.05, "min": -1.0, "max": 1.0}
    index = read_script(tmp_path / "browser" / "2.js")
    assert {k: index[k] for k in ("prompt", "score", "length", "unit", "kept", "parts", "about")} == {
        "prompt": [0, 0, 1, 1],
        "score": [1.0, 0.1, 0.1, -1.0],
        "length": [5, 3, 1, 0],
        "unit": "tokens",
        "kept": [0, 1, 2, 3],
        "parts": {"acc": [1, 0, 0, 0], "format_reward": [0.1, 0.1, 0.1, 0.0]},
        "about": {"finish_reason": ["stop", "stop", "length", "abort"]},
    }
    assert [text for _, text in index["prompts"]] == ["2*3?", "1+1?"]
    texts = read_texts(tmp_path / "browser" / "2.texts.js")
    assert [row["output"] for row in texts["rows"]] == OUTPUTS
    assert texts["rows"][1]["values"]["advantages"] == [-0.5, 0.0, -1.0]
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_sample_of_a_batch_has_extremes_and_every_prompt() -> None:
    groups = [n // 8 for n in range(800)]
    scores = [((n * 37) % 800) / 800 for n in range(800)]
    order = sampled_order(groups, scores, seed=5)
    assert sorted(order) == list(range(800))
    ranked = sorted(range(800), key=lambda n: scores[n])
    assert set(order[:16]) == {*ranked[:8], *ranked[-8:]}
    assert {groups[n] for n in order[:116]} == set(range(100))
    best = {g: max(range(g * 8, g * 8 + 8), key=lambda n: scores[n]) for g in range(100)}
    worst = {g: min(range(g * 8, g * 8 + 8), key=lambda n: scores[n]) for g in range(100)}
    assert {*best.values(), *worst.values()} <= set(order[:316])
    assert sum(n == best[groups[n]] for n in order[16:100]) < 42  # drawn at random, not the best
    assert order == sampled_order(groups, scores, seed=5) != sampled_order(groups, scores, seed=6)
    assert sorted(sampled_order([0, 0, 1], [math.nan, 1.0, math.inf], seed=0)) == [0, 1, 2]


class Counted(Sequence[Any]):
    """A column that counts the rows that are read."""

    def __init__(self, make: Any) -> None:
        self.make, self.read = make, set[int]()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: Any) -> Any:
        self.read.add(row)
        return self.make(row)


@pytest.mark.parametrize("max_mb", [0.3, 1.0, 100.0])
def test_a_dump_keeps_to_its_limit_and_reads_no_more_rows_than_it_keeps(tmp_path: Path, max_mb: float) -> None:
    draw = random.Random(3)
    words = [[f"{draw.randrange(10**6)} " for _ in range(200)] for _ in range(1000)]
    outputs, pieces = Counted(lambda row: "".join(words[row])), Counted(lambda row: words[row])
    path = dump_rollouts(
        tmp_path,
        step=1,
        inputs=[f"question {n // 8}" for n in range(1000)],
        outputs=outputs,
        gts=["g"] * 1000,
        scores=[draw.random() for _ in range(1000)],
        token_texts=pieces,
        token_values={
            "token_ids": [[draw.randrange(10**5) for _ in w] for w in words],
            "x": [[-0.123456] * 200] * 1000,
        },
        max_mb=max_mb,
    )
    written = sum(file.stat().st_size for file in (path, *(tmp_path / "browser").glob("1.*")))
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    (entry,) = read_script(tmp_path / "browser" / "steps.js")
    assert entry["rows"] == 1000
    assert entry["kept"] == len(rows) == len(read_texts(tmp_path / "browser" / "1.texts.js")["rows"])
    if max_mb == 100.0:
        assert len(rows) == 1000
        return
    assert 0.5 * max_mb < written / 1e6 <= max_mb
    assert len(outputs.read) <= len(rows) + 1
    with_tokens = [row for row in rows if "x" in row]
    assert 0 < len(with_tokens) <= len(pieces.read) < len(rows)


def test_page_is_self_contained_and_never_writes_markup() -> None:
    page = page_of("rollouts")
    assert "SCRIPT_HASH" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    for danger in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert danger not in page
    assert not re.search(r"<[^>]+\son\w+=", page.split("<script>")[0])


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


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    for step in (1, 2, 3):
        dump(tmp_path, step, scores=[1.0, step / 10, 0.1, -1.0])
    return opened(browser, tmp_path)


def opened(browser: Browser, folder: Path) -> Browser:
    browser.console.clear()
    browser.open((folder / "index.html").as_uri())
    browser.wait_for("typeof texts !== 'undefined' && texts.size && document.querySelectorAll('#rows li').length")
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


def image_part(colour: str, side: int) -> dict[str, Any]:
    stream = io.BytesIO()
    Image.new("RGB", (side, side // 2), colour).save(stream, "PNG")
    return {"type": "image", "sha": f"{colour}{side}".encode().hex(), "image": stream.getvalue()}


def test_a_prompt_shows_its_images_at_most_256_pixels_wide(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    images = [image_part("red", 60), image_part("blue", 60), image_part("red", 900)]
    parts = [[images[0]], [images[1]], [images[2], images[0]], []]
    asked = {"type": "text", "text": "Where is it?"}
    talks: list[Any] = [[{"role": "user", "content": [*part, asked]}] for part in parts]
    dump(folder, 1, inputs=["Where is it?"] * 4, messages=talks)
    files = {path.name: Image.open(path).size for path in (folder / "images").iterdir()}
    assert files == {f"{part['sha']}.png": size for part, size in zip(images, [(60, 30), (60, 30), (256, 128)])}
    assert read_script(folder / "browser" / "1.js")["prompt"] == [0, 1, 2, 3]  # one text, other images
    (folder / "images" / f"{images[1]['sha']}.png").unlink()
    opened(browser, folder)
    loaded = "[...document.querySelectorAll('#prompt img')].map(e => e.complete && e.naturalWidth)"
    browser.wait_for(f"{loaded}.join() === '60'")
    assert browser.run("document.getElementById('prompt').textContent").endswith("Where is it?")
    browser.press("j")
    browser.wait_for("document.getElementById('prompt').textContent.includes('[image not kept]')")
    browser.press("j")
    browser.wait_for(f"{loaded}.join() === '256,60'")
    assert "blocked" not in " ".join(map(str, browser.console))


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


def test_tokens_show_the_weight_version_that_drew_them(browser: Browser, tmp_path: Path) -> None:
    """Tokens that were not drawn have version -1 and no colour; 3 is the oldest version, 5 the newest."""
    versions = [[3, 4, 5, -1, 5], [3, 3, 3], [4], []]
    dump(tmp_path, 1, token_values={"token_ids": [[7] * len(row) for row in versions], "weight_versions": versions})
    browser.open((tmp_path / "index.html").as_uri())
    browser.wait_for("typeof texts !== 'undefined' && texts.size && document.querySelectorAll('#output span').length")
    shades = browser.run("[...document.querySelectorAll('#output span')].map(e => e.style.background)")
    assert [shades[0], shades[3]] == ["", ""]
    assert [float(shade.rpartition(",")[2].strip(" )")) for shade in (shades[1], shades[2])] == [0.375, 0.75]
    browser.run("document.querySelectorAll('#output span')[1].dispatchEvent(new MouseEvent('mouseenter'))")
    assert browser.run("document.getElementById('token').textContent").endswith("weight versions 4")


def test_keys_and_filters_choose_samples(page: Browser) -> None:
    page.press("ArrowLeft")
    page.wait_for("document.getElementById('step').value === '2' && location.hash.includes('step=2')")
    page.wait_for("texts.has(2) && document.querySelector('#rows li:nth-child(2) .score').textContent === '0.2'")

    def enter(field: str, text: str) -> None:
        page.run(f"(e => {{ e.value = {json.dumps(text)}; e.dispatchEvent(new Event('input')); }})({field})")

    enter("low", "0.15")
    assert scores(page) == ["1", "0.2"]
    enter("q", "it IS")
    assert scores(page) == ["0.2"]
    enter("q", "nowhere")
    assert "no sample matches" in page.run("document.getElementById('detail').textContent")
    page.run("document.getElementById('regex').click()")
    enter("q", "^it.is +[0-9]$")
    assert scores(page) == ["0.2"]
    enter("q", "(")
    assert page.run("document.getElementById('q').classList.contains('wrong')")
    enter("q", "")
    enter("low", "")
    enter("long", "1")
    assert scores(page) == ["0.1", "-1"]
    enter("long", "")
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


def test_prompts_with_their_scores_lead_to_the_samples(page: Browser) -> None:
    page.press("g")
    lines = page.run("[...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
    assert [line.split() for line in lines] == [
        ["2*3?", "0.65", "0.35", "4", "2"],
        ["1+1?", "-0.45", "0.55", "0.5", "2"],
    ]
    heights = "[...document.querySelectorAll('tbody .cells button')].map(cell => parseFloat(cell.style.height))"
    assert page.run(heights) == pytest.approx([100, 65, 55, 9])
    page.run("[...document.querySelectorAll('th button')].find(b => b.textContent === 'mean score').click()")
    page.run("[...document.querySelectorAll('th button')].find(b => b.textContent === 'mean score ↓').click()")
    page.run("document.querySelector('tbody tr').click()")
    assert scores(page) == ["0.1", "-1"]
    assert page.run("document.getElementById('prompt').textContent") == "1+1?"
    page.run("document.querySelector('#chips button').click()")
    assert len(scores(page)) == 4


def test_histogram_and_choices_filter(browser: Browser, tmp_path: Path) -> None:
    dump(tmp_path, 1, about={"data_source": ["a", "a", "b", "b"], "finish_reason": ["stop"] * 4})
    page = opened(browser, tmp_path)
    page.run("document.querySelectorAll('#histogram .hit')[1].dispatchEvent(new MouseEvent('click'))")
    assert scores(page) == ["0.1", "0.1"]
    choose = "(e => {{ e.value = '{}'; e.dispatchEvent(new Event('change')); }})(document.getElementById('{}'))"
    page.run(choose.format("b", "is_data_source"))
    assert scores(page) == ["0.1"]
    assert page.run("document.getElementById('is_finish_reason')") is None
    page.run("document.querySelectorAll('#histogram .hit')[1].dispatchEvent(new MouseEvent('click'))")
    assert scores(page) == ["0.1", "-1"]
    page.run(choose.format("format_reward", "part"))
    page.run(choose.format("0.05", "partlow"))
    assert scores(page) == ["0.1"]


def test_two_samples_side_by_side_and_a_prompt_over_steps(page: Browser) -> None:
    page.press("j")
    page.press("p")
    page.press("ArrowLeft")
    page.wait_for("document.querySelectorAll('main.pair section')[1]?.innerText.includes('step 2')")
    assert page.run("[...document.querySelectorAll('main.pair .big')].map(e => e.textContent)") == ["0.3", "1"]
    page.press("Escape")
    page.press("h")
    page.wait_for("document.querySelectorAll('.history circle').length === 6")
    page.run("document.querySelectorAll('.history circle')[1].dispatchEvent(new MouseEvent('click'))")
    page.wait_for("location.hash.includes('step=1') && document.getElementById('score').textContent === '0.1'")


def test_selection_is_exported_as_json_lines(page: Browser) -> None:
    page.run("window.download = (name, text) => { window.saved = [name, text]; }")
    page.run("(e => { e.value = '0.05'; e.dispatchEvent(new Event('input')); })(low)")
    page.run("document.getElementById('export').click()")
    name, text = page.run("window.saved")
    rows = [json.loads(line) for line in text.rstrip("\n").split("\n")]
    assert name == "rollouts-3.jsonl"
    assert [(row["step"], row["score"], row["output"]) for row in rows] == [
        (3, score, output) for score, output in zip([1.0, 0.3, 0.1], OUTPUTS)
    ]


def test_conversations_have_turns_and_folds(browser: Browser, tmp_path: Path) -> None:
    pieces = ["<think>", "hm", "</think>", "Call", "<tool_call>", "{}", "</tool_call>", "result 4", "So", " 4"]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    dump_rollouts(
        tmp_path,
        step=1,
        inputs=["chat"],
        outputs=["".join(pieces)],
        gts=["4"],
        scores=[1.0],
        messages=[
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
                {"role": "assistant", "content": "<think>sum</think>one moment", "tool_calls": [call]},
                {"role": "tool", "name": "add", "content": "3"},
            ]
        ],
        token_texts=[pieces],
        token_values={"token_ids": [list(range(10))], "turn_ids": [[0] * 7 + [-1] + [1] * 2]},
    )
    page = opened(browser, tmp_path)
    roles = "[...document.querySelectorAll('{} .role')].map(e => e.textContent)"
    assert page.run(roles.format("#prompt")) == ["system", "user", "assistant", "tool"]
    assert page.run(roles.format("#output")) == ["assistant", "environment", "assistant"]
    folds = "[...document.querySelectorAll('{} details')].map(e => e.firstChild.textContent)"
    assert page.run(folds.format("#prompt")) == ["thinking · 18 characters", "tool call · add", "tool result · add"]
    assert page.run(folds.format("#output")) == ["thinking · 3 tokens", "tool call · 3 tokens"]
    assert page.run("document.querySelector('#output details').open") is False
    page.press("f")
    assert page.run("document.querySelector('#output details').open") is True
    assert page.run("[...document.querySelectorAll('#output .turn')].map(e => e.innerText)")[1:] == [
        *("environment\nresult 4", "assistant\nSo 4")
    ]
    assert page.console == []


def test_five_thousand_long_rows_are_browsed_quickly(browser: Browser, tmp_path: Path) -> None:
    output = "word " * 1500
    dump_rollouts(
        tmp_path,
        step=1,
        inputs=[f"question {n // 8}" for n in range(5000)],
        outputs=[f"{output}{n}" for n in range(5000)],
        gts=["g"] * 5000,
        scores=[n % 7 / 7 for n in range(5000)],
        token_values={"token_ids": [range(1500)] * 5000},
        max_mb=8.0,
    )
    page = opened(browser, tmp_path)
    assert page.run("document.querySelectorAll('#rows li').length") < 60
    assert re.fullmatch(
        r"5,000 of 5,000 samples, \d{3} with text show all", page.run("document.getElementById('count').textContent")
    )
    page.run("document.querySelector('#count a').click()")
    page.run("document.getElementById('scroll').scrollTop = 1e9")
    page.wait_for("[...document.querySelectorAll('#rows li .about')].some(e => e.textContent.startsWith('#4999 '))")
    moves = "const start = performance.now(); for (let i = 0; i < 10; i++) move(1); return performance.now() - start;"
    assert page.run(f"(() => {{ {moves} }})()") < 1000 * scaled_s(3)
    page.press("g")
    assert page.run("document.querySelectorAll('tbody tr').length") == 400
    assert "625 prompts, the first 400 are shown" in page.run("document.getElementById('detail').textContent")
