"""Processed images: what an image processor made of pictures, as rows and requests carry it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlsys.ipc.codec import allow_records

if TYPE_CHECKING:
    from rlsys.protocol.data import DataProto

IMAGES = "multi_modal_inputs"
"""The column of images and videos: per row a tuple of ImageInputs in the order of the prompt, () for a row of text."""


@dataclass(frozen=True)
class ImageInputs:
    """The images of one processor call, or a video. Rows with the same share the object, which travels once a message.

    `shas` identify the pictures by their pixels; `pictures` are their PNG files as uint8 arrays, of a video its first
    frame; `tensors` is what the model takes of all of them: pixel_values with image_grid_thw or pixel_attention_mask.
    `seconds` pass from one step of a video's grid to the next.
    """

    shas: tuple[str, ...]
    pictures: tuple[np.ndarray, ...] = field(compare=False)
    tensors: Mapping[str, Tensor] = field(compare=False)
    seconds: float = field(default=0.0, compare=False)

    def names(self, count: int) -> list[str]:
        """Of its `count` grids or tiles: the hash of the picture that each is, or all hashes and a number."""
        return [*self.shas] if len(self.shas) == count else [f"{self.shas}/{number}" for number in range(count)]


def images_of(batch: "DataProto") -> list[tuple[ImageInputs, ...]]:
    """The images of each row."""
    return list(batch.non_tensor_batch.get(IMAGES, [()] * len(batch)))


allow_records(ImageInputs)
