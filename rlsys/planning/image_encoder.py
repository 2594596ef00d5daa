"""The image encoder of a vision-language model in numbers: of what transformers builds, without memory."""

from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING

from rlsys.config.vocabulary import GRIDS, TILES
from rlsys.models.megatron.family import decoder_family
from rlsys.planning.footprint import ENCODER, ImageEncoder
from rlsys.types import HFConfig
from rlsys.utils.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan_facts(hf_config: HFConfig, *, freeze_vision_tower: bool = False) -> HFConfig:
    """What is planned by: a config.json, quantised weights being read as bfloat16, or of a vision-language model its
    decoder's with the sizes of the encoder.

    Itself where transformers cannot read it or there is no table of the decoder, which planning then says.
    """
    if hf_config.get("model_type") not in (*GRIDS, *TILES):
        return {key: value for key, value in hf_config.items() if key != "quantization_config"}
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**hf_config)
        return {**decoder_family(config)[1], ENCODER: asdict(_sizes(config, freeze_vision_tower))}
    except (ConfigError, CheckpointError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError):
        return hf_config


def _sizes(config: "PretrainedConfig", freeze: bool) -> ImageEncoder:
    """A layer's four attention matrices and the last of its MLP have `hidden` rows, as has the filter of patches; a
    gated MLP has two more matrices of `ffn` rows, another one of twice as many. Attention in grids keeps seven times
    `hidden` for its backward pass: queries, keys and values as they are projected in one, the first two rotated, and
    the results of windows apart and together."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from rlsys.models.hf import build, layer_modules
    from rlsys.models.vision import is_tower

    model, is_grid = build(config, head="lm", packed=False), config.model_type in GRIDS
    decoder = {id(p) for part in (model.get_decoder(), model.lm_head) for p in part.parameters()}
    own = {name: p for name, p in model.named_parameters() if id(p) not in decoder}
    outside = [part for part in model.modules() if all(id(p) not in decoder for p in part.parameters())]
    units = [part for part in layer_modules(model) if part in outside]
    layer = next(part for part in outside if isinstance(part, GradientCheckpointingLayer))
    (filters,) = (p for p in own.values() if p.ndim > 2)
    hidden, in_unit = filters.shape[0], sum(p.numel() for p in units[0].parameters())
    patches = (config.vision_config.spatial_merge_size if is_grid else config.scale_factor) ** 2
    return ImageEncoder(
        layer=in_unit,
        outer=sum(p.numel() for p in own.values()) - in_unit * len(units),
        num_layers=len(units),
        hidden=hidden,
        q=2 * hidden if is_grid else hidden,
        kv=3 * hidden // 2 if is_grid else hidden,
        ffn=(sum(p.shape[0] for p in layer.parameters() if p.ndim == 2) - 5 * hidden) // 2,
        routed=0,
        adaptable=sum(sum(p.shape) for p in own.values() if p.ndim == 2),
        patches=patches,
        pixels=patches * filters.shape[-1] ** 2,
        patch=prod(filters.shape[1:]),
        deep=len(getattr(config.vision_config, "deepstack_visual_indexes", ())),
        frozen=sum(p.numel() for name, p in own.items() if is_tower(name)) if freeze else 0,
    )
