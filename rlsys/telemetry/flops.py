"""Model FLOPs and how much of the hardware's peak they used (MFU), after PaLM (arXiv 2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence

# Dense bf16 peaks in FLOP/s from the vendors' data sheets; the longest matching name wins.
_PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100": 989e12,
    "H100 PCIE": 756e12,
    "H800": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "A10": 125e12,
    "V100": 125e12,
}


def model_flops(
    *, num_params: int, num_layers: int, attention_width: int, sequence_tokens: Sequence[int], backward: bool = True
) -> float:
    """FLOPs of one pass over sequences of the given lengths: 6 N a token + 12 L H Q a pair of tokens, a third forward.

    `num_params` are the parameters active for a token without the input embedding; `attention_width` is heads times
    head size. Attention counts the full square, as in PaLM and verl, so a causal kernel may show a little more.
    """
    tokens = sum(sequence_tokens)
    pairs = sum(n * n for n in sequence_tokens)
    forward = 2.0 * num_params * tokens + 4.0 * num_layers * attention_width * pairs
    return 3.0 * forward if backward else forward


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its marketing name, None when unknown (then MFU is not reported)."""
    words = device_name.upper().replace("-", " ").split()
    known = [name for name in _PEAK_FLOPS if set(name.split()) <= set(words)]
    return _PEAK_FLOPS[max(known, key=len)] if known else None


def mfu_metrics(role: str, *, flops: float, seconds: float, num_devices: int, device_name: str) -> dict[str, float]:
    """`perf/mfu/{role}` (actor, actor_infer, critic, ...), or nothing where the device's peak is unknown."""
    peak = peak_flops(device_name)
    if peak is None or seconds <= 0 or num_devices <= 0:
        return {}
    return {f"perf/mfu/{role}": flops / (seconds * num_devices * peak)}
