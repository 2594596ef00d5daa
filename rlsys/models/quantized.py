"""Quantised checkpoints, read as bfloat16, box by box.

FP8 as DeepSeek-V3 was published: float8 weights, and a float32 scale for every block of 128 x 128; an element times the
scale of its block in float32, rounded once. MXFP4 as gpt-oss was: see `PackedExperts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlsys.config.engines import FLOAT8_BLOCKS, float8_block
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.interfaces import StoredTensor
from rlsys.types import HFConfig
from rlsys.utils.errors import CheckpointError

SCALE = "_scale_inv"
"""What the name of a weight's scales ends with."""
FP8, FP8_NAME, BLOCK = torch.float8_e4m3fn, "float8_e4m3fn", FLOAT8_BLOCKS[0]
PACKED = "_blocks"
"""What the name of an MXFP4 weight's elements ends with, and `_scales` that of its scales."""
SMALLEST, LARGEST = 1e-4, torch.finfo(FP8).max
"""Of magnitudes: of a block of zeros, and of an element."""


def scale_shape(shape: Sequence[int], block: int = BLOCK) -> tuple[int, ...]:
    """The shape of the scales of a matrix, one for each block of rows and columns."""
    return tuple(-(-size // block) for size in shape)


def block_of(shape: Sequence[int], scales: Sequence[int]) -> int:
    """Rows and columns of the blocks of a matrix whose scales have this shape."""
    return next(block for block in FLOAT8_BLOCKS if scale_shape(shape, block) == tuple(scales))


def block_settings(text: HFConfig, rollout: GenerationConfig, *, is_pushed: bool = True) -> dict[str, object]:
    """The quantization_config of an engine's model, with blocks in all linear layers but routers."""
    block = float8_block(text, rollout, is_pushed=is_pushed)
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(text["num_hidden_layers"])]
    blocks = {"weight_block_size": [block, block], "modules_to_not_convert": routers}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **blocks}


@dataclass(frozen=True)
class BlockScaledTensor:
    """Float8 `elements` with one of `scales` for each `block`, as a bfloat16 tensor of which boxes are read."""

    elements: StoredTensor
    scales: StoredTensor
    block: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.elements.shape)

    def read(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        first = [at // n for at, n in zip(start, self.block, strict=True)]
        ends = [-(-(at + size) // n) for at, size, n in zip(start, shape, self.block, strict=True)]
        scales = self.scales.read(first, [end - at for at, end in zip(first, ends, strict=True)]).float()
        for dim, (at, size, n) in enumerate(zip(start, shape, self.block, strict=True)):
            scales = scales.index_select(dim, torch.arange(at, at + size) // n - first[dim])
        return (self.elements.read(start, shape).float() * scales).to(torch.bfloat16)


@dataclass(frozen=True)
class PackedExperts:
    """MXFP4 `blocks` (E, N, G, 16) of two elements a byte, with one of `scales` (E, N, G) for each block, as a bfloat16
    tensor (E, 32 G, N) of which boxes are read."""

    blocks: StoredTensor
    scales: StoredTensor
    dtype: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, columns, groups = self.scales.shape
        return experts, 32 * groups, columns

    def read(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        first, skipped = divmod(start[1], 32)
        at, size = (start[0], start[2], first), (shape[0], shape[2], -(-(skipped + shape[1]) // 32))
        packed = self.blocks.read((*at, 0), (*size, 16)), self.scales.read(at, size)
        return convert_moe_packed_tensors(*packed, rows_per_chunk=2**20)[:, skipped : skipped + shape[1]]


def unscaled(tensors: Mapping[str, StoredTensor], hf_config: HFConfig) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with its config.json, quantised weights with their scales as bfloat16 tensors.

    CheckpointError for scales without a weight, or not of its blocks.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in (name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)):
        if (scales := f"{name}_scales") not in plain:
            raise CheckpointError(f"{name}{PACKED} is there without {scales}")
        plain[name] = PackedExperts(plain.pop(name + PACKED), plain.pop(scales))
    block = tuple((hf_config.get("quantization_config") or {}).get("weight_block_size") or (BLOCK, BLOCK))
    for name in (name for name in tensors if name.endswith(SCALE)):
        weight = name.removesuffix(SCALE)
        if weight not in plain:
            raise CheckpointError(f"{name} scales a tensor that is not there")
        shape = tuple(plain[weight].shape)
        sizes = (*(1,) * (len(shape) - len(block)), *block)
        if tuple(tensors[name].shape) != tuple(-(-size // n) for size, n in zip(shape, sizes, strict=True)):
            raise CheckpointError(f"{name} is {tuple(tensors[name].shape)}: not a scale for each {block} of {shape}")
        plain[weight] = BlockScaledTensor(plain[weight], tensors[name], sizes)
    return plain


def check_blocks(quantised: Mapping[str, object], path: str | Path) -> None:
    """CheckpointError for a quantization_config of other weights than these, which are not read."""
    method, is_dynamic = quantised.get("quant_method"), quantised.get("activation_scheme", "dynamic") == "dynamic"
    if method != "mxfp4" and not (method == "fp8" and quantised.get("weight_block_size") and is_dynamic):
        why = "only mxfp4 and fp8 with a scale for each block are read; take a bfloat16 checkpoint of the model"
        raise CheckpointError(f"{path} is quantised ({method}): {why}")


def without_quantization(hf_config: HFConfig, path: str | Path) -> dict[str, object]:
    """The config.json of the bfloat16 model that a quantised one is read as; CheckpointError as of `check_blocks`."""
    if quantised := hf_config.get("quantization_config"):
        check_blocks(quantised, path)
    return {name: value for name, value in hf_config.items() if name != "quantization_config"}
