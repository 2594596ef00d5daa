"""python -m trainer.main_sft key=value ...: supervised fine-tuning."""

from rlsys.config import SFTConfig
from trainer.job import job_main

main = job_main(SFTConfig, "trainer.supervised:train")

if __name__ == "__main__":
    raise SystemExit(main())
