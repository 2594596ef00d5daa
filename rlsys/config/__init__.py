"""Typed configuration with verl's key names; imports neither torch nor ray."""

from rlsys.config.cli import main_config as main_config
from rlsys.config.load import load_config as load_config
from rlsys.config.plan import plan_batches as plan_batches
from rlsys.config.schema.jobs import DPOConfig as DPOConfig
from rlsys.config.schema.jobs import EvalConfig as EvalConfig
from rlsys.config.schema.jobs import PPOConfig as PPOConfig
from rlsys.config.schema.jobs import RMConfig as RMConfig
from rlsys.config.schema.jobs import SFTConfig as SFTConfig
