"""AReaL's names, used as its documentation uses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlsys import areal
from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.algorithm import AlgorithmConfig, KLControlConfig
from rlsys.config.schema.model import OptimConfig, ShardConfig
from rlsys.protocol import DataProto
from rlsys.utils.errors import ConfigError
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


def built_by_path(folder: Path) -> tuple[bool, str, int]:
    saved = small_engine()
    saved.upload_weights(areal.WeightUpdateMeta(version=1, weights_path=str(folder)))
    given: Any = {"model_path": str(folder), "parallel_strategy": areal.ParallelStrategy(), "dtype": torch.float32}
    plain = areal.FSDPEngine(**given)
    adapted = areal.FSDPEngine(**given, use_lora=True, optim=OptimConfig(lr=0.1))
    with pytest.raises(ValueError, match=r"the job has 1 ranks, .*data_parallel_size=2"):
        areal.FSDPEngine(str(folder), areal.ParallelStrategy(data_parallel_size=2))
    with pytest.raises(ValueError, match="set optim=OptimConfig"):
        areal.FSDPEngine(**given, use_lora=True)
    held, read = whole(saved), whole(plain)
    assert adapted.lora is not None
    return all(torch.equal(held[name], read[name]) for name in held), plain.shard.dtype, adapted.lora.rank


def test_an_engine_is_built_by_the_arguments_of_areal(tmp_path: Path) -> None:
    assert run_ranks(1, built_by_path, tmp_path) == [(True, "float32", 32)]


def built_on_megatron(folder: Path) -> tuple[bool, bool]:
    saved = small_engine()
    saved.upload_weights(areal.WeightUpdateMeta(version=1, weights_path=str(folder)))
    build: Any = areal.MegatronEngine
    engine = build(str(folder), areal.ParallelStrategy(), torch.float32, optim=OptimConfig(lr=0.1))
    with pytest.raises(ValueError, match=r"the job has 1 ranks, .*tensor_parallel_size=2"):
        build(str(folder), areal.ParallelStrategy(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="Transformer Engine"):
        build(str(folder), areal.ParallelStrategy(), use_fp8=True)
    scores = [one.forward(small_rows(), ("log_probs",))["log_probs"] for one in (saved, engine)]
    return torch.allclose(*scores, atol=1e-5), build is areal.MegatronEngine


def test_megatrons_engine_is_built_by_the_arguments_of_areal(tmp_path: Path) -> None:
    assert run_ranks(1, built_on_megatron, tmp_path) == [(True, True)]
    with pytest.raises(AttributeError, match=r"'rlsys\.areal' has no attribute 'MegatronEngines'"):
        areal.MegatronEngines  # noqa: B018


def test_an_actor_has_the_attributes_by_which_it_computes_advantages() -> None:
    engine: Any = None
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus", reward_bias=-1.0, reward_scaling=10.0)
    actor = areal.FSDPPPOActor(engine, ActorConfig(), rollout_n=2, algorithm=algorithm)
    assert (actor.reward_bias, actor.reward_scaling, actor.group_size, actor.kl_ctl) == (-1.0, 10.0, 2, 0.0)
    ones = torch.ones(2, 1)
    batch = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[1.5], [0.5]]),
            "response_mask": ones,
            "old_log_probs": ones * -1,
            "ref_log_prob": ones * -3,
        }
    )
    assert actor.compute_advantages(batch).tensors["token_level_rewards"].flatten().tolist() == [5.0, -5.0]
    kl = {"kl_ctrl": KLControlConfig(kl_coef=0.25), "use_kl_in_reward": True}
    actor.algorithm = algorithm.model_copy(update=kl)
    shaped = actor.compute_advantages(batch).tensors
    assert actor.kl_ctl == 0.25
    assert shaped["token_level_rewards"].flatten().tolist() == [4.5, -5.5]
    assert shaped["returns"].flatten().tolist() == [4.5, -5.5]
    assert "advantages" not in batch.tensors.keys()  # noqa: SIM118


def test_a_data_loader_continues_in_the_middle_of_an_epoch() -> None:
    rows = [f"row {number}" for number in range(7)]
    assert list(areal.StatefulDataLoader(rows, batch_size=2)) == [rows[0:2], rows[2:4], rows[4:6]]
    loader = areal.StatefulDataLoader(rows, batch_size=2, shuffle=True, seed=3, collate_fn=tuple)
    epochs = [list(loader), list(loader)]
    assert len(loader) == len(epochs[0]) == len(epochs[1]) == 3
    assert epochs[0] != epochs[1]
    drawn: list[Any] = epochs[0]
    assert len({row for batch in drawn for row in batch}) == 6
    first, second = (areal.StatefulDataLoader(rows, batch_size=2, shuffle=True, seed=3) for _ in range(2))
    assert next(iter(first)) == list(drawn[0])
    second.load_state_dict(first.state_dict())
    assert [tuple(batch) for batch in second] == epochs[0][1:]
    assert [tuple(batch) for batch in second] == epochs[1]


def test_an_actor_uploads_its_weights_under_a_version(tmp_path: Path) -> None:
    assert run_ranks(1, uploads, tmp_path) == [(3, True, True)]


def test_a_parallel_strategy_is_the_arguments_of_an_engine() -> None:
    strategy = areal.ParallelStrategy(tensor_parallel_size=2, data_parallel_size=4, context_parallel_size=2)
    config = strategy.megatron()["megatron"]
    assert (strategy.world_size, config.tensor_model_parallel_size, config.context_parallel_size) == (16, 2, 2)
    assert strategy.fsdp() == {"sp_size": 2, "shard": ShardConfig(tensor_parallel_size=2)}
    with pytest.raises(ValueError, match="take MegatronEngine"):
        areal.ParallelStrategy(pipeline_parallel_size=2).fsdp()


def test_generation_parameters_are_copied_with_changes() -> None:
    params = areal.GenerationHyperparameters(max_new_tokens=8, n_samples=4, temperature=0.7)
    assert (params.new(n_samples=1).n_samples, params.new(n_samples=1).temperature, params.greedy) == (1, 0.7, False)
    assert areal.GenerationHyperparameters(greedy=True).temperature == 0.0
    with pytest.raises(ValueError, match=r"frequency_penalty=0\.5: .* set 0 or leave it out"):
        params.new(frequency_penalty=0.5)
    ids: Any = [1, 2]
    request = areal.ModelRequest(input_ids=ids, gconfig=params, tokenizer=object(), metadata={"a": 1})
    assert request.input_ids == (1, 2)
