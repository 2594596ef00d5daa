"""The names that settings choose from. The modules that implement them use these or assert that they are the same."""

from typing import Literal, get_args

ADV_ESTIMATORS = (
    *("gae", "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus"),
    *("reinforce_plus_plus_baseline", "remax", "opo", "gpg", "gdpo"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)
POLICY_LOSSES = (
    *("vanilla", "gspo", "cispo", "sapo", "gpg", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro"),
    "bypass_mode",
)
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)
KLEstimator = Literal[KLKind, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
"""A KL estimator, or with + its straight-through form."""
REJECTION_MODES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "token_m2"),
)
REJECTION_ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
REWARD_MANAGERS = ("naive", "dapo")
TRACKERS = {"console": "", "tensorboard": "trackers", "trackio": "trackers", "wandb": "wandb", "mlflow": "mlflow"}
"""Trackers, and the extra of rlsys that installs the library of the same name (empty: none needed)."""
ALWAYS_WRITTEN = ("file", "jsonl")
"""Names in trainer.logger for the JSONL file, which is always written."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What a config.json calls the number of routed experts."""
ROW_FILES = (".parquet", ".json", ".jsonl", ".csv")
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Vision-language models (model_type) that cut images of any size into a grid; positions have three axes (M-RoPE)."""
TIMESTAMPS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Those of GRIDS that read the time of a video's frames as text."""
TILES = ("idefics3", "smolvlm")
"""Those that cut images into tiles of one size, each with as many features; positions are plain."""
