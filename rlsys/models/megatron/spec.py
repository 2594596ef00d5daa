"""Which modules a Megatron model is made of: Transformer Engine's on CUDA, plain ones with exact attention on CPU.

T packed tokens, N heads on this rank, D head size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.models.megatron import start

# isort: split

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

HAS_TRANSFORMER_ENGINE = not start.ON_CPU and importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight says that its gradient is a sum over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a pack, one after another; grouped and latent heads included."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config, self.scale = config, softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any,
        **options: Any,
    ) -> Tensor:
        """query (T, N, D), key and value of as many or fewer heads -> (T, N * value size)."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True)
        grouped = query.shape[1] != key.shape[1]
        outs = [
            F.scaled_dot_product_attention(
                *(x[None] for x in part), is_causal=True, scale=self.scale, enable_gqa=grouped
            )[0]
            for part in parts
        ]
        return torch.cat(outs, dim=1).transpose(0, 1).flatten(1)


def block_spec(config: Any, *, vp_stage: int | None) -> Any:
    """The layers of one pipeline stage or virtual chunk."""
    spec: Any = get_gpt_decoder_block_spec(
        config, HAS_TRANSFORMER_ENGINE, normalization=config.normalization, vp_stage=vp_stage
    )
    if not HAS_TRANSFORMER_ENGINE:
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            _exact(layer)
    return spec


def _exact(spec: ModuleSpec) -> None:
    """Put this module's norm and attention into a specification, in place."""
    for name, part in vars(spec.submodules).items() if spec.submodules is not None else ():
        if part is WrappedTorchNorm:
            setattr(spec.submodules, name, RMSNorm)
        elif part is DotProductAttention:
            setattr(spec.submodules, name, PackedAttention)
        elif isinstance(part, ModuleSpec):
            _exact(part)
