"""Merging checkpoints into Hugging Face model directories, splitting those into ranks, and comparing the two.

One tensor is in memory at a time, and what it is made of. Output is there wholly or not at all.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rlsys.config.schema.model import ModelConfig
from rlsys.engines.export import KEPT_FLOATS, copy_tokenizer, name_parts
from rlsys.engines.tensor_files import PiecedTensor
from rlsys.model_merger.formats import SPLIT, SplitLayout, find_checkpoint, is_split, open_checkpoint
from rlsys.model_merger.model_card import write_model_card
from rlsys.models import hf
from rlsys.models.megatron.family import Head, family_of, find_family, tied
from rlsys.models.megatron.rules import by_local
from rlsys.models.quantized import without_quantization
from rlsys.types import EXPORT_FILE_BYTES, HFConfig, Shapes, Shard
from rlsys.utils import safetensors_header
from rlsys.utils.atomic import write_whole, written_dir, written_whole
from rlsys.utils.errors import CheckpointError, raised_as
from rlsys.utils.grouping import buckets
from rlsys.utils.run_folders import HUGGINGFACE

DTYPES = {stored: getattr(torch, name) for name, stored in safetensors_header.DTYPES.items()}
"""Torch's types by safetensors' names of them."""
TensorSpec = tuple[str, tuple[int, ...]]


def merge(
    local_dir: Path,
    target_dir: Path,
    *,
    backend: str | None = None,
    config_dir: Path | None = None,
    carry_from: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    file_bytes: int = EXPORT_FILE_BYTES,
) -> int:
    """Write a checkpoint as a model directory; returns the number of tensors.

    `local_dir` is any path that `find_checkpoint` understands, or a model directory, whose FP8 weights become bfloat16.
    `config_dir` has config.json and the tokenizer (by default `huggingface/` in the checkpoint), `carry_from` is a
    model directory to take tensors from that training does not hold (multi-token prediction). Floats are converted to
    `dtype`, a safetensors name such as BF16; by default those of training to the type that config.json names.
    CheckpointError for anything missing, superfluous or misshapen; nothing is left behind then.
    """
    is_model = _is_model(local_dir)
    checkpoint = local_dir if is_model else find_checkpoint(local_dir)
    config_dir = config_dir or (checkpoint if is_model else checkpoint / HUGGINGFACE)
    if not (config_dir / "config.json").is_file():
        raise CheckpointError(f"{config_dir} has no config.json: set --hf_model_config_path to the trained model")
    hf_config = read_config_json(config_dir)
    pieced: dict[str, PiecedTensor] = {} if is_model else open_checkpoint(checkpoint, hf_config, backend)
    stored: hf.TensorSource = hf.open_model_dir(checkpoint) if is_model else pieced
    if not is_model and not is_split(checkpoint):
        dtype = dtype or safetensors_header.DTYPES.get(str(hf_config.get("dtype") or hf_config.get("torch_dtype")))
    carried = _carried(hf_config)
    weights = stored
    if carry_from is not None:
        lacking = [name for name in _expected(config_dir, hf_config, stored) if name.endswith(KEPT_FLOATS)]
        given = hf.open_model_dir(carry_from)
        weights = {**{name: given[name] for name in (*carried, *lacking) if name in given}, **stored}
    expected = _expected(config_dir, hf_config, weights)
    hf.check_names(expected, weights, aliases=carried)
    if lines := list(differing_copies(pieced)):
        raise CheckpointError(f"ranks disagree on {len(lines)} tensors: {'; '.join(lines[:3])}")
    shapes = {**expected, **{name: shape for name, shape in carried.items() if name in weights}}
    specs = {name: (_kept(name, weights[name].dtype, dtype), tuple(shape)) for name, shape in shapes.items()}
    tensors = (hf.read_whole(weights[name]).to(torch_dtype(spec[0])) for name, spec in specs.items())

    with _written_model(target_dir, overwrite=overwrite) as staging:
        write_model_files(staging, specs, tensors, file_bytes=file_bytes)
        _copy_settings(config_dir, staging, most_common(specs))
        write_model_card(checkpoint, staging, title=target_dir.name)
    return len(specs)


def split(model_dir: Path, target_dir: Path, layout: SplitLayout, *, overwrite: bool = False) -> int:
    """Write a model directory as one file a Megatron rank, besides split.json and `huggingface/`; returns the number of
    files. ConfigError for a layout that cannot be, CheckpointError for files that are not the model's."""
    hf_config = read_config_json(model_dir)
    family = family_of(hf_config)
    weights = hf.open_model_dir(model_dir)
    carried = family.carried(hf_config)
    files = list(layout.files(family))
    for _, place in files:
        family.check(hf_config, place)
    expected = family.hf_shapes(hf_config, head=layout.head)
    hf.check_names(expected, weights, aliases=[*family.aliases(hf_config), *carried])

    with _written_model(target_dir, overwrite=overwrite) as staging:
        for file, place in files:
            shapes, shards = layout.content(family, hf_config, file, place)
            grouped = by_local(shards)
            specs = {name: (weights[own[0].box.tensor].dtype, shapes[name]) for name, own in grouped.items()}
            write_file(staging / file, specs, (_local(weights, specs[n], own) for n, own in grouped.items()))
        if kept := {name: (weights[name].dtype, shape) for name, shape in carried.items() if name in weights}:
            write_file(staging / "carried.safetensors", kept, (hf.read_whole(weights[name]) for name in kept))
        write_whole(staging / SPLIT, msgspec.json.encode(layout), durable=True)
        (staging / HUGGINGFACE).mkdir()
        _copy_settings(model_dir, staging / HUGGINGFACE, None)
    return len(files)


def compare(local_dir: Path, model_dir: Path, *, backend: str | None = None) -> list[str]:
    """How the bits of a checkpoint (or another model directory) differ from those of a model directory: one line a
    tensor, none when they are equal. Tensors the checkpoint does not hold but carries may be missing there."""
    hf_config = read_config_json(model_dir)
    theirs, lines = hf.open_model_dir(model_dir), list[str]()
    if _is_model(local_dir):
        ours = hf.open_model_dir(local_dir)
    else:
        ours = open_checkpoint(find_checkpoint(local_dir), hf_config, backend)
        lines += differing_copies(ours)
    spare = {"lm_head.weight"} if tied(hf_config) else set[str]()
    spare |= _carried(hf_config).keys()
    lines += [f"{name} is only in {local_dir}" for name in sorted(ours.keys() - theirs.keys() - spare)]
    lines += [f"{name} is only in {model_dir}" for name in sorted(theirs.keys() - ours.keys() - spare)]
    both = sorted(ours.keys() & theirs.keys())
    return lines + [line for name in both if (line := _difference(name, ours[name], theirs[name]))]


def _is_model(directory: Path) -> bool:
    return any(directory.glob("*.safetensors")) and (directory / "config.json").is_file()


def read_config_json(directory: Path) -> dict[str, object]:
    """The config.json of a directory, of a quantised checkpoint as it is read; CheckpointError if it cannot be read."""
    with raised_as(CheckpointError, f"cannot read {directory / 'config.json'}", OSError, ValueError):
        return without_quantization(json.loads((directory / "config.json").read_text()), directory)


def most_common(specs: Mapping[str, TensorSpec]) -> str:
    """The torch name of the type of most tensors."""
    return str(DTYPES[Counter(dtype for dtype, _ in specs.values()).most_common(1)[0][0]]).removeprefix("torch.")


def _carried(hf_config: HFConfig) -> Shapes:
    family = find_family(hf_config)
    return family.carried(hf_config) if family else {}


def _expected(config_dir: Path, hf_config: HFConfig, weights: hf.TensorSource) -> Shapes:
    """The shapes of the model's tensors by its table, or by transformers' own model for families without one."""
    scalar = "score.weight" in weights
    head: Head = ("value" if "score.bias" in weights else "score") if scalar else "lm"
    if (family := find_family(hf_config)) is not None:
        return family.hf_shapes(hf_config, head=head)
    model = hf.build(hf.read_config(ModelConfig(path=str(config_dir))), head="scalar" if scalar else "lm", packed=False)
    return {name: tuple(tensor.shape) for name, tensor in hf.saved_names(model, hf.saved_tensors_of(model)).items()}


def _kept(name: str, stored: str, wanted: str | None) -> str:
    floats = stored in ("F64", "F32", "F16", "BF16")
    return wanted if wanted is not None and floats and not name.endswith(KEPT_FLOATS) else stored


def _local(weights: hf.TensorSource, spec: TensorSpec, shards: Sequence[Shard]) -> Tensor:
    dtype, shape = spec
    for name in dict.fromkeys(shard.box.tensor for shard in shards):
        if weights[name].dtype != dtype:
            both = f"{name} is {weights[name].dtype} and {shards[0].box.tensor} {dtype}"
            raise CheckpointError(f"{both}: one Megatron tensor has both")
    tensor = torch.empty(shape, dtype=torch_dtype(dtype))
    hf.fill_shards(tensor, shards, weights)
    return tensor


def differing_copies(tensors: Mapping[str, PiecedTensor]) -> Iterator[str]:
    """Boxes that several files hold, and not with the same bits."""
    for name, tensor in tensors.items():
        for first, other in tensor.copies:
            one, two = (tensor.read_piece(piece, piece.start, piece.shape) for piece in (first, other))
            if one.dtype != two.dtype or not torch.equal(_bytes_of(one), _bytes_of(two)):
                yield f"{name} in {first.file.name} and in {other.file.name}"


def _difference(name: str, ours: hf.StoredTensor, theirs: hf.StoredTensor) -> str:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{name} is {ours.dtype} {ours.shape} and {theirs.dtype} {theirs.shape}"
    mine, other = (_bytes_of(hf.read_whole(tensor)) for tensor in (ours, theirs))
    return "" if torch.equal(mine, other) else f"{name} differs in {int((mine != other).sum())} bytes"


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _copy_settings(source: Path, target: Path, dtype: str | None) -> None:
    config = read_config_json(source)
    if dtype is not None and dtype not in (config.get("dtype"), config.get("torch_dtype")):
        config = {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": dtype}
    write_whole(target / "config.json", f"{json.dumps(config, indent=2)}\n".encode(), durable=True)
    copy_tokenizer(source, target)


@contextmanager
def _written_model(target: Path, *, overwrite: bool) -> Iterator[Path]:
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already: give another folder, or --overwrite")
    with raised_as(CheckpointError, f"cannot write {target}", OSError, CheckpointError), written_dir(target) as staging:
        yield staging


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
    with written_whole(path, durable=True) as file:
        file.write(safetensors_header.header((name, spec[0], spec[1], num_bytes(spec)) for name, spec in specs.items()))
        for name, (dtype, shape) in specs.items():
            tensor = next(given)
            assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(dtype), tuple(shape)), name
            if tensor.numel():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


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
