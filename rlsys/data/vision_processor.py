"""From messages, images and videos to token ids and pixels, for vision-language models."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from rlsys.config.checks.files import model_facts
from rlsys.config.vocabulary import GRIDS, TILES, TIMESTAMPS
from rlsys.data.chat import MARKERS, Kwargs, Message, Prompt, Tokenizer, as_messages, encode_text, render, with_parts
from rlsys.data.images import ImageError, image_hash, load_image, png_bytes
from rlsys.data.videos import Video, is_video, load_video
from rlsys.models.hf import saved_config
from rlsys.models.vision import num_features, placeholder_ids
from rlsys.protocol import ImageInputs
from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    from PIL import Image


class VisionProcessor:
    """The image processor and the tokenizer of a model, which make ids and pixels in one call.

    At most `limit_images` images stand in a prompt, any number for None; each pair of a video's frames counts as one.
    """

    def __init__(self, config: Any, image_processor: Any, tokenizer: Tokenizer, *, limit_images: int | None) -> None:
        self.config, self.image_processor, self.tokenizer = config, image_processor, tokenizer
        self.limit_images = limit_images
        token_id = config.image_token_id
        self.image_token = str(tokenizer.convert_ids_to_tokens(token_id))
        self.video_token = ""
        if config.model_type in GRIDS:
            ids = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
            self._start, self.video_token, self._end = map(str, tokenizer.convert_ids_to_tokens(ids))
        if encode_text(tokenizer, self.image_token) != [token_id]:
            raise ConfigError(f"the tokenizer does not know the model's image token {token_id} ({self.image_token})")

    @classmethod
    def from_path(
        cls, path: str, tokenizer: Tokenizer, *, settings: Mapping[str, Any], limit_images: int | None
    ) -> "VisionProcessor | None":
        """That of the model in a folder, None for a model of text; `settings` replace those of its image processor."""
        if model_facts(path).get("model_type") not in (*GRIDS, *TILES):
            if settings:
                raise ConfigError(f"data.mm_processor_kwargs: the model {path} has no image processor; remove them")
            return None
        no_processor = f"actor_rollout_ref.model.path={path}: no image processor"
        with raised_as(ConfigError, no_processor, OSError, ValueError, ImportError):
            processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil", **settings)
        if unknown := sorted(settings.keys() - processor.valid_kwargs.__annotations__.keys()):
            known = ", ".join(sorted(processor.valid_kwargs.__annotations__))
            raise ConfigError(f"data.mm_processor_kwargs: {unknown[0]} is not among {known}")
        return cls(saved_config(path), processor, tokenizer, limit_images=limit_images)

    def check_limit(self, num_images: int) -> None:
        """ValueError for more images than a prompt may have."""
        if self.limit_images is not None and num_images > self.limit_images:
            limit = f"actor_rollout_ref.rollout.limit_images={self.limit_images}"
            raise ValueError(f"{num_images} images are more than {limit}")

    def load(self, values: Sequence[Any], root: str | None = None) -> "list[Image.Image | Video]":
        """Decode a prompt's images and videos, the latter mappings with `video`; ValueError naming the one that cannot
        be, or if there are too many."""
        self.check_limit(len(values))
        kinds = ["video" if is_video(value) else "image" for value in values]
        if "video" in kinds and not self.video_token:
            raise ImageError(f"it has videos, which only models of type {', '.join(GRIDS)} take")
        pictures: list[Image.Image | Video] = []
        for number, (value, kind) in enumerate(zip(values, kinds, strict=True), 1):
            with raised_as(ImageError, f"{kind} {kinds[:number].count(kind)} of {kinds.count(kind)}", ImageError):
                pictures.append((load_video if kind == "video" else load_image)(value, root=root))
        self.check_limit(sum(-(-len(one.frames) // 2) if isinstance(one, Video) else 1 for one in pictures))
        return pictures

    def encode(
        self, prompt: Prompt, media: Sequence[object], *, root: str | None = None, template_kwargs: Kwargs | None = None
    ) -> tuple[list[int], tuple[ImageInputs, ...]]:
        """Token ids of a prompt with `<image>` and `<video>` where they stand, and those of `media`, as in `load`.

        ValueError if both do not fit.
        """
        pictures = self.load(media, root)
        messages = [self._with_parts(message) for message in as_messages(prompt)]
        text = render(self.tokenizer, messages, add_generation_prompt=True, template_kwargs=template_kwargs)
        text, inputs = self.expand(text, pictures)
        ids = encode_text(self.tokenizer, text, special_tokens=not self.tokenizer.chat_template)
        num_tokens = sum(map(ids.count, placeholder_ids(self.config)))
        wanted = sum(sum(num_features(self.config, one.tensors)) for one in inputs)
        if num_tokens != wanted:
            raise ValueError(f"{num_tokens} placeholders, {wanted} features of {len(pictures)} images (data.image_key)")
        return ids, inputs

    def expand(self, text: str, pictures: "Sequence[Image.Image | Video]") -> tuple[str, tuple[ImageInputs, ...]]:
        """A rendered text whose placeholders, one for each image or video, are as many as it has features; these."""
        if not pictures:
            return text, ()
        if self.config.model_type in TIMESTAMPS:  # each pair of frames has its own start and end
            text = text.replace(f"{self._start}{self.video_token}{self._end}", self.video_token)
        tokens = [token for token in (self.image_token, self.video_token) if token]
        pieces = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
        if pieces[1::2] != [self.video_token if isinstance(one, Video) else self.image_token for one in pictures]:
            there = f"{len(pieces) // 2} placeholders {' or '.join(tokens)} in the rendered prompt"
            raise ValueError(f"{there}, not {len(pictures)} in the order of the images and videos")
        made = [
            part
            for is_video, some in groupby(pictures, lambda one: isinstance(one, Video))
            for part in (map(self._process_video, cast("Iterator[Video]", some)) if is_video else [self._process(some)])
        ]
        pieces[1::2] = chain.from_iterable(texts for _, texts in made)
        return "".join(pieces), tuple(inputs for inputs, _ in made)

    def _with_parts(self, message: Message) -> Message:
        """A message as chat templates take it: content parts where it has markers."""
        if self.tokenizer.chat_template:
            return with_parts(message, lambda marker: {"type": marker[1:-1]})
        tokens = {"<image>": self.image_token, "<video>": self.video_token}
        return {**message, "content": MARKERS.sub(lambda marker: tokens[marker[0]], message["content"])}

    def _process(self, some: "Iterable[Image.Image | Video]") -> tuple[ImageInputs, list[str]]:
        """Images as the model takes them, and the text that stands for each in a prompt."""
        images = cast("list[Image.Image]", list(some))
        if self.config.model_type in GRIDS:
            made = self.image_processor(images=images, return_tensors="pt")
            tensors = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            texts = [self.image_token * count for count in num_features(self.config, tensors)]
        else:
            made = self.image_processor(images=[images], return_row_col_info=True, return_tensors="pt")
            tensors = {name: made[name][0] for name in ("pixel_values", "pixel_attention_mask") if name in made}
            texts = self._tile_texts(made, num_features(self.config, tensors)[0])
        pictures = tuple(np.frombuffer(png_bytes(image), np.uint8) for image in images)
        return ImageInputs(tuple(map(image_hash, images)), pictures, tensors), texts

    def _process_video(self, video: Video) -> tuple[ImageInputs, list[str]]:
        """The same of a video: a grid of several steps in time, or for TIMESTAMPS one grid for each with its time.

        The processor makes each frame an image, whose patches hold it `size` times; those of a video hold the next.
        """
        size = self.image_processor.temporal_patch_size
        frames, times = ([*each, *[each[-1]] * (-len(video.frames) % size)] for each in (video.frames, video.times))
        steps = len(frames) // size
        made = self.image_processor(images=frames, return_tensors="pt")
        _, height, width = made["image_grid_thw"][0].tolist()
        pixels = made["pixel_values"].view(steps, size, height * width, 3, size, -1)[..., 0, :]
        pixels = pixels.permute(0, 2, 3, 1, 4).reshape(steps * height * width, -1)
        timed = self.config.model_type in TIMESTAMPS
        grids = torch.tensor([[1, height, width]] * steps if timed else [[steps, height, width]])
        tensors = {"pixel_values": pixels, "image_grid_thw": grids}
        texts = [self.video_token * count for count in num_features(self.config, tensors)]
        if timed:
            seconds = [(times[at] + times[at + size - 1]) / 2 for at in range(0, len(times), size)]
            pairs = zip(seconds, texts, strict=True)
            texts = ["".join(f"<{second:.1f} seconds>{self._start}{text}{self._end}" for second, text in pairs)]
        pace = size / video.fps if hasattr(self.config.vision_config, "tokens_per_second") else 1.0
        return ImageInputs((video.sha,), (np.frombuffer(png_bytes(video.frames[0]), np.uint8),), tensors, pace), texts

    def _tile_texts(self, made: Mapping[str, Any], per_tile: int) -> list[str]:
        """The text of each image that is cut into tiles, by the rows and columns of tiles in it."""
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        around, whole = "<fake_token_around_image>", "<global-img>"
        sizes = zip(made["rows"][0], made["cols"][0], strict=True)
        return [get_image_prompt_string(r, c, per_tile, around, self.image_token, whole) for r, c in sizes]
