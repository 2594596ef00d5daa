"""Log-probability, entropy and collision probability of given tokens, without ever holding all logits.

M positions, H hidden size, V vocabulary, K most likely tokens. Only `chunk_elements` logits exist at a time, in forward
and in backward, where they are recomputed; the results are float32 (float64 in a float64 model) whatever the model
computes in.
"""

import shutil
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._triton import has_triton

from rlsys.types import LOGITS_CHUNK_ELEMENTS


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output weight on this rank: those from `start` on; the ranks of `group` hold all of them."""

    start: int
    group: dist.ProcessGroup


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    outputs: Collection[str] = ("log_probs",),
    chunk_elements: int | None = None,
    part: VocabularyPart | None = None,
    topk_ids: Tensor | None = None,
    topk: int = 0,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """Statistics (M,) of softmax(logits / temperature), differentiable in `hidden` and `weight`, of which logits are
    the product, with `softcap` c bent to c tanh(logits / c) (Gemma 2, arXiv:2408.00118).

    hidden (M, H), weight (V, H), targets (M,) int64. `outputs` picks among `log_probs` (of the targets, always there),
    `entropy` (-sum_v p_v log p_v, nats), `sum_pi_squared` (sum_v p_v^2) and, both (M, K), `topk_log_probs` of
    `topk_ids`, which unless given are those of the `topk` most likely tokens. ValueError unless the temperature is > 0.
    With `part`, `weight` is this rank's rows of the vocabulary, the ranks exchange numbers of (M,) only, and the
    gradient of `hidden` is this rank's part of a sum over the group.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = (chunk_elements or LOGITS_CHUNK_ELEMENTS.get(hidden.device.type, 1 << 26)) // max(1, weight.shape[0]) or 1
    if topk_ids is None:
        topk_ids = _most_likely(hidden, weight, rows, topk, part)
    columns = torch.cat([targets[:, None], topk_ids], dim=1)
    options = 1.0 / temperature, softcap, rows, "entropy" in outputs, "sum_pi_squared" in outputs, part
    log_probs, entropy, squares = _TokenStats.apply(hidden, weight, columns, *options)
    stats = {"log_probs": log_probs[:, 0], "entropy": entropy, "sum_pi_squared": squares}
    if "topk_log_probs" in outputs:
        stats |= {"topk_log_probs": log_probs[:, 1:], "topk_ids": topk_ids.to(log_probs)}
    return {name: value for name, value in stats.items() if value is not None}


@torch.no_grad()
def _most_likely(hidden: Tensor, weight: Tensor, rows: int, topk: int, part: VocabularyPart | None) -> Tensor:
    """Ids (M, topk) of the most likely tokens of the whole vocabulary, the most likely first."""
    ids = torch.zeros(len(hidden), topk, dtype=torch.long, device=hidden.device)
    if not topk:
        return ids
    scores_of = _Scores(hidden, weight, 1.0, None, rows)
    best = torch.full(ids.shape, -torch.inf, dtype=scores_of.dtype, device=hidden.device)
    own = min(topk, len(weight))
    for chunk in scores_of.parts():
        best[chunk, :own], ids[chunk, :own] = scores_of.of(chunk).topk(own)
    if part is None:
        return ids
    held = [(torch.empty_like(best), torch.empty_like(ids)) for _ in range(dist.get_world_size(part.group))]
    dist.all_gather([scores for scores, _ in held], best, group=part.group)
    dist.all_gather([numbers for _, numbers in held], ids + part.start, group=part.group)
    winners = torch.cat([scores for scores, _ in held], dim=1).topk(topk).indices
    return torch.cat([numbers for _, numbers in held], dim=1).gather(1, winners)


FUSED_FROM = 4096
"""Vocabularies on CUDA for which kernels are compiled."""


@cache
def can_build_kernels() -> bool:
    """Whether torch.compile can make kernels for a GPU here."""
    return bool(has_triton() and shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").exists())


@cache
def _fused(function: Callable[..., object]) -> Callable[..., Any]:
    """`function` compiled to kernels that read each logit once or twice; itself where nothing can compile them."""
    return torch.compile(function) if can_build_kernels() else function


def moments_of(scores: Tensor, moments: bool) -> tuple[Tensor, ...]:
    """log sum_v exp(s_v) of each row of scores (m, V) and, with `moments`, sum_v p_v s_v and sum_v p_v^2."""
    log_norm = torch.logsumexp(scores, dim=-1)
    if not moments:
        return (log_norm,)
    probs = torch.exp(scores - log_norm[:, None])
    return log_norm, torch.linalg.vecdot(probs, scores), torch.linalg.vecdot(probs, probs)


def log_prob_slope(
    scores: Tensor, log_norm: Tensor, column: Tensor, d_rows: Tensor, d_target: Tensor, dtype: torch.dtype
) -> Tensor:
    """d loss / d scores (m, V) of log-probs alone: `d_target` at `column` of each row, less `d_rows` p_v."""
    is_target = torch.arange(scores.shape[1], device=scores.device) == column[:, None]
    slope = torch.where(is_target, d_target[:, None], 0.0) - d_rows[:, None] * torch.exp(scores - log_norm[:, None])
    return slope.to(dtype)


class _Scores:
    """Logits of one chunk after another, bent where they have a cap, and scaled; float32 at least.

    Half-precision factors are multiplied straight into float32 on CUDA; otherwise one buffer serves all chunks.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, scale: float, cap: float | None, rows: int) -> None:
        self.hidden, self.weight, self.scale, self.cap, self.rows = hidden, weight, scale, cap, rows
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
            scores = wide_product(hidden, vocabulary)
        if self.cap is not None:
            scores = scores.div_(self.cap).tanh_().mul_(self.cap)
        return scores if self.scale == 1.0 else scores.mul_(self.scale)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The product (m, n) in float32 of half-precision matrices (m, k) and (k, n), never rounded to their type."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        cap: float | None,
        rows: int,
        entropy: bool,
        squares: bool,
        vocabulary: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scores_of = _Scores(hidden, weight, scale, cap, rows)
        reduced = _fused(moments_of) if hidden.is_cuda and len(weight) >= FUSED_FROM else moments_of
        target_of = _Targets(targets, vocabulary, len(weight))
        log_norm, mean, square_sum = hidden.new_zeros(3, len(hidden), dtype=scores_of.dtype)
        log_probs = torch.zeros(targets.shape, dtype=scores_of.dtype, device=hidden.device)
        for part in scores_of.parts():
            scores = scores_of.of(part)
            log_norm[part], *moments = reduced(scores, entropy or squares)
            log_probs[part] = target_of.scores(scores, part)
            if vocabulary is None:
                log_probs[part] -= log_norm[part, None]
            if moments:
                mean[part], square_sum[part] = moments
        if vocabulary is not None:
            _combine(vocabulary.group, log_norm, log_probs, mean, square_sum, moments=entropy or squares)
        ctx.save_for_backward(hidden, weight, log_norm, mean, square_sum)
        ctx.scale, ctx.cap, ctx.rows, ctx.target_of = scale, cap, rows, target_of
        ctx.set_materialize_grads(False)
        return log_probs, log_norm - mean if entropy else None, square_sum.clone() if squares else None

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, d_log_probs: Tensor | None, d_entropy: Tensor | None, d_squares: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, log_norm, mean, square_sum = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        scores_of = _Scores(hidden, weight, ctx.scale, ctx.cap, ctx.rows)
        is_alone = d_log_probs is not None and d_log_probs.shape[1] == 1 and d_entropy is None and d_squares is None
        is_fused = hidden.is_cuda and len(weight) >= FUSED_FROM and is_alone
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=scores_of.dtype) if need_weight else None
        for part in scores_of.parts():
            scores = scores_of.of(part)
            bend = None if ctx.cap is None else 1 - (scores / (ctx.scale * ctx.cap)).square()
            if d_log_probs is not None and is_fused:
                slope = ctx.target_of.slope(scores, log_norm, part, ctx.scale * d_log_probs, hidden.dtype)
            else:
                slope = _slope(scores, log_norm, mean, square_sum, (d_log_probs, d_entropy, d_squares), part)
                if d_log_probs is not None:
                    ctx.target_of.add(slope, part, d_log_probs)
                slope = (slope if ctx.scale == 1.0 else slope.mul_(ctx.scale)).to(hidden.dtype)
            if bend is not None:
                slope = (slope * bend).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(slope, weight, out=d_hidden[part])
            if d_weight is not None and scores_of.same:
                d_weight.addmm_(slope.t(), hidden[part])
            elif d_weight is not None:
                d_weight += wide_product(slope.t(), hidden[part])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), *(None,) * 7


class _Targets:
    """The columns of the targets among this rank's scores; a target that another rank holds counts zero here."""

    def __init__(self, targets: Tensor, vocabulary: VocabularyPart | None, size: int) -> None:
        self.size, self.here = size, None
        self.column = targets
        if vocabulary is not None:
            column = targets - vocabulary.start
            self.here = (column >= 0) & (column < size)
            self.column = column.clamp(0, max(0, size - 1))

    def scores(self, scores: Tensor, part: slice) -> Tensor:
        if self.size == 0:
            return scores.new_zeros(self.column[part].shape)
        picked = scores.gather(1, self.column[part])
        return picked if self.here is None else picked * self.here[part]

    def add(self, slope: Tensor, part: slice, values: Tensor) -> None:
        """Add `values` (M, 1 + K) of the rows of `part` to the targets' columns of `slope`."""
        if self.size:
            slope.scatter_add_(1, self.column[part], self._own(values, part))

    def slope(self, scores: Tensor, log_norm: Tensor, part: slice, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`log_prob_slope` of the rows of `part`, of which `values` (M, 1) are the gradients."""
        own = self._own(values, part)[:, 0]
        return _fused(log_prob_slope)(scores, log_norm[part], self.column[part, 0], values[part, 0], own, dtype)

    def _own(self, values: Tensor, part: slice) -> Tensor:
        return values[part] if self.here is None else values[part] * self.here[part]


def _combine(
    group: dist.ProcessGroup, log_norm: Tensor, log_probs: Tensor, mean: Tensor, square_sum: Tensor, *, moments: bool
) -> None:
    """Make statistics of the ranks' parts those of the whole vocabulary, in place; `log_probs` come as scores.

    A part's share of the probability is exp(own log_norm - whole log_norm), by which its moments are weighted.
    """
    own, highest = log_norm.clone(), log_norm.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.cat([(own - highest).exp_()[:, None], log_probs], dim=1)
    dist.all_reduce(sums, group=group)
    torch.add(highest, sums[:, 0].log_(), out=log_norm)
    torch.sub(sums[:, 1:], log_norm[:, None], out=log_probs)
    if moments:
        share = (own - log_norm).exp_()
        weighted = torch.stack([mean * share, square_sum * share * share])
        dist.all_reduce(weighted, group=group)
        mean.copy_(weighted[0])
        square_sum.copy_(weighted[1])


def _slope(
    scores: Tensor, log_norm: Tensor, mean: Tensor, square_sum: Tensor, grads: tuple[Tensor | None, ...], part: slice
) -> Tensor:
    """d loss / d scores without the target's own term; overwrites `scores`.

    d entropy / d s_i = -p_i (s_i - mean) and d squares / d s_i = 2 p_i (p_i - squares), where mean = sum_v p_v s_v.
    """
    d_log_probs, d_entropy, d_squares = grads
    probs = (scores - log_norm[part, None]).exp_()
    if d_entropy is None and d_squares is None and d_log_probs is not None:
        return probs.mul_(-d_log_probs[part].sum(dim=1, keepdim=True))
    factor = torch.zeros_like(probs)
    if d_entropy is not None:
        factor.sub_(scores.sub_(mean[part, None]).mul_(d_entropy[part, None]))
    if d_squares is not None:
        factor.add_((probs - square_sum[part, None]).mul_(2 * d_squares[part, None]))
    if d_log_probs is not None:
        factor.sub_(d_log_probs[part].sum(dim=1, keepdim=True))
    return factor.mul_(probs)
