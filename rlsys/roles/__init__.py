"""PPOActor, PPOCritic, LMEngine and RWEngine: each an engine with a loss."""

from rlsys.roles.actor import PPOActor
from rlsys.roles.critic import PPOCritic
from rlsys.roles.lm import LMEngine, RankSums, mean_over_ranks
from rlsys.roles.reward_model import RWEngine
from rlsys.roles.update import mini_batches

__all__ = [
    "LMEngine",
    "PPOActor",
    "PPOCritic",
    "RWEngine",
    "RankSums",
    "mean_over_ranks",
    "mini_batches",
]
