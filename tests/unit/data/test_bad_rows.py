"""Every kind of bad row is refused with file and row, or skipped and counted, and never slips through."""

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlsys.config.schema.data import PromptsConfig
from rlsys.data.dataset import PromptDataset
from rlsys.data.rows import read_prompt_row
from rlsys.utils.errors import ConfigError, DataError
from tests.start_tokenizer import build_tokenizer

GOOD: dict[str, Any] = {
    "data_source": "rlsys/arithmetic",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
HEAD = "prompt,data_source,ground_truth"
CONFIG = PromptsConfig(max_prompt_length=64)
SKIP = PromptsConfig(max_prompt_length=64, bad_rows="skip")
tokenizer = cache(build_tokenizer)


def load(path: Path, config: PromptsConfig = CONFIG) -> PromptDataset:
    return PromptDataset.load(str(path), tokenizer(), config)


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != key}


def asking(*messages: Any) -> dict[str, Any]:
    return {**GOOD, "prompt": list(messages)}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# name: (row as a value or as the bytes of its line, what the message must say)
BAD_LINES: dict[str, tuple[Any, str]] = {
    "prompt missing": (without("prompt"), "'prompt' is missing"),
    "prompt null": ({**GOOD, "prompt": None}, "'prompt' is null"),
    "prompt a number": ({**GOOD, "prompt": 5}, "must be text or a list"),
    "prompt an object": ({**GOOD, "prompt": user("x")}, "must be text or a list"),
    "prompt blank": ({**GOOD, "prompt": " \n"}, "blank"),
    "prompt without messages": ({**GOOD, "prompt": []}, "empty list"),
    "prompt with NUL": ({**GOOD, "prompt": "a\0b"}, "NUL"),
    "prompt of 10 MB": ({**GOOD, "prompt": "x" * 10_000_000}, "characters"),
    "prompt too long": ({**GOOD, "prompt": "x" * 100}, "max_prompt_length=64"),
    "row of 20 MB": ({**GOOD, "note": "x" * 20_000_000}, "too long for one row"),
    "message a text": (asking("hello"), "message 0 must be"),
    "message of mixed parts": (asking(user([{"type": "text", "text": "a"}, "b"])), "'content' must be text"),
    "message null": (asking(user("a"), None), "message 1 must be"),
    "message without role": (asking({"content": "a"}), "no 'role'"),
    "message without content": (asking({"role": "user"}), "no 'content'"),
    "message with null content": (asking(user(None)), "no 'content'"),
    "message with a number": (asking(user(12)), "'content' must be text"),
    "message with parts": (asking(user([{"type": "audio"}])), "'audio' is not supported"),
    "part of no type": (asking(user([{"type": ["text"], "text": "a"}])), "\"['text']\" is not supported"),
    "part with a number": (asking(user([{"type": "text", "text": 5}])), "'content' must be text"),
    "image part without an image": (asking(user([{"type": "image"}])), "has 0 images and the prompt 1 times <image>"),
    "content a number in a list": (asking(user([1])), "'content' must be text"),
    "message role a number": (asking({"role": 1, "content": "a"}), "'role' must be text"),
    "message role unknown": (asking({"role": "human", "content": "a"}), "'human' is not one of"),
    "user blank": (asking({"role": "system", "content": "a"}, user("  ")), "blank"),
    "all messages blank": (asking({"role": "system", "content": ""}), "all messages are blank"),
    "data_source missing": (without("data_source"), "'data_source' is missing"),
    "data_source null": ({**GOOD, "data_source": None}, "'data_source' is null"),
    "data_source a list": ({**GOOD, "data_source": ["a"]}, "'data_source' must be text"),
    "data_source blank": ({**GOOD, "data_source": ""}, "'data_source' is blank"),
    "reward_model missing": (without("reward_model"), "'reward_model' is missing"),
    "reward_model null": ({**GOOD, "reward_model": None}, "'reward_model' is null"),
    "reward_model a text": ({**GOOD, "reward_model": "2"}, "'reward_model' must be"),
    "ground_truth missing": ({**GOOD, "reward_model": {"style": "rule"}}, "no 'ground_truth'"),
    "ground_truth null": ({**GOOD, "reward_model": {"ground_truth": None}}, "no 'ground_truth'"),
    "style a number": ({**GOOD, "reward_model": {"style": 1, "ground_truth": "2"}}, "style must be text"),
    "extra_info a text": ({**GOOD, "extra_info": "x"}, "'extra_info' must be an object"),
    "extra_info a list": ({**GOOD, "extra_info": [1]}, "'extra_info' must be an object"),
    "ability a number": ({**GOOD, "ability": 3}, "'ability' must be text"),
    "images": ({**GOOD, "images": ["a.png"]}, "images"),
    "videos": ({**GOOD, "videos": ["a.mp4"]}, "put <video> where each video stands"),
    "audios": ({**GOOD, "audios": ["a.wav"]}, "rows with audios are not supported"),
    "audios a number": ({**GOOD, "audios": 5}, "rows with audios are not supported"),
    "half a surrogate pair": (b'{"data_source": "a", "prompt": "\\ud800"}', "not valid Unicode"),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', "not UTF-8 at byte 12"),
    "Latin-1": ('{"prompt": "é"}'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "UTF-16"),
    "not JSON": (b"hello", "not valid JSON"),
    "single quotes": (b"{'prompt': 'a'}", "not valid JSON"),
    "no bracket at the end": (b'{"prompt": "a"', "not valid JSON: Expecting ',' delimiter at column 15"),
    "two rows on a line": (b'{"prompt": "a"} {"prompt": "b"}', "not valid JSON"),
    "trailing comma": (b'{"prompt": "a",}', "not valid JSON"),
    "unescaped tab": (b'{"prompt": "a\tb"}', "not valid JSON"),
    "a list": (b'["prompt"]', "must be an object, this is a list; a file that is one JSON array must end in .json"),
    "a number": (b"17", "must be an object"),
    "null": (b"null", "must be an object, this is null"),
    "NaN": (b'{"prompt": NaN}', "NaN is not JSON"),
    "Infinity": (b'{"prompt": -Infinity}', "Infinity is not JSON"),
    "key twice": (b'{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice"),
    "nested too deeply": (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too deeply"),
    "huge integer": (b'{"prompt": ' + b"9" * 5000 + b"}", "integer"),
}


def as_line(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_refused_by_name_or_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    row, message = BAD_LINES[kind]
    path = tmp_path / "rows.jsonl"
    good = as_line(GOOD)
    path.write_bytes(good + b"\n\n" + as_line(row).replace(b"\n", b"") + b"\n" + good + b"\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: ") as caught:
        load(path)
    assert message in str(caught.value)
    dataset = load(path, SKIP)
    assert [row.index for row in dataset] == [0, 1]
    assert [(Path(b.file).name, b.place) for b in dataset.bad_rows] == [("rows.jsonl", "line 3")]
    assert dataset.metrics()["data/bad_rows"] == 1
    only_bad = tmp_path / "only.jsonl"
    only_bad.write_bytes(as_line(row).replace(b"\n", b"") + b"\n")
    with pytest.raises(DataError, match=r"only\.jsonl"):
        load(only_bad, SKIP)


def test_a_file_that_ends_within_a_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(as_line(GOOD) + b"\n" + as_line(GOOD)[:-20])
    with pytest.raises(DataError, match=r"line 2: .*the file ends within this line"):
        load(path)
    assert len(load(path, SKIP)) == 1


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def wrong_utf8(path: Path) -> None:
    table = pa.table({**{k: [v] * 3 for k, v in without("prompt").items()}})
    raw = pa.array([b"1+1=", b"\xff\xfe", b"2+2="], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(table.append_column("prompt", text), path)


def broken_page(path: Path) -> None:
    rows = [{**GOOD, "prompt": f"{i}+{i}="} for i in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100, compression="snappy", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)


def cut_parquet(path: Path) -> None:
    write_parquet(path, [GOOD] * 3)
    path.write_bytes(path.read_bytes()[:-100])


def text(content: str | bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def bad_footer(path: Path) -> None:
    write_parquet(path, [GOOD] * 3)
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<i", 2**31 - 1) + b"PAR1")


def bad_state(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [{"filename": 5}]}')


BAD_FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut parquet": ("a.parquet", cut_parquet, "whole file: not a readable parquet"),
    "parquet with a bad footer": ("a.parquet", bad_footer, "whole file: not a readable parquet"),
    "parquet that is text": ("a.parquet", text("hello"), "whole file: not a readable parquet"),
    "empty parquet file": ("a.parquet", text(b""), "whole file: not a readable parquet"),
    "parquet without rows": ("a.parquet", lambda p: pq.write_table(pa.table({"a": []}), p), "it has no rows"),
    "parquet with a broken page": ("a.parquet", broken_page, "rows 100 to 199: the row group cannot be read"),
    "parquet not UTF-8": ("a.parquet", wrong_utf8, "row 1: the text is not UTF-8"),
    "parquet with null prompt": (
        "a.parquet",
        lambda p: write_parquet(p, [GOOD, {**GOOD, "prompt": None}, GOOD]),
        "row 1: column 'prompt' is null",
    ),
    "parquet with bytes": (
        "a.parquet",
        lambda p: write_parquet(p, [{**GOOD, "prompt": b"1+1="}]),
        "row 0: column 'prompt' must be text",
    ),
    "parquet with numbers": (
        "a.parquet",
        lambda p: write_parquet(p, [{**GOOD, "prompt": 5}]),
        "row 0: column 'prompt' must be text",
    ),
    "parquet with NaN truth": (
        "a.parquet",
        lambda p: write_parquet(p, [{**GOOD, "reward_model": {"ground_truth": float("nan")}}]),
        "row 0: column 'reward_model': its ground_truth is nan",
    ),
    "parquet with an unknown time zone": (
        "a.parquet",
        lambda p: pq.write_table(
            pa.Table.from_pylist([GOOD]).append_column("at", pa.array([1], pa.timestamp("us", tz="Mars/Olympus"))), p
        ),
        "row 0: a value cannot be read: 'Mars/Olympus'",
    ),
    "parquet with a column twice": (
        "a.parquet",
        lambda p: pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"]), p),
        "'prompt' occurs twice",
    ),
    "saved dataset with a wrong state": ("saved", bad_state, "whole file: its state.json is broken"),
    "empty jsonl": ("a.jsonl", text(b""), "it has no rows"),
    "jsonl of blank lines": ("a.jsonl", text(b"\n \r\n"), "it has no rows"),
    "semicolons": ("a.csv", text(HEAD.replace(",", ";")), "its columns must be separated by commas: 'prompt;"),
    "cut json": ("a.json", text(json.dumps([GOOD, GOOD])[:-30]), "whole file: not valid JSON"),
    "json with a text in it": ("a.json", text(json.dumps([GOOD, "x"])), "row 1: a row must be"),
    "empty json list": ("a.json", text("[]"), "it has no rows"),
    "csv with too few cells": ("a.csv", text(f"{HEAD}\na,b,c\nd,e\n"), "line 3: it has 2 cells"),
    "csv with too many cells": ("a.csv", text("prompt,data_source\na,b,c\n"), "line 2: it has 3 cells"),
    "csv with an open quote": ("a.csv", text('prompt,data_source\n"a,b\n'), "line 2: unexpected end"),
    "csv with text after a quote": ("a.csv", text('prompt,data_source\n"a"b,c\n'), "line 2: "),
    "csv not UTF-8": ("a.csv", text(b"prompt,data_source,ground_truth\n\xff,b,c\n"), "line 2: the text is not UTF-8"),
    "csv with a column twice": ("a.csv", text("prompt,prompt\na,b\n"), "'prompt' occurs twice"),
    "csv with an empty cell": ("a.csv", text(f"{HEAD}\n,b,c\n"), "line 2: column 'prompt' is null"),
    "csv with only a header": ("a.csv", text("prompt,data_source\n"), "it has no rows"),
    "empty csv": ("a.csv", text(b""), "it has no rows"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused_with_its_place_or_skipped(kind: str, tmp_path: Path) -> None:
    name, write, message = BAD_FILES[kind]
    path = tmp_path / name
    write(path)
    with pytest.raises(DataError) as caught:
        load(path)
    assert f"{path}, " in str(caught.value)
    assert message in str(caught.value)
    other = tmp_path / "good.jsonl"
    other.write_bytes(as_line(GOOD))
    dataset = PromptDataset.load([str(path), str(other)], tokenizer(), SKIP)
    assert len(dataset) >= 1
    assert any(message in str(bad) for bad in dataset.bad_rows)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.parquet", "file not found"),
        ("hdfs://host/train.parquet", "only local files"),
        ("rows.txt", "rows are read from .parquet"),
        ("folder", "no state.json.*; set a file$"),
        ("shards", r"no state.json.*; set a list of files, \[.*/shards/0.jsonl,.*/shards/1.jsonl,...\]"),
        ("splits", "set one of them: .*/splits/train"),
    ],
)
def test_a_file_that_cannot_be_meant_is_a_config_error_whatever_the_policy(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "shards").mkdir()
    for shard in ("0.jsonl", "1.jsonl", "2.jsonl"):
        (tmp_path / "shards" / shard).write_bytes(as_line(GOOD))
    (tmp_path / "splits" / "train").mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    file = name if "://" in name else str(tmp_path / name)
    for config in (CONFIG, SKIP):
        with pytest.raises(ConfigError, match=message):
            PromptDataset.load(file, tokenizer(), config)


def test_a_chat_template_that_refuses_a_row_makes_it_a_bad_row(tmp_path: Path) -> None:
    strict = build_tokenizer()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_line(GOOD) + b"\n" + as_line(asking({"role": "system", "content": "s"}, user("a"))))
    with pytest.raises(DataError, match=r"line 2: the chat template rejects the messages: TemplateError: no system"):
        PromptDataset.load(str(path), strict, CONFIG)
    assert len(PromptDataset.load(str(path), strict, SKIP)) == 1


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(100000000) %}x{% endfor %}", "OverflowError"),
    ],
)
def test_a_chat_template_that_fails_makes_bad_rows(template: str, problem: str, tmp_path: Path) -> None:
    broken = build_tokenizer()
    broken.chat_template = template
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_line(GOOD) + b"\n")
    with pytest.raises(DataError, match=rf"line 1: the chat template rejects the messages: {problem}"):
        PromptDataset.load(str(path), broken, CONFIG)


def test_harmless_oddities_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    line = as_line({**GOOD, "prompt": "é\u2028\U0001f600", "extra_info": None, "unknown": {"a": [1, None]}})
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line + b"\r\n" + line)
    dataset = load(path)
    assert len(dataset) == 3
    assert dataset[0].raw_prompt == "é\u2028\U0001f600"
    assert dataset[0].fields == {"unknown": {"a": [1, None]}}
    assert dataset[0].extra_info == {}
    csv_path = tmp_path / "odd.csv"
    csv_path.write_bytes(b'\xef\xbb\xbfprompt,data_source,ground_truth\r\n"a\nb, ""c""",src,2\r\n')
    assert load(csv_path)[0].raw_prompt == 'a\nb, "c"'


def test_what_stands_for_nothing_is_read() -> None:
    """No audio, a call of a tool without words, and a row's own source where another would do for the rest."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    values = asking(user("1+1="), called) | {"audios": []}
    row = read_prompt_row(values, CONFIG, source="custom")
    assert (row.data_source, row.raw_prompt[1]["content"]) == ("rlsys/arithmetic", "")
    assert read_prompt_row(without("data_source"), CONFIG, source="custom").data_source == "custom"
    both = {**GOOD, "ground_truth": "9"}
    assert read_prompt_row(both, CONFIG).reward_model["ground_truth"] == "2"
    without_images = read_prompt_row(asking(user("what does <image> mean?")), CONFIG)
    assert (without_images.images, without_images.raw_prompt[0]["content"]) == ((), "what does <image> mean?")


def test_a_text_prompt_has_its_images_where_the_markers_stand() -> None:
    row = {**GOOD, "prompt": "<image> or <image>?", CONFIG.image_key: ["a.png", "b.png"]}
    assert read_prompt_row(row, CONFIG).images == ("a.png", "b.png")
    with pytest.raises(ValueError, match="has 1 images and the prompt 2 times <image>"):
        read_prompt_row(row | {CONFIG.image_key: ["a.png"]}, CONFIG)


def test_a_video_of_a_content_part_keeps_its_settings() -> None:
    video = {"video": "a.mp4", "fps": 2.0}
    row = read_prompt_row(asking(user([{"type": "video", **video}, {"type": "text", "text": " what?"}])), CONFIG)
    assert (row.images, row.raw_prompt[0]["content"]) == ((video,), "<video> what?")
