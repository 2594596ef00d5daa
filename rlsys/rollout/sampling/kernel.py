"""A Triton kernel that samples a token for each row of logits, without top-k, top-p or banned ids."""

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

BLOCK = 8192
NUM_WARPS = 16


@triton.jit
def _uniform(key, position):
    """The uniform of `rlsys.rollout.sampling.sample.uniforms` in [0, 1)."""
    x = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _scores(source, at, size, temperature, block: tl.constexpr):
    lane = at + tl.arange(0, block)
    return tl.load(source + lane, mask=lane < size, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _sample_rows(logits, pitch, size, table, rows, positions, samples, forced: tl.constexpr, block: tl.constexpr):
    """A program samples one row: a pass for the largest score and the sum, a second one up to the token."""
    row = tl.program_id(0)
    if tl.load(table + 3 * rows + row) == 0:
        return
    key = tl.load(table + row)
    start = tl.load(table + 2 * rows + row)
    source = logits + row.to(tl.int64) * pitch
    position = tl.load(positions + row).to(tl.int64)
    temperature = tl.load(table + rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    lanes = tl.arange(0, block)

    most = tl.full((), float("-inf"), tl.float32)
    base = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float64)
    token = tl.full((), 0, tl.int32)
    for at in range(0, size, block):
        score = _scores(source, at, size, temperature, block)
        peak = tl.max(score, 0)
        if peak > most:
            token = at + tl.min(tl.where(score == peak, lanes, block), 0)
            total *= tl.exp(base - peak).to(tl.float64)
            most = peak
            base = peak
        total += tl.sum(tl.exp(score - base), 0).to(tl.float64)

    picked = most
    if not greedy:
        target = _uniform(key, position) * total
        below = tl.full((), 0.0, tl.float64)
        at = 0
        while at < size:
            score = _scores(source, at, size, temperature, block)
            weight = tl.exp(score - base)
            share = tl.sum(weight, 0).to(tl.float64)
            if below + share > target:
                passed = below + tl.cumsum(weight.to(tl.float64), 0) > target
                first = tl.min(tl.where(passed, lanes, block), 0)
                if first < block:
                    token = at + first
                    picked = tl.sum(tl.where(lanes == first, score, 0.0), 0)
                at = size
            below += share
            at += block

    finite = (total > 0) & (total < float("inf"))
    full = (picked - most).to(tl.float64) - tl.log(total)
    out = samples + row * 5
    tl.store(out, (position - start).to(tl.float64))
    tl.store(out + 1, token.to(tl.float64))
    tl.store(out + 2, full)
    tl.store(out + 3, tl.where(greedy, 0.0, full))
    tl.store(out + 4, finite.to(tl.float64))
    tl.store(source + token, forced)


def sample_rows(logits: Tensor, positions: Tensor, table: Tensor, *, forced: float) -> Tensor:
    """Sample rows of `logits` (N, V) as `sample_tokens` does, and force the logits of their tokens.

    `positions` (N,) are the absolute positions of the new tokens; `table` (4, N) int64 holds each row's key, the bits
    of its temperature in float64, its first position, and whether it is sampled here. Returns (N, 5) index, token,
    full, sampled, finite in float64, unset for the other rows. A row is sampled alike in any batch. If rounding puts a
    uniform beyond the last token, about once in 10 million samples, the most likely token is taken.
    """
    rows, size = logits.shape
    samples = torch.empty(rows, 5, dtype=torch.float64, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(logits):
        _sample_rows[(rows,)](
            logits, logits.stride(0), size, table, rows, positions, samples, forced, block, num_warps=NUM_WARPS
        )
    return samples
