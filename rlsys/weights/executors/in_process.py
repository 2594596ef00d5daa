"""The local executor: trainer engine and rollout engine live in the same process.

Where this rank holds the whole model, tensors are copied by plan; otherwise the trainer's ranks gather bucket by bucket
(collective: every rank takes part) and each loads its own rollout engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import box_checksums, digest
from rlsys.weights.layout import dtype_of, gaps, shard_view, view_of
from rlsys.weights.plan import make_plan, resolve_names
from rlsys.weights.target import Moved, Target
from rlsys.weights.verify import LayoutSums, box_sums, merge_sums

BUCKET_BYTES = 256 << 20


def reshard_local(
    engine: TrainEngine, rollout: RolloutEngine, *, version: int, bucket_bytes: int = BUCKET_BYTES
) -> Moved:
    """Bring the rollout engine of this process to the trainer's weights and verify them by checksum.

    Raises WeightTransferError, and leaves the rollout engine quarantined, when anything does not fit or arrive.
    """
    started_s = time.monotonic()
    target = Target(rollout)
    tensors = target.begin()
    source, layout = engine.weight_layout(), target.layout
    names = resolve_names([source], [layout])
    dtypes = {names[name]: dtype for name, dtype in layout.dtypes.items()}
    whole = not gaps([source])
    if whole:
        sent = _copy_by_plan(engine, tensors, source, layout, dtypes)
        tensors = target.tensors()
    else:
        sent = _load_gathered(engine, rollout, dtypes, bucket_bytes)
        layout, tensors = rollout.weight_layout(), rollout.local_tensors()
    held = {shard.box.tensor: layout.full_shapes[shard.box.tensor] for shard in layout.shards}
    for name, checksum in merge_sums([box_sums(layout, tensors)], held).items():
        if sent.get(names[name]) != checksum:
            raise WeightTransferError(f"tensor '{name}' that arrived is not the one that the trainer holds")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if whole:
        target.finish(version)
    else:
        rollout.finish_update(version)
    return Moved(version, num_bytes, time.monotonic() - started_s, digest({name: sent[name] for name in dtypes}))


def local_sums(engine: TrainEngine, rollout: RolloutEngine) -> tuple[LayoutSums, LayoutSums]:
    """What this rank's trainer and rollout engine hold, the trainer's cast to the rollout's dtypes."""
    source, target = engine.weight_layout(), rollout.weight_layout()
    names = resolve_names([source], [target])
    dtypes = {names[name]: dtype for name, dtype in target.dtypes.items()}
    return (
        LayoutSums(source, box_sums(source, engine.local_tensors(), dtypes)),
        LayoutSums(target, box_sums(target, rollout.local_tensors())),
    )


@torch.no_grad()
def _copy_by_plan(
    engine: TrainEngine,
    ours: Mapping[str, Tensor],
    source: WeightLayout,
    target: WeightLayout,
    dtypes: Mapping[str, str],
) -> dict[str, int]:
    """Copy what this rank holds straight into the engine's tensors; returns the checksums of the source, as cast."""
    theirs = engine.local_tensors()
    for copy in make_plan([source], [target]).copies:
        held = Shard(Box(copy.tensor, copy.start, copy.shape), copy.source_local, copy.source_start)
        view_of(ours[copy.local], copy.local_start, copy.shape).copy_(shard_view(theirs, held))
    return merge_sums([box_sums(source, theirs, dtypes)], source.full_shapes)


@torch.no_grad()
def _load_gathered(
    engine: TrainEngine, rollout: RolloutEngine, dtypes: Mapping[str, str], bucket_bytes: int
) -> dict[str, int]:
    """Load gathered tensors through the engine's own loader; returns their checksums, as cast."""
    sent: dict[str, int] = {}
    for bucket in engine.weights(bucket_bytes):
        wanted = [(name, tensor.to(dtype_of(dtypes[name]))) for name, tensor in bucket if name in dtypes]
        rollout.load(wanted)
        sums = box_checksums((tensor, (0,) * tensor.ndim, tensor.shape) for _, tensor in wanted)
        sent |= zip([name for name, _ in wanted], sums, strict=True)
    return sent
