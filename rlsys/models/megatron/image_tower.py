"""The image encoder of a vision-language model on Megatron's first stage: transformers' own module, a copy on every
tensor-parallel rank, whose features replace embeddings of image tokens and are added to the first layers' results.

F features, H hidden size, N tokens of a pack, t of them on this rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from rlsys.models.megatron.family import Family
from rlsys.models.stacked import saved_stacks
from rlsys.models.vision import VisionModel, image_features
from rlsys.utils.errors import ConfigError


@dataclass(kw_only=True)
class ImagePacking(PackedSeqParams):
    """A pack with images: what the encoder takes, and the feature that stands at each token of this rank (t,), or -1.

    Layers find here what they add, for layers that are recomputed run when later packs have gone through others.
    """

    tensors: Mapping[str, Tensor]
    numbers: Tensor
    deep: Sequence[Tensor] = ()


class _AddedLater(torch.autograd.Function):
    """The tokens as they are; in backward, when all layers have run theirs, each feature gets the gradient of the leaf
    that the layers were given for it: layers that are recomputed could not share one graph of the encoder."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, leaves: Sequence[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *(leaf.grad for leaf in ctx.leaves)


class GridRotary(nn.Module):
    """Angles (N, 1, 1, D) of a whole pack from positions (1, 3, N), by transformers' own `rotary` embedding."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, position_ids: Tensor, section: Sequence[int], cp_group: object = None) -> Tensor:
        cos, sin = self.rotary(position_ids.float(), position_ids[0, :, None])
        angles = torch.atan2(sin, cos)  # (1, N, D), or (3, 1, N, D) where Qwen2-VL's attention joined the axes itself
        if angles.dim() == 4:
            parts = angles.split([*section, *section], dim=-1)
            angles = torch.cat([part[number % 3] for number, part in enumerate(parts)], dim=-1)
        return angles[0, :, None, None]


class ImageTower(nn.Module):
    """What a transformers model, which is on the meta device, has beside its decoder; the decoder is taken out.

    `family` is that of the decoder with the names and the encoder of this model. ConfigError if features are added to
    layers beyond the `num_layers` of the first chunk.
    """

    def __init__(self, model: VisionModel, decoder_family: Family, num_layers: int) -> None:
        super().__init__()
        self.num_deep = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
        if self.num_deep > num_layers:
            why = f"features of images are added to the first {self.num_deep} layers, the first stage has {num_layers}"
            raise ConfigError(f"{why}: set a smaller pipeline_model_parallel_size")
        decoder = model.get_decoder()
        saved = {held: name for held, parts in saved_stacks(model).items() for name in parts}
        embedding = next(name for name, p in model.named_parameters() if p is decoder.embed_tokens.weight)
        (own,) = (name for name, module in model.model.named_children() if module is decoder)
        delattr(model.model, own)
        del model.lm_head
        self.model, self.rotary = model, GridRotary(decoder.rotary_emb)
        tower = [(saved.get(name, name), f"tower.model.{name}", tuple(p.shape)) for name, p in model.named_parameters()]
        prefix = saved.get(embedding, embedding).removesuffix("embed_tokens.weight")
        self.family = replace(decoder_family, prefix=prefix, tower=tuple(tower))

    def join(self, chunk: GPTModel, dtype: torch.dtype) -> None:
        """Become a part of the first chunk, with parameters that are not yet filled."""
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    real = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="cpu"))
                    real.partial_over = "tensors"  # type: ignore[attr-defined]
                    module._parameters[name] = real
        chunk.tower = self
        for number in range(self.num_deep):
            chunk.decoder.layers[number].register_forward_hook(partial(_add_features, number), with_kwargs=True)

    def embed(self, tokens: Tensor, packing: ImagePacking, *, sequence_parallel: bool) -> Tensor:
        """Tokens (t, 1, H), or this rank's share of them under sequence parallelism, with features in their places."""
        sharing = mpu.get_tensor_model_parallel_world_size()
        if sequence_parallel:
            packing.numbers = packing.numbers.chunk(sharing)[mpu.get_tensor_model_parallel_rank()]
        features, *deep = (part.to(tokens.dtype) for part in image_features(self.model, packing.tensors))
        if features.requires_grad and not sequence_parallel:
            for part in (features, *deep):  # all ranks have the same gradient, and their sum is taken
                part.register_hook(lambda grad: grad / sharing)
        places = (packing.numbers >= 0).nonzero()[:, 0]
        tokens = tokens.index_put((places,), features[packing.numbers[places], None])
        packing.deep = deep
        if deep and features.requires_grad:
            packing.deep = [part.detach().requires_grad_() for part in deep]
            return _AddedLater.apply(tokens, packing.deep, *deep)
        return tokens


def _add_features(
    number: int, layer: nn.Module, args: object, options: Mapping[str, object], output: tuple[Tensor, object]
) -> tuple[Tensor, object]:
    """What a layer gives, with its features of images added."""
    packing = options["packed_seq_params"]
    if not isinstance(packing, ImagePacking):
        return output
    places = (packing.numbers >= 0).nonzero()[:, 0]
    return output[0].index_add(0, places, packing.deep[number][packing.numbers[places], None]), output[1]
