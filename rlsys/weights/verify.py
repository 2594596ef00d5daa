"""Whether a trainer and its rollout engines hold the same weights: checksums of boxes, merged and compared."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rlsys.types import Box, Shapes, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import add_checksums, digest, prepared_checksums
from rlsys.weights.layout import dtype_of, num_elements, shard_view, subtract_all, whole_box
from rlsys.weights.plan import resolve_names

BoxChecksum = tuple[Box, int]
"""A box that one rank holds, and its checksum."""
LayoutChecksums = tuple[WeightLayout, Sequence[BoxChecksum]]
"""One rank's layout and the checksums of its boxes."""


@dataclass(frozen=True)
class TensorCheck:
    """One rollout tensor beside the trainer's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    source_checksum: int
    checksum: int

    @property
    def equal(self) -> bool:
        return self.source_checksum == self.checksum


def layout_checksums(
    layout: WeightLayout, tensors: Mapping[str, Tensor], dtypes: Mapping[str, str] | None = None
) -> tuple[BoxChecksum, ...]:
    """Checksums of all boxes of one rank, each cast first to the dtype that `dtypes` names for its tensor."""
    names, shapes = {**layout.dtypes, **(dtypes or {})}, layout.full_shapes
    boxes = [shard.box for shard in layout.shards]
    values = [(shard_view(tensors, shard), shard.box.start, shapes[shard.box.tensor]) for shard in layout.shards]
    return tuple(zip(boxes, prepared_checksums(values, [dtype_of(names[box.tensor]) for box in boxes])(), strict=True))


def merge_rank_checksums(ranks: Sequence[Sequence[BoxChecksum]], full_shapes: Shapes) -> dict[str, int]:
    """Checksums of whole tensors from those of all ranks' boxes.

    Raises WeightTransferError where replicas of a box differ or boxes do not tile their tensor.
    """
    boxes: dict[str, dict[Box, int]] = {}
    for checksums in ranks:
        for box, checksum in checksums:
            if boxes.setdefault(box.tensor, {}).setdefault(box, checksum) != checksum:
                raise WeightTransferError(f"two ranks hold different values of {box}")
    tilings = {name: tiling(name, shape, boxes.get(name, {})) for name, shape in full_shapes.items()}
    return {name: add_checksums([boxes[name][box] for box in tiles]) for name, tiles in tilings.items()}


def tiling(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Box]:
    """The boxes that together are a tensor; those inside larger ones are left out."""
    missing, chosen = [whole_box(name, shape)], list[Box]()
    for box in sorted(boxes, key=lambda b: (-num_elements(b), b.start)):
        left = subtract_all(missing, box)
        gained = sum(map(num_elements, missing)) - sum(map(num_elements, left))
        if gained == num_elements(box):
            chosen.append(box)
            missing = left
        elif gained:
            raise WeightTransferError(f"{box} overlaps other boxes of its tensor: their checksums cannot be added")
    if sum(map(num_elements, missing)):
        raise WeightTransferError(f"no rank holds {missing[0]}")
    return chosen


def compare_checksums(source: Sequence[LayoutChecksums], destination: Sequence[LayoutChecksums]) -> list[TensorCheck]:
    """One check for each rollout tensor, from the checksums of all ranks of both groups."""
    layouts = [layout for layout, _ in destination]
    names = resolve_names([layout for layout, _ in source], layouts)
    shapes = _full_shapes(destination)
    sent = merge_rank_checksums([checksums for _, checksums in source], _full_shapes(source))
    received = merge_rank_checksums([checksums for _, checksums in destination], shapes)
    dtypes = {name: dtype for layout in layouts for name, dtype in layout.dtypes.items()}
    return [
        TensorCheck(name, shapes[name], dtypes[name], sent[names[name]], checksum)
        for name, checksum in sorted(received.items())
    ]


def _full_shapes(ranks: Sequence[LayoutChecksums]) -> Shapes:
    """Of all tensors but those that only an engine's loader can place."""
    return {n: tuple(s) for layout, _ in ranks for n, s in layout.full_shapes.items() if n not in layout.loader}


def write_report(path: Path, checks: Sequence[TensorCheck], *, version: int) -> None:
    """Write a JSON file that lists every tensor and says first whether all are equal."""
    unequal = [check.name for check in checks if not check.equal]
    report = {
        "version": version,
        "equal": not unequal,
        "unequal": unequal,
        "checksum": digest({check.name: check.checksum for check in checks}),
        "tensors": [
            vars(check)
            | {"equal": check.equal}
            | {name: f"{getattr(check, name):016x}" for name in ("source_checksum", "checksum")}
            for check in checks
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
