"""Forward and backward of attention over packed sequences: ours, a dense block-diagonal mask, and padding, in one run.

python scripts/bench/packed_attention.py [--device cuda]
"""

import argparse
import json
from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.models.attention import Packing, packed_attention

HEADS, KV_HEADS, DIM = 9, 3, 64
CASES = {"64 of 20-60": (64, 20, 60), "16 of 64-256": (16, 64, 256), "4 of 512-1024": (4, 512, 1024)}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_mask(lengths: list[int], device: str) -> Attend:
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    order = torch.arange(len(owner), device=device)
    mask = (owner[:, None] == owner[None]) & (order[:, None] >= order[None])
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def padded(lengths: list[int], device: str) -> Attend:
    longest = max(lengths)
    keep = (torch.arange(longest)[None] < torch.tensor(lengths)[:, None]).to(device)
    place = torch.zeros_like(keep, dtype=torch.long).masked_scatter(keep, torch.arange(sum(lengths), device=device))

    def attend(*inputs: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1)[place].transpose(1, 2) for x in inputs)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)[keep][None]

    return attend


def ours(lengths: list[int], device: str) -> Attend:
    packing = Packing(lengths, torch.device(device))
    return lambda q, k, v: packed_attention(nn.Module(), q, k, v, None, packing=packing)[0]


def seconds(attend: Attend, inputs: list[Tensor]) -> float:
    """The best of five forward and backward passes after a warm-up."""
    times = []
    for _ in range(6):
        start = perf_counter()
        attend(*inputs).square().sum().backward()
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    report = {}
    for name, (num, shortest, longest) in CASES.items():
        lengths = torch.randint(shortest, longest + 1, (num,), generator=torch.Generator().manual_seed(0)).tolist()
        shapes = [(1, heads, sum(lengths), DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
        makers = {"ours": ours, "dense_mask": dense_mask, "padded": padded}
        times = {kind: seconds(make(lengths, device), inputs) for kind, make in makers.items()}
        ratios = {f"{kind}_over_ours": times[kind] / times["ours"] for kind in ("dense_mask", "padded")}
        report[name] = {"tokens": sum(lengths), **{f"{k}_ms": 1e3 * t for k, t in times.items()}, **ratios}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
