"""The critic's loss."""

import torch
from torch import Tensor

from rlsys.algorithms.aggregate import agg_loss
from rlsys.algorithms.masked import masked_sum, to_loss_sum
from rlsys.config.schema.actor import CriticConfig
from rlsys.interfaces import LossSum


def compute_value_loss(
    *,
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    config: CriticConfig,
    batch_rows: int | None = None,
) -> LossSum:
    """Half the larger of the squared errors of the value and of the value clipped to near the old one (B, R).

    `max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) / 2`, the clipped value loss of PPO's reference code
    (studied in arXiv:2005.12729). Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean.
    """
    clipped_vpreds = vpreds.clamp(min=values - config.cliprange_value, max=values + config.cliprange_value)
    unclipped, clipped = (vpreds - returns).square(), (clipped_vpreds - returns).square()
    losses, scale = 0.5 * torch.maximum(unclipped, clipped), config.loss_scale_factor
    total, count = agg_loss(losses, response_mask, config.loss_agg_mode, loss_scale_factor=scale, batch_rows=batch_rows)
    tokens = response_mask.bool().sum()
    metrics = {
        "critic/vf_loss": (total, count),
        "critic/vf_clipfrac": (masked_sum((clipped > unclipped).to(vpreds.dtype), response_mask), tokens),
        "critic/vpred_mean": (masked_sum(vpreds, response_mask), tokens),
    }
    return to_loss_sum(total, count, metrics)
