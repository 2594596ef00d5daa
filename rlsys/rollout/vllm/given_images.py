"""Images as vLLM takes them from us: processed. Its own image processors, which need torchvision, are not used.

An item is one grid, or one tile: what has placeholder tokens in a row in the prompt.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from rlsys.models.vision import image_places, joined_images, num_features, one_image
from rlsys.protocol import ImageInputs
from rlsys.types import LARGEST_IMAGE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GRID, RAW_VIEW = "image_grid_thw", 3
"""The sizes of grids, which no tiles have; the code of a tensor's bytes in vLLM's msgpack."""


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
        return image_prompt(
            [config.image_token_id] * sum(num_features(config, image.tensors)), config, [image], salt=""
        )

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
            return {"image": None}

        def get_mm_max_tokens_per_item(self, *_: object, **__: object) -> Mapping[str, int]:
            config = self.get_hf_config()
            return {"image": sum(num_features(config, one_image(config, self.side)))}

    for name in config.architectures:
        model: Any = ModelRegistry.models[name].load_model_cls()
        del model._processor_factory
        MULTIMODAL_REGISTRY.register_processor(ProfiledImage, info=Info, dummy_inputs=lambda _: None)(model)  # pyrefly: ignore
    arguments = {"mm_processor_cache_gb": 0, "mm_device_do_normalize": False}
    return {name: value for name, value in arguments.items() if name in EngineArgs.__dataclass_fields__}


def image_prompt(
    ids: Sequence[int], config: "PretrainedConfig", images: Sequence[ImageInputs], *, salt: str
) -> dict[str, object]:
    """The input of a prompt with images; what vLLM computed of an image serves prompts of the same `salt` only."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    tensors, names, places = _items(ids, config, images, salt)
    fields = {name: MultiModalFieldConfig.batched("image", keep_on_cpu="pixel" not in name) for name in tensors}
    if GRID in tensors:
        fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", tensors[GRID].prod(-1))
    return {
        "type": "multimodal",
        "prompt_token_ids": list(ids),
        "cache_salt": salt,
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields),
        "mm_hashes": {"image": names},
        "mm_placeholders": {"image": [PlaceholderRange(at, count) for at, count in places]},
    }


def image_features(
    ids: Sequence[int], config: "PretrainedConfig", images: Sequence[ImageInputs], *, salt: str
) -> dict[str, object]:
    """The same for a server's route /inference/v1/generate: its `features`, written as vLLM 0.26 to 0.32 read them."""
    tensors, names, places = _items(ids, config, images, salt)
    parts = {name: tensor.unbind() for name, tensor in tensors.items()}
    if GRID in tensors:
        parts["pixel_values"] = tensors["pixel_values"].split(tensors[GRID].prod(-1).tolist())
    items = [dict(zip(parts, item, strict=True)) for item in zip(*parts.values(), strict=True)]
    return {
        "mm_hashes": {"image": names},
        "mm_placeholders": {"image": [{"offset": at, "length": count} for at, count in places]},
        "kwargs_data": {"image": [_packed(item) for item in items]},
    }


def _packed(item: Mapping[str, Tensor]) -> str:
    """The tensors of an item in vLLM's msgpack, each with how it is joined with those of other items."""
    packed = {}
    for name, values in item.items():
        field: tuple[str, dict[str, object]] = "batched", {"keep_on_cpu": "pixel" not in name}
        if GRID in item and name == "pixel_values":
            field = "flat", {"slices": [(0, len(values), None)], "dim": 0, "keep_on_cpu": False}
        data = msgspec.msgpack.Ext(RAW_VIEW, values.contiguous().numpy().tobytes())
        packed[name] = {"data": (str(values.dtype).removeprefix("torch."), tuple(values.shape), data), "field": field}
    return b64encode(msgspec.msgpack.encode(packed)).decode()


def _items(
    ids: Sequence[int], config: "PretrainedConfig", images: Sequence[ImageInputs], salt: str
) -> tuple[dict[str, Tensor], list[str], list[tuple[int, int]]]:
    """What the model takes of all images; the name, and the first placeholder and their number, of each item."""
    tensors = joined_images(images)
    counts = num_features(config, tensors)
    if GRID not in tensors:
        tiles = tensors["pixel_values"]
        seen = torch.ones(len(tiles), *tiles.shape[2:], dtype=torch.bool)
        tensors = {"pixel_attention_mask": seen, **tensors, "num_patches": torch.ones(len(tiles), dtype=torch.int64)}
    names = [
        f"{salt}/{one.shas[number] if GRID in tensors else (*one.shas, number)}"
        for one in images
        for number in range(len(num_features(config, one.tensors)))
    ]
    starts = [int(places[0]) for places in image_places(config, torch.tensor(ids), images).split(counts)]
    return tensors, names, list(zip(starts, counts, strict=True))
