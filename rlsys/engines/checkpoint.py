"""Resumable checkpoints: sharded, atomic, verified before a byte is used, loadable on another number of ranks.

A directory holds `model_world_size_W_rank_R.safetensors` and `optim_...` per rank, `extra_state_...json` (random
generators), `tensors.json` (where each box lies), `fsdp_config.json` and, last, `manifest.json` with the size and the
checksum of every other file. All ranks must see the same directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from rlsys.engines import rng
from rlsys.engines.dcp_storage import (
    METADATA,
    STORAGE_ERRORS,
    SafetensorsReader,
    SafetensorsWriter,
    data_file,
    read_tensor_index,
)
from rlsys.engines.mesh import Ranks, gather_json, together
from rlsys.utils.atomic import commit_dir, staging_dir, write_text_durable
from rlsys.utils.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class State:
    """What is saved or restored: sharded parameters by name, this rank's parts of the optimizer's moments by
    `<moment>.<name>`, and whether the random generators go along."""

    model: Mapping[str, Any]
    moments: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    extra: bool

    def tensors(self) -> dict[str, Any]:
        """DTensors under the keys of the checkpoint."""
        optim = {}
        for key, local in self.moments.items():
            moment, _, name = key.partition(".")
            optim[f"optim.{moment}.{name}"] = _like(self.parameters[name], local)
        return {**{f"model.{name}": p.detach() for name, p in self.model.items()}, **optim}


def _like(parameter: Any, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def save(path: Path, state: State, ranks: Ranks, header: Mapping[str, Any]) -> None:
    """Write `path`; on any failure CheckpointError on all ranks, and what was at `path` before is untouched."""
    errors = (*STORAGE_ERRORS, CheckpointError)
    first = ranks.rank == 0
    try:
        together(lambda: staging_dir(path) if first else None, errors, CheckpointError)
        staging = path.with_name(path.name + ".tmp")
        files = together(lambda: _write(staging, state), errors, CheckpointError)
        everyone = {name: entry for part in gather_json(files) for name, entry in part.items()}
        together(lambda: _commit(staging, path, everyone, ranks, header) if first else None, errors, CheckpointError)
    except CheckpointError as error:
        if first:
            shutil.rmtree(path.with_name(path.name + ".tmp"), ignore_errors=True)
        raise CheckpointError(f"cannot save {path}: {error}") from error


def _write(staging: Path, state: State) -> dict[str, dict[str, Any]]:
    """Write this rank's files; returns their sizes and checksums by name."""
    tensors = state.tensors()
    names = sorted({data_file(key.partition(".")[0]) for key in tensors})
    if tensors:
        _unwrapped(lambda: dcp.save(tensors, storage_writer=SafetensorsWriter(staging)))
    if state.extra:
        names.append(_extra_file(dist.get_world_size(), dist.get_rank()))
        write_text_durable(staging / names[-1], json.dumps(rng.capture()))
    if dist.get_rank() == 0 and tensors:
        names.append(METADATA)
    return {name: _fingerprint(staging / name) for name in names if (staging / name).exists()}


def _unwrapped(work: Callable[[], Any]) -> None:
    """DCP raises every rank's errors on all ranks; raise each where it happened."""
    try:
        work()
    except CheckpointException as error:
        own = error.failures.get(dist.get_rank())
        if own is not None:
            raise CheckpointError(str(own[0])) from error


def _commit(staging: Path, path: Path, files: Mapping[str, Any], ranks: Ranks, header: Mapping[str, Any]) -> None:
    unseen = [name for name in files if not (staging / name).exists()]
    if unseen:
        raise OSError(f"{unseen[0]} of another rank is not visible here: all ranks need one shared directory")
    layout = {"FSDP_version": 2, "world_size": ranks.world_size, "shard_size": ranks.shard_size}
    write_text_durable(staging / "fsdp_config.json", json.dumps(layout))
    files = {**files, "fsdp_config.json": _fingerprint(staging / "fsdp_config.json")}
    manifest = {"format": FORMAT, "world_size": ranks.world_size, **header, "files": dict(sorted(files.items()))}
    write_text_durable(staging / MANIFEST, json.dumps(manifest, indent=1))
    commit_dir(staging, path)


def _extra_file(world_size: int, rank: int) -> str:
    return f"extra_state_world_size_{world_size}_rank_{rank}.json"


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory; CheckpointError if there is no whole checkpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: cannot read {MANIFEST}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: format {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def verify(path: Path, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Check every `parts`-th file against the manifest, which is returned; CheckpointError names the first bad file."""
    manifest = read_manifest(path)
    for name in list(manifest["files"])[part::parts]:
        expected = manifest["files"][name]
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing")
        size = (path / name).stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{path / name} is truncated: {size} bytes instead of {expected['bytes']}")
        if _fingerprint(path / name) != expected:
            raise CheckpointError(f"{path / name} is corrupted: its checksum differs from the manifest's")
    return manifest


def load(path: Path, state: State, ranks: Ranks) -> dict[str, Any]:
    """Restore `state` in place; returns the header that was saved. CheckpointError, before anything is changed, if a
    file is damaged or the checkpoint is another model's."""
    errors = (*STORAGE_ERRORS, CheckpointError, KeyError)
    manifest = together(lambda: verify(path, part=ranks.rank, parts=ranks.world_size), errors, CheckpointError)
    tensors = state.tensors()
    together(lambda: _check_same_model(path, tensors), errors, CheckpointError)
    if tensors:
        reader = SafetensorsReader(path)
        together(lambda: _unwrapped(lambda: dcp.load(tensors, storage_reader=reader)), errors, CheckpointError)
    if state.extra:
        together(lambda: _restore_rng(path, manifest["world_size"], ranks), errors, CheckpointError)
    return manifest


def _check_same_model(path: Path, tensors: Mapping[str, Any]) -> None:
    kinds = {key.partition(".")[0] for key in tensors}
    saved = {k: e for k, e in read_tensor_index(path).items() if k.partition(".")[0] in kinds} if tensors else {}
    notes = [
        *_some("is not in the checkpoint", sorted(set(tensors) - set(saved))),
        *_some("is only in the checkpoint", sorted(set(saved) - set(tensors))),
        *[
            f"{key} is {tuple(saved[key]['shape'])} there and {tuple(tensor.shape)} here"
            for key, tensor in sorted(tensors.items())
            if key in saved and tuple(saved[key]["shape"]) != tuple(tensor.shape)
        ][:3],
    ]
    if notes:
        raise CheckpointError(f"{path} is of another model: {'; '.join(notes)}")


def _some(what: str, names: Sequence[str]) -> list[str]:
    return [f"{name} {what}" for name in names[:3]] + ([f"and {len(names) - 3} more"] if len(names) > 3 else [])


def _restore_rng(path: Path, saved_world: int, ranks: Ranks) -> None:
    own = ranks.rank if saved_world == ranks.world_size else 0
    state = json.loads((path / _extra_file(saved_world, own)).read_text())
    if saved_world == ranks.world_size:
        rng.restore(state)
    else:
        rng.derive(state, ranks.rank)
