"""AReaL's names for what rlsys has: `from rlsys.areal import FSDPPPOActor, ParallelStrategy, ...`."""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlsys.agent.presets import MathRLVRWorkflow, MathVerifier, RLVRWorkflow, VisionRLVRWorkflow  # noqa: F401
from rlsys.config.schema.megatron import MegatronConfig
from rlsys.engines.fsdp.engine import FSDPEngine as FSDPEngine
from rlsys.fleet.external.engine import RemoteEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.interfaces import RolloutEngine, TrainEngine  # noqa: F401
from rlsys.roles.actor import PPOActor
from rlsys.roles.critic import PPOCritic as PPOCritic
from rlsys.roles.lm import LMEngine
from rlsys.roles.reward_model import RWEngine as RWEngine
from rlsys.types import GenerationHyperparameters as GenerationHyperparameters
from rlsys.types import LLMRequest as LLMRequest
from rlsys.types import LLMResponse as LLMResponse
from rlsys.types import ModelRequest as ModelRequest
from rlsys.types import ModelResponse as ModelResponse
from rlsys.types import WeightUpdateMeta as WeightUpdateMeta

FSDPPPOActor, FSDPLMEngine, InferenceEngine = PPOActor, LMEngine, RolloutEngine
RemoteSGLangEngine, RemotevLLMEngine = SGLangRemoteEngine, VLLMRemoteEngine
AsyncRolloutCollector = RemoteEngine


class SettingsOfAReaL(SimpleNamespace):
    """A section of AReaL's configuration by keyword. What it may hold is what `trainer.main_ppo` reads."""


PPOActorConfig = RolloutConfig = SGLangConfig = DatasetConfig = SettingsOfAReaL


class GRPOConfig(SettingsOfAReaL):
    """The configuration of a GRPO run: sections actor, ref, rollout, sglang, train_dataset and eval_dataset, and keys
    such as allocation_mode and async_training."""

    def arguments(self) -> list[str]:
        """The settings as arguments of `trainer.main_ppo.main`, which refuses those that it does not know."""
        return [
            f"{key}={json.dumps(vars(value) if isinstance(value, SettingsOfAReaL) else value)}"
            for key, value in vars(self).items()
        ]


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

    def fsdp(self) -> dict[str, object]:
        """Arguments of FSDPEngine. ValueError for sizes that FSDP does not have."""
        if max(self.tensor_parallel_size, self.pipeline_parallel_size, self.expert_parallel_size) > 1:
            raise ValueError("FSDP has data and context parallelism only; for the other sizes take MegatronEngine")
        return {"sp_size": self.context_parallel_size}

    def megatron(self) -> dict[str, Any]:
        """Arguments of MegatronEngine."""
        config = MegatronConfig(
            tensor_model_parallel_size=self.tensor_parallel_size,
            pipeline_model_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_parallel_size,
        )
        return {"megatron": config}
