"""python -m trainer.main_ppo key=value ...: PPO, GRPO and related algorithms."""

from rlsys.config import PPOConfig
from trainer.job import job_main

main = job_main(PPOConfig, "trainer.build:train")

if __name__ == "__main__":
    raise SystemExit(main())
