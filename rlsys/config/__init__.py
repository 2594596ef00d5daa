"""Typed configuration with verl's key names; imports neither torch nor ray."""

from rlsys.config.load import load_config
from rlsys.config.plan import BatchPlan, plan_batches
from rlsys.config.schema import EvalConfig, PPOConfig, RMConfig, SFTConfig

__all__ = ["BatchPlan", "EvalConfig", "PPOConfig", "RMConfig", "SFTConfig", "load_config", "plan_batches"]
