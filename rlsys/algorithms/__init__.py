"""Advantage estimators, policy losses, KL and corrections: pure tensor functions."""

from rlsys.algorithms import bypass_loss  # it registers its loss
from rlsys.algorithms.advantage import register_adv_est
from rlsys.algorithms.policy_loss import register_policy_loss
