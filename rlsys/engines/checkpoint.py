"""Resumable checkpoints: sharded, atomic, verified before a byte is used, loadable on another number of ranks.

A directory holds `model_world_size_W_rank_R.safetensors` and `optim_...` per rank, `extra_state_...json` (random
generators), `tensors.json` (where each box is stored), a file on the layout it was written from (`fsdp_config.json`)
and, last, `manifest.json` with the size and the checksum of every other file; beside them `huggingface/`, which has the
model's configuration and tokenizer. All ranks must see one directory.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from threading import Event, get_native_id
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.engines import rng
from rlsys.engines.mesh import gather_json, together
from rlsys.engines.tensor_files import METADATA, Entries, StoredBoxes, read_tensor_index, write_files, write_index
from rlsys.models.hf import differing_tensors
from rlsys.telemetry.jsonl import JsonObject
from rlsys.utils.atomic import commit_dir, read_checked_json, staging_dir, write_checked_json, write_whole
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import CheckpointError, raised_as
from rlsys.utils.run_folders import HUGGINGFACE

MANIFEST = "manifest.json"
FORMAT = 1


class Contents(Protocol):
    """What is saved or restored: `parts` among "model", "optimizer" and "extra", the random generators."""

    @property
    def parts(self) -> frozenset[str]: ...
    @property
    def layout(self) -> tuple[str, JsonObject]:
        """Name and contents of the file that says from which layout the checkpoint was written."""

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Full shape of every tensor that is loaded, by its key in the checkpoint; the same on all ranks."""

    def boxes(self) -> StoredBoxes:
        """This rank's tensors, live."""

    def read(self, path: Path) -> None: ...


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each in host memory, complete with the current stream's work.

    Of tensors on a GPU it is pinned, in memory that PyTorch keeps for the next copies.
    """
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]
    return [copy.copy_(tensor.detach(), non_blocking=True) for copy, tensor in zip(copies, tensors, strict=True)]


class Saving:
    """A checkpoint on its way: a thread writes this rank's files, `finish` commits them; both ends are collective.

    On any failure there is a CheckpointError on all ranks, and what was at `path` before is untouched. With `copies`
    the thread writes copies, made beside other work of a GPU: tensors may change once `copied` is set. `settings`
    writes the model's configuration and tokenizer into `huggingface/`.
    """

    def __init__(
        self, path: Path, state: Contents, header: JsonObject, *, settings: Callable[[Path], None], copies: bool = False
    ) -> None:
        self.copied, self._copies = Event(), copies
        self._stream = torch.cuda.Stream() if copies and torch.cuda.is_initialized() else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._path, self._state, self._header, self._settings = path, state, header, settings
        self._name_end = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}"
        self._extra = json.dumps(rng.capture()) if "extra" in state.parts else None
        with staged(path, "save") as self._staging:
            together(lambda: staging_dir(path), only_first=True)
        self._files = in_daemon_thread(partial(self._run, list(state.boxes())), name="checkpoint")

    def _run(self, boxes: list[tuple[str, Sequence[int], Tensor]]) -> tuple[Entries, JsonObject]:
        """This rank's entries of the index, and size and checksum of its files by name."""
        try:
            if self._copies:
                with torch.cuda.stream(self._stream):
                    copies = copied_to_host([tensor for *_, tensor in boxes])
                if self._stream is not None:
                    self._stream.synchronize()
                boxes[:] = [(key, start, copy) for (key, start, _), copy in zip(boxes, copies, strict=True)]
                os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)  # the step beside it goes first
        finally:
            self.copied.set()
        names, entries = write_files(self._staging, self._name_end, boxes)
        if self._extra is not None:
            names.append(f"extra_state_{self._name_end}.json")
            write_whole(self._staging / names[-1], self._extra.encode(), durable=True)
        return entries, {name: _fingerprint(self._staging / name) for name in names}

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are there, or cannot be written."""
        return self._files.done()

    def finish(self) -> None:
        """Wait for all ranks' files and commit the checkpoint."""
        with staged(self._path, "save") as staging:
            entries, files = together(self._files.result)
            write_index(staging, entries, self._state.shapes())
            everyone = {name: entry for part in gather_json(files) for name, entry in part.items()}
            together(lambda: self._settings(staging / HUGGINGFACE), only_first=True)
            commit = (staging, self._path, everyone, self._state.layout, self._header)
            together(lambda: _commit(*commit), only_first=True)


@contextmanager
def staged(path: Path, verb: str) -> Iterator[Path]:
    """The directory that becomes `path`; CheckpointError that this rank cannot `verb` it, and then it is removed."""
    staging = path.with_name(path.name + ".tmp")
    try:
        yield staging
    except CheckpointError as error:
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"cannot {verb} {path}: {error}") from error


def _commit(staging: Path, path: Path, files: JsonObject, layout: tuple[str, JsonObject], header: JsonObject) -> None:
    if unseen := [name for name in files if not (staging / name).exists()]:
        raise OSError(f"{unseen[0]} of another rank is not visible here: all ranks need one shared directory")
    write_whole(staging / layout[0], json.dumps(layout[1]).encode(), durable=True)
    own = [layout[0], METADATA] if (staging / METADATA).exists() else [layout[0]]
    files = {**files, **{name: _fingerprint(staging / name) for name in own}}
    manifest = {"format": FORMAT, "world_size": dist.get_world_size(), **header, "files": dict(sorted(files.items()))}
    write_checked_json(staging / MANIFEST, manifest)
    commit_dir(staging, path)


def _fingerprint(path: Path) -> JsonObject:
    with path.open("rb") as file:
        digest = file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def verify(path: Path, *, part: int = 0, parts: int = 1) -> JsonObject:
    """Check every `parts`-th file against the manifest, which is returned; CheckpointError names the first bad file."""
    with raised_as(CheckpointError, f"{path} is not a whole checkpoint: cannot read {MANIFEST}", OSError, ValueError):
        manifest = read_checked_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: format {manifest.get('format')}, this version reads {FORMAT}")
    for name in list(manifest["files"])[part::parts]:
        expected = manifest["files"][name]
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing")
        there = _fingerprint(path / name)
        if there["bytes"] != expected["bytes"]:
            raise CheckpointError(f"{path / name} is truncated: {there['bytes']} bytes instead of {expected['bytes']}")
        if there != expected:
            raise CheckpointError(f"{path / name} is corrupted: its checksum differs from the manifest's")
    return manifest


def load(path: Path, state: Contents, *, optimizer: str | None = None) -> JsonObject:
    """Restore `state` in place; returns the header that was saved. CheckpointError, before anything is changed, if a
    file is damaged or the checkpoint is of another model or another kind of `optimizer`."""
    manifest = together(lambda: verify(path, part=dist.get_rank(), parts=dist.get_world_size()))
    saved = manifest.get("optimizer") or "AdamW"
    if optimizer is not None and saved != optimizer:
        why = f"{path} has the state of {saved}, and this run's optimizer is {optimizer}"
        how = "with the same optim.optimizer and number of processes"
        raise CheckpointError(f"{why}: continue {how}, or without that state by load_contents=[model,extra]")
    together(lambda: _check_parts(path, state.parts))
    together(lambda: _check_same_model(path, state.shapes()))
    together(lambda: state.read(path))
    if "extra" in state.parts:
        together(lambda: _restore_rng(path, manifest["world_size"]))
    return manifest


def _check_parts(path: Path, wanted: frozenset[str]) -> None:
    files = {"model": "model_*", "optimizer": "optim_*", "extra": "extra_state_*"}
    there = [part for part, name in files.items() if part in wanted and any(path.glob(name))]
    if missing := ", ".join(sorted(wanted.difference(there))):
        raise CheckpointError(f"{path} was saved without {missing}; set checkpoint.load_contents=[{','.join(there)}]")


def _check_same_model(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    kinds = {key.partition(".")[0] for key in shapes}
    index = read_tensor_index(path) if shapes else {}
    saved = {key: tuple(entry["shape"]) for key, entry in index.items() if key.partition(".")[0] in kinds}
    if differences := differing_tensors(shapes, saved, whose="this model's"):
        raise CheckpointError(f"{path} was saved from a different model: {differences}")


def _restore_rng(path: Path, saved_world: int) -> None:
    rank = dist.get_rank()
    same = saved_world == dist.get_world_size()
    state = json.loads((path / f"extra_state_world_size_{saved_world}_rank_{rank if same else 0}.json").read_text())
    if same:
        rng.restore(state)
    else:
        rng.derive(state, rank)
