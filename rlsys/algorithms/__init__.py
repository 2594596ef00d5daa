"""Advantage estimators, policy losses, KL and corrections: pure tensor functions."""

from rlsys.algorithms.advantage import (
    adv_estimator_names,
    estimator_takes,
    get_adv_estimator_fn,
    register_adv_est,
)
from rlsys.algorithms.aggregate import LOSS_AGG_MODES, agg_loss
from rlsys.algorithms.bypass_loss import bypass_mode
from rlsys.algorithms.correction import rollout_correction
from rlsys.algorithms.covariance_loss import select_tokens
from rlsys.algorithms.filters import informative_groups, overlong_penalty, pf_ppo_rows
from rlsys.algorithms.groups import group_ids_of
from rlsys.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    get_kl_controller,
    kl_penalty,
)
from rlsys.algorithms.mismatch import mismatch_metrics, probs_diff_metrics
from rlsys.algorithms.normalize import normalize, shape_rewards
from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.policy_loss import (
    PolicyLoss,
    get_policy_loss_fn,
    policy_loss_names,
    register_policy_loss,
)
from rlsys.algorithms.stages import (
    add_selected_tokens,
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantage,
    filter_groups,
    group_ids,
    is_truncated,
    rewards_from_scores,
    shape_batch_rewards,
)
from rlsys.algorithms.value_loss import compute_value_loss

__all__ = [
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "FixedKLController",
    "KLController",
    "PolicyLoss",
    "actor_loss",
    "add_selected_tokens",
    "adv_estimator_names",
    "agg_loss",
    "apply_kl_penalty",
    "apply_rollout_correction",
    "bypass_mode",
    "compute_advantage",
    "compute_value_loss",
    "estimator_takes",
    "filter_groups",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "group_ids",
    "group_ids_of",
    "informative_groups",
    "is_truncated",
    "kl_penalty",
    "mismatch_metrics",
    "normalize",
    "overlong_penalty",
    "pf_ppo_rows",
    "policy_loss_names",
    "probs_diff_metrics",
    "register_adv_est",
    "register_policy_loss",
    "rewards_from_scores",
    "rollout_correction",
    "select_tokens",
    "shape_batch_rewards",
    "shape_rewards",
]
