"""AReaL's names for what rlsys has: `from rlsys.areal import FSDPPPOActor, ParallelStrategy, ...`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from rlsys.agent.presets import MathRLVRWorkflow, MathVerifier, RLVRWorkflow, VisionRLVRWorkflow
from rlsys.algorithms.stages import compute_advantage, shaped_rewards
from rlsys.config.schema.algorithm import AlgorithmConfig
from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.data.cursor import Cursor
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp import engine as fsdp
from rlsys.engines.mesh import make_ranks
from rlsys.fleet.external.engine import RemoteEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.actor import PPOActor
from rlsys.roles.critic import PPOCritic
from rlsys.roles.lm import LMEngine
from rlsys.roles.reward_model import RWEngine
from rlsys.types import GenerationHyperparameters, LLMRequest, LLMResponse, ModelRequest, WeightUpdateMeta
from rlsys.types import ModelResponse as ModelResponse

FSDPLMEngine, InferenceEngine, AsyncRolloutCollector = LMEngine, RolloutEngine, RemoteEngine
RemoteSGLangEngine, RemotevLLMEngine, vLLMRemoteEngine = SGLangRemoteEngine, VLLMRemoteEngine, VLLMRemoteEngine


class SettingsOfAReaL(SimpleNamespace):
    """A section of AReaL's configuration by keyword. What it may hold is what `trainer.main_ppo` reads."""


PPOActorConfig = RolloutConfig = SGLangConfig = DatasetConfig = SettingsOfAReaL


class GRPOConfig(SettingsOfAReaL):
    """The configuration of a GRPO run: sections actor, ref, rollout, sglang, train_dataset and eval_dataset, and keys
    such as allocation_mode and async_training."""

    def arguments(self) -> list[str]:
        """The settings as arguments of `trainer.main_ppo.main`, which refuses those that it does not know."""
        return [f"{key}={json.dumps(value, default=vars)}" for key, value in vars(self).items()]


class RolloutWorkflow:
    """The base of AReaL's workflows: `async arun_episode(engine, data)` returns tensors, or None to reject the row."""


@dataclass(frozen=True)
class ParallelStrategy:
    """Parallel sizes; `fsdp()` and `megatron()` are the arguments of the engines that they stand for."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        model = self.tensor_parallel_size * self.pipeline_parallel_size
        return model * self.context_parallel_size * self.data_parallel_size

    def check_ranks(self, kw: Mapping[str, object]) -> None:
        """ValueError where the job of an engine with these arguments has another number of ranks."""
        if self.world_size != (num_ranks := make_ranks(str(kw.get("device", "cpu"))).world_size):
            raise ValueError(f"the job has {num_ranks} ranks, {self} another number")

    def fsdp(self, dtype: object = "auto") -> dict[str, object]:
        """Arguments of FSDPEngine. ValueError for sizes that FSDP does not have."""
        if max(self.pipeline_parallel_size, self.expert_parallel_size) > 1:
            raise ValueError("FSDP has data, tensor and context parallelism; for the other sizes take MegatronEngine")
        shard = {"dtype": str(dtype), "tensor_parallel_size": self.tensor_parallel_size}
        return {"sp_size": self.context_parallel_size, "shard": ShardConfig.model_validate(shard)}

    def megatron(self) -> dict[str, MegatronConfig]:
        """Arguments of MegatronEngine."""
        config = MegatronConfig(
            tensor_model_parallel_size=self.tensor_parallel_size,
            pipeline_model_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_parallel_size,
        )
        return {"megatron": config}


class FSDPEngineOfAReaL(fsdp.FSDPEngine):
    """FSDPEngine by the arguments of AReaL's documents: `use_lora` is for adapters of rank 32, `kw` for the options.

    ValueError for a strategy of another number of ranks, and for `use_lora` without `optim`, which trains adapters.
    """

    def __init__(self, model_path: str, parallel_strategy: ParallelStrategy, dtype: object = "auto", **kw: Any) -> None:
        parallel_strategy.check_ranks(kw)
        rank = 32 if kw.pop("use_lora", False) else 0
        if rank and "optim" not in kw:
            raise ValueError("use_lora=True trains adapters; set optim=OptimConfig(lr=...), too")
        kw = {"options": TrainEngineOptions(**kw), **parallel_strategy.fsdp(dtype)}
        super().__init__(ModelConfig(path=model_path, lora_rank=rank), **kw)


FSDPEngine = FSDPEngineOfAReaL


@cache
def __getattr__(name: str) -> object:
    if name != "MegatronEngine":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from rlsys.engines.megatron.engine import MegatronEngine  # needs Megatron-Core

    class MegatronEngineOfAReaL(MegatronEngine):
        """MegatronEngine by the arguments of AReaL's documents; ValueError and `kw` as of FSDPEngine."""

        def __init__(
            self, model_path: str, parallel_strategy: ParallelStrategy, dtype: object = "auto", **kw: Any
        ) -> None:
            parallel_strategy.check_ranks(kw)
            more = {"dtype": str(dtype), "fp8": "hybrid" if kw.pop("use_fp8", False) else None}
            megatron = MegatronConfig.model_validate(parallel_strategy.megatron()["megatron"].model_dump() | more)
            super().__init__(ModelConfig(path=model_path), TrainEngineOptions(**kw), megatron=megatron)

    return MegatronEngineOfAReaL


@dataclass(eq=False)
class FSDPPPOActor(PPOActor):
    """PPOActor with AReaL's attributes, which `algorithm` and `rollout_n` hold."""

    algorithm: AlgorithmConfig = field(default=AlgorithmConfig(), kw_only=True)
    reward_bias = property(attrgetter("algorithm.reward_bias"))
    reward_scaling = property(attrgetter("algorithm.reward_scaling"))
    group_size = property(attrgetter("rollout_n"))

    @property
    def kl_ctl(self) -> float:
        """The weight of the KL penalty in the rewards."""
        return self.algorithm.kl_ctrl.kl_coef if self.algorithm.use_kl_in_reward else 0.0

    def compute_advantages(self, batch: DataProto) -> DataProto:
        """Rewards out of token_level_scores, with old_log_probs and ref_log_prob for the penalty, then advantages and
        returns (B, R), all by `algorithm`; pure."""
        batch, _ = shaped_rewards(batch, self.algorithm, num_repeat=self.rollout_n)
        return compute_advantage(batch, self.algorithm, num_repeat=self.rollout_n)


class StatefulDataLoader(Cursor):
    """Rows in batches: an iteration is (the rest of) an epoch, and `load_state_dict` continues where `state_dict` was.

    `order` are batch_size, shuffle and seed; a batch is always whole. ConfigError for fewer rows than a batch.
    """

    def __init__(self, dataset: Sequence[object], collate_fn: Callable[..., object] = list, **order: Any) -> None:
        size, shuffle = order.pop("batch_size", 1), order.pop("shuffle", False)
        super().__init__(len(dataset), batch_size=size, shuffle=shuffle, **order)
        self.dataset, self._collate = dataset, collate_fn

    def __len__(self) -> int:
        return self._num_rows // self._batch_size

    def __iter__(self) -> Iterator[object]:
        for _ in range((self._num_rows - self._position) // self._batch_size or len(self)):
            yield self._collate([self.dataset[row] for row in self.next().rows])
