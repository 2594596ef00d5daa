"""python -m trainer.main_sft key=value ...: supervised fine-tuning."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlsys.config import SFTConfig
from rlsys.config.cli import main_config


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then run; the exit code is 0, 1 for a failed run or 2 for a wrong configuration."""
    config = main_config(sys.argv[1:] if argv is None else argv, SFTConfig)
    from trainer.supervised import run_sft

    return run_sft(config)


if __name__ == "__main__":
    raise SystemExit(main())
