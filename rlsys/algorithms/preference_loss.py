"""Losses on preferences, from the log-ratios of whole responses: log p(policy) - log p(reference).

P pairs, B rows; all log-ratios are sums over the tokens of a response, except for IPO, whose are means.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsys.config.schema.jobs import DPOLossConfig


def dpo_loss(chosen: Tensor, rejected: Tensor, config: DPOLossConfig) -> Tensor:
    """The loss of each pair (P,).

    sigmoid: `-log sigmoid(beta * margin)` (DPO, arXiv:2305.18290, eq. 7), of which the share `label_smoothing` is
    taken with the labels swapped (cDPO). ipo: `(margin - 1 / (2 beta))^2` (arXiv:2310.12036, eq. 17).
    """
    margin = chosen - rejected
    if config.loss_type == "ipo":
        return (margin - 1 / (2 * config.beta)).square()
    swapped = config.label_smoothing
    return -(1 - swapped) * logsigmoid(config.beta * margin) - swapped * logsigmoid(-config.beta * margin)


def kto_loss(log_ratio: Tensor, is_desirable: Tensor, kl: float, config: DPOLossConfig) -> Tensor:
    """The loss of each row (B,): `weight * (1 - sigmoid(+-beta * (log_ratio - kl)))` (KTO, arXiv:2402.01306, eq. 8).

    The sign is that of the label; `kl` is the reference point, an estimate of KL(policy || reference) of at least 0.
    """
    lead = config.beta * (log_ratio - kl)
    lost = 1 - torch.sigmoid(torch.where(is_desirable, lead, -lead))
    return torch.where(is_desirable, config.desirable_weight * lost, config.undesirable_weight * lost)
