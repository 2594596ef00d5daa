"""The local executor: trainer engine and rollout engine are in the same process.

Where this rank holds the whole model, tensors are copied by plan; otherwise the trainer's ranks gather bucket by bucket
(collective: every rank takes part) and each loads its own rollout engine.
"""

import time

import torch

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import TransferReport
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import box_checksums, digest
from rlsys.weights.engine_update import EngineUpdate
from rlsys.weights.executors.base import Executor, Layouts, RemainingTime, wait_all
from rlsys.weights.fp8 import Fp8Weights, float8_shapes
from rlsys.weights.layout import dtype_of, missing_boxes
from rlsys.weights.plan import make_plan, resolve_names, source_dtypes
from rlsys.weights.verify import layout_checksums, merge_rank_checksums


@torch.no_grad()
def reshard_local(
    engine: TrainEngine, rollout: RolloutEngine, *, version: int, bucket_bytes: int = 256 << 20
) -> TransferReport:
    """Bring the rollout engine of this process to the trainer's weights and verify them by checksum.

    Raises WeightTransferError, and leaves the rollout engine quarantined, when a tensor does not fit or arrive.
    """
    started_s = time.monotonic()
    update = EngineUpdate(rollout)
    tensors = update.begin()
    layout = update.layout
    trained = Fp8Weights(engine, shapes) if (shapes := float8_shapes([layout])) else engine
    source = trained.weight_layout()
    names = resolve_names([source], [layout])
    dtypes = source_dtypes(names, [layout])
    is_whole = not missing_boxes([source])
    if is_whole:
        given = trained.local_tensors()
        for copy in make_plan([source], [layout]).copies:
            copy.view(tensors).copy_(copy.source_view(given))
        sent = merge_rank_checksums([layout_checksums(source, given, dtypes)], source.full_shapes)
        tensors = update.tensors()
    else:
        sent = dict[str, int]()  # checksums of what the engine's own loader is given, as cast
        for bucket in trained.weights(bucket_bytes):
            wanted = [(name, tensor.to(dtype_of(dtypes[name]))) for name, tensor in bucket if name in dtypes]
            rollout.load(wanted)
            checksums = box_checksums((tensor, (0,) * tensor.ndim, tensor.shape) for _, tensor in wanted)
            sent |= zip([name for name, _ in wanted], checksums, strict=True)
        layout, tensors = rollout.weight_layout(), rollout.local_tensors()
    held = {shard.box.tensor: layout.full_shapes[shard.box.tensor] for shard in layout.shards}
    for name, checksum in merge_rank_checksums([layout_checksums(layout, tensors)], held).items():
        if sent.get(names[name]) != checksum:
            raise WeightTransferError(f"tensor '{name}': the received values differ from the trainer's")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if is_whole:
        update.finish(version)
    else:
        rollout.finish_update(version)
    seconds = time.monotonic() - started_s
    return TransferReport(version, num_bytes, seconds, digest({name: sent[name] for name in dtypes}))


class LocalExecutor(Executor):
    """`local`: each process of both groups holds both engines."""

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        """Nothing has to be prepared."""

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        reports = wait_all(self.source.execute_all_async("reshard_weights", version), remaining_s)
        checksum, *others = {report.checksum for report in reports}
        if others:
            raise WeightTransferError(f"the rollout ranks report different checksums: {[checksum, *others]}")
        return sum(report.num_bytes for report in reports), checksum
