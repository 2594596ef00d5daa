"""Typed configuration with verl's key names; imports neither torch nor ray."""

from rlsys.config.cli import main_config
from rlsys.config.load import load_config
from rlsys.config.plan import plan_batches
from rlsys.config.schema.jobs import DPOConfig, EvalConfig, GradedJob, PPOConfig, RMConfig, SFTConfig
