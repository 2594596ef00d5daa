"""python -m trainer.main_rm key=value ...: a reward model from chosen and rejected responses."""

from rlsys.config import RMConfig
from trainer.job import job_main

main = job_main(RMConfig, "trainer.supervised:train")

if __name__ == "__main__":
    raise SystemExit(main())
