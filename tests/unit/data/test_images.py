"""Every form of image is read as the same RGB, and every kind of bad one is refused with its reason."""

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlsys.data.images import MAX_IMAGE_BYTES, ImageError, image_hash, load_image

RED = Image.new("RGB", (4, 3), (255, 0, 0))


def encoded(image: Image.Image = RED, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG file with this header and these chunks behind it."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
PNG, JPEG = encoded(), encoded(NOISE, "JPEG")
SCAN = png(4, 3, chunk(b"IDAT", zlib.compress(b"\0" * 39)))

# name: (what stands in the row, what the message must say)
BAD_IMAGES: dict[str, tuple[Any, str]] = {
    "null": (None, "this is null"),
    "a number": (7, "this is a int"),
    "true": (True, "this is a bool"),
    "a list": ([PNG], "this is a list"),
    "a list of numbers": ([137, 80, 78], "this is a list"),
    "an object without a known key": ({"src": "a.png"}, "this has 'src'"),
    "an empty object": ({}, "this has nothing"),
    "bytes and path null": ({"bytes": None, "path": None}, "must have one of bytes"),
    "bytes are a number": ({"bytes": 3}, "this is a int"),
    "nested without end": ({"image": {"image": {"image": {"image": {"image": {"image": PNG}}}}}}, "nested too deeply"),
    "an empty text": ("", "not a file"),
    "no bytes": (b"", "no bytes"),
    "a path that is not there": ("cat.png", "cat.png': file not found"),
    "a path of a folder": (".", "not a file"),
    "a path with NUL": ("a\0b.png", "file not found"),
    "a path of 10 KB": ("x" * 10_000 + ".png", "file not found"),
    "a file URL that is not there": ("file:///nowhere/cat.png", "/nowhere/cat.png': file not found"),
    "a file without bytes": ("empty.png", "no bytes"),
    "a file that is too large": ("large.png", f"more than {MAX_IMAGE_BYTES}"),
    "a pipe": ("pipe", "not a file"),
    "an http URL": ("http://example.com/a.png", "it is not fetched; store the bytes"),
    "an https URL in a part": ({"type": "image_url", "image_url": {"url": "https://a.b/c"}}, "not fetched"),
    "an s3 URL": ({"path": "s3://bucket/a.png"}, "not fetched"),
    "too many bytes": (b"\0" * (MAX_IMAGE_BYTES + 1), f"more than {MAX_IMAGE_BYTES}"),
    "a data URL without data": ("data:image/png;base64", "a comma"),
    "a data URL that is empty": ("data:image/png;base64,", "no bytes"),
    "a data URL of wrong base64": ("data:image/png;base64,@@@@", "base64 cannot be decoded"),
    "a data URL of text": ("data:text/plain,hello", "not a readable image: it starts with b'hello'"),
    "base64 of text": (base64.b64encode(b"hello " * 20).decode(), "it starts with b'hello "),
    "base64 cut within a byte": ("A" * 65, "base64 cannot be decoded"),
    "a web page": (b"<!DOCTYPE html><html>", "it starts with b'<!DOCTYPE html>"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "it starts with b'version https://"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not a readable image"),
    "PDF": (b"%PDF-1.4\n", "not a readable image"),
    "PostScript, which would start a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable"),
    "only a signature": (PNG[:8], "not a readable image"),
    "PNG that ends in its pixels": (encoded(NOISE)[:5000], "cannot be decoded"),
    "PNG whose last bytes are zero": (encoded(NOISE)[:-20] + b"\0" * 20, "cannot be decoded"),
    "PNG without pixels": (png(4, 3), "cannot be decoded"),
    "PNG with too few rows": (png(4, 3, chunk(b"IDAT", zlib.compress(b"\0" * 5))), "cannot be decoded"),
    "PNG of zero size": (png(0, 3, chunk(b"IDAT", zlib.compress(b""))), ""),
    "PNG of 400 megapixels": (png(20_000, 20_000), "400000000 pixels"),
    "PNG of 64 megapixels": (png(8_000, 8_000), "8000 x 8000: more than 50000000 pixels"),
    "PNG with a text of 100 MB": (
        png(4, 3, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 100_000_000)), SCAN[33:-12]),
        "Decompressed data too large",
    ),
    "JPEG that ends in its pixels": (JPEG[: len(JPEG) // 2], "truncated"),
    "JPEG that is only a header": (JPEG[:100], "cannot be decoded"),
    "GIF that ends in its pixels": (encoded(NOISE.quantize(), "GIF")[:1200], "cannot be decoded"),
    "WebP that ends in its pixels": (encoded(NOISE, "WEBP")[:300], "cannot be decoded"),
    "TIFF with a wild offset": (b"II*\0\xff\xff\xff\x7f", ""),
    "a PIL image of zero size": (Image.new("RGB", (0, 5)), "0 x 5: it has no pixels"),
    "a line of 1 x 500": (Image.new("RGB", (500, 1)), "more than 200 times"),
    "floating-point pixels": (Image.new("F", (4, 4), 0.5), "floating-point"),
    "32-bit pixels": (Image.new("I", (4, 4), 2**20), "numbers from 1048576"),
    "negative pixels": (Image.new("I", (4, 4), -1), "numbers from -1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "red image.png").write_bytes(PNG)
    (folder / "empty.png").touch()
    with (folder / "large.png").open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns before it raises
@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_with_what_is_wrong(kind: str, folder: Path) -> None:
    value, message = BAD_IMAGES[kind]
    with pytest.raises(ImageError) as caught:
        load_image(value, root=folder)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


FORMS: dict[str, Callable[[Path], Any]] = {
    "a PIL image": lambda _: RED,
    "bytes": lambda _: PNG,
    "a view of bytes": lambda _: memoryview(PNG),
    "a path below the root": lambda _: "red image.png",
    "an absolute path": lambda folder: str(folder / "red image.png"),
    "a Path": lambda folder: folder / "red image.png",
    "a file URL": lambda folder: f"file://{folder}/red%20image.png",
    "a data URL": lambda _: data_url(PNG),
    "a data URL in percent form": lambda _: "data:image/png," + "".join(f"%{b:02x}" for b in PNG),
    "base64 in lines": lambda _: base64.encodebytes(PNG).decode(),
    "URL-safe base64 without padding": lambda _: base64.urlsafe_b64encode(encoded(kind="BMP")).decode().rstrip("="),
    "an Image feature": lambda _: {"bytes": PNG, "path": "gone.png"},
    "an Image feature with a path": lambda _: {"bytes": None, "path": "red image.png"},
    "verl's mapping": lambda _: {"image": data_url(PNG), "max_pixels": 100},
    "an image part": lambda _: {"type": "image", "image": RED},
    "an image_url part": lambda _: {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "low"}},
    "an image_url part as text": lambda _: {"type": "image_url", "image_url": data_url(PNG)},
    "a palette": lambda _: encoded(RED.quantize()),
    "with alpha": lambda _: encoded(RED.convert("RGBA")),
    "TIFF": lambda _: encoded(kind="TIFF"),
    "lossless WebP": lambda _: encoded(kind="WEBP", lossless=True),
    "CMYK": lambda _: encoded(RED.convert("CMYK"), "TIFF"),
    "an animation that turns blue": lambda _: encoded(
        kind="GIF", save_all=True, append_images=[Image.new("RGB", RED.size, "blue")]
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels_and_hash(form: str, folder: Path) -> None:
    image = load_image(FORMS[form](folder), root=folder)
    assert (image.mode, image.size) == ("RGB", (4, 3))
    assert (np.asarray(image) == (255, 0, 0)).all()
    assert image_hash(image) == image_hash(RED)


def test_the_hash_depends_on_size_and_pixels() -> None:
    other = RED.copy()
    other.putpixel((3, 2), (255, 0, 1))
    hashes = {image_hash(image) for image in (RED, other, RED.transpose(Image.Transpose.ROTATE_90))}
    assert len(hashes) == 3
    assert all(len(h) == 32 for h in hashes)


def test_a_photograph_is_turned_upright_as_its_camera_says() -> None:
    image = Image.new("RGB", (3, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    upright = load_image(encoded(image, exif=exif))
    assert upright.size == (2, 3)
    assert upright.getpixel((1, 0)) == (255, 255, 255)


def test_what_is_transparent_is_white() -> None:
    half = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    half.putpixel((1, 0), (0, 0, 0, 128))
    assert np.asarray(load_image(encoded(half))).tolist() == [[[255, 255, 255], [127, 127, 127]]]
    keyed = Image.new("P", (1, 1), 0)
    keyed.putpalette([0, 0, 255])
    assert load_image(encoded(keyed, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_greys_of_16_bits_are_scaled_to_8() -> None:
    grey = Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16))
    for kind in ("PNG", "TIFF"):
        assert np.asarray(load_image(encoded(grey, kind)))[..., 0].tolist() == [[0, 1, 128, 255]]
