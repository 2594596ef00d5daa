"""How answers are asked for and shown: their end, their padding, their text."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.config import PPOConfig, load_config
from rlsys.data.start_assets import START_MODEL
from rlsys.protocol import DataProto
from rlsys.rewards.manager import Graded
from rlsys.types import SamplingParams
from rlsys.utils.errors import ConfigError
from tests.start_tokenizer import build_tokenizer
from tests.unit.trainer.asynchronous import LengthManager, prompt_groups
from trainer.generation import print_answers, sampling_meta, training_sampling, validation_sampling
from trainer.local_files import load_tokenizer
from trainer.staleness_window import StalenessWindow

ROLLOUT = "actor_rollout_ref.rollout"


def config(*argv: str) -> PPOConfig:
    return load_config(["--config-name=quickstart", *argv])


@pytest.mark.parametrize("made", [training_sampling, validation_sampling])
def test_tokens_that_end_an_answer_take_the_place_of_the_models(made: Callable[[PPOConfig], SamplingParams]) -> None:
    given = made(config(f"{ROLLOUT}.eos=[2,3]"))
    assert (given.stop_token_ids, given.ignore_eos) == ((2, 3), True)
    assert sampling_meta(given, pad_token_id=0, step=1)["stop_token_ids"] == (2, 3)
    one, none = made(config(f"{ROLLOUT}.eos=2")), made(config())
    assert (one.stop_token_ids, none.stop_token_ids, none.ignore_eos) == ((2,), (), False)
    endless = made(config(f"{ROLLOUT}.eos=2", f"{ROLLOUT}.ignore_eos=true"))
    assert (endless.stop_token_ids, endless.ignore_eos) == ((), True)


def test_rows_are_filled_up_by_the_token_that_was_asked_for(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(str(tmp_path))
    shutil.copy(START_MODEL / "config.json", tmp_path)
    model = config(f"actor_rollout_ref.model.path={tmp_path}").actor_rollout_ref.model
    assert load_tokenizer(model).pad_token_id == 0
    assert load_tokenizer(model, 3).pad_token_id == 3
    with pytest.raises(ConfigError, match=rf"{ROLLOUT}.padding=9999: the tokenizer in .* has ids up to"):
        load_tokenizer(model, 9999)


def test_a_reward_function_cannot_regroup_answers() -> None:
    class Renaming(LengthManager):
        def grade(self, data: DataProto) -> Graded:
            return replace(super().grade(data), extra={"uid": np.array(["one"] * len(data), dtype=object)})

    groups = prompt_groups(StalenessWindow(groups_per_step=1, max_staleness=1), max_tokens=8, manager=Renaming())
    groups.start()
    group = groups.open[0]
    with pytest.raises(ConfigError, match="'uid', by which answers are grouped: give it another name"):
        groups.grade([group])


def test_answers_are_printed_without_their_padding(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("12", add_special_tokens=False)["input_ids"]
    batch = DataProto.from_dict(
        {"responses": torch.tensor([[*ids, 0, 0]]), "response_mask": torch.tensor([[1] * len(ids) + [0, 0]])}
    )
    print_answers(batch, tokenizer)
    assert capsys.readouterr().out == f"--- answer 0: 12\n{ids}\n"
