"""Export of a trained model as a directory that transformers loads: safetensors, configuration, tokenizer."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from rlsys.engines.checkpoint import staged
from rlsys.engines.mesh import together
from rlsys.models.hf import Head, auto_model
from rlsys.utils.atomic import commit_dir, fsync_file, staging_dir, write_whole

KEPT_FLOATS = (".e_score_correction_bias",)
"""Floats that stay as they are when a model is saved in another type."""
Buckets = Iterable[list[tuple[str, Tensor]]]
"""Tensors by name, gathered bucket by bucket."""
Adapter = tuple[Mapping[str, Tensor], Mapping[str, object]]
"""Tensors of an adapter under peft's names, and its adapter_config."""
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    *("generation_config.json", "*processor_config.json"),
)


def write(path: Path, weights: Buckets, settings: Callable[[Path], None], *, adapter: Adapter | None = None) -> None:
    """Write a model directory from gathered weights; rank 0 writes, all ranks gather. `settings` writes the rest,
    `adapter` (tensors, adapter_config) goes to `lora_adapter/`. CheckpointError leaves an old one as it was."""
    files: dict[str, list[str]] = {}

    def finish(staging: Path) -> None:
        name_parts(staging, files)
        settings(staging)
        if adapter is not None:
            tensors, adapter_config = adapter
            folder = staging / "lora_adapter"
            folder.mkdir()
            save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
            write_whole(folder / "adapter_config.json", json.dumps(adapter_config, indent=1).encode(), durable=True)
        for file in staging.rglob("*"):
            if file.is_file():
                fsync_file(file)
        commit_dir(staging, path)

    with staged(path, "export") as staging:
        together(lambda: staging_dir(path), only_first=True)
        for number, bucket in enumerate(weights):
            together(lambda: files.update(_write_bucket(staging, number, bucket)), only_first=True)  # noqa: B023
        together(lambda: finish(staging), only_first=True)


def _write_bucket(staging: Path, number: int, bucket: Sequence[tuple[str, Tensor]]) -> dict[str, list[str]]:
    name = f"part-{number:05d}.safetensors"
    save_file({n: t.to("cpu").contiguous() for n, t in bucket}, staging / name, metadata={"format": "pt"})
    return {name: [n for n, _ in bucket]}


def is_cast(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is converted to the type in which a model is saved."""
    return tensor.is_floating_point() and not name.endswith(KEPT_FLOATS)


def write_settings(folder: Path, config: PretrainedConfig, sources: Sequence[Path]) -> None:
    """What a model directory has beside weights: config.json, generation_config.json, and the tokenizer's files of
    `sources`, of which later ones replace earlier ones."""
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    for source in sources:
        copy_tokenizer(source, folder)
    if not (folder / "generation_config.json").exists():
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    for file in folder.glob("*.json"):
        fsync_file(file)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a model directory that are neither weights nor its configuration, and force them to disk."""
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
                fsync_file(target / file.name)


def name_parts(staging: Path, files: Mapping[str, Sequence[str]]) -> None:
    """Give safetensors files (names of their tensors by file) the names that transformers reads: model.safetensors, or
    numbered parts in the order of their present names, with an index."""
    if not files:
        return
    if len(files) == 1:
        (staging / next(iter(files))).rename(staging / "model.safetensors")
        return
    weight_map, size = {}, 0
    for number, (old, names) in enumerate(sorted(files.items()), 1):
        new = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (staging / old).rename(staging / new)
        size += (staging / new).stat().st_size
        weight_map.update(dict.fromkeys(names, new))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_whole(staging / "model.safetensors.index.json", json.dumps(index, indent=1).encode(), durable=True)


def exported_config(config: PretrainedConfig, head: Head, dtype: torch.dtype) -> PretrainedConfig:
    """The configuration to write: which class loads it, and the dtype of its weights."""
    own = type(config).from_dict(config.to_dict())
    own.architectures = [auto_model(config, head)._model_mapping[type(config)].__name__]
    own.dtype = dtype
    if head == "scalar":
        own.num_labels, own.classifier_dropout = 1, 0.0
    return own
