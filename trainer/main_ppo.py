"""python -m trainer.main_ppo key=value ...: PPO, GRPO and their kin."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlsys.config import PPOConfig
from rlsys.config.cli import main_config


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then train; the exit code is 0, 1 for a failed run or 2 for a wrong configuration."""
    config = main_config(sys.argv[1:] if argv is None else argv, PPOConfig)
    from trainer.build import run_ppo

    return run_ppo(config)


if __name__ == "__main__":
    raise SystemExit(main())
