"""GRPO on GSM8K with AReaL's names: `gsm8k_grpo.py [actor.path=... train_dataset.path=...] [--dry-run]`.

The rows are those of `prepare_data.py --task gsm8k --out ~/data/gsm8k`.
"""

import sys

from rlsys.areal import DatasetConfig, GRPOConfig, PPOActorConfig, RolloutConfig
from trainer.main_ppo import main

CONFIG = GRPOConfig(
    experiment_name="gsm8k-grpo",
    actor=PPOActorConfig(path="Qwen/Qwen2.5-1.5B-Instruct", lr=1e-6, eps_clip=0.2, group_reward_norm=True),
    rollout=RolloutConfig(n_generations=4, max_tokens=1024, batch_size=256),
    train_dataset=DatasetConfig(path="~/data/gsm8k/train.parquet"),
    eval_dataset=DatasetConfig(path="~/data/gsm8k/test.parquet"),
)

if __name__ == "__main__":
    sys.exit(main([*CONFIG.arguments(), *sys.argv[1:]]))
