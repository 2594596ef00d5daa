"""verl's module of this name, for plug-ins written for it: the decorators, KL and the aggregation to a scalar."""

from torch import Tensor

from rlsys.algorithms.advantage import get_adv_estimator_fn, register_adv_est
from rlsys.algorithms.aggregate import agg_loss as agg_loss_sum
from rlsys.algorithms.kl import kl_penalty as kl_penalty
from rlsys.algorithms.policy_loss import get_policy_loss_fn, register_policy_loss

__all__ = ["agg_loss", "get_adv_estimator_fn", "get_policy_loss_fn", "register_adv_est", "register_policy_loss"]


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, *, loss_scale_factor: float | None = None, **_: object
) -> Tensor:
    """verl's scalar loss over these rows; sizes of the global batch are ignored, as counts are divided by later."""
    total, count = agg_loss_sum(loss_mat, loss_mask, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    return total / count.clamp(min=1)
