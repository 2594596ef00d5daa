"""Typed configuration with verl's key names; imports neither torch nor ray."""

from rlsys.config.cli import main_config
from rlsys.config.load import load_config
from rlsys.config.plan import BatchPlan, RolePlan, plan_batches, plan_text, total_steps
from rlsys.config.pools import Pools, resolve_pools
from rlsys.config.schema.jobs import EvalConfig, PPOConfig, RMConfig, SFTConfig

__all__ = [
    "BatchPlan",
    "EvalConfig",
    "PPOConfig",
    "Pools",
    "RMConfig",
    "RolePlan",
    "SFTConfig",
    "load_config",
    "main_config",
    "plan_batches",
    "plan_text",
    "resolve_pools",
    "total_steps",
]
