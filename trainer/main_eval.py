"""python -m trainer.main_eval key=value ...: answers to validation prompts, graded."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlsys.config import EvalConfig
from rlsys.config.cli import main_config


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then run; the exit code is 0, 1 for a failed run or 2 for a wrong configuration."""
    config = main_config(sys.argv[1:] if argv is None else argv, EvalConfig)
    from trainer.evaluation import run_eval

    return run_eval(config)


if __name__ == "__main__":
    raise SystemExit(main())
