"""Tiny vision-language models of random weights, images as their processors make them, and rows that have them."""

import io
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from packaging.version import Version
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlsys.models.hf import auto_model
from rlsys.models.vision import joined_images
from rlsys.protocol import IMAGES, DataProto, ImageInputs, object_array
from tests.start_tokenizer import build_tokenizer

IMAGE, START, END, VIDEO = 50, 51, 52, 53
TWINS = {IMAGE: 49, VIDEO: 48}
"""Tokens that are embedded as these: what an image or video token is that the model drew."""
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
GRID_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
TILE_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN25 = {
    "model_type": "qwen2_5_vl",
    "text_config": {**TEXT, "rope_parameters": ROPE},
    "vision_config": {**GRID_TOWER, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16},
    **IDS,
}
QWEN3 = {
    "model_type": "qwen3_vl",
    "text_config": {**TEXT, "rope_parameters": ROPE, "head_dim": 8},
    "vision_config": {
        **GRID_TOWER,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    **IDS,
}
QWEN35 = {
    "model_type": "qwen3_5",
    "text_config": {
        **TEXT,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "vision_config": {**GRID_TOWER, "out_hidden_size": 32, "num_position_embeddings": 16},
    **IDS,
}
"""Its gated delta layers take packed rows on Megatron only, so it is not one of MODELS."""
SMOL = {
    "model_type": "smolvlm",
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": TILE_TOWER,
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
IDEFICS3 = {**SMOL, "model_type": "idefics3", "tie_word_embeddings": False}


def wide(config: dict[str, Any], *, head_dim: int = 32) -> dict[str, Any]:
    """The same with heads of the sizes that engines' kernels take, and all that engines read of a published model's."""
    is_tied = config.get("tie_word_embeddings", False)
    sizes: dict[str, Any] = {
        "tie_word_embeddings": is_tied,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 128,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
    }
    text, tower = {**config["text_config"], **sizes}, {**config["vision_config"], "hidden_size": 2 * head_dim}
    if "rope_parameters" in text:
        part = {"partial_rotary_factor": 0.25} if "partial_rotary_factor" in text["rope_parameters"] else {}
        rotated = int(head_dim * part.get("partial_rotary_factor", 1))  # as published: vLLM 0.26 takes no other part
        section = [rotated // 2 - 2 * (rotated // 6), rotated // 6, rotated // 6]
        interleaved = "qwen3" in config["model_type"]
        own = {"mrope_section": section, "mrope_interleaved": interleaved, **part}
        text["rope_parameters"] = {**text["rope_parameters"], **own}
        tower |= {"out_hidden_size": 4 * head_dim, "patch_size": 14, "window_size": 56}
    text |= {name: head_dim for name in ("linear_key_head_dim", "linear_value_head_dim") if name in text}
    return {**config, "text_config": text, "vision_config": tower}


MODELS = {"qwen2_5_vl": QWEN25, "qwen3_vl": QWEN3, "smolvlm": SMOL, "idefics3": IDEFICS3}


def random_images(config: dict[str, Any], sizes: Sequence[tuple[int, ...]], *, seed: int = 0) -> ImageInputs:
    """One processor call's images: of grids (height, width) in patches, or each of height x width tiles."""
    draw = torch.Generator().manual_seed(seed)
    if "image_size" not in config["vision_config"]:
        grids = torch.tensor([[1, height, width] for height, width in sizes])
        width = 3 * 2 * config["vision_config"]["patch_size"] ** 2
        tensors = {
            "pixel_values": torch.randn(int(grids.prod(-1).sum()), width, generator=draw),
            "image_grid_thw": grids,
        }
    else:
        side, tiles = config["vision_config"]["image_size"], sum(height * width for height, width in sizes)
        tensors = {"pixel_values": torch.randn(tiles, 3, side, side, generator=draw)}
    shas = tuple(f"{seed}-{number}-{size}" for number, size in enumerate(sizes))
    return ImageInputs(shas, (torch.zeros(1, dtype=torch.uint8).numpy(),) * len(sizes), tensors)


def random_video(config: dict[str, Any], size: Sequence[int], *, seed: int = 0, seconds: float = 0.5) -> ImageInputs:
    """A video of this size (steps in time, height, width) in patches, as the model takes it."""
    video = random_images(config, [(size[0] * size[1], size[2])], seed=seed)
    grids = [[1, *size[1:]]] * size[0] if "qwen3" in config["model_type"] else [[*size]]
    tensors = {**video.tensors, "image_grid_thw": torch.tensor(grids)}
    return ImageInputs((f"video {seed} {size}",), video.pictures, tensors, seconds)


def image_ids(config: dict[str, Any], size: Sequence[int]) -> list[int]:
    """The tokens that stand for an image: a quarter of its patches, or four for each tile; or for a video."""
    grids = "image_size" not in config["vision_config"]
    if len(size) == 3:
        tokens = [VIDEO] * (size[1] * size[2] // 4)
        return (
            [7, START, *tokens, END] * size[0] if "qwen3" in config["model_type"] else [START, *tokens * size[0], END]
        )
    return [START, *[IMAGE] * (size[0] * size[1] // 4 if grids else size[0] * size[1] * 4), END]


SIZES: list[list[tuple[int, ...]]] = [[(4, 6)], [], [(2, 4), (4, 2)], [(6, 4)]]
VIDEOS: list[list[tuple[int, ...]]] = [[(2, 4, 6)], [(4, 6)], [(2, 4), (2, 6, 2), (4, 2)], [(1, 2, 2), (2, 2, 6)], []]
"""With steps in time: those after which transformers places text as all others do."""


def vision_rows(config: dict[str, Any], sizes: Sequence[Sequence[tuple[int, ...]]] = SIZES) -> DataProto:
    """Rows whose prompts have images or videos of these sizes with text around them, and responses of some lengths."""
    draw = torch.Generator().manual_seed(1)

    def text(count: int) -> list[int]:
        return torch.randint(3, min(TWINS.values()), (count,), generator=draw).tolist()

    if "image_size" in config["vision_config"]:
        sizes = [[(1, height // 2) for height, _ in row] for row in sizes]

    def pads(columns: int, tokens: list[list[int]]) -> torch.Tensor:
        return (torch.arange(columns) < torch.tensor(list(map(len, tokens)))[:, None]).long()

    response = 5
    prompts = [
        [*text(2), *[token for size in row for token in [*image_ids(config, size), *text(1)]], *text(n)]
        for n, row in enumerate(sizes, 1)
    ]
    responses = [text(response - n % 3) for n in range(len(sizes))]
    width = max(map(len, prompts))
    left = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    right = torch.tensor([r + [0] * (response - len(r)) for r in responses])
    mask = torch.cat([pads(width, prompts).flip(1), pads(response, responses)], 1)
    tensors = {
        "prompts": left,
        "responses": right,
        "input_ids": torch.cat([left, right], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
        "response_mask": mask[:, width:],
    }
    images = [
        tuple(
            random_video(config, size, seed=n) if len(size) == 3 else random_images(config, [size], seed=n)
            for size in row
        )
        if any(len(size) == 3 for size in row)
        else (random_images(config, row, seed=n),) * bool(row)
        for n, row in enumerate(sizes)
    ]
    return DataProto.from_dict(tensors, {IMAGES: object_array(images)})


def random_model(config: dict[str, Any], *, seed: int = 1, has_twin: bool = False) -> Any:
    """transformers' model, with the weights of an engine of this seed but for TWINS, if it `has_twin`."""
    settings = AutoConfig.for_model(**config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_model(settings).from_config(settings).eval()
    embedding = model.get_input_embeddings().weight.data
    for token, twin in TWINS.items():
        embedding[twin] = embedding[token if has_twin else twin]
    return model


@torch.no_grad()
def reference(model: Any, rows: DataProto) -> torch.Tensor:
    """Log-probabilities of responses by transformers' own forward pass of one row at a time, with its positions."""
    scores = torch.zeros(rows.tensors["responses"].shape, dtype=model.dtype)
    columns = (rows.tensors["input_ids"], rows.tensors["attention_mask"].bool(), rows.non_tensor_batch[IMAGES])
    for row, (ids, mask, images) in enumerate(zip(*columns, strict=True)):
        own, count = ids[mask], int(rows.tensors["response_mask"][row].sum())
        given, read = joined_images([one for one in images if not one.seconds]), own.clone()
        for token, twin in TWINS.items():
            read[len(own) - count :][own[len(own) - count :] == token] = twin
        if videos := [one for one in images if one.seconds]:
            if model.config.model_type == "qwen2_5_vl" and Version(version("transformers")) < Version("5.18"):
                pytest.skip("transformers before 5.18 counts the seconds of a video's grid as whole ones")
            grids = [one.tensors["image_grid_thw"] for one in videos]
            given["pixel_values_videos"] = torch.cat([one.tensors["pixel_values"] for one in videos])
            given["video_grid_thw"] = torch.stack([torch.cat([grid[:, 0].sum()[None], grid[0, 1:]]) for grid in grids])
            given["second_per_grid_ts"] = torch.tensor([one.seconds for one in videos])
        if "image_grid_thw" in given or videos:
            given["mm_token_type_ids"] = ((read == IMAGE) + 2 * (read == VIDEO)).long()[None]
        elif images:
            given["pixel_values"] = given["pixel_values"][None]
        log_probs = model(input_ids=read[None], **given).logits[0].log_softmax(-1)
        scores[row, :count] = log_probs[:-1].gather(1, own[1:, None])[-count:, 0]
    return scores


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
"""What a chat template of a vision-language model does with content parts, for grids."""


def write_model(folder: Path, config: dict[str, Any] = QWEN25) -> Path:
    """A tiny model of grids with its tokenizer and image processor, as a folder."""
    tokenizer = build_tokenizer()
    names = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})  # pyrefly: ignore
    tokenizer.chat_template = TEMPLATE
    keys = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(keys, tokenizer.convert_tokens_to_ids(list(names)), strict=True))  # pyrefly: ignore
    text = {**config["text_config"], "vocab_size": len(tokenizer)}
    text |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    settings = AutoConfig.for_model(**{**config, **ids, "text_config": text})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto_model(settings).from_config(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = config["vision_config"]["patch_size"]
    Qwen2VLImageProcessorPil(patch_size=side, min_pixels=4 * side**2, max_pixels=64 * side**2).save_pretrained(folder)
    return folder


def write_rows(file: Path, count: int = 8, *, videos: bool = False) -> Path:
    """Questions about one to three pictures of random pixels, as a parquet file; every fourth has none, or a video."""
    draw = np.random.default_rng(0)

    def picture(width: int) -> dict[str, Any]:
        data = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (16, width, 3), dtype=np.uint8)).save(data, "PNG")
        return {"bytes": data.getvalue(), "path": None}

    texts = ["<video> " * videos, "<image> ", "<image> <image> ", "<image> <image> <image> "]
    rows = [
        {
            "prompt": [{"role": "user", "content": texts[number % 4] + f"{number}+1="}],
            "videos": [{"video": [picture(16)] * 3, "fps": 1.5}] * (videos and number % 4 == 0),
            "images": [picture(16 + 8 * (number % 2)) for _ in range(number % 4)],
            "data_source": "toy",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file
