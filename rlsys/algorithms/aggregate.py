"""From a loss per token to (sum, count), so that splitting a mini-batch never changes the gradient."""

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_sum
from rlsys.config.vocabulary import LOSS_AGG_MODES


def agg_loss(
    per_token: Tensor,
    mask: Tensor,
    loss_agg_mode: str,
    *,
    loss_scale_factor: float | None = None,
    batch_rows: int | None = None,
    count_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of a loss (b, R) over its mask and the count to divide by; dividing total by total gives verl's `agg_loss`.

    - token-mean: all tokens weigh the same (DAPO, arXiv:2503.14476); the count is tokens.
    - token-sum: the plain sum; the count is the share `b / batch_rows` of the mini-batch, so that it totals to 1.
    - seq-mean-token-sum: the sum of each row, averaged over rows; the count is rows with a token.
    - seq-mean-token-sum-norm: that, divided by `loss_scale_factor` (Dr. GRPO, arXiv:2503.20783), by default R.
    - seq-mean-token-mean: the mean of each row, averaged over rows (GRPO, arXiv:2402.03300); the count is rows.

    `batch_rows` are the rows of the whole mini-batch over all ranks. The count is taken over `count_mask` where one is
    given, for losses that drop tokens but are divided by all. ValueError for an unknown mode.
    """
    counted = (mask if count_mask is None else count_mask).bool()
    if loss_agg_mode == "token-mean":
        return masked_sum(per_token, mask), counted.sum()
    if loss_agg_mode == "token-sum":
        share = torch.full((), len(mask) / (batch_rows or len(mask)), dtype=torch.float64, device=mask.device)
        return masked_sum(per_token, mask), share
    rows = counted.any(dim=1).sum()
    row_sums = masked_sum(per_token, mask, dim=1)
    if loss_agg_mode == "seq-mean-token-sum":
        return row_sums.sum(), rows
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return row_sums.sum() / (loss_scale_factor or mask.shape[1]), rows
    if loss_agg_mode == "seq-mean-token-mean":
        return (row_sums / mask.bool().sum(dim=1).clamp(min=1)).sum(), rows
    raise ValueError(f"unknown loss_agg_mode '{loss_agg_mode}', one of {', '.join(LOSS_AGG_MODES)}")
