"""The disk executor: Hugging Face safetensors in a directory for each version, complete or not there at all.

Every trainer rank writes its own boxes into one mapped file beside the final place; rank 0 commits it by a rename.
Engines of this run read their boxes; servers of anybody's may load the directory as a model.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import WeightLayout
from rlsys.utils.atomic import commit_dir, fsync_file, staging_dir, write_text_durable
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import digest
from rlsys.weights.image import ImageTensor, plan_image, read_boxes, tensors_in, write_boxes
from rlsys.weights.plan import Copy
from rlsys.weights.segment import Segment
from rlsys.weights.target import Moved, Target

FILE, SUMS = "model.safetensors", "rlsys_checksums.json"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True)
class DiskSpec:
    """What one rank needs; `header` are the first bytes of the file, `writes` this rank's copies into it."""

    root: str
    header: bytes
    num_bytes: int
    tensors: tuple[ImageTensor, ...]
    names: Mapping[str, str]
    assets: str = ""
    keep: int = 2
    writes: tuple[Copy, ...] = ()
    writer: int = -1

    def place(self, version: int) -> Path:
        return Path(self.root) / f"v{version}"


@dataclass(frozen=True)
class Written:
    """The parts of the checksums that one rank wrote, by tensor."""

    version: int
    sums: Mapping[str, int]
    seconds: float


def plan_disk(
    sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout], *, root: str, assets: str = "", keep: int = 2
) -> tuple[tuple[DiskSpec, ...], DiskSpec]:
    """The specs of all writers and the one of every reader; `assets` is a folder whose small files are copied along."""
    image = plan_image(sources, destinations, align_bytes=1)
    header = _header(image.tensors)
    tensors = tuple(replace(entry, offset=entry.offset + len(header)) for entry in image.tensors)
    reader = DiskSpec(root, header, image.num_bytes + len(header), tensors, image.names, assets, keep)
    writers = (replace(reader, writes=image.plan.from_rank(s.rank), writer=n) for n, s in enumerate(sources))
    return tuple(writers), reader


def _header(tensors: Sequence[ImageTensor]) -> bytes:
    """The header of a safetensors file, padded so that the data are aligned."""
    entries = {
        t.name: {"dtype": DTYPES[t.dtype], "shape": t.shape, "data_offsets": [t.offset, t.offset + t.num_bytes]}
        for t in tensors
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


class DiskWriter:
    """A trainer rank's side; rank 0 prepares and commits."""

    def __init__(self, spec: DiskSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine

    def prepare(self, version: int) -> None:
        """Rank 0: an empty file of the full size beside the final place."""
        staging = staging_dir(self.spec.place(version))
        with (staging / FILE).open("wb") as file:
            file.write(self.spec.header)
            file.truncate(self.spec.num_bytes)

    def send(self, version: int) -> Written:
        """Write this rank's boxes."""
        started_s = time.monotonic()
        file = self._staging(version) / FILE
        segment = Segment.open(str(file), self.spec.num_bytes)
        try:
            sums = write_boxes(
                self.spec.writes, self.engine.local_tensors(), tensors_in(segment.bytes, self.spec.tensors)
            )
        finally:
            segment.close()
        fsync_file(file)
        return Written(version, sums, time.monotonic() - started_s)

    def commit(self, version: int, sums: Mapping[str, int]) -> str:
        """Rank 0: put the checksums and the assets beside, rename, forget old versions. Returns the directory."""
        staging, final = self._staging(version), self.spec.place(version)
        for asset in sorted(Path(self.spec.assets).glob("*")) if self.spec.assets else []:
            if asset.is_file() and asset.suffix in (".json", ".txt", ".model", ".jinja"):
                shutil.copyfile(asset, staging / asset.name)
                fsync_file(staging / asset.name)
        text = {"version": version, "digest": digest(sums), "tensors": {name: f"{n:016x}" for name, n in sums.items()}}
        write_text_durable(staging / SUMS, json.dumps(text))
        commit_dir(staging, final)
        held = [int(p.name[1:]) for p in final.parent.glob("v*") if p.name[1:].isdigit() and int(p.name[1:]) != version]
        for old in sorted(held)[: max(0, len(held) + 1 - self.spec.keep)]:
            shutil.rmtree(self.spec.place(old))
        return str(final)

    def _staging(self, version: int) -> Path:
        final = self.spec.place(version)
        return final.with_name(final.name + ".tmp")

    def close(self) -> None:
        """Nothing is held between pushes."""


class DiskReader:
    """A rollout engine's side."""

    def __init__(self, spec: DiskSpec, engine: RolloutEngine) -> None:
        self.spec, self.target = spec, Target(engine)

    def receive(self, version: int) -> Moved:
        """Bring the engine to a committed version: quarantine, copy, check, release."""
        started_s = time.monotonic()
        tensors = self.target.begin()
        place = self.spec.place(version)
        try:
            stated = json.loads((place / SUMS).read_text())
        except (OSError, ValueError) as error:
            raise WeightTransferError(f"{place} holds no complete weights: {error}") from error
        if stated.get("version") != version:
            raise WeightTransferError(f"{place} holds weight version {stated.get('version')}")
        published = {name: int(text, 16) for name, text in stated["tensors"].items()}
        segment = Segment.open(str(place / FILE), self.spec.num_bytes)
        try:
            image = tensors_in(segment.bytes, self.spec.tensors)
            num_bytes = read_boxes(self.target.layout, tensors, image, self.spec.names, published)
            del image
        finally:
            segment.close()
        self.target.finish(version)
        return Moved(version, num_bytes, time.monotonic() - started_s, digest(published))

    def close(self) -> None:
        """Nothing is held between pushes."""
