"""Images as SGLang takes them from us: processed. Its own image processors, which need torchvision, are not used."""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch

from rlsys.models.vision import joined_images, num_features, pack_images
from rlsys.protocol import ImageInputs


class GivenImages:
    """In the place of SGLang's processor of a model: what a request brings is processed."""

    prefer_tokenized_input = True

    async def process_mm_data_async(self, image_data: Sequence[object], **_: object) -> object:
        return image_data[0]

    def clear_preprocess_cache(self) -> None:
        """There is none."""


def take_given_images() -> None:
    """Have SGLang's engines of this process take processed images."""
    from sglang.srt.managers import tokenizer_manager

    wrapper = next(name for name in vars(tokenizer_manager) if name.endswith("get_processor_wrapper"))
    for name in ("import_processors", wrapper):
        setattr(tokenizer_manager, name, lambda *_, **__: None)
    tokenizer_manager.get_mm_processor = lambda *_, **__: GivenImages()


def image_record(images: Sequence[ImageInputs], *, salt: str) -> str:
    """Images as a text, for the `/generate` of a server with the image processor of `rlsys.rollout.sglang.server`."""
    tensors = [b64encode(safetensors.torch.save({**one.tensors})).decode() for one in images]
    held = [(one.shas, one.seconds, text) for one, text in zip(images, tensors, strict=True)]
    return json.dumps({"salt": salt, "images": held})


def read_image_record(text: str) -> tuple[list[ImageInputs], str]:
    """The images of such a text, and their salt; ValueError for another text."""
    record = json.loads(text)
    tensors = [safetensors.torch.load(b64decode(text)) for _, _, text in record["images"]]
    held = zip(record["images"], tensors, strict=True)
    return [ImageInputs(tuple(shas), (), own, seconds) for (shas, seconds, _), own in held], record["salt"]


def request_images(ids: Sequence[int], config: Any, images: Sequence[ImageInputs], *, salt: str) -> object:
    """The `image_data` of a request; what SGLang computed of an image serves requests of the same `salt` only.

    A video is an item of as many images as it has steps in time: in one grid SGLang's encoder would mix them.
    """
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    packed, positions = pack_images(config, torch.tensor(ids), [len(ids)], [images])
    tensors = joined_images(images)
    grids, counts = tensors["image_grid_thw"], num_features(config, tensors)
    names = [name for one in images for name in one.names(len(one.tensors["image_grid_thw"]))]
    items = []
    parts = tensors["pixel_values"].split(grids.prod(-1).tolist())
    for name, pixels, grid, places in zip(names, parts, grids, packed.places.split(counts), strict=True):
        item = MultimodalDataItem(modality=Modality.IMAGE, feature=pixels, offsets=[(int(places[0]), int(places[-1]))])
        item.hash = int.from_bytes(hashlib.sha256(f"{salt}/{name}".encode()).digest()[:7], "big")
        item.set("image_grid_thw", torch.tensor([[1, *grid.tolist()[1:]]] * int(grid[0])))
        items.append(item)
    return MultimodalProcessorOutput(
        mm_items=items,
        input_ids=list(ids),
        im_token_id=config.image_token_id,
        mrope_positions=positions,
        mrope_position_delta=(positions.max() + 1 - len(ids)).view(1, 1),
    )
