"""A small engine, rows and a loss for the engine's own tests."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum
from rlsys.protocol import DataProto

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def random_model(config: Mapping[str, Any] = MODEL, **changes: Any) -> ModelConfig:
    """A model of random weights; without gradient checkpointing unless asked for."""
    return ModelConfig(override_config=dict(config), **{"enable_gradient_checkpointing": False, **changes})


def small_engine(
    model: ModelConfig | None = None,
    *,
    shard: ShardConfig = ShardConfig(seed=1),  # noqa: B008
    sp_size: int = 1,
    **options: Any,
) -> FSDPEngine:
    options = {"optim": OptimConfig(lr=1e-2), "training": MicroBatches(rows=2), **options}
    return FSDPEngine(model or random_model(), TrainEngineOptions(**options), shard=shard, sp_size=sp_size)


def small_rows(num: int = 4) -> DataProto:
    ids = torch.randint(1, 40, (num, 7), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "prompts": ids[:, :3],
            "responses": ids[:, 3:],
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "response_mask": ones[:, 3:],
        }
    )


def nll(outputs: Mapping[str, Tensor], rows: Any) -> LossSum:
    return LossSum(-sum(values.sum() for values in outputs.values()), float(rows["response_mask"].sum()))


def train(engine: FSDPEngine, **options: Any) -> Any:
    engine.forward_backward(small_rows(), nll, **options)
    return engine.optim_step()


def whole(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.weights(1 << 12) for name, tensor in bucket}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())
