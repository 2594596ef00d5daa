"""Vision-language models: packed rows against transformers' own forward pass, row by row, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.protocol import DataProto
from tests.engine_gradients import gradients
from tests.ranks import run_ranks
from tests.tiny_vision import MODELS, random_model, reference, vision_rows
from tests.unit.engines.common import nll


def engine_of(config: dict[str, Any], rows: int = 4, *, lora: int = 0, **options: Any) -> FSDPEngine:
    model = ModelConfig(
        override_config=config, enable_gradient_checkpointing=False, lora_rank=lora, **options.pop("model", {})
    )
    shard = ShardConfig(seed=1).model_copy(update={"dtype": "float64", "model_dtype": "float64"})
    return FSDPEngine(model, optim=OptimConfig(lr=1e-2), shard=shard, training=MicroBatches(rows=rows), **options)


@pytest.mark.parametrize("family", MODELS)
def test_packed_rows_have_the_log_probs_of_transformers_own_forward(family: str) -> None:
    rows = vision_rows(MODELS[family])
    expected = reference(random_model(MODELS[family]).double(), rows)
    for packed in (True, False):
        (scores,) = run_ranks(1, scored, MODELS[family], rows, packed)
        torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-6)


def scored(config: dict[str, Any], rows: DataProto, packed: bool) -> Tensor:
    return engine_of(config, model={"use_remove_padding": packed}).forward(rows, ("log_probs",))["log_probs"]


def grads(config: dict[str, Any], rows: int, sp_size: int = 1, **options: Any) -> dict[str, Tensor]:
    engine = engine_of(config, rows, sp_size=sp_size, **options)
    batch = vision_rows(config)
    share = len(batch) // engine.dp_size
    batch = batch[engine.dp_rank * share : (engine.dp_rank + 1) * share]
    engine.forward_backward(batch, nll)
    return gradients(engine)


@pytest.mark.parametrize("family", MODELS)
def test_gradients_depend_neither_on_the_packs_nor_on_the_ranks(family: str) -> None:
    (whole,) = run_ranks(1, grads, MODELS[family], 4)
    assert any("vision" in name or "visual" in name for name in whole)
    for world, rows, sp in ((1, 1, 1), (2, 1, 1), (2, 4, 2)):
        (other, _) = (*run_ranks(world, grads, MODELS[family], rows, sp), None)[:2]
        assert other.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023
