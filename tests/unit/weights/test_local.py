"""The local executor notices what did not arrive."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.in_process import LocalReshard


def model_of(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False))


class Trainer:
    """A trainer rank that holds everything, or says that it holds only the first rows."""

    def __init__(self, *, partial: bool = False) -> None:
        self.tensors = {name: p.detach() for name, p in model_of(1).named_parameters()}
        self.partial = partial

    def weight_layout(self) -> WeightLayout:
        shards = []
        for name, tensor in self.tensors.items():
            shape = (1, *tensor.shape[1:]) if self.partial else tuple(tensor.shape)
            shards.append(Shard(Box(name, (0,) * tensor.ndim, shape), name, (0,) * tensor.ndim))
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return WeightLayout(0, "", tuple(shards), shapes, dict.fromkeys(shapes, "float32"))

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        yield list(self.tensors.items())


class Forgetful(HFRollout):
    """An engine that takes weights and keeps the old ones of one tensor."""

    def local_tensors(self) -> Mapping[str, Tensor]:
        kept = dict(super().local_tensors())
        return {**kept, "model.norm.weight": torch.full_like(kept["model.norm.weight"], 7.0)}

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        super().load([item for item in bucket if item[0] != "model.norm.weight"])


def test_weights_arrive_whole_or_not_at_all() -> None:
    trainer: Any = Trainer()
    good = HFRollout(model_of(2), context=EngineContext(load_format="dummy"))
    LocalReshard(trainer, good).push(5)
    assert all(torch.equal(good.local_tensors()[name], tensor) for name, tensor in trainer.tensors.items())
    assert (good.health()["version"], good.health()["quarantined"]) == (5, False)
    bad = Forgetful(model_of(2))
    with pytest.raises(WeightTransferError, match=r"'model\.norm\.weight': the received values differ"):
        LocalReshard(trainer, bad).push(5)
    assert (bad.health()["version"], bad.health()["quarantined"]) == (0, True)


def test_a_tensor_that_the_trainer_lacks_is_named() -> None:
    with pytest.raises(WeightTransferError, match="no rank of the trainer holds"):
        LocalReshard(cast(Any, Trainer(partial=True)), HFRollout(model_of(2)))
    trainer: Any = Trainer()
    del trainer.tensors["lm_head.weight"]
    with pytest.raises(WeightTransferError, match=r"no tensor 'lm_head\.weight'"):
        LocalReshard(trainer, HFRollout(model_of(2))).push(1)
    layout = Trainer().weight_layout()
    trainer = Trainer()
    trainer.weight_layout = lambda: replace(layout, full_shapes={**layout.full_shapes, "lm_head.weight": (21, 8)})
    with pytest.raises(WeightTransferError, match=r"two shapes: \(21, 8\)"):
        LocalReshard(trainer, HFRollout(model_of(2))).push(1)


class Packing(HFRollout):
    """An engine of which one tensor can be set by its own loader only."""

    def weight_layout(self) -> WeightLayout:
        layout = super().weight_layout()
        shards = tuple(shard for shard in layout.shards if shard.box.tensor != "model.norm.weight")
        return replace(layout, shards=shards, loader=("model.norm.weight",))


def test_tensors_in_loader_are_loaded_by_the_engine() -> None:
    trainer: Any = Trainer()
    trainer.tensors["model.norm.weight"] += 0.5
    engine = Packing(model_of(2), context=EngineContext(load_format="dummy"))
    LocalReshard(trainer, engine).push(5)
    assert all(torch.equal(engine.local_tensors()[name], tensor) for name, tensor in trainer.tensors.items())
    assert engine.health()["version"] == 5


def test_staging_for_a_loader_is_freed_after_a_push() -> None:
    staged = list[Any]()

    class Staging(Packing):
        def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
            staged.extend(tensor.untyped_storage()._weak_ref() for _, tensor in bucket)
            super()._load(bucket)

    local = LocalReshard(cast(Any, Trainer()), Staging(model_of(2)))
    for version in range(2):
        local.push(version)
        assert len(staged) == version + 1
        assert all(map(torch.UntypedStorage._expired, staged))


def test_a_sleeping_engine_frees_weights_of_which_a_push_holds_views() -> None:
    trainer, engine = Trainer(), HFRollout(model_of(2))
    views = engine.local_tensors()
    engine.device = "cuda"  # a sleeping engine of the CPU keeps its memory
    engine.sleep(["weights"])
    assert not sum(tensor.untyped_storage().nbytes() for tensor in views.values())
    engine.wake(["weights"])
    assert all(torch.equal(tensor, model_of(2).get_parameter(name)) for name, tensor in views.items())
    LocalReshard(cast(Any, trainer), engine).push(2)
    assert all(torch.equal(views[name], tensor) for name, tensor in trainer.tensors.items())
