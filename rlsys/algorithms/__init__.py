"""Advantage estimators, policy losses, KL and corrections: pure tensor functions."""

from rlsys.algorithms.advantage import register_adv_est
from rlsys.algorithms.bypass_loss import bypass_mode
from rlsys.algorithms.filters import informative_groups
from rlsys.algorithms.groups import group_ids_of
from rlsys.algorithms.kl import KLController, get_kl_controller
from rlsys.algorithms.mismatch import probs_diff_metrics
from rlsys.algorithms.normalize import normalize
from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.policy_loss import register_policy_loss
from rlsys.algorithms.stages import (
    add_selected_tokens,
    apply_distillation,
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantage,
    filter_groups,
    rewards_from_scores,
    shape_batch_rewards,
)
from rlsys.algorithms.value_loss import compute_value_loss

__all__ = [
    "KLController",
    "actor_loss",
    "add_selected_tokens",
    "apply_distillation",
    "apply_kl_penalty",
    "apply_rollout_correction",
    "bypass_mode",
    "compute_advantage",
    "compute_value_loss",
    "filter_groups",
    "get_kl_controller",
    "group_ids_of",
    "informative_groups",
    "normalize",
    "probs_diff_metrics",
    "register_adv_est",
    "register_policy_loss",
    "rewards_from_scores",
    "shape_batch_rewards",
]
