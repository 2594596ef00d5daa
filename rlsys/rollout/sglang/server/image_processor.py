"""The image processor of an SGLang server: it takes the images of our requests as they are, and no others."""

from typing import Any, ClassVar

from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from rlsys.models.hf import saved_config
from rlsys.rollout.sglang.given_images import read_image_record, request_images

NAMES = [f"{family}ForConditionalGeneration" for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")]


class GivenImageProcessor(BaseMultimodalProcessor):
    """What SGLang knows a model's image processor by: the names of classes in `models`, and one method."""

    models: ClassVar[list[type]] = [type(name, (), {}) for name in NAMES]

    def __init__(self, hf_config: object, server_args: Any, *args: object, **kwargs: object) -> None:
        super().__init__(hf_config, server_args, *args, **kwargs)
        self._config = saved_config(server_args.model_path)

    async def process_mm_data_async(
        self, image_data: Any, input_text: object, request_obj: Any, *_: object, **__: object
    ) -> object:
        if request_obj.input_ids is None or not str(image_data[0]).startswith("{"):
            raise ValueError("this server takes images that a training run has processed; start it without IMAGES=1")
        images, salt = read_image_record(image_data[0])
        return request_images(request_obj.input_ids, self._config, images, salt=salt)
