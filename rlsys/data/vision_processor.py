"""From messages and images to token ids and pixels, for vision-language models."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoConfig, AutoImageProcessor

from rlsys.config.checks.files import model_facts
from rlsys.config.vocabulary import GRIDS, TILES
from rlsys.data.chat import IMAGE_MARKER, Message, as_messages, encode_text, render, with_parts
from rlsys.data.images import ImageError, image_hash, load_image, png_bytes
from rlsys.models.vision import num_features
from rlsys.protocol import ImageInputs
from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase


class VisionProcessor:
    """The image processor and the tokenizer of a model, which make ids and pixels in one call.

    At most `limit_images` images stand in a prompt, any number for None.
    """

    def __init__(
        self,
        config: Any,
        image_processor: Any,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        limit_images: int | None = None,
    ) -> None:
        self.config, self.image_processor, self.tokenizer = config, image_processor, tokenizer
        self.limit_images = limit_images
        token_id = config.image_token_id
        self.image_token = str(tokenizer.convert_ids_to_tokens(token_id))
        if encode_text(tokenizer, self.image_token) != [token_id]:
            raise ConfigError(f"the tokenizer does not know the model's image token {token_id} ({self.image_token})")

    @classmethod
    def from_path(
        cls,
        path: str,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        settings: Mapping[str, Any],
        limit_images: int | None = None,
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
        return cls(AutoConfig.from_pretrained(path), processor, tokenizer, limit_images=limit_images)

    def check_limit(self, num_images: int) -> None:
        """ValueError for more images than a prompt may have."""
        if self.limit_images is not None and num_images > self.limit_images:
            limit = f"actor_rollout_ref.rollout.limit_images={self.limit_images}"
            raise ValueError(f"{num_images} images are more than {limit}")

    def load(self, values: Sequence[Any], root: str | None = None) -> "list[Image.Image]":
        """Decode a prompt's images; ValueError naming the one that cannot be, or if there are too many."""
        self.check_limit(len(values))
        images = []
        for number, value in enumerate(values, 1):
            with raised_as(ImageError, f"image {number} of {len(values)}", ImageError):
                images.append(load_image(value, root=root))
        return images

    def encode(
        self,
        prompt: str | Sequence[Message],
        values: Sequence[object],
        *,
        root: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], tuple[ImageInputs, ...]]:
        """Token ids of a prompt with `<image>` where each image stands, and the images of `values`, as in `load`.

        Without images `<image>` is text. ValueError if both do not fit.
        """
        images = self.load(values, root)
        messages = [self._with_parts(message) for message in as_messages(prompt)] if images else as_messages(prompt)
        text = render(self.tokenizer, messages, add_generation_prompt=True, template_kwargs=template_kwargs)
        text, inputs = self.expand(text, images)
        ids = encode_text(self.tokenizer, text, special_tokens=not self.tokenizer.chat_template)
        num_tokens = ids.count(self.config.image_token_id)
        wanted = sum(sum(num_features(self.config, one.tensors)) for one in inputs)
        if inputs and num_tokens != wanted:
            raise ValueError(f"{num_tokens} tokens {self.image_token} for {wanted} features of {len(images)} images")
        return ids, inputs

    def expand(self, text: str, images: "Sequence[Image.Image]") -> tuple[str, tuple[ImageInputs, ...]]:
        """A rendered text whose placeholders, one for each image, are as many as the image has features; the images."""
        if not images:
            return text, ()
        *before, after = text.split(self.image_token)
        if len(before) != len(images):
            raise ValueError(f"{len(before)} placeholders {self.image_token} in the rendered prompt, not {len(images)}")
        inputs, replacements = self._process(images)
        whole = "".join(part + replacement for part, replacement in zip(before, replacements, strict=True)) + after
        return whole, (inputs,)

    def _with_parts(self, message: Message) -> Message:
        """A message as chat templates take it: content parts where it has `<image>`."""
        content = message["content"]
        if IMAGE_MARKER not in content or not self.tokenizer.chat_template:
            return {**message, "content": content.replace(IMAGE_MARKER, self.image_token)}
        return with_parts(message, repeat({"type": "image"}))

    def _process(self, images: "Sequence[Image.Image]") -> tuple[ImageInputs, list[str]]:
        """The images as the model takes them, and the text that stands for each in a prompt."""
        is_grid = self.config.model_type in GRIDS
        if is_grid:
            made = self.image_processor(images=list(images), return_tensors="pt")
            tensors = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            texts = [self.image_token * count for count in num_features(self.config, tensors)]
        else:
            made = self.image_processor(images=[list(images)], return_row_col_info=True, return_tensors="pt")
            tensors = {name: made[name][0] for name in ("pixel_values", "pixel_attention_mask") if name in made}
            texts = self._tile_texts(made, num_features(self.config, tensors)[0])
        pictures = tuple(np.frombuffer(png_bytes(image), np.uint8) for image in images)
        return ImageInputs(tuple(map(image_hash, images)), pictures, tensors), texts

    def _tile_texts(self, made: Mapping[str, Any], per_tile: int) -> list[str]:
        """The text of each image that is cut into tiles, by the rows and columns of tiles in it."""
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        around, whole = "<fake_token_around_image>", "<global-img>"
        sizes = zip(made["rows"][0], made["cols"][0], strict=True)
        return [get_image_prompt_string(r, c, per_tile, around, self.image_token, whole) for r, c in sizes]
