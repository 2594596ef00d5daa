"""AReaL's names, used as its documentation uses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlsys import areal
from rlsys.config.schema.actor import ActorConfig
from tests.ranks import run_ranks
from tests.unit.engines.common import small_engine, small_rows, whole


def uploads(folder: Path) -> tuple[int, bool, bool]:
    engine = small_engine()
    actor = areal.FSDPPPOActor(engine, ActorConfig())
    before = actor.compute_logp(small_rows()).tensors["old_log_probs"]
    actor.set_version(2)
    actor.upload_weights(areal.WeightUpdateMeta(version=3, weights_path=str(folder / "actor")))
    engine.upload_weights(areal.WeightUpdateMeta(version=3, weights_path=str(folder / "engine")))
    files = [load_file(path) for name in ("actor", "engine") for path in (folder / name).glob("*.safetensors")]
    held = whole(engine)
    same = all(torch.equal(file[name].float(), held[name].float()) for file in files for name in held if name in file)
    return actor.version, same and len(files) == 2, bool(before.isfinite().all())


def test_an_actor_uploads_its_weights_under_a_version(tmp_path: Path) -> None:
    assert run_ranks(1, uploads, tmp_path) == [(3, True, True)]


def test_a_parallel_strategy_is_the_arguments_of_an_engine() -> None:
    strategy = areal.ParallelStrategy(tensor_parallel_size=2, data_parallel_size=4, context_parallel_size=2)
    config = strategy.megatron()["megatron"]
    assert (strategy.world_size, config.tensor_model_parallel_size, config.context_parallel_size) == (16, 2, 2)
    assert areal.ParallelStrategy(data_parallel_size=2, context_parallel_size=2).fsdp() == {"sp_size": 2}
    with pytest.raises(ValueError, match="take MegatronEngine"):
        strategy.fsdp()


def test_generation_parameters_are_copied_with_changes() -> None:
    params = areal.GenerationHyperparameters(max_new_tokens=8, n_samples=4, temperature=0.7)
    assert (params.new(n_samples=1).n_samples, params.new(n_samples=1).temperature, params.greedy) == (1, 0.7, False)
    assert areal.GenerationHyperparameters(greedy=True).temperature == 0.0
    ids: Any = [1, 2]
    request = areal.ModelRequest(input_ids=ids, gconfig=params, tokenizer=object(), metadata={"a": 1})
    assert request.input_ids == (1, 2)
