"""A model that Megatron cannot take is refused before any worker starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import ModelConfig
from rlsys.utils.errors import ConfigError
from tests.contracts.train_engine import MODELS
from workers.build import check_megatron_model


@pytest.mark.parametrize(
    ("model", "sizes", "says"),
    [
        ("qwen2-tied", {"tensor_model_parallel_size": 3}, "4 attention heads are not divisible"),
        ("qwen2-tied", {"pipeline_model_parallel_size": 4}, "2 layers cannot be split"),
        ("qwen3-moe", {"expert_model_parallel_size": 3}, "4 experts are not divisible"),
        ("qwen3-window", {}, "sliding"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: str, sizes: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    with pytest.raises(ConfigError, match=says) as error:
        check_megatron_model(
            "critic.megatron", ModelConfig(path=str(tmp_path)), MegatronConfig(full_determinism=False, **sizes)
        )
    assert str(error.value).startswith("critic.megatron: ")


def test_what_can_be_cut_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-moe"]))
    sizes = MegatronConfig(full_determinism=False, tensor_model_parallel_size=2, expert_model_parallel_size=4)
    check_megatron_model("critic.megatron", ModelConfig(path=str(tmp_path)), sizes)
