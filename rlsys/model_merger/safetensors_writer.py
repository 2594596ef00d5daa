"""Safetensors files written tensor by tensor: what is in memory is one tensor, whatever the file's size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlsys.engines.export import name_parts
from rlsys.types import EXPORT_FILE_BYTES
from rlsys.utils import safetensors_header
from rlsys.utils.boxes import buckets
from rlsys.utils.errors import CheckpointError

DTYPES = {stored: getattr(torch, name) for name, stored in safetensors_header.DTYPES.items()}
"""Torch's types by safetensors' names of them."""
TensorSpec = tuple[str, tuple[int, ...]]


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of safetensors' name for it; CheckpointError for one torch lacks."""
    if name not in DTYPES:
        raise CheckpointError(f"stored type {name} is not known: {', '.join(DTYPES)}")
    return DTYPES[name]


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of this type and shape."""
    dtype, shape = spec
    return torch_dtype(dtype).itemsize * prod(shape)


def write_file(path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[Tensor]) -> None:
    """Write one file and force it to disk. `tensors` come in the order of `specs`, names to (stored type, shape)."""
    given = iter(tensors)
    with path.open("wb") as file:
        entries = ((name, spec[0], spec[1], num_bytes(spec)) for name, spec in specs.items())
        file.write(safetensors_header.header(entries))
        for name, (dtype, shape) in specs.items():
            tensor = next(given)
            assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(dtype), tuple(shape)), name
            if tensor.numel():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_model_files(
    directory: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[Tensor], *, file_bytes: int = EXPORT_FILE_BYTES
) -> None:
    """The safetensors files of a model directory: one, or numbered ones of about `file_bytes` with their index."""
    given, files = iter(tensors), dict[str, list[str]]()
    for number, names in enumerate(buckets({name: num_bytes(spec) for name, spec in specs.items()}, file_bytes)):
        file = f"part-{number:05d}.safetensors"
        write_file(directory / file, {name: specs[name] for name in names}, given)
        files[file] = names
    name_parts(directory, files)
