"""Videos of rows: lists of frames, or files from which PyAV takes some."""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlsys.data.images import MAX_IMAGE_PIXELS, ImageError, file_bytes, image_hash, load_image, unwrapped
from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    from PIL import Image

MAX_VIDEO_BYTES = 1 << 30
MAX_VIDEO_PIXELS = 10 * MAX_IMAGE_PIXELS
MAX_FRAMES = 768
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,flv"
"""Formats that are decoded; some others of FFmpeg's name files and addresses that it would open."""

VIDEO_PARTS = {"video": "video", "video_url": "video_url"}
"""Types of content parts that are videos, and the key of the video in each."""
SETTINGS: Mapping[str, float] = {"fps": 2.0, "sample_fps": 0.0, "nframes": 0, "min_frames": 4, "max_frames": MAX_FRAMES}
"""What a row may set of a video, and the defaults: those of qwen-vl-utils. 0 is not set."""


@dataclass(frozen=True)
class Video:
    """Frames of one size, the second at which each is seen, and how many are seen a second."""

    frames: "Sequence[Image.Image]"
    times: Sequence[float]
    fps: float

    @property
    def sha(self) -> str:
        """32 hexadecimal digits that depend on the pixels of the frames and on their times."""
        parts = [*map(image_hash, self.frames), *map(str, self.times), str(self.fps)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def is_video(value: object) -> bool:
    """Whether `as_video` made this."""
    return isinstance(value, Mapping) and "video" in value


def as_video(value: object) -> Mapping[str, object]:
    """A video of a column, or a content part, as verl's {"video": ..., "fps": ...}."""
    if not isinstance(value, Mapping) or value.keys().isdisjoint(VIDEO_PARTS):
        return {"video": value}
    return {"video" if name == "video_url" else name: part for name, part in value.items() if name != "type"}


def load_video(value: Mapping[str, object], *, root: str | Path | None = None) -> Video:
    """The video of a mapping that `as_video` returns, with paths from `root`. Raises ImageError.

    All frames of a list are taken, `sample_fps` or `fps` of them a second; of a file `nframes`, or `fps` a second but
    at least `min_frames` and at most `max_frames`.
    """
    settings, source = dict[str, float](SETTINGS), value["video"]
    for name, number in value.items():
        if name == "video" or number is None:
            continue
        if name not in SETTINGS:
            raise ImageError(f"{name!r} of a video is not read, only {', '.join(SETTINGS)}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise ImageError(f"its {name} must be a number above 0, this is {number!r}")
        settings[name] = number
    if isinstance(source, list | tuple):
        return _of_frames(source, settings["sample_fps"] or settings["fps"], root)
    return _decoded(file_bytes(unwrapped(source), root, max_bytes=MAX_VIDEO_BYTES), settings)


def _of_frames(values: Sequence[object], fps: float, root: str | Path | None) -> Video:
    frames: list[Image.Image] = []
    for number, value in enumerate(values, 1):
        with raised_as(ImageError, f"frame {number} of {len(values)}", ImageError):
            frames.append(load_image(value, root=root))
        if frames[-1].size != frames[0].size:
            raise ImageError(f"frame {number} has the size {frames[-1].size}, the first {frames[0].size}")
        _check_frames(len(values), *frames[0].size)
    _check_frames(len(frames))
    return Video(frames, [number / fps for number in range(len(frames))], fps)


def _check_frames(count: int, width: int = 1, height: int = 1) -> None:
    if not 0 < count <= MAX_FRAMES:
        raise ImageError(f"the video has {count} frames; from 1 to {MAX_FRAMES} are taken")
    if count * width * height > MAX_VIDEO_PIXELS:
        raise ImageError(f"the {count} frames of {width} x {height} have more than {MAX_VIDEO_PIXELS} pixels")


def _decoded(data: bytes, settings: Mapping[str, float]) -> Video:
    """Frames of a file at equal distances, an even number of them."""
    with raised_as(ConfigError, "video files need PyAV: pip install -e '.[video]', or give their frames", ImportError):
        import av
    with (
        raised_as(ImageError, "the video cannot be decoded"),
        av.open(io.BytesIO(data), mode="r", options={"format_whitelist": FORMATS}) as file,
    ):
        stream = file.streams.video[0]
        total = sum(packet.size > 0 for packet in file.demux(stream))
        rate = float(stream.average_rate or 0)
        wanted = settings["nframes"] or total / rate * settings["fps"]
        if not settings["nframes"]:
            wanted = min(max(wanted, settings["min_frames"]), settings["max_frames"])
        count = max(int(min(wanted, total)) // 2 * 2, 1)
        _check_frames(count, stream.width, stream.height)
        chosen = {*np.linspace(0, total - 1, count).round().astype(int).tolist()}
        file.seek(0)
        seen = [(n / rate, one.to_image()) for n, one in enumerate(file.decode(stream)) if n in chosen]
    _check_frames(len(seen))
    times, frames = zip(*seen, strict=True)
    return Video(frames, times, count / total * rate)
