"""Prompts of a stream: their order, and a resume at any batch."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema.data import DataConfig, SFTDataConfig
from rlsys.data.dataset import RowStream
from rlsys.data.files import Row
from rlsys.data.rows import PromptRow
from rlsys.data.supervised import TokenizedText
from rlsys.utils.errors import ConfigError
from rlsys.utils.hub import open_rows
from trainer.prompts import training_prompts


def parse(row: Row) -> PromptRow | None:
    text = row.values["prompt"]
    return None if text == "4" else PromptRow(text, "mine", {}, {}, token_ids=[int(text)], is_truncated=text == "9")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("rows")
    for name, numbers in {"a": range(7), "b": range(7, 11)}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": str(n)}) for n in numbers))
    return str(folder / "a.jsonl"), str(folder / "b.jsonl")


def stream(files: tuple[str, ...], *, state: Mapping[str, Any] | None = None, **settings: Any) -> RowStream:
    data = DataConfig(train_files=files, streaming=True, **{"train_batch_size": 3, "shuffle_buffer_size": 4} | settings)
    made = RowStream(files, data, parse, data.gen_batch_size)
    if state is not None:
        made.load_state_dict(json.loads(json.dumps(state)))
    return made


def test_texts_are_streamed_as_prompts_are(files: tuple[str, str]) -> None:
    data = SFTDataConfig(train_files=files, streaming=True, train_batch_size=4, shuffle_buffer_size=3, shuffle=False)
    source = RowStream(files, data, lambda row: [TokenizedText([1], [int(row.values["prompt"])], [1])], 4)
    batches = [[source[number][0].response_ids for number in source.next().rows] for _ in range(3)]
    assert batches == [[[n % 11] for n in range(start, start + 4)] for start in (0, 4, 8)]


def texts(source: RowStream) -> list[int]:
    return [int(str(source[index].raw_prompt)) for index in source.next().rows]


def test_a_trainer_that_runs_again_takes_the_first_rows_again(files: tuple[str, str]) -> None:
    """As `fit` after an interrupt before the first checkpoint, and what was left out is counted again."""
    source = stream(files, shuffle=False)
    data = DataConfig(train_files=files, streaming=True)
    for _ in range(2):  # the row of 4 is left out when its block is read
        prompts = training_prompts(data, source, pad_token_id=0, restarts=False)
        assert [prompts.next().tensors["prompts"][:, -1].tolist() for _ in range(2)] == [[0, 1, 2], [3, 5, 6]]
        assert source.num_overlong == 1


def test_rows_come_in_order_over_and_over_without_those_that_are_too_long(files: tuple[str, str]) -> None:
    source = stream(files, shuffle=False)
    assert source.data_sources == ("mine",)
    once = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert [number for _ in range(7) for number in texts(source)] == [*once, *once, 0]
    assert source.next().epoch == 2
    assert [source.metrics()[f"data/{name}_prompts"] for name in ("overlong", "truncated")] == [2, 2]
    assert [row["prompt"] for row in islice(open_rows(files), 8)] == [str(n) for n in range(8)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resume_at_any_batch_continues_exactly(files: tuple[str, str], shuffle: bool) -> None:
    whole, states = stream(files, shuffle=shuffle), []
    batches = []
    for _ in range(9):
        states.append((whole.state_dict(), whole.metrics()))
        batches.append(texts(whole))
    for at, (state, metrics) in enumerate(states):
        resumed = stream(files, shuffle=shuffle, state=state)
        assert resumed.metrics() == metrics
        assert [texts(resumed) for _ in range(9 - at)] == batches[at:]
    if shuffle:
        assert sorted(number for batch in batches for number in batch)[:9] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert [texts(stream(files, seed=seed)) for seed in (1, 1, 2)].count(batches[0]) == 2


def test_other_rows_or_another_order_are_refused(files: tuple[str, str], tmp_path: Path) -> None:
    state = stream(files).state_dict()
    for other in (stream(files[:1]), stream(files, seed=7), stream(files, shuffle_buffer_size=5)):
        with pytest.raises(ConfigError, match=r"trainer\.resume_mode=disable"):
            other.load_state_dict(state)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="there are no rows"):
        stream((str(tmp_path / "empty.jsonl"),))
