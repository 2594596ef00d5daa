"""Which modules a Megatron model is made of: Transformer Engine's on CUDA, plain ones with exact attention on CPU.

T packed tokens, N heads on this rank, D head size.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rlsys.models.attention import causal_attention
from rlsys.models.megatron import shim
from rlsys.models.megatron.blocks import SCALED_ROPE, Settings, rope_of
from rlsys.models.megatron.family import Family
from rlsys.types import HFConfig

# isort: split

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, mappings
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention

HAS_TRANSFORMER_ENGINE = not shim.ON_CPU and importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight counts from zero or one and says that its gradient is a sum over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]
        self.counts_from_one = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self.counts_from_one:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a pack, one after another; grouped and latent heads and sinks included.

    Under context parallelism this rank's queries meet the keys and values of all ranks (rlsys/models/context.py).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        pg_collection: Any,
        **options: object,
    ) -> None:
        super().__init__()
        self.config, self.group = config, pg_collection.cp
        window = config.window_size[0] + 1 if _is_windowed(config, layer_number) else None
        self.attend = partial(causal_attention, scaling=softmax_scale, window=window)
        heads = config.num_attention_heads // pg_collection.tp.size()
        sinks = torch.empty(heads, dtype=config.params_dtype) if config.softmax_type == "learnable" else None
        self.register_parameter("softmax_offset", None if sinks is None else nn.Parameter(sinks))

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
        share = packed_seq_params.cu_seqlens_q.share
        if self.group.size() > 1:
            both = mappings.gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.group)
            key, value = both[share.order].split([key.shape[-1], value.shape[-1]], dim=-1)
        parts = query.transpose(0, 1)[None].split([span.stop - span.start for span in share.spans], dim=2)
        seen = [x.transpose(0, 1)[None] for x in (key, value)]
        outs = [
            self.attend(q, *(x[:, :, own.first : own.stop] for x in seen), sinks=self.softmax_offset)
            for q, own in zip(parts, share.spans, strict=True)
        ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1).flatten(1)


class DeltaNorm(nn.RMSNorm):
    """The norm of a gated delta layer's heads: its weight counts from zero, and its gradient is a sum over the ranks
    that share the heads, with sequence parallelism or without."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.partial_over = "tensors"  # type: ignore[assignment]


class PackedGatedDelta(GatedDeltaNet):
    """Megatron's gated delta layer for the sequences of a pack, whose ends the host knows, decaying in float32 as
    transformers' does."""

    def _resolve_cu_seqlens(self, padded: object, ends: Tensor, *args: object, **options: object) -> Tensor:
        return ends

    def _compute_g_and_beta(self, a_log: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        return super()._compute_g_and_beta(a_log.float(), *args)  # pyrefly: ignore


class StackedExperts(GptOssExperts):
    """Transformers' experts of gpt-oss behind Megatron's dispatcher. T tokens, H hidden size."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **options: object) -> None:
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.moe_ffn_hidden_size}
        own = {"num_local_experts": num_local_experts, "swiglu_limit": config.activation_func_clamp_value}
        with torch.device("meta"):
            super().__init__(AutoConfig.for_model("gpt_oss", experts_implementation="grouped_mm", **sizes, **own))
        self.to(config.params_dtype).to_empty(device=torch.cuda.current_device())
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]  # with the ranks that have the same experts only

    # pyrefly: ignore
    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """tokens (T, H), those of the first expert first, and their weights (T,) -> (T, H)."""
        experts = torch.repeat_interleave(tokens_per_expert.to(tokens.device), output_size=len(tokens))
        return super().forward(tokens, experts[:, None], probs[:, None]), None


def block_spec(config: Any, *, vp_stage: int | None) -> Any:
    """The layers of one pipeline stage or virtual chunk."""
    spec: Any = get_gpt_decoder_block_spec(
        config, HAS_TRANSFORMER_ENGINE, normalization=config.normalization, vp_stage=vp_stage
    )
    if not HAS_TRANSFORMER_ENGINE:
        spec.layer_norm = RMSNorm
    first = get_transformer_layer_offset(config, vp_stage=vp_stage) if config.linear_attention_freq else 0
    for number, layer in enumerate(spec.layer_specs):
        _swap(layer, _replaced(config))
        if config.linear_attention_freq and config.linear_attention_freq[first + number]:
            spec.layer_specs[number] = _with_gated_delta(layer)
    for layer in spec.layer_specs if config.num_moe_experts and config.add_bias_linear else ():
        mlp = layer.submodules.mlp  # since 0.17 a partial
        getattr(mlp, "keywords", vars(mlp))["submodules"].experts = StackedExperts
    return spec


def _with_gated_delta(layer: ModuleSpec) -> ModuleSpec:
    """A layer with gated delta attention instead of its own, made of the same linear layers."""
    own: TransformerLayerSubmodules = layer.submodules  # pyrefly: ignore
    linear = own.self_attention.submodules  # pyrefly: ignore
    parts = GatedDeltaNetSubmodules(linear.linear_qkv, DeltaNorm, linear.linear_proj)  # pyrefly: ignore
    return replace(layer, submodules=replace(own, self_attention=ModuleSpec(module=PackedGatedDelta, submodules=parts)))


def _replaced(config: Any) -> dict[object, type[nn.Module]]:
    """Modules of Megatron's specification that ours stand in for.

    Of Transformer Engine's it is attention alone, where its own has no kernel to share sequences: in float32, and with
    keys and values of different sizes, or to a window; and attention with sinks.
    """
    if not HAS_TRANSFORMER_ENGINE:
        return {WrappedTorchNorm: RMSNorm, DotProductAttention: PackedAttention}
    no_kernel = config.multi_latent_attention or config.window_size or config.params_dtype == torch.float32
    if (config.context_parallel_size > 1 and no_kernel) or config.softmax_type != "vanilla":
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return {TEDotProductAttention: PackedAttention}
    return {}


def add_blocks(model: Any, family: Family, hf_config: HFConfig) -> None:
    """Give a GPTModel what layers of the family have beside Megatron's own."""
    config = model.config
    if scaled := hf_rope(family, hf_config):
        model.rotary_pos_emb.inv_freq = scaled[0]
    if family.scaled_embedding and model.pre_process:
        model.embedding.register_forward_hook(lambda _, args, out: out * out.new_tensor(config.hidden_size**0.5))
    rotary = RotaryEmbedding(config.kv_channels, **family.window_rope(hf_config)) if family.window_rope else None
    for layer in model.decoder.layers:
        for module in (layer.self_attention, layer.mlp) if family.post_norms else ():
            module.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            module.register_forward_hook(lambda module, args, out: (module.post_layernorm(out[0]), *out[1:]))
        if rotary and _is_windowed(config, layer.layer_number):
            layer.self_attention.register_forward_pre_hook(partial(_rotate, rotary), with_kwargs=True)


def hf_rope(family: Family, hf_config: HFConfig) -> tuple[Tensor, float] | None:
    """The rotary frequencies of a model for which transformers computes them, and the factor of queries and keys."""
    kind = rope_of(hf_config)["rope_type"]
    if family.mla or kind not in SCALED_ROPE:
        return None
    return ROPE_INIT_FUNCTIONS[kind](AutoConfig.for_model(**hf_config))


def _rotate(rotary: RotaryEmbedding, module: object, args: object, options: Settings) -> tuple[object, Settings]:
    return args, {**options, "rotary_pos_emb": rotary(len(options["rotary_pos_emb"]), packed_seq=True)}


def _rotate_pack(t: Tensor, ends: Tensor, freqs: Tensor, *, cp_group: object = None, **options: float) -> Tensor:
    """Megatron's unfused rotation of a pack, at places that the host knows: its own asks the device in each layer.

    `freqs` are those of the longest sequence, or of each token of the pack.
    """
    share = ends.share  # pyrefly: ignore
    places = share.tokens if len(freqs) == share.total else share.positions
    return rope_utils._apply_rotary_pos_emb_bshd(t[:, None], freqs[places], **options)[:, 0]  # pyrefly: ignore


rope_utils._apply_rotary_pos_emb_thd = _rotate_pack  # pyrefly: ignore
# Megatron-Core 0.19 gives queries without a latent a norm that the models do not have; the specification has none.
MLASelfAttention._resolve_qk_norm_config = lambda self, submodules: vars(submodules)  # pyrefly: ignore


def _is_windowed(config: Any, layer_number: int) -> bool:
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)


def mend_latent_attention(model: nn.Module) -> None:
    """Give latent attention of the plain specification the whole gradient under sequence parallelism.

    Megatron-Core 0.16 cuts the rotary part of the keys, which all heads share, by columns, and takes the gradient of
    this rank's heads for that of all. Handed over whole, it goes the way of Transformer Engine's modules.
    """
    for module in model.modules():
        if isinstance(module, MLASelfAttention) and isinstance(module.linear_kv_down_proj, ColumnParallelLinear):
            module.linear_kv_down_proj.register_forward_hook(_whole_latent)


def _whole_latent(module: nn.Module, args: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
    whole = mappings.gather_from_tensor_model_parallel_region(output[0])
    return mappings.scatter_to_sequence_parallel_region(whole), output[1]


def _swap(spec: ModuleSpec, replaced: Mapping[object, type[nn.Module]]) -> None:
    """Put other modules into a specification, in place."""
    for name, part in vars(spec.submodules).items() if spec.submodules is not None else ():
        if isinstance(part, ModuleSpec):
            _swap(part, replaced)
        elif isinstance(part, type) and part in replaced:
            setattr(spec.submodules, name, replaced[part])
