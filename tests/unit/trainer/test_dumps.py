"""Dumps beside the next step: whole when settled, in order, and never silent about what went wrong."""

import base64
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.config.schema.trainer import GradingDeadlinesConfig, TrainerConfig
from rlsys.protocol import DataProto
from rlsys.utils.errors import DeadlineError
from tests.start_tokenizer import build_tokenizer
from tests.unit.trainer.asynchronous import exit_code_after
from trainer.dumps import BackgroundDumps, dump


class Letters:
    """Token n is the n-th letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids)

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]


def batch_of(score: float) -> DataProto:
    rows = {
        "prompts": torch.tensor([[0, 1]]),
        "responses": torch.tensor([[2, 3]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "token_level_scores": torch.tensor([[0.0, score]]),
    }
    models = np.array([{"ground_truth": "cd"}], dtype=object)
    return DataProto.from_dict(rows, non_tensors={"reward_model": models})


def background_dumps(folder: Path, save_s: float = 60.0) -> BackgroundDumps:
    run = TrainerConfig(rollout_data_dir=str(folder), deadlines=GradingDeadlinesConfig(save_s=save_s))
    return BackgroundDumps(run, Letters())


def test_every_step_is_written_by_the_time_it_is_settled(tmp_path: Path) -> None:
    dumps = background_dumps(tmp_path)
    for step in range(1, 4):
        dumps.write(batch_of(float(step)), step)
    dumps.settle()
    lines = [json.loads((tmp_path / f"{step}.jsonl").read_text()) for step in range(1, 4)]
    assert [(line["input"], line["output"], line["score"]) for line in lines] == [("ab", "cd", n) for n in (1, 2, 3)]


def test_the_pieces_of_the_page_are_the_text_of_an_answer(tmp_path: Path) -> None:
    tokenizer, text = build_tokenizer(), "¿7 + 5? Twölf – 12 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    batch = batch_of(1.0)
    rows = {
        "prompts": batch.tensors["prompts"],
        "responses": torch.tensor([ids]),
        "attention_mask": torch.ones(1, 2 + len(ids), dtype=torch.int64),
        "token_level_scores": torch.zeros(1, len(ids)),
    }
    dump(DataProto.from_dict(rows, non_tensors=batch.non_tensor_batch), 1, tmp_path, tokenizer)
    packed = (tmp_path / "browser" / "1.texts.js").read_text().split('"')[1]
    (row,) = json.loads(zlib.decompress(base64.b64decode(packed)))["rows"]
    assert "".join(row["tokens"]) == row["output"] == text
    assert len(row["tokens"]) == len(ids)


def test_a_failure_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "browser").write_text("in the way")
    dumps = background_dumps(tmp_path)
    dumps.write(batch_of(1.0), 1)
    with pytest.raises(FileExistsError):
        dumps.write(batch_of(2.0), 2)
    dumps.settle()


def test_a_folder_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "browser").mkdir()
    os.mkfifo(tmp_path / "browser" / "steps.js")  # reading it waits for a writer
    dumps = background_dumps(tmp_path, save_s=0.3)
    dumps.write(batch_of(1.0), 1)
    with pytest.raises(DeadlineError, match=f"the folder {tmp_path} did not answer within 0.3 s at stage 'dump_roll"):
        dumps.write(batch_of(2.0), 2)
    dumps.write(batch_of(2.0), 2)  # not waited for again, nor queued behind the one that hangs
    (tmp_path / "browser" / "steps.js").write_text("steps([]);")
    dumps.settle()
    assert not (tmp_path / "2.jsonl").exists()


def test_a_folder_that_does_not_answer_does_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "browser").mkdir()
    os.mkfifo(tmp_path / "browser" / "steps.js")

    def work() -> None:
        dumps = background_dumps(tmp_path, save_s=0.1)
        dumps.write(batch_of(1.0), 1)
        with pytest.raises(DeadlineError):
            dumps.settle()

    assert exit_code_after(work) == 0
