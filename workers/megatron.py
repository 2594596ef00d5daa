"""MegatronPPOWorker: the actor on Megatron-Core, under the name that other frameworks use."""

from __future__ import annotations

from rlsys.config.schema.actor import ActorRolloutRefConfig
from rlsys.config.schema.algorithm import AlgorithmConfig
from rlsys.utils.errors import ConfigError
from workers.actor import ActorWorker
from workers.build import EngineRun


class MegatronPPOWorker(ActorWorker):
    """One rank of an actor that Megatron-Core trains; ConfigError for another strategy."""

    def __init__(self, config: ActorRolloutRefConfig, algorithm: AlgorithmConfig, run: EngineRun) -> None:
        if config.actor.strategy != "megatron":
            raise ConfigError(
                f"MegatronPPOWorker: actor_rollout_ref.actor.strategy={config.actor.strategy}; set it to megatron"
            )
        super().__init__(config, algorithm, run)
