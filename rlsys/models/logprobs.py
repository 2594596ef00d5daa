"""Log-probability, entropy and collision probability of given tokens, without ever holding all logits.

M positions, H hidden size, V vocabulary. Only `chunk_elements` logits exist at a time, in forward and in backward,
where they are computed anew; the results are float32 (float64 in a float64 model) whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    outputs: Collection[str] = ("log_probs",),
    chunk_elements: int | None = None,
) -> dict[str, Tensor]:
    """Statistics (M,) of softmax(hidden @ weight.T / temperature), differentiable in `hidden` and `weight`.

    hidden (M, H), weight (V, H), targets (M,) int64. `outputs` picks among `log_probs` (of the targets, always there),
    `entropy` (-sum_v p_v log p_v, nats) and `sum_pi_squared` (sum_v p_v^2). ValueError unless the temperature is > 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    limit = chunk_elements or CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26)
    rows = max(1, limit // weight.shape[0])
    wanted = ("entropy" in outputs, "sum_pi_squared" in outputs)
    stats = _TokenStats.apply(hidden, weight, targets, 1.0 / temperature, rows, *wanted)
    named = zip(("log_probs", "entropy", "sum_pi_squared"), stats, strict=True)
    return {name: value for name, value in named if value is not None}


class _Scores:
    """Scaled logits of one chunk after another, float32 at least.

    Half-precision factors are multiplied straight into float32 on CUDA; elsewhere one buffer serves all chunks.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, scale: float, rows: int) -> None:
        self.hidden, self.weight, self.scale, self.rows = hidden, weight, scale, rows
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.same = hidden.dtype == self.dtype
        self.buffer = hidden.new_empty(min(rows, len(hidden)) if self.same else 0, weight.shape[0], dtype=self.dtype)

    def parts(self) -> list[slice]:
        return [slice(at, min(at + self.rows, len(self.hidden))) for at in range(0, len(self.hidden), self.rows)]

    def of(self, part: slice) -> Tensor:
        hidden, vocabulary = self.hidden[part], self.weight.t()
        if self.same:
            scores = torch.mm(hidden, vocabulary, out=self.buffer[: part.stop - part.start])
        else:
            scores = _wide_product(hidden, vocabulary)
        return scores if self.scale == 1.0 else scores.mul_(self.scale)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b).float()


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, rows: int, entropy: bool, squares: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scores_of = _Scores(hidden, weight, scale, rows)
        log_norm, log_probs, mean, square_sum = (
            torch.zeros(len(hidden), dtype=scores_of.dtype, device=hidden.device) for _ in range(4)
        )
        for part in scores_of.parts():
            scores = scores_of.of(part)
            log_norm[part] = torch.logsumexp(scores, dim=-1)
            log_probs[part] = scores.gather(1, targets[part, None])[:, 0] - log_norm[part]
            if entropy or squares:
                probs = torch.exp(scores - log_norm[part, None])
                mean[part] = torch.linalg.vecdot(probs, scores)
                square_sum[part] = torch.linalg.vecdot(probs, probs)
        ctx.save_for_backward(hidden, weight, targets, log_norm, mean, square_sum)
        ctx.scale, ctx.rows = scale, rows
        ctx.set_materialize_grads(False)
        return log_probs, log_norm - mean if entropy else None, square_sum.clone() if squares else None

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_log_probs: Tensor | None, d_entropy: Tensor | None, d_squares: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, mean, square_sum = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        scores_of = _Scores(hidden, weight, ctx.scale, ctx.rows)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=scores_of.dtype) if need_weight else None
        for part in scores_of.parts():
            scores = scores_of.of(part)
            slope = (scores - log_norm[part, None]).exp_()
            if d_entropy is None and d_squares is None and d_log_probs is not None:
                slope.mul_(-d_log_probs[part, None])
            else:
                slope = _slope(slope, scores, mean, square_sum, (d_log_probs, d_entropy, d_squares), part)
            if d_log_probs is not None:
                slope.scatter_add_(1, targets[part, None], d_log_probs[part, None])
            slope = (slope if ctx.scale == 1.0 else slope.mul_(ctx.scale)).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(slope, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, slope.t(), hidden[part])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *(None,) * 5


def _slope(
    probs: Tensor, scores: Tensor, mean: Tensor, square_sum: Tensor, grads: tuple[Tensor | None, ...], part: slice
) -> Tensor:
    """d loss / d scores without the target's own term; overwrites `scores`.

    d entropy / d s_i = -p_i (s_i - mean) and d squares / d s_i = 2 p_i (p_i - squares), where mean = sum_v p_v s_v.
    """
    d_log_probs, d_entropy, d_squares = grads
    factor = torch.zeros_like(probs)
    if d_entropy is not None:
        factor.sub_(scores.sub_(mean[part, None]).mul_(d_entropy[part, None]))
    if d_squares is not None:
        factor.add_((probs - square_sum[part, None]).mul_(2 * d_squares[part, None]))
    if d_log_probs is not None:
        factor.sub_(d_log_probs[part, None])
    return factor.mul_(probs)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _wide_product(a, b)
