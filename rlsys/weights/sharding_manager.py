"""The controller's side of weight transfer: connect two groups, push versions, validate, restore a lost rank."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlsys.types import TransferReport, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.base import Executor, RemainingTime, TransferOptions, WeightGroup, wait_all
from rlsys.weights.executors.cuda_ipc import IpcExecutor, SharedMemoryExecutor
from rlsys.weights.executors.disk import DiskExecutor
from rlsys.weights.executors.gather import GatherExecutor
from rlsys.weights.executors.in_process import LocalExecutor
from rlsys.weights.executors.nccl import NcclExecutor
from rlsys.weights.fp8 import float8_shapes
from rlsys.weights.layout import missing_boxes
from rlsys.weights.plan import resolve_names, source_dtypes
from rlsys.weights.verify import TensorCheck, compare_checksums, write_report

log = logging.getLogger(__name__)
PEER_S = 20.0
"""For each stage between two engines, of which one serves meanwhile."""

ExecutorName = Literal["auto", "shm", "local", "ipc", "nccl", "disk", "gather"]
EXECUTORS: dict[str, type[Executor]] = {
    "shm": SharedMemoryExecutor,
    "ipc": IpcExecutor,
    "nccl": NcclExecutor,
    "disk": DiskExecutor,
    "gather": GatherExecutor,
    "local": LocalExecutor,
}


class ShardingManager:
    """Moves weights from a trainer group into a rollout group; a WeightTransfer.

    `executor`: "shm" engines copy from a snapshot in shared memory of one host; "ipc" engines copy from the trainer's
    own memory, between hosts through its ranks on each; "nccl" the trainer sends, over NCCL or gloo; "disk" a directory
    for each version below `disk_root`; "gather" full tensors through the engines' loaders; "local" each process holds a
    worker of both groups, "gather" where its trainer has not the whole model. "auto" chooses by where the ranks are
    (see `choose`). Every call returns or raises within `deadline_s`; after a failed push the engines that did not
    complete it stay quarantined until the next good one. `validate` writes into `report_dir`. With `offloads` the
    memory that the trainer gives from is freed between two pushes.
    """

    def __init__(
        self,
        source: WeightGroup,
        destination: WeightGroup,
        *,
        executor: ExecutorName = "auto",
        deadline_s: float = 300.0,
        report_dir: str | Path | None = None,
        disk_root: str | Path | None = None,
        disk_assets: str | Path = "",
        bucket_bytes: int = 256 << 20,
        offloads: bool = False,
    ) -> None:
        if (executor == "disk") != (disk_root is not None):
            raise ValueError("set disk_root with executor='disk', and only with it")
        self.source, self.destination = source, destination
        self.executor, self._is_auto = executor, executor == "auto"
        self.deadline_s = deadline_s
        self.report_dir = None if report_dir is None else Path(report_dir)
        self.version: int | None = None
        """The version that was pushed last, as its caller numbered it."""
        self.validated: dict[str, int] = {}
        """The engines' checksums of that version, if it was validated."""
        self._options = TransferOptions(deadline_s, bucket_bytes, disk_root, str(disk_assets), offloads)
        self._transport: Executor | None = None
        self._layouts: tuple[list[WeightLayout], list[WeightLayout]] = ([], [])

    def connect(self, destination: WeightGroup | None = None) -> None:
        """Exchange layouts, plan and join, with another rollout group if given.

        WeightTransferError when the two groups' layouts do not fit.
        """
        self.destination = destination or self.destination
        with self._stage("connect") as remaining_s:
            engines = _by_group_rank(wait_all(self.destination.execute_all_async("weight_layout"), remaining_s))
            trainers = wait_all(self.source.execute_all_async("weight_layout", float8_shapes(engines)), remaining_s)
            self._layouts = _by_group_rank(trainers), engines
            if self._is_auto:
                self.executor = choose(*self._layouts)
            if self.executor == "local" and any(missing_boxes([layout]) for layout in trainers):
                self.executor = "gather"
            transport = EXECUTORS[self.executor](self.source, self.destination, self._options)
            transport.connect(*self._layouts, remaining_s)
            if transport.unused:
                log.warning("no rollout engine uses the trainer's tensors %s", ", ".join(transport.unused))
            self._transport = transport

    def push(self, version: int) -> TransferReport:
        """Bring every rollout engine to the trainer's weights, under this version."""
        started_s = time.monotonic()
        with self._stage(f"push of version {version}") as remaining_s:
            transport = self._connected()
            self.validated = {}
            transport.stage.drain()
            num_bytes, checksum = transport.push(version, remaining_s)
            self.version = version
        seconds, network, stage_s = time.monotonic() - started_s, transport.network_bytes, transport.stage.drain()
        return TransferReport(version, num_bytes, seconds, checksum, self.executor, network, stage_s)

    def restore(self, rank: int) -> None:
        """Bring a restarted rollout rank to the last pushed version, where the executor still has it.

        "shm" and "disk" do without the trainer; "ipc" reads its memory, which must not have changed since the push.
        """
        with self._stage(f"restore of rollout rank {rank}") as remaining_s:
            transport = self._connected()
            if self.version is None:
                raise WeightTransferError(f"rollout rank {rank} cannot be restored before the first push")
            transport.restore(rank, self.version, remaining_s)

    def copy(self, peer: WeightGroup, newcomer: WeightGroup) -> None:
        """Bring an engine the last pushed version from one that has it, by "nccl"; `connect` before the next push.

        Where that push was validated, every tensor must have its checksum.
        """
        if self.version is None:
            raise WeightTransferError("there are no weights to copy before the first push")
        if any(layout.loader for layout in self._layouts[1]):
            raise WeightTransferError("an engine whose own loader must place some tensors cannot send them")
        between = ShardingManager(peer, newcomer, executor="nccl", deadline_s=min(self.deadline_s, PEER_S))
        with closing(between):
            between.connect()
            between.push(self.version)
            checks = between.validate() if self.validated else []
            if changed := [check.name for check in checks if check.checksum != self.validated.get(check.name)]:
                raise WeightTransferError(f"{len(changed)} tensors changed since they were pushed: {changed[:5]}")

    def validate(self) -> list[TensorCheck]:
        """Compare every tensor of every engine with the trainer's by checksum.

        Writes `weights_v<version>.json` into `report_dir`; WeightTransferError names the tensors that differ. Call it
        between a push and the trainer's next step.
        """
        with self._stage("validation") as remaining_s:
            self._connected()
            sources, destinations = self._layouts
            dtypes = source_dtypes(resolve_names(sources, destinations), destinations)
            sent = wait_all(self.source.execute_all_async("weight_checksum", dtypes), remaining_s)
            received = wait_all(self.destination.execute_all_async("weight_checksum"), remaining_s)
            checks = compare_checksums([*zip(sources, sent, strict=True)], [*zip(destinations, received, strict=True)])
        if self.report_dir is not None:
            write_report(self.report_dir / f"weights_v{self.version}.json", checks, version=self.version or 0)
        if unequal := [check.name for check in checks if not check.equal]:
            raise WeightTransferError(f"{len(unequal)} tensors differ between trainer and rollout: {unequal[:5]}")
        self.validated = {check.name: check.checksum for check in checks}
        return checks

    def close(self) -> None:
        """Leave the transfer on all ranks that answer, and log the others; shared memory goes with the last of them."""
        self._transport = None
        end_s = time.monotonic() + self.deadline_s
        sides = (self.destination, self.source)
        for call in [call for side in sides for call in side.execute_all_async("close_weight_transfer")]:
            try:
                call.get(max(0.01, end_s - time.monotonic()))
            except Exception as error:
                log.warning("a rank did not leave the weight transfer: %s", error)

    def _connected(self) -> Executor:
        if self._transport is None:
            raise WeightTransferError("the sharding manager is not connected: call connect() first")
        return self._transport

    @contextmanager
    def _stage(self, stage: str) -> Iterator[RemainingTime]:
        """Give the remaining seconds at any moment; add the stage to an error that passes."""
        end_s = time.monotonic() + self.deadline_s
        try:
            yield lambda: max(0.01, end_s - time.monotonic())
        except Exception as error:
            error.add_note(f"weight transfer: {stage}; engines that did not complete it stay quarantined")
            raise


FSDPHFShardingManager = FSDPVLLMShardingManager = FSDPSGLangShardingManager = ShardingManager
MegatronHFShardingManager = MegatronVLLMShardingManager = MegatronSGLangShardingManager = ShardingManager
"""One class serves every pair of engines: all that differs between them is in their layouts."""


def choose(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> ExecutorName:
    """The executor for these ranks, by their devices and hosts.

    "ipc" between GPUs of one host, and over hosts that all have trainer ranks; "nccl" over other hosts; else "shm".
    """
    layouts, trained_on = (*sources, *destinations), {layout.host for layout in sources}
    if len({layout.host for layout in layouts}) > 1:
        return "ipc" if {layout.host for layout in destinations} <= trained_on else "nccl"
    return "ipc" if {layout.device for layout in layouts} == {"cuda"} else "shm"


def _by_group_rank(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """Layouts under their ranks in the group, by which its workers are called."""
    return [replace(layout, rank=rank) for rank, layout in enumerate(layouts)]
