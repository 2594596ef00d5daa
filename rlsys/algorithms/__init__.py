"""Advantage estimators, policy losses, KL and corrections: pure tensor functions."""

from rlsys.algorithms import bypass_loss  # noqa: F401  it registers its loss
from rlsys.algorithms.advantage import register_adv_est as register_adv_est
from rlsys.algorithms.policy_loss import register_policy_loss as register_policy_loss
