"""Which modules a Megatron model is made of: Transformer Engine's on CUDA, plain ones with exact attention on CPU.

T packed tokens, N heads on this rank, D head size.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsys.models.context import own_spans, whole_order
from rlsys.models.megatron import shim

# isort: split

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

HAS_TRANSFORMER_ENGINE = not shim.ON_CPU and importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight says that its gradient is a sum over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a pack, one after another; grouped and latent heads included.

    Under context parallelism this rank's queries meet the keys and values of all ranks (rlsys/models/context.py).
    """

    def __init__(
        self,
        config: object,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        pg_collection: Any,
        **options: object,
    ) -> None:
        super().__init__()
        self.config, self.scale, self.group = config, softmax_scale, pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any,
        **options: object,
    ) -> Tensor:
        """query (T, N, D), key and value of as many or fewer heads -> (T, N * value size)."""
        lengths, size = packed_seq_params.cu_seqlens_q.diff().tolist(), self.group.size()
        if size > 1:
            order = whole_order(lengths, size).to(query.device)
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.group)[order]
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        spans = list(own_spans(lengths, self.group.rank(), size))
        queries = query.transpose(0, 1).split([span.stop - span.start for span in spans], dim=1)
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        outs = [
            _causal(q, keys[:, span.first : span.stop], values[:, span.first : span.stop], self.scale)
            for q, span in zip(queries, spans, strict=True)
        ]
        return torch.cat(outs, dim=1).transpose(0, 1).flatten(1)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """The last tokens' attention (N, t, D) to all tokens (N or fewer, T, D) up to their own."""
    last, earlier = query.shape[1], key.shape[1] - query.shape[1]
    mask = query.new_ones(last, key.shape[1], dtype=torch.bool).tril(earlier) if earlier else None
    return F.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]


def block_spec(config: Any, *, vp_stage: int | None) -> Any:
    """The layers of one pipeline stage or virtual chunk."""
    spec: Any = get_gpt_decoder_block_spec(
        config, HAS_TRANSFORMER_ENGINE, normalization=config.normalization, vp_stage=vp_stage
    )
    if not HAS_TRANSFORMER_ENGINE:
        spec.layer_norm = RMSNorm
    if replaced := _replaced(config):
        for layer in spec.layer_specs:
            _swap(layer, replaced)
    return spec


def _replaced(config: Any) -> dict[object, type[nn.Module]]:
    """Modules of Megatron's specification that ours stand in for.

    Of Transformer Engine's it is attention alone, where its own has no kernel to share sequences: in float32, and with
    keys and values of different sizes.
    """
    if not HAS_TRANSFORMER_ENGINE:
        return {WrappedTorchNorm: RMSNorm, DotProductAttention: PackedAttention}
    if config.context_parallel_size > 1 and (config.multi_latent_attention or config.params_dtype == torch.float32):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return {TEDotProductAttention: PackedAttention}
    return {}


def mend_latent_attention(model: nn.Module) -> None:
    """Give latent attention of the plain specification the whole gradient under sequence parallelism.

    Megatron-Core 0.16 cuts the rotary part of the keys, which all heads share, by columns, and takes the gradient of
    this rank's heads for that of all. Handed over whole, it goes the way of Transformer Engine's modules.
    """
    for module in model.modules():
        if isinstance(module, MLASelfAttention) and isinstance(module.linear_kv_down_proj, ColumnParallelLinear):
            module.linear_kv_down_proj.register_forward_hook(_whole_latent)


def _whole_latent(module: nn.Module, args: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
    whole = gather_from_tensor_model_parallel_region(output[0])
    return scatter_to_sequence_parallel_region(whole), output[1]


def _swap(spec: ModuleSpec, replaced: Mapping[object, type[nn.Module]]) -> None:
    """Put other modules into a specification, in place."""
    for name, part in vars(spec.submodules).items() if spec.submodules is not None else ():
        if isinstance(part, ModuleSpec):
            _swap(part, replaced)
        elif isinstance(part, type) and part in replaced:
            setattr(spec.submodules, name, replaced[part])
