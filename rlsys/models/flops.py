"""Floating-point operations of a model and the peak of a device, for model FLOPs utilisation (MFU).

Only matrix products count, a multiply-add as two; attention counts what a causal mask leaves. Recomputation for
gradient checkpointing does not count, as in Chowdhery et al. 2022 (PaLM, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from time import perf_counter
from typing import Any

import torch

DENSE_PEAK = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIE": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 FLOP/s (V100: fp16) from the makers' data sheets, by words of the device name; most words win."""


def block_parameters(config: Any) -> int:
    """Weights of one block that multiply every token: attention, and the MLP or the experts a token is sent to."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return attention + 3 * hidden * config.intermediate_size
    routed = experts * 3 * hidden * getattr(config, "moe_intermediate_size", config.intermediate_size)
    return attention + routed + hidden * (getattr(config, "num_experts", None) or config.num_local_experts)


def forward_flops(config: Any, lengths: Iterable[int], *, num_head_tokens: int | None = None) -> float:
    """FLOPs of one forward pass over sequences of these lengths; the LM head runs on `num_head_tokens` (None: all)."""
    lengths = list(lengths)
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    blocks = config.num_hidden_layers * (2 * tokens * block_parameters(config) + 4 * pairs * heads * head_dim)
    head_tokens = tokens if num_head_tokens is None else num_head_tokens
    return float(blocks + 2 * head_tokens * config.hidden_size * config.vocab_size)


def training_flops(config: Any, lengths: Iterable[int], *, num_head_tokens: int | None = None) -> float:
    """FLOPs of forward and backward: three times the forward pass."""
    return 3 * forward_flops(config, lengths, num_head_tokens=num_head_tokens)


def data_sheet_flops(device_name: str) -> float | None:
    """Dense half-precision FLOP/s of a device by its marketing name, None when it is not in the table."""
    words = set(device_name.upper().replace("-", " ").split())
    known = [name for name in DENSE_PEAK if set(name.split()) <= words]
    return DENSE_PEAK[max(known, key=len)] if known else None


@cache
def peak_flops(device: torch.device) -> float:
    """FLOP/s the device can reach: the data sheet's number for a known GPU, else a measured product."""
    known = data_sheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known or measured_flops(device)


def measured_flops(device: torch.device, *, repeats: int = 3, size: int | None = None) -> float:
    """FLOP/s of a square matrix product, the best of `repeats`: bf16 4096 on CUDA, float32 1024 on CPU."""
    cuda = device.type == "cuda"
    size, dtype = (size or 4096, torch.bfloat16) if cuda else (size or 1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):
        start = perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
