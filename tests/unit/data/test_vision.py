"""Rows with images: markers and content parts, ids and pixels of one call, batches that hold each image once."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from rlsys.config.schema.data import PromptsConfig
from rlsys.data.collate import collate_prompts
from rlsys.data.dataset import PromptDataset
from rlsys.data.images import ImageError
from rlsys.data.rows import take_images
from rlsys.data.videos import as_video, load_video
from rlsys.data.vision_processor import VisionProcessor
from rlsys.models.vision import num_features
from rlsys.protocol import IMAGES, DataProto
from rlsys.utils.errors import ConfigError, DataError
from tests.tiny_vision import QWEN3, QWEN25, write_model

COLUMNS = {"<image>": "images", "<video>": "videos"}


def picture(width: int, height: int = 16, shade: int = 0) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 80, 160)).save(data, "PNG")
    return data.getvalue()


def row(content: Any, images: list[bytes] | None = None, **more: object) -> dict[str, Any]:
    more = {"videos": None, **more}  # of all rows, for a file has the columns of its first
    held = more if images is None else {"images": [{"bytes": image, "path": None} for image in images], **more}
    return {"prompt": [{"role": "user", "content": content}], "data_source": "toy", "ground_truth": "1", **held}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> VisionProcessor:
    return processor_of(tmp_path_factory.mktemp("model"), QWEN3)


def processor_of(folder: Path, config: dict[str, Any]) -> VisionProcessor:
    tokenizer = AutoTokenizer.from_pretrained(write_model(folder, config))
    made = VisionProcessor.from_path(str(folder), tokenizer, settings={}, limit_images=3)
    assert made is not None
    return made


@pytest.fixture
def load(processor: VisionProcessor, tmp_path: Path) -> Callable[..., PromptDataset]:
    def load(*rows: dict[str, Any], **config: Any) -> PromptDataset:
        pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / "rows.parquet")
        tokenizer: Any = processor.tokenizer
        return PromptDataset.load(
            str(tmp_path / "rows.parquet"), tokenizer, PromptsConfig(**config), processor=processor
        )

    return load


def test_each_image_stands_for_as_many_tokens_as_it_has_features(load: Any, processor: VisionProcessor) -> None:
    dataset = load(row("<image> and <image>?", [picture(16), picture(32)]), row("none"))
    inputs = dataset[0].load_images()[0]
    assert num_features(processor.config, inputs.tensors) == [4, 8]
    text = processor.tokenizer.decode(list(dataset[0].token_ids))
    start, image, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    assert text == f"{start}{image * 4}{end} and {start}{image * 8}{end}?"
    assert dataset[1].load_images() == ()


def test_the_pixels_are_those_of_the_models_own_processor(load: Any, processor: VisionProcessor) -> None:
    (inputs,) = load(row("<image>", [picture(16, shade=7)]))[0].load_images()
    mean, std = (torch.tensor(getattr(processor.image_processor, name)) for name in ("image_mean", "image_std"))
    expected = (torch.tensor([7, 80, 160]) / 255 - mean) / std
    shown = inputs.tensors["pixel_values"].view(16, 3, 2, 4, 4)  # patches, channels, the still image twice, patch
    torch.testing.assert_close(shown, expected[None, :, None, None, None].expand_as(shown), rtol=0, atol=1e-5)
    assert np.asarray(Image.open(io.BytesIO(inputs.pictures[0].tobytes()))).tolist()[0][0] == [7, 80, 160]


BAD = {
    "an image too few": (row("<image> <image>", [picture(16)]), "has 1 images and the prompt 2 times <image>"),
    "images in another column": (row("<image>"), "1 placeholders, 0 features of 0 images (data.image_key)"),
    "an image without a place": (row("what?", [picture(16)]), "has 1 images and the prompt 0 times <image>"),
    "a broken image": (row("<image><image>", [picture(16), b"no image at all"]), "image 2 of 2: "),
    "too many images": (row("<image>" * 4, [picture(16)] * 4), "rollout.limit_images=3"),
    "a placeholder in the text": (row("<image><|image_pad|>", [picture(16)]), "2 placeholders <|image_pad|>"),
    "a video too few": (row("<video><image>", [picture(16)]), "has 0 videos and the prompt 1 times <video>"),
    "a video without frames": (row("<video>", videos=[{"video": []}]), "video 1 of 1: the video has 0 frames"),
    "a broken frame": (
        row("<video><video>", videos=[[picture(16)], [picture(16), b"no"]]),
        "video 2 of 2: frame 2 of 2: it is not a readable image",
    ),
    "frames of two sizes": (
        row("<video>", videos=[{"video": [picture(16), picture(32)], "fps": None}]),
        "frame 2 has the size (32, 16), the first (16, 16)",
    ),
    "a rate of 0": (row("<video>", videos=[{"video": [picture(16)], "fps": 0}]), "its fps must be a number above 0"),
    "a size of its own": (
        row("<video>", videos=[{"video": [picture(16)], "max_pixels": 9}]),
        "'max_pixels' of a video",
    ),
    "frames over the limit": (row("<video>", videos=[[picture(16)] * 7]), "4 images are more than"),
    "a playlist of other files": (
        row("<video>", videos=["data:,%23EXTM3U%0A%23EXTINF:1,%0A/etc/passwd"]),
        "the video cannot be decoded",
    ),
    "a prompt that is too long": (row("<image>" + "1 " * 600, [picture(16)]), "data.max_prompt_length=512"),
}


@pytest.mark.parametrize(("bad", "why"), BAD.values(), ids=BAD)
def test_a_bad_row_is_refused_by_file_row_and_image_or_skipped(load: Any, bad: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet, row 1: ") as caught:
        load(row("<image>", [picture(16)]), bad, truncation="left")
    assert why in str(caught.value)
    assert len(load(row("<image>", [picture(16)]), bad, bad_rows="skip").bad_rows) == 1


def test_an_image_that_changes_during_a_run_stops_it(load: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(16))
    (seen,) = load({**row("<image>"), "images": ["a.png"]})
    (tmp_path / "a.png").write_bytes(picture(16, shade=9))
    with pytest.raises(DataError, match=r"row 0: an image or video has changed"):
        seen.load_images()
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match="row 0: image 1 of 1"):
        seen.load_images()


def test_a_batch_holds_and_sends_each_image_once_however_its_rows_are_arranged(load: Any) -> None:
    first, second = picture(16), picture(32)
    dataset = load(row("<image>", [first]), row("no image"), row("again <image>", [first]), row("<image>", [second]))
    batch = collate_prompts(list(dataset), pad_token_id=0).repeat(4)
    batch.reorder(torch.randperm(16))
    column = DataProto.concat(batch.chunk(2)).non_tensor_batch[IMAGES]
    assert {images[0].shas for images in column if images} == {row.image_shas for row in dataset if row.image_shas}
    header, buffers = batch.to_buffers()
    pixels = [one.nbytes for one in buffers if one.nbytes in (16 * 96 * 4, 32 * 96 * 4)]
    assert sorted(pixels) == [16 * 96 * 4, 32 * 96 * 4]
    received = DataProto.from_buffers(header, buffers).non_tensor_batch[IMAGES]
    assert received.tolist() == batch.non_tensor_batch[IMAGES].tolist()
    held = {id(one.tensors["pixel_values"]) for images in received for one in images}
    assert len(held) == 2


def test_settings_of_the_image_processor_are_obeyed_or_refused(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    small = VisionProcessor.from_path(folder, tokenizer, settings={"max_pixels": 64}, limit_images=None)
    assert small is not None
    _, (inputs,) = small.encode("<image>", [Image.new("RGB", (64, 64))])
    assert inputs.tensors["image_grid_thw"].tolist() == [[1, 2, 2]]
    with pytest.raises(ConfigError, match=r"data\.mm_processor_kwargs: max_pixel is not among .*max_pixels"):
        VisionProcessor.from_path(folder, tokenizer, settings={"max_pixel": 64}, limit_images=None)


def test_content_parts_are_text_with_markers() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:,a"}},
        {"type": "text", "text": " or "},
        {"type": "image"},
        {"type": "text", "text": " or <image>"},
    ]
    values, images = take_images(row(parts) | {"images": ["b", "c"]}, "prompt", COLUMNS)
    assert values["prompt"][0]["content"] == "<image> or <image> or <image>"
    assert images == ({"url": "data:,a"}, "b", "c")
    assert "images" not in values
    parts = [{"type": "video_url", "video_url": {"url": "data:,v"}}, {"type": "image"}, {"type": "video"}]
    values, images = take_images(row(parts) | {"images": ["b"], "videos": [["c"]]}, "prompt", COLUMNS)
    assert values["prompt"][0]["content"] == "<video><image><video>"
    assert images == ({"video": {"url": "data:,v"}}, "b", {"video": ["c"]})


@given(st.lists(st.sampled_from(["text ", "<image>", "inline"]), max_size=8))
def test_images_come_in_the_order_of_the_prompt(pieces: list[str]) -> None:
    parts = [
        {"type": "image", "image": f"inline {n}"} if piece == "inline" else {"type": "text", "text": piece}
        for n, piece in enumerate(pieces)
    ]
    column = [f"column {n}" for n, piece in enumerate(pieces) if piece == "<image>"]
    expected = [f"{'inline' if p == 'inline' else 'column'} {n}" for n, p in enumerate(pieces) if p != "text "]
    values, images = take_images(row(parts) | {"images": column}, "prompt", COLUMNS)
    assert list(images) == expected
    assert values["prompt"][0]["content"].count("<image>") == len(expected)


@pytest.mark.parametrize(("config", "fps"), [(QWEN3, 4), (QWEN25, None)])
def test_a_video_is_its_frames_in_pairs_with_their_time(tmp_path: Path, config: dict[str, Any], fps: float) -> None:
    processor = processor_of(tmp_path, config)
    video = as_video({"type": "video", "video": [picture(16, shade=shade) for shade in (3, 5, 9)], "fps": fps})
    ids, (image, inputs) = processor.encode("<image> then <video>!", [picture(16), video])
    grids, text = inputs.tensors["image_grid_thw"].tolist(), processor.tokenizer.decode(ids)
    start, pads, end = "<|vision_start|>", "<|video_pad|>" * 4, "<|vision_end|>"
    before = f"{start}{'<|image_pad|>' * 4}{end} then "
    if config is QWEN3:  # frames at 0, 0.25 and 0.5 s, the last one twice
        assert grids == [[1, 4, 4]] * 2
        assert text == f"{before}<0.1 seconds>{start}{pads}{end}<0.5 seconds>{start}{pads}{end}!"
    else:
        assert (grids, inputs.seconds, image.seconds) == ([[2, 4, 4]], 1.0, 0.0)
        assert text == f"{before}{start}{pads * 2}{end}!"
    mean, std = (getattr(processor.image_processor, name)[0] for name in ("image_mean", "image_std"))
    red = inputs.tensors["pixel_values"].view(2, 16, 3, 2, 16)[:, :, 0]  # steps, patches, frames of a step, pixels
    for step, shades in enumerate([(3, 5), (9, 9)]):
        expected = (torch.tensor(shades) / 255 - mean) / std
        torch.testing.assert_close(red[step], expected[None, :, None].expand(16, 2, 16), rtol=0, atol=1e-5)
    other = as_video({"video": video["video"], "fps": 3.0})
    assert len({processor.encode("<video>", [one])[1][0] for one in (video, video, other)}) == 2


def test_models_of_tiles_take_no_videos(processor: VisionProcessor) -> None:
    other = VisionProcessor(processor.config, processor.image_processor, processor.tokenizer, limit_images=None)
    other.video_token = ""
    with pytest.raises(ImageError, match="only models of type qwen2_vl"):
        other.load([as_video([picture(16)])])


@pytest.mark.parametrize(
    ("form", "codec", "settings", "times"),
    [
        ("mp4", "mpeg4", {}, [0.0, 0.6, 1.3, 1.9]),
        ("matroska", "mpeg4", {"fps": 3}, [0.0, 0.4, 0.8, 1.1, 1.5, 1.9]),
        ("avi", "mpeg4", {"nframes": 3}, [0.0, 1.9]),
        ("mpegts", "mpeg2video", {"fps": 9, "max_frames": 2}, [0.0, 1.9]),
    ],
)
def test_a_file_gives_frames_at_equal_distances(form: str, codec: str, settings: Any, times: list[float]) -> None:
    """Twenty frames, ten a second, each lighter than the one before."""
    data = io.BytesIO()
    with av.open(data, "w", format=form) as file:
        stream: Any = file.add_stream(codec, rate=25 if codec == "mpeg2video" else 10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for number in range(20):
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 16), (10 * number,) * 3))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    video = load_video(as_video({"type": "video_url", "video_url": {"url": data.getvalue()}, **settings}))
    rate = 25 if codec == "mpeg2video" else 10
    assert [round(time * rate) for time in video.times] == [round(time * 10) for time in times]
    assert [round(np.asarray(frame).mean() / 10) for frame in video.frames] == [round(10 * time) for time in times]
    assert video.fps == pytest.approx(len(times) / 20 * rate)
