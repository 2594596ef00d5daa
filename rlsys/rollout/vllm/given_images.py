"""Images as vLLM takes them from us: processed. Its own image processors, which need torchvision, are not used.

An item is one grid, or one tile: what has placeholder tokens in a row in the prompt. A grid of several steps in time is
a video to vLLM, all others are images.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import BatchFeature, PretrainedConfig

from rlsys.models.vision import image_places, num_features, one_image
from rlsys.protocol import ImageInputs
from rlsys.types import LARGEST_IMAGE

GRID, RAW_VIEW = "image_grid_thw", 3
"""The sizes of grids, which no tiles have; the code of a tensor's bytes in vLLM's msgpack."""
VIDEO = {"pixel_values": "pixel_values_videos", GRID: "video_grid_thw"}
"""What vLLM's models call the tensors of videos."""


class Item(NamedTuple):
    """What vLLM knows an item by, its first placeholder and their number, and what the model takes."""

    name: str
    offset: int
    length: int
    tensors: Mapping[str, Tensor]


class ProfiledImage:
    """In the place of vLLM's processor of a model: it makes the image with which vLLM measures the memory it needs."""

    cache = None

    def __init__(self, info: Any, dummy_inputs: object, **_: object) -> None:
        self.info, self.dummy_inputs = info, self

    def get_dummy_processor_inputs(self, **_: object) -> None:
        """Nothing: `apply` makes them."""

    def apply(self, *_: object, **__: object) -> dict[str, object]:
        """A prompt that is one image of the largest size."""
        config = self.info.get_hf_config()
        image = ImageInputs(("",), (), one_image(config, self.info.side))
        ids = [config.image_token_id] * sum(num_features(config, image.tensors))
        return image_prompt(ids, config, [image], salt="")

    get_dummy_mm_inputs = apply


def take_given_images(config: Any, *, max_model_len: int) -> dict[str, object]:
    """Have vLLM's next engine of this model take processed images; returns the arguments that it needs for it.

    Some versions would normalise pixels once more, in the model, where the model's folder has an image processor.
    """
    from vllm import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseProcessingInfo

    class Info(BaseProcessingInfo):
        def __init__(self, ctx: object) -> None:
            super().__init__(ctx)
            self.side = isqrt(min(LARGEST_IMAGE, max_model_len))

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None, "video": None}

        def get_mm_max_tokens_per_item(self, *_: object, **__: object) -> Mapping[str, int]:
            config = self.get_hf_config()
            largest = sum(num_features(config, one_image(config, self.side)))
            return {"image": largest, "video": largest - 1}  # memory is measured with the kind of most tokens

    for name in config.architectures:
        model: Any = ModelRegistry.models[name].load_model_cls()
        del model._processor_factory
        MULTIMODAL_REGISTRY.register_processor(ProfiledImage, info=Info, dummy_inputs=lambda _: None)(model)  # pyrefly: ignore
    arguments = {"mm_processor_cache_gb": 0, "mm_device_do_normalize": False}
    return {name: value for name, value in arguments.items() if name in EngineArgs.__dataclass_fields__}


def image_prompt(
    ids: Sequence[int], config: PretrainedConfig, images: Sequence[ImageInputs], *, salt: str
) -> dict[str, object]:
    """The input of a prompt with images; what vLLM computed of an image serves prompts of the same `salt` only."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    kinds, tensors, fields = _items(ids, config, images, salt), dict[str, Tensor](), dict[str, object]()
    for kind, items in kinds.items():
        for name, first in items[0].tensors.items():
            parts = [item.tensors[name] for item in items]
            if _is_flat(name, first):
                tensors[name] = torch.cat(parts)
                fields[name] = MultiModalFieldConfig.flat_from_sizes(kind, torch.tensor(list(map(len, parts))))
            else:
                tensors[name] = torch.stack(parts)
                fields[name] = MultiModalFieldConfig.batched(kind, keep_on_cpu="pixel" not in name)
    return {
        "type": "multimodal",
        "prompt_token_ids": list(ids),
        "cache_salt": salt,
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields),
        "mm_hashes": {kind: [item.name for item in items] for kind, items in kinds.items()},
        "mm_placeholders": {
            kind: [PlaceholderRange(item.offset, item.length) for item in items] for kind, items in kinds.items()
        },
    }


def image_features(
    ids: Sequence[int], config: PretrainedConfig, images: Sequence[ImageInputs], *, salt: str
) -> dict[str, object]:
    """The same for a server's route /inference/v1/generate: its `features`, written as vLLM 0.26 to 0.32 read them."""
    kinds = _items(ids, config, images, salt).items()
    return {
        "mm_hashes": {kind: [item.name for item in items] for kind, items in kinds},
        "mm_placeholders": {
            kind: [{"offset": item.offset, "length": item.length} for item in items] for kind, items in kinds
        },
        "kwargs_data": {kind: [_packed(item.tensors) for item in items] for kind, items in kinds},
    }


def _is_flat(name: str, values: Tensor) -> bool:
    """Whether a tensor of an item has rows, which are joined with those of other items: the patches of a grid."""
    return name.startswith("pixel_values") and values.ndim == 2


def _packed(item: Mapping[str, Tensor]) -> str:
    """The tensors of an item in vLLM's msgpack, each with how it is joined with those of other items."""
    packed = {}
    for name, values in item.items():
        field: tuple[str, dict[str, object]] = "batched", {"keep_on_cpu": "pixel" not in name}
        if _is_flat(name, values):
            field = "flat", {"slices": [(0, len(values), None)], "dim": 0, "keep_on_cpu": False}
        data = msgspec.msgpack.Ext(RAW_VIEW, values.contiguous().numpy().tobytes())
        packed[name] = {"data": (str(values.dtype).removeprefix("torch."), tuple(values.shape), data), "field": field}
    return b64encode(msgspec.msgpack.encode(packed)).decode()


def _items(
    ids: Sequence[int], config: PretrainedConfig, images: Sequence[ImageInputs], salt: str
) -> dict[str, list[Item]]:
    """The items by vLLM's kind of them, in the order of the prompt."""
    places, seen, items = image_places(config, torch.tensor(ids), images), 0, dict[str, list[Item]]()
    for one in images:
        counts, parts = num_features(config, one.tensors), {name: t.unbind() for name, t in one.tensors.items()}
        if GRID in parts:
            parts["pixel_values"] = one.tensors["pixel_values"].split(one.tensors[GRID].prod(-1).tolist())
        for number, (name, length) in enumerate(zip(one.names(len(counts)), counts, strict=True)):
            kind, tensors = "image", {key: values[number] for key, values in parts.items()}
            if GRID not in tensors:
                shown = torch.ones(tensors["pixel_values"].shape[1:], dtype=torch.bool)
                tensors = {"pixel_attention_mask": shown, **tensors, "num_patches": torch.tensor(1)}
            elif tensors[GRID][0] > 1:
                kind, seconds = "video", torch.tensor(one.seconds, dtype=torch.float64)
                tensors = {VIDEO[key]: values for key, values in tensors.items()} | {"second_per_grid_ts": seconds}
            items.setdefault(kind, []).append(Item(f"{salt}/{name}", int(places[seen]), length, tensors))
            seen += length
    return items
