"""The local executor: trainer engine, which has the whole model, and rollout engine are in the same process."""

import time

import numpy as np
import torch

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import TransferReport
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.batched_copy import BatchedCopy
from rlsys.weights.engine_update import with_staging
from rlsys.weights.executors.base import Executor, Layouts, RemainingTime, wait_all
from rlsys.weights.fp8 import Fp8Weights, float8_shapes
from rlsys.weights.plan import make_plan
from rlsys.weights.rank_plan import Checksums, PlanReceiver, source_checksums, split_plan


class LocalReshard(PlanReceiver):
    """Copies between two engines of this process, prepared at the first push and at one before which memory has moved.

    With `offloads`, or staging for a loader, it holds no memory of either engine between two pushes.
    """

    def __init__(self, engine: TrainEngine, rollout: RolloutEngine, *, offloads: bool = False) -> None:
        """WeightTransferError for a tensor that the trainer does not have, not whole, or in another shape."""
        layout = with_staging(rollout.weight_layout())
        self.trained = Fp8Weights(engine, shapes) if (shapes := float8_shapes([layout])) else engine
        source, self.offloads = self.trained.weight_layout(), offloads
        self.plans = split_plan(make_plan([source], [layout]), [source])
        super().__init__(self.plans.destination(layout.rank), rollout)
        self.release()

    def release(self) -> None:
        """Hold no memory of the two engines."""
        self._addresses, self._copy, self.checksums = list[int](), BatchedCopy([]), None
        self._sent: Checksums = list[int]  # of no copies

    @torch.no_grad()
    def push(self, version: int) -> TransferReport:
        """Copy all tensors; WeightTransferError, and a quarantined engine, when one does not arrive."""
        started_s = time.monotonic()
        tensors, given = self.update.begin(), self.trained.local_tensors()
        addresses = [tensor.data_ptr() for tensor in (*tensors.values(), *given.values())]
        if addresses != self._addresses:
            self._copy = BatchedCopy([(copy.view(tensors), copy.source_view(given)) for copy in self.plan.copies])
            self._sent = source_checksums(self.plans.sources[0], given)
            self._addresses, self.checksums = addresses, None
        self._copy.run()
        self.received, sent = version, self.plans.merge([np.array(self._sent(), np.uint64)])
        self.finish(version, sent)
        num_bytes, checksum = self._copy.num_bytes, self.plans.digest(sent)
        if self.offloads or self.update.layout.loader:
            self.release()
        return TransferReport(version, num_bytes, time.monotonic() - started_s, checksum)


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
