"""Images of rows and messages, in any form that they come in, decoded to RGB within limits."""

import base64
import hashlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote, unquote_to_bytes

from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 50_000_000
MAX_ASPECT = 200
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that Pillow decodes; others start programs (EPS) or hold what is not an image (HDF5)."""

KEYS = ("bytes", "image", "image_url", "url", "path")
IMAGE_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
"""Types of content parts that are images, in OpenAI's APIs and chat templates, and the key of the image in each."""

_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{64,}={0,2}\s*")


class ImageError(ValueError):
    """An image that cannot be used; the message says what is wrong with it."""


def load_image(value: object, *, root: str | Path | None = None) -> "Image.Image":
    """The first frame of an image as upright 8-bit RGB, on white where it is transparent.

    `value` is a PIL image, the bytes of a file, a path (from `root` unless it is absolute), a file:// or data: URL,
    base64, or a mapping that has one of these under one of KEYS. Nothing is fetched. Raises ImageError.
    """
    with raised_as(ConfigError, "images need Pillow: pip install -e '.[vision]'", ImportError):
        from PIL import Image, ImageOps, UnidentifiedImageError

    data = b""
    try:
        value = unwrapped(value)
        if not isinstance(value, Image.Image):
            data = file_bytes(value, root)
            value = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(*value.size)
        value.load()
        return _rgb(ImageOps.exif_transpose(value))
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        start = f"it starts with {data[:16]!r}, and {', '.join(FORMATS)} are read"
        raise ImageError(f"it is not a readable image: {start}") from error
    except Exception as error:  # decoders raise whatever a broken file makes them run into
        raise ImageError(f"the image cannot be decoded: {type(error).__name__}: {error}") from error


def image_hash(image: "Image.Image") -> str:
    """32 hexadecimal digits that depend on the mode, size and pixels of an image, and not on its file."""
    digest = hashlib.sha256(f"{image.mode} {image.width} {image.height} ".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()[:32]


def png_bytes(image: "Image.Image") -> bytes:
    """The image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def unwrapped(value: object) -> object:
    """What is inside of {"bytes": ..., "path": ...} or {"type": "image_url", "image_url": {"url": ...}}; ImageError."""
    for _ in KEYS:
        if not isinstance(value, Mapping):
            return value
        if not (held := [value[key] for key in KEYS if value.get(key) is not None]):
            names = ", ".join(map(repr, value)) or "nothing"
            raise ImageError(f"an image must have one of {', '.join(KEYS)} that is not null, this has {names}")
        value = held[0]
    raise ImageError("the image is nested too deeply")


def file_bytes(value: object, root: str | Path | None, *, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """The bytes of a file that is given as `load_image` says; ImageError if there are none or too many."""
    if isinstance(value, str | os.PathLike):
        value = _bytes_of_text(os.fspath(value), root, max_bytes)
    if not isinstance(value, bytes | bytearray | memoryview):
        name = "null" if value is None else f"a {type(value).__name__}"
        raise ImageError(f"it must be bytes, a path, a data URL or a PIL image, this is {name}")
    if not value:
        raise ImageError("it has no bytes")
    if len(value) > max_bytes:
        raise ImageError(f"it has {len(value)} bytes, more than {max_bytes}")
    return bytes(value)


def _bytes_of_text(text: str, root: str | Path | None, max_bytes: int) -> bytes:
    if text.startswith("data:"):
        head, comma, data = text.partition(",")
        if not comma:
            raise ImageError("a data URL must have a comma before its data")
        return _base64_bytes(unquote(data)) if head.endswith(";base64") else unquote_to_bytes(data)
    name = unquote(text.removeprefix("file://")) if text.startswith("file://") else text
    if "://" in name:
        raise ImageError(f"{name[:200]}: it is not fetched; store the bytes, or the path of a local file")
    path = os.path.join(root or "", name)
    if os.path.isfile(path):
        if os.path.getsize(path) > max_bytes:
            raise ImageError(f"{path} has {os.path.getsize(path)} bytes, more than {max_bytes}")
        return Path(path).read_bytes()
    if _BASE64.fullmatch(text):
        return _base64_bytes(text)
    raise ImageError(f"{path[:200]!r}: {'not a file' if os.path.exists(path) else 'file not found'}")


def _base64_bytes(text: str) -> bytes:
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    with raised_as(ImageError, "its base64 cannot be decoded", ValueError):
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def _check_size(width: int, height: int) -> None:
    if not width or not height:
        raise ImageError(f"the image is {width} x {height}: it has no pixels")
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(f"the image is {width} x {height}: more than {MAX_IMAGE_PIXELS} pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"the image is {width} x {height}: one side is more than {MAX_ASPECT} times the other")


def _rgb(image: "Image.Image") -> "Image.Image":
    """An image of any mode as 8-bit RGB; greys of 16 bits are scaled."""
    from PIL import Image

    if image.mode == "F":
        raise ImageError("its pixels are floating-point numbers, of no known range: save it with 8 bits")
    if image.mode.startswith("I"):
        image = image.convert("I")
        lowest, highest = cast(tuple[int, int], image.getextrema())
        if lowest < 0 or highest > 65535:
            raise ImageError(f"its pixels are numbers from {lowest} to {highest}: save it with 8 or 16 bits")
        return image.point(lambda value: value * (1 / 257)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
