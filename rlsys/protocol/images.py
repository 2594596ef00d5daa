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
"""The column of images: per row a tuple of ImageInputs in the order of the prompt, () for a row without images."""


@dataclass(frozen=True)
class ImageInputs:
    """The images of one processor call. Rows that have the same images share the object, which travels once a message.

    `shas` identify the pictures by their pixels; `pictures` are their PNG files as uint8 arrays; `tensors` is what the
    model takes of all of them: pixel_values with image_grid_thw or pixel_attention_mask.
    """

    shas: tuple[str, ...]
    pictures: tuple[np.ndarray, ...] = field(compare=False)
    tensors: Mapping[str, Tensor] = field(compare=False)


def images_of(batch: "DataProto") -> list[tuple[ImageInputs, ...]]:
    """The images of each row."""
    return list(batch.non_tensor_batch.get(IMAGES, [()] * len(batch)))


allow_records(ImageInputs)
