"""The functions of flash-linear-attention that Megatron's gated delta layers call, token by token on a CPU.

B packs (one), T tokens, H heads, K and V head sizes.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsys.models.megatron.family import PACKED_DELTA

_megatron = importlib.util.find_spec("megatron")
_folders = (_megatron.submodule_search_locations if _megatron else None) or ()
HAS_PACKED_DELTA = any(Path(folder, PACKED_DELTA).is_dir() for folder in _folders)
"""Whether Megatron's gated delta layers take packed rows, given this library."""


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, **options: Any) -> Any:
    """x (B, T, D), weight (D, width): each sequence convolved on its own, then SiLU."""
    assert options.pop("activation") == "silu"
    assert not any(options.values())
    parts = [x[:, a:b].transpose(1, 2) for a, b in pairwise(cu_seqlens.tolist())]
    left = weight.shape[1] - 1
    outs = [F.conv1d(F.pad(part, (left, 0)), weight[:, None], bias, groups=len(weight)) for part in parts]
    return F.silu(torch.cat(outs, dim=2).transpose(1, 2)), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> Any:
    """q, k (B, T, H, K), v (B, T, H, V), g and beta (B, T, H) -> (B, T, H, V): a state (H, K, V) per sequence."""
    assert not any(options.values())
    scale, outs = k.shape[-1] ** -0.5, []
    for begin, end in pairwise(cu_seqlens.tolist()):
        state = q.new_zeros(q.shape[2], k.shape[-1], v.shape[-1])
        for t in range(begin, end):
            key = k[0, t]
            state = state * g[0, t].exp()[:, None, None]
            change = (v[0, t] - (state * key[..., None]).sum(1)) * beta[0, t][:, None]
            state = state + key[..., None] * change[:, None]
            outs.append((state * (scale * q[0, t])[..., None]).sum(1))
    return torch.stack(outs)[None].type_as(v), None


def import_reference() -> None:
    """Import transformers' models with gated delta layers while the library is hidden: what they compute with is chosen
    at their import, and its kernels run on GPUs only."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    finally:
        del sys.modules["fla"]
        sys.modules.update(hidden)


def install() -> None:
    """Put these functions where Megatron imports them from, unless the library is installed or nothing calls them."""
    if importlib.util.find_spec("fla") is not None or not HAS_PACKED_DELTA:
        return
    import_reference()
    modules = {
        "fla": {},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(module).update(members)
        sys.modules[name] = module
