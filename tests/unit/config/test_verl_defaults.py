"""Each default of verl's own configuration, given to us by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import PPOConfig
from rlsys.config.arguments import Arguments
from rlsys.config.load import load
from rlsys.config.overrides import Override
from rlsys.config.schema.jobs import SFTConfig
from rlsys.utils.errors import ConfigError

FILE = Path(__file__).parents[2] / "golden" / "verl_defaults.json"
MODEL = "models/deepseek-llm-7b-chat"
ROLLOUT = "actor_rollout_ref.rollout"
REFUSED = {
    f"{ROLLOUT}.tensor_model_parallel_size": "the hf engine runs a model in one process",
    "trainer.logger": "wandb is not installed; pip install -e '.[wandb]' or remove wandb",
}
"""What verl's defaults need beside them: an engine that is cut, and a library."""
TWO_NAMES = ("actor_rollout_ref.model.lora.alpha", "critic.model.lora.alpha")
"""verl has 16 under one name of the setting and 32 under the other, each for one of its training engines."""


def defaults(file: str) -> dict[str, Any]:
    """verl's values by key."""

    def leaves(tree: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{path}{name}.")
            else:
                yield f"{path}{name}", value

    return dict(leaves(json.loads(FILE.read_text())[file], ""))


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Override, ...]:
    """A home folder with the files that verl's defaults name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "data" / "rlhf" / "gsm8k"
    for folder in (data, tmp_path / MODEL):
        folder.mkdir(parents=True)
    (tmp_path / MODEL / "config.json").write_text('{"max_position_embeddings": 4096}')
    for name in ("train.parquet", "test.parquet"):
        (data / name).write_bytes(b"PAR1")
    return (Override("actor_rollout_ref.model.path", f"~/{MODEL}"),)


def refusal(*overrides: Override) -> str:
    try:
        load(Arguments(overrides=overrides), PPOConfig)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow  # two minutes
@pytest.mark.parametrize(("file", "count"), [("ppo_trainer", 843), ("ppo_megatron_trainer", 203)])
def test_each_default_of_verl_is_accepted_on_its_own(file: str, count: int, base: tuple[Override, ...]) -> None:
    values = defaults(file)
    assert len(values) == count
    answers = {key: refusal(*base, Override(key, value)) for key, value in values.items() if key not in REFUSED}
    assert {key: answer for key, answer in answers.items() if answer} == {}


def test_all_defaults_of_verl_are_accepted_together(base: tuple[Override, ...]) -> None:
    values = {key: value for key, value in defaults("ppo_trainer").items() if key not in (*REFUSED, *TWO_NAMES)}
    assert refusal(*base, *(Override(key, value) for key, value in values.items())) == ""


def test_defaults_of_verls_megatron_section_are_accepted_in_sft() -> None:
    section = "actor_rollout_ref.actor.megatron."
    values = {k: v for k, v in defaults("ppo_megatron_trainer").items() if k.startswith(section)}
    settings = [Override(key.replace(section, "engine."), value) for key, value in values.items()]
    loaded = load(Arguments(overrides=(Override("engine.strategy", "megatron"), *settings)), SFTConfig)
    assert loaded.config.engine.megatron.override_transformer_config["attention_backend"] == "flash"


def test_a_default_of_verl_that_needs_more_says_so(base: tuple[Override, ...]) -> None:
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    assert REFUSED[key] in refusal(*base, Override(key, defaults("ppo_trainer")[key]))
