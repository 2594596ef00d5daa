"""MegatronPPOWorker: the actor on Megatron-Core under the name that the ecosystem knows."""

from __future__ import annotations

from rlsys.config.schema.actor import ActorRolloutRefConfig
from rlsys.utils.errors import ConfigError
from workers.actor import ActorWorker
from workers.build import EngineRun


class MegatronPPOWorker(ActorWorker):
    """One rank of an actor that Megatron-Core trains; ConfigError where the configuration says another engine."""

    def __init__(self, config: ActorRolloutRefConfig, run: EngineRun) -> None:
        if config.actor.strategy != "megatron":
            raise ConfigError(
                f"MegatronPPOWorker: actor_rollout_ref.actor.strategy={config.actor.strategy}; write megatron"
            )
        super().__init__(config, run)
