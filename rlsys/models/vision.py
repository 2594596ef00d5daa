"""Vision-language models: the families that are known, and where an image's features stand among a row's tokens.

A row's images and videos are placeholder tokens among its ids: the first ones, as many as they have features. Later
ones were drawn by the model, which has nothing to show for them. N tokens, F features, H hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rlsys.config.vocabulary import GRIDS, TILES
from rlsys.protocol import ImageInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class VisionModel(Protocol):
    """What is used of transformers' vision-language models."""

    config: Any
    model: Any
    lm_head: nn.Module

    def get_input_embeddings(self) -> nn.Module: ...
    def get_decoder(self) -> Any: ...
    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


def has_images(config: "PretrainedConfig") -> bool:
    """Whether this is the configuration of a vision-language model whose images are taken."""
    return config.model_type in (*GRIDS, *TILES)


def num_features(config: "PretrainedConfig", tensors: Mapping[str, Tensor]) -> list[int]:
    """How many features the model makes of each grid, or of each tile."""
    if config.model_type in GRIDS:
        return (tensors["image_grid_thw"].prod(-1) // config.vision_config.spatial_merge_size**2).tolist()
    vision = config.vision_config
    return [(vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2] * len(tensors["pixel_values"])


def is_tower(name: str) -> bool:
    """Whether a parameter belongs to the image encoder, by its name in the model or in a checkpoint."""
    return name.startswith(("model.visual.", "visual.", "model.vision_model."))


@dataclass(frozen=True)
class PackedImages:
    """The images of a pack, each once: `places` (F,) of features among its tokens, their `numbers` (F,) among the
    features of the images, and what the model takes of these.

    A pack of text has an image without places, which no token sees: every rank must run the image encoder, or the
    collectives of its shards would not match.
    """

    places: Tensor
    numbers: Tensor
    tensors: Mapping[str, Tensor]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "PackedImages":
        tensors = {name: t.to(device, non_blocking=non_blocking) for name, t in self.tensors.items()}
        places, numbers = (t.to(device, non_blocking=non_blocking) for t in (self.places, self.numbers))
        return PackedImages(places, numbers, tensors)


@dataclass(frozen=True)
class Embedded:
    """Tokens (N, H) with the features of images in their places, and what the first layers add for each feature."""

    tokens: Tensor
    images: PackedImages
    deep: Sequence[Tensor] = ()

    def arguments(self, shape: tuple[int, int], columns: slice = slice(None)) -> dict[str, object]:
        """Those of the language model for some columns of tokens in rows of this shape."""
        given: dict[str, object] = {"inputs_embeds": self.tokens.view(*shape, -1)[:, columns]}
        if self.deep:
            number = feature_numbers(self.images, shape[0] * shape[1]).view(shape)[:, columns]
            here = number >= 0
            given |= {"visual_pos_masks": here, "deepstack_visual_embeds": [x[number[here]] for x in self.deep]}
        return given


def feature_numbers(images: PackedImages, num_tokens: int) -> Tensor:
    """The number of the feature that stands at each token (N,), or -1."""
    numbers = torch.full((num_tokens,), -1, device=images.places.device)
    numbers[images.places] = images.numbers
    return numbers


def pack_images(
    config: "PretrainedConfig", token_ids: Tensor, lengths: Sequence[int], images: Sequence[Sequence[ImageInputs]]
) -> tuple[PackedImages, Tensor]:
    """The images of the sequences of a pack, and the positions of its tokens: (N,), or (3, N) for grids.

    `images` are the ImageInputs of each sequence; the answers to one prompt share them, and they are encoded once.
    ValueError for a sequence with fewer placeholders than features.
    """
    places, positions, first = list[Tensor](), list[Tensor](), 0
    once = list(dict.fromkeys(one for own in images for one in own))
    counts = [sum(num_features(config, one.tensors)) for one in once]
    numbers = dict(zip(once, torch.arange(sum(counts)).split(counts), strict=True))
    for ids, own in zip(token_ids.split(list(lengths)), images, strict=True):
        own_places = image_places(config, ids, own)
        places.append(own_places + first)
        positions.append(_positions(config, len(ids), own_places, own))
        first += len(ids)
    order = [token_ids.new_empty(0), *(numbers[one] for own in images for one in own)]
    packed = PackedImages(torch.cat(places), torch.cat(order), joined_images(once) or one_image(config))
    return packed, torch.cat(positions, -1)


def image_places(config: "PretrainedConfig", ids: Tensor, images: Sequence[ImageInputs]) -> Tensor:
    """Where the features of a row's ImageInputs stand among its ids (N,); ValueError for fewer placeholders."""
    if images and not has_images(config):
        raise ValueError(f"a model of type {config.model_type} takes no images")
    wanted = sum(sum(num_features(config, one.tensors)) for one in images)
    places = ids.new_empty(0)
    if wanted:
        places = torch.isin(ids, ids.new_tensor([*placeholder_ids(config)])).nonzero()[:wanted, 0]
    if len(places) < wanted:
        raise ValueError(f"{len(places)} image tokens in a row for {wanted} features of its images")
    return places


def placeholder_ids(config: "PretrainedConfig") -> set[int]:
    """The tokens that stand for features of images, and of videos."""
    return {config.image_token_id, getattr(config, "video_token_id", config.image_token_id)}


def _positions(config: "PretrainedConfig", length: int, places: Tensor, images: Sequence[ImageInputs]) -> Tensor:
    """The positions of a row whose features stand at `places`. Source: arXiv:2409.12191, with the time of 2502.13923.

    Text behind a video continues from its largest position, as in vLLM; in transformers 5.3 to 5.19 it overlaps it.
    """
    if config.model_type in TILES:
        return torch.arange(length)
    merge, pace = config.vision_config.spatial_merge_size, getattr(config.vision_config, "tokens_per_second", 1.0)
    parts, seen, done, first = list[Tensor](), 0, 0, 0
    for one in images:
        for steps, height, width in one.tensors["image_grid_thw"].tolist():
            text = int(places[seen]) - done
            times = (torch.arange(steps).double() * (one.seconds * pace)).long()
            grid = torch.cartesian_prod(times, torch.arange(height // merge), torch.arange(width // merge)).T
            parts += [torch.arange(first, first + text).expand(3, -1), grid + first + text]
            seen, done, first = seen + grid.shape[1], done + text + grid.shape[1], int(parts[-1].max()) + 1
    return torch.cat([*parts, torch.arange(first, first + length - done).expand(3, -1)], 1)


def one_image(config: "PretrainedConfig", side: int = 1) -> dict[str, Tensor]:
    """An image with nothing on it: a square of `side` x `side` features, or a tile."""
    vision = config.vision_config
    if config.model_type in TILES:
        return {"pixel_values": torch.ones(1, 3, vision.image_size, vision.image_size)}
    side *= vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([[1, side, side]])}


def embed(model: VisionModel, token_ids: Tensor, images: PackedImages) -> Embedded:
    """The embeddings of N tokens, those of placeholders replaced by features of the images."""
    features, *deep = image_features(model, images.tensors)
    tokens = model.get_input_embeddings()(token_ids)
    if not len(images.places):
        return Embedded(tokens + (sum((part.sum() for part in deep), features.sum()) * 0.0).to(tokens.dtype), images)
    return Embedded(tokens.index_put((images.places,), features.to(tokens.dtype)[images.numbers]), images, deep)


def image_features(model: VisionModel, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The features (F, H) of images, and those that the first layers add."""
    given = {name: t[None] for name, t in tensors.items()} if model.config.model_type in TILES else tensors
    output = model.model.get_image_features(**given, return_dict=True)
    parts = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
    return [part.flatten(0, -2) if isinstance(part, Tensor) else torch.cat(part) for part in parts]


def joined_images(images: Sequence[ImageInputs]) -> dict[str, Tensor]:
    """The tensors of several ImageInputs, one after another; none of no images."""
    return {name: torch.cat([one.tensors[name] for one in images]) for name in (images[0].tensors if images else ())}
