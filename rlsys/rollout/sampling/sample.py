"""Sampling tokens: counter-based uniforms, truncation by a probability threshold, inversion of the cumulative sum.

Letters: B rows, V vocabulary. A sample depends on the engine's seed, the request's seed and the absolute position of
the token in its sequence, and on nothing else: neither on the rest of its batch nor on whether the request was resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BLOCK = 64
TOP_P_WIDTH = 256
NO_TOKEN = -1


def signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 tensors, modulo 2**64."""
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def combine_seeds(*parts: int | Tensor) -> Tensor:
    """One int64 hash of several integers, elementwise where a part is a tensor; order matters."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        value = part if isinstance(part, Tensor) else torch.tensor(signed(part), dtype=torch.int64)
        key = mix64((key ^ value) + signed(GOLDEN))
    return key


def row_keys(engine_seed: int, request_seeds: Sequence[int]) -> Tensor:
    """The key (B,) of each request's stream of uniforms."""
    return combine_seeds(engine_seed, torch.tensor([signed(s) for s in request_seeds], dtype=torch.int64))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in [0, 1) as float64 with 53 random bits, one for each (key, position)."""
    return _shift_right(mix64(keys + positions * signed(GOLDEN)), 11).double() * 2.0**-53


def stop_id_table(stop_ids: Sequence[tuple[int, ...]]) -> Tensor:
    """(B, S); short rows repeat their first id, empty ones hold -1."""
    width = max([1, *map(len, stop_ids)])
    return torch.tensor([[*ids, *[ids[0] if ids else NO_TOKEN] * (width - len(ids))] for ids in stop_ids])


@dataclass(frozen=True)
class BatchSampling:
    """The sampling parameters of B rows as tensors.

    keys (B,) int64, temperature (B,) (0 = greedy), top_p (B,), top_k (B,) int64 (-1 = all). What any of the rows needs
    is known on the host, so that passes that no row needs are skipped.
    """

    keys: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    scaled: bool = False
    any_greedy: bool = False
    any_top_p: bool = False
    max_top_k: int = -1


class SampledTokens(NamedTuple):
    """Tokens (B,), their log-probabilities under the full and the sampled distribution (B,), finite (B,) bool."""

    tokens: Tensor
    full_logprobs: Tensor
    sampled_logprobs: Tensor
    finite: Tensor


def sample_tokens(
    logits: Tensor, positions: Tensor, params: BatchSampling, banned: Tensor | None = None
) -> SampledTokens:
    """Sample one token for each row of `logits` (B, V).

    `positions` (B,) are the absolute positions of the new tokens; `banned` (B, S) holds ids that must not be sampled,
    -1 for none. Full log-probabilities are those of softmax(logits / temperature), of softmax(logits) for greedy rows;
    sampled ones are after the ban, top-k and top-p (in this order, renormalised), and 0 for greedy rows. Tokens that
    tie with the last one kept are kept. A row whose probabilities are NaN is reported in `finite`.
    """
    scores = logits.float()
    if params.scaled:
        scores = scores / torch.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    probs = torch.softmax(scores, dim=-1)
    allowed = probs if banned is None else _ban(probs, banned)
    weights = _truncate(allowed, params) if params.max_top_k > 0 or params.any_top_p else allowed
    blocks = _block_sums(weights)
    kept = blocks.sum(-1, dtype=torch.float64)
    tokens = _invert(weights, blocks, uniforms(params.keys, positions))
    if params.any_greedy:
        tokens = torch.where(params.temperature > 0, tokens, allowed.argmax(-1))
    full = probs.gather(1, tokens[:, None]).squeeze(1).log()
    sampled = (full - kept.log()).float()
    sampled = torch.where(params.temperature > 0, sampled, 0.0) if params.any_greedy else sampled
    return SampledTokens(tokens, full, sampled, torch.isfinite(kept) & (kept > 0))


def _ban(probs: Tensor, banned: Tensor) -> Tensor:
    """A copy with the banned ids at zero; a row lists either ids or only -1."""
    index = banned.clamp(min=0)
    return probs.scatter(1, index, probs.gather(1, index).masked_fill(banned >= 0, 0.0))


def _truncate(probs: Tensor, params: BatchSampling) -> Tensor:
    if params.max_top_k > 0:
        width = min(params.max_top_k, probs.shape[1])
        last = probs.topk(width, dim=-1).values.gather(1, params.top_k.clamp(1, width)[:, None] - 1)
        limited = (params.top_k > 0) & (params.top_k <= width)
        probs = torch.where(probs >= torch.where(limited[:, None], last, 0.0), probs, 0.0)
    if params.any_top_p:
        mass = probs.sum(-1, dtype=torch.float64) * params.top_p.double()
        cut = torch.where(params.top_p < 1, _top_p_cut(probs, mass, TOP_P_WIDTH), 0.0)
        probs = torch.where(probs >= cut[:, None], probs, 0.0)
    return probs


def _top_p_cut(probs: Tensor, mass: Tensor, width: int) -> Tensor:
    """The smallest probability (B,) of the fewest most probable tokens that hold `mass` (B,)."""
    width = min(width, probs.shape[1])
    top = probs.topk(width, dim=-1).values
    before = top.cumsum(-1, dtype=torch.float64) - top
    num_kept = (before < mass[:, None]).sum(-1).clamp(min=1)
    cut = top.gather(1, num_kept[:, None] - 1).squeeze(1)
    beyond = num_kept == width
    if width < probs.shape[1] and bool(beyond.any()):
        cut[beyond] = _top_p_cut(probs[beyond], mass[beyond], probs.shape[1])
    return cut


def _block_sums(probs: Tensor) -> Tensor:
    """Sums (B, ceil(V / BLOCK)) of neighbouring probabilities."""
    rest = probs.shape[1] % BLOCK
    whole = probs[:, : probs.shape[1] - rest].reshape(probs.shape[0], -1, BLOCK).sum(-1)
    return torch.cat([whole, probs[:, -rest:].sum(-1, keepdim=True)], 1) if rest else whole


def _invert(probs: Tensor, blocks: Tensor, uniform: Tensor) -> Tensor:
    """The tokens (B,) at which the cumulative sum of `probs` passes `uniform` (B,) times its total.

    First the block, then the token inside it, so that only one block a row is summed up element by element.
    """
    block, within = _pass_point(blocks, uniform)
    last = probs.shape[1] - 1
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=last)).masked_fill(columns > last, 0.0)
    offset, _ = _pass_point(inside, within)
    return (block * BLOCK + offset).clamp(max=last)


def _pass_point(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative weights (B, N) pass uniform * total, and the uniform (B,) that is left inside that entry."""
    total = weights.cumsum(-1, dtype=torch.float64)
    target = uniform * total[:, -1]
    index = torch.searchsorted(total, target[:, None], right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(1, index).squeeze(1).double()
    below = total.gather(1, index).squeeze(1) - weight
    return index.squeeze(1), ((target - below) / weight).clamp(0.0, 1.0 - 2.0**-53)
