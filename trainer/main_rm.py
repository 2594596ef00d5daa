"""python -m trainer.main_rm key=value ...: a reward model from chosen and rejected responses."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.config import RMConfig
from trainer.job import checked_config, run_job


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the exit code is 0, 1 for a failed run or 2 for a wrong configuration."""
    return run_job(checked_config(argv, RMConfig), "trainer.supervised:train")


if __name__ == "__main__":
    raise SystemExit(main())
