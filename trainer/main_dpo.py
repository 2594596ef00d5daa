"""python -m trainer.main_dpo key=value ...: a policy from preferences, by DPO, IPO or KTO."""

from rlsys.config import DPOConfig
from trainer.job import job_main

main = job_main(DPOConfig, "trainer.supervised:train")

if __name__ == "__main__":
    raise SystemExit(main())
