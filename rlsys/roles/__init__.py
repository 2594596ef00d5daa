"""PPOActor, PPOCritic, LMEngine, RWEngine: an engine and a loss each."""

from rlsys.roles.actor import ActorSettings, PPOActor
from rlsys.roles.critic import CriticSettings, PPOCritic
from rlsys.roles.lm import LMEngine, RankSums, mean_over_ranks
from rlsys.roles.reward_model import RWEngine
from rlsys.roles.update import UpdateSettings, mini_batches

__all__ = [
    "ActorSettings",
    "CriticSettings",
    "LMEngine",
    "PPOActor",
    "PPOCritic",
    "RWEngine",
    "RankSums",
    "UpdateSettings",
    "mean_over_ranks",
    "mini_batches",
]
