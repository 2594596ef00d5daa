"""GPTModel chunks of one rank, from a family's tables and the parallel sizes, and their heads.

M response tokens, H hidden size, T packed tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsys.config.schema.megatron import HAS_FLASH_ATTENTION, MegatronConfig, MegatronShardConfig
from rlsys.models.context import PackShare, own_among
from rlsys.models.logprobs import VocabularyPart
from rlsys.models.megatron import shim

# isort: split

from megatron.core import __version__, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from rlsys.models.megatron.family import Family, Head
from rlsys.models.megatron.image_tower import ImagePacking, ImageTower
from rlsys.models.megatron.parallel import ParallelSizes, with_recompute
from rlsys.models.megatron.spec import HAS_TRANSFORMER_ENGINE, add_blocks, block_spec, hf_rope, mend_latent_attention
from rlsys.models.packing import TokenRows, sequence_ends
from rlsys.models.token_model import token_numbers
from rlsys.models.vision import feature_numbers
from rlsys.types import HFConfig
from rlsys.utils.errors import ConfigError, raised_as


def transformer_config(
    family: Family, hf_config: HFConfig, megatron: MegatronShardConfig, *, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Megatron's configuration of the model split as `megatron` says; ConfigError for settings it refuses."""
    sizes = ParallelSizes.from_config(megatron)
    own = family.transformer_config(hf_config, dtype)
    if scaled := hf_rope(family, hf_config):
        own["softmax_scale"] = scaled[1] ** 2 * own["kv_channels"] ** -0.5
    overrides = family.free_overrides(megatron, own)
    fp8 = overrides.get("fp8", megatron.fp8 if isinstance(megatron, MegatronConfig) else None)
    if fp8 is not None and not HAS_TRANSFORMER_ENGINE:
        raise ConfigError(f"fp8={fp8} needs Transformer Engine on CUDA: remove fp8")
    moe = own.get("num_moe_experts") is not None
    if (moe or family.mla) and sizes.tp > 1 and not sizes.sequence_parallel:
        raise ConfigError("experts and latent attention on tensor-parallel ranks: set sequence_parallel=true")
    settings: dict[str, Any] = {  # fused kernels would be compiled without Transformer Engine, which takes minutes
        "activation_func": nn.functional.silu,
        **own,
        **sizes.arguments(),
        "sequence_parallel": sizes.sequence_parallel and sizes.tp > 1,
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "use_cpu_initialization": shim.ON_CPU,
        "overlap_p2p_comm": sizes.vp > 1,
        "batch_p2p_comm": sizes.vp == 1,
        "bias_activation_fusion": HAS_TRANSFORMER_ENGINE and "activation_func" not in own,
        "bias_dropout_fusion": HAS_TRANSFORMER_ENGINE,
        "apply_rope_fusion": HAS_TRANSFORMER_ENGINE and not family.mla and own.get("mrope_section") is None,
        "gradient_accumulation_fusion": True,
        "moe_grouped_gemm": HAS_TRANSFORMER_ENGINE and moe,
        "moe_permute_fusion": HAS_TRANSFORMER_ENGINE and moe,
        "fp8": fp8,
    }
    backend = overrides.pop("attention_backend", None) or "auto"
    settings["attention_backend"] = AttnBackend["auto" if backend == "flash" and not HAS_FLASH_ATTENTION else backend]
    kind = MLATransformerConfig if family.mla else TransformerConfig
    with raised_as(ConfigError, "Megatron refuses this configuration", TypeError, ValueError, AssertionError):
        return kind(**settings | with_recompute(overrides, layers=recompute))


def weigh_router_losses(config: TransformerConfig, aux: Any, z: float | None, weight: float) -> None:
    """Give the routers' own losses, of coefficients `aux` and `z`, this weight per token on any number of ranks:
    Megatron-Core 0.16 divides them by the number of ranks that share tokens once too often."""
    if __version__.startswith("0.16."):
        weight *= config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    config.moe_aux_loss_coeff = [x * weight for x in aux] if isinstance(aux, list) else aux * weight
    config.moe_z_loss_coeff = None if z is None else z * weight


def build_chunks(
    family: Family,
    hf_config: HFConfig,
    megatron: MegatronShardConfig,
    *,
    dtype: torch.dtype,
    recompute: bool = False,
    fuse_gradients: bool = False,
    head: Head,
    device: torch.device,
    tower: ImageTower | None = None,
) -> "list[TokenGPT]":
    """This rank's chunks in order, parameters not yet filled; Megatron's groups of `megatron` must be current.

    `tower` is the image encoder of a vision-language model. With `fuse_gradients` Transformer Engine's products add the
    gradients of their weights to `main_grad` themselves, unless gradient_accumulation_fusion=false, and not with
    quantized weights: there the first micro-batch of each call would replace what earlier calls have added.
    """
    sizes = ParallelSizes.from_config(megatron)
    config = transformer_config(family, hf_config, megatron, dtype=dtype, recompute=recompute)
    quantized = config.fp8 or config.fp4 or config.quant_recipe
    fuses = fuse_gradients and HAS_TRANSFORMER_ENGINE and config.gradient_accumulation_fusion and not quantized
    config.gradient_accumulation_fusion = False  # Megatron's output layer, never called, would ask for apex
    arguments = family.model_args(hf_config, tp_size=sizes.tp, head=head)
    chunks = []
    for number in range(sizes.vp):
        stage = number if sizes.vp > 1 else None
        ends = {
            "pre_process": mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        }
        spec = block_spec(config, vp_stage=stage)
        chunk = TokenGPT(config=config, transformer_layer_spec=spec, vp_stage=stage, **ends, **arguments)
        if head != "lm" and chunk.post_process:
            chunk.output_layer = nn.Linear(config.hidden_size, 1, device=device)  # pyrefly: ignore
        if config.sequence_parallel:
            mend_latent_attention(chunk)
        if tower is not None and config.mrope_section is not None:
            chunk.rotary_pos_emb = tower.rotary  # pyrefly: ignore
        if tower is not None and chunk.pre_process:
            tower.join(chunk, dtype)
        add_blocks(chunk, family, hf_config)
        chunk.vocabulary = int(hf_config["vocab_size"])
        for layer in chunk.modules() if fuses else ():
            if hasattr(layer, "fuse_wgrad_accumulation"):
                layer.fuse_wgrad_accumulation = True  # pyrefly: ignore
        chunks.append(chunk.to(device))
    config.gradient_accumulation_fusion = fuses
    return chunks


class TokenGPT(GPTModel):
    """A GPTModel that ends with its hidden states; `token_outputs` of the last stage makes numbers of them."""

    vocabulary: int
    tower: ImageTower
    chunk_elements: int | None = None

    def forward(self, *, packed_seq_params: PackedSeqParams, **given: object) -> Tensor:  # pyrefly: ignore
        if self.pre_process and isinstance(packed_seq_params, ImagePacking):
            tokens = self.embedding(input_ids=given["input_ids"], position_ids=given["position_ids"])
            parallel = self.config.sequence_parallel
            given["decoder_input"] = self.tower.embed(tokens, packed_seq_params, sequence_parallel=parallel)
        return super().forward(packed_seq_params=packed_seq_params, **given)  # pyrefly: ignore

    def _postprocess(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:  # pyrefly: ignore
        return hidden_states

    @property
    def is_lm(self) -> bool:
        return not isinstance(self.output_layer, nn.Linear)

    def token_outputs(
        self, hidden: Tensor, rows: TokenRows, outputs: Sequence[str], temperature: float, topk: int = 0
    ) -> dict[str, Tensor]:
        """`token_numbers` from hidden states (T or this rank's share, 1, H), equal on all ranks of tensor and context
        parallelism."""
        group: Any = mpu.get_context_parallel_group()
        options: dict[str, Any] = {"temperature": temperature, "topk": topk, "chunk_elements": self.chunk_elements}
        layer: Any = self.output_layer
        if self.is_lm:
            head, options["part"] = self._vocabulary_part()
        else:
            head = lambda states: layer(states.to(layer.weight.dtype))[:, 0]  # noqa: E731

        def own(places: Tensor) -> tuple[Tensor, Tensor]:
            return own_among(places, rows.lengths, group.rank(), group.size())

        several = group if group.size() > 1 else None
        return token_numbers(self._whole(hidden), rows, outputs, head, own, several, **options)

    def _whole(self, hidden: Tensor) -> Tensor:
        """All tokens (T, H) of the pack or of this context-parallel rank's share; the backward pass adds the parts of
        tensor-parallel ranks where the head is cut."""
        if self.config.sequence_parallel:
            whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=self.is_lm)
        else:
            whole = tensor_parallel.copy_to_tensor_model_parallel_region(hidden) if self.is_lm else hidden
        return whole[:, 0]

    def _vocabulary_part(self) -> tuple[Tensor, VocabularyPart | None]:
        """This rank's rows of the output weight without those that pad the vocabulary."""
        tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group: Any = mpu.get_tensor_model_parallel_group()
        begin = dist.get_rank(group) * len(weight)
        real = min(max(self.vocabulary - begin, 0), len(weight))
        weight = weight if real == len(weight) else weight[:real]
        return weight, VocabularyPart(begin, group) if dist.get_world_size(group) > 1 else None


def packed_arguments(rows: TokenRows, device: torch.device) -> dict[str, Any]:
    """What TokenGPT is called with for one pack (1, T), or for this rank's share of its tokens."""
    group: Any = mpu.get_context_parallel_group()
    ends = sequence_ends(rows.lengths, device)
    ends.share = PackShare(rows.lengths, group.rank(), group.size(), device)  # pyrefly: ignore
    longest = max(rows.lengths)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    ids = rows.token_ids
    if rows.images is not None and len(rows.images.places):
        numbers = feature_numbers(rows.images, rows.num_tokens)
        packing = ImagePacking(**vars(packing), tensors=rows.images.tensors, numbers=numbers)
    if group.size() > 1:
        packing.cu_seqlens_q_padded = packing.cu_seqlens_kv_padded = ends
        packing.pad_between_seqs = False  # pyrefly: ignore  # or Transformer Engine compares both bounds in each layer
        own = ends.share.tokens  # pyrefly: ignore
        ids = ids[own]
        if isinstance(packing, ImagePacking):
            packing.numbers = packing.numbers[own]
    return {
        "input_ids": ids[None],
        "position_ids": rows.position_ids[None],
        "attention_mask": None,
        "packed_seq_params": packing,
    }
