"""The controller's side of weight transfer: connect the groups, push a version, prove it, bring back a lost rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlsys.types import TransferReport, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.plan import resolve_names
from rlsys.weights.shm import Moved, ShmPlan, plan_shm
from rlsys.weights.sides import Answer, WeightGroup
from rlsys.weights.verify import LayoutSums, Side, TensorCheck, compare, write_report

log = logging.getLogger(__name__)

Executor = Literal["shm", "local"]


class ShardingManager:
    """Moves weights from a trainer group into a rollout group; a WeightTransfer.

    "shm": two groups on one host; every trainer rank writes its own boxes into shared memory, rollout ranks read
    theirs. "local": one group whose workers hold both engines; pass it as both. Every call answers or raises within
    `deadline_s`; a failed push leaves the engines that did not complete quarantined, and the next good one heals them.
    `report_dir` is where `validate` writes its JSON files.
    """

    def __init__(
        self,
        source: WeightGroup,
        destination: WeightGroup,
        *,
        executor: Executor = "shm",
        deadline_s: float = 300.0,
        report_dir: str | Path | None = None,
    ) -> None:
        if executor == "local" and source is not destination:
            raise ValueError("the local executor needs one group whose workers hold both engines")
        self.source, self.destination = source, destination
        self.executor: Executor = executor
        self.deadline_s = deadline_s
        self.report_dir = None if report_dir is None else Path(report_dir)
        self.version: int | None = None
        self._plan: ShmPlan | None = None
        self._layouts: tuple[list[WeightLayout], list[WeightLayout]] = ([], [])

    def connect(self) -> None:
        """Exchange layouts, compile the plan and open the memory; WeightTransferError when the sides do not fit."""
        if self.executor == "local":
            return
        with self._stage("connect") as left_s:
            self._layouts = sources, destinations = (
                _numbered(_all(self.source.execute_all_async("weight_layout"), left_s)),
                _numbered(_all(self.destination.execute_all_async("weight_layout"), left_s)),
            )
            plan = plan_shm(sources, destinations)
            if plan.unused:
                log.warning("no rollout engine wants the trainer's tensors %s", ", ".join(plan.unused))
            path = self.source.execute_rank_async(0, "open_weight_transfer", plan.writers[0]).get(left_s())
            self._plan = plan.at(path)
            opened = [
                self.source.execute_rank_async(rank, "open_weight_transfer", self._plan.writers[rank])
                for rank in range(1, self.source.world_size)
            ]
            opened += [self._open_reader(rank) for rank in range(self.destination.world_size)]
            _all(opened, left_s)

    def push(self, version: int) -> TransferReport:
        """Bring every rollout engine to the trainer's weights, under this version."""
        started_s = time.monotonic()
        with self._stage(f"push of version {version}") as left_s:
            if self.executor == "local":
                moved = _all(self.source.execute_all_async("reshard_weights", version), left_s)
            else:
                self._connected()
                _all(self.source.execute_all_async("send_weights", version), left_s)
                moved = _all(self.destination.execute_all_async("receive_weights", version), left_s)
            checksum = _one_checksum(moved)
            self.version = version
        return TransferReport(
            version=version,
            num_bytes=sum(part.num_bytes for part in moved),
            seconds=time.monotonic() - started_s,
            checksum=checksum,
            executor=self.executor,
        )

    def restore(self, rank: int) -> None:
        """Bring a restarted rollout rank to the last pushed version; the trainer is not asked for anything."""
        with self._stage(f"restore of rollout rank {rank}") as left_s:
            self._connected()
            if self.version is None:
                raise WeightTransferError(f"rollout rank {rank} cannot be restored before the first push")
            self._open_reader(rank).get(left_s())
            self.destination.execute_rank_async(rank, "receive_weights", self.version).get(left_s())

    def validate(self) -> list[TensorCheck]:
        """Compare every tensor of every engine with the trainer's by checksum (and by difference to what was sent).

        Writes `weights_v<version>.json` into `report_dir`; WeightTransferError names the tensors that differ. To be
        called between a push and the trainer's next step.
        """
        with self._stage("validation") as left_s:
            checks = compare(*(self._local_sums(left_s) if self.executor == "local" else self._sums(left_s)))
        if self.report_dir is not None:
            write_report(self.report_dir / f"weights_v{self.version}.json", checks, version=self.version or 0)
        if unequal := [check.name for check in checks if not check.equal]:
            raise WeightTransferError(f"{len(unequal)} tensors differ between trainer and rollout: {unequal[:5]}")
        return checks

    def close(self) -> None:
        """Leave the transfer on all ranks; the memory goes with the last of them."""
        if self._plan is None:
            return
        self._plan = None
        with self._stage("close") as left_s:
            for group in (self.destination, self.source):
                _all(group.execute_all_async("close_weight_transfer"), left_s)

    def _sums(self, left_s: Callable[[], float]) -> tuple[Side, Side, dict[str, float]]:
        """The checksums of both sides, and the largest differences to what was sent."""
        self._connected()
        sources, destinations = self._layouts
        names = resolve_names(sources, destinations)
        dtypes = {names[name]: dtype for layout in destinations for name, dtype in layout.dtypes.items()}
        sent = _all(self.source.execute_all_async("weight_checksum", dtypes), left_s)
        arrived = _all(self.destination.execute_all_async("weight_checksum"), left_s)
        apart = _all(self.destination.execute_all_async("weight_difference"), left_s)
        largest = {name: max(found.get(name, 0.0) for found in apart) for name in names}
        return Side(sources, sent), Side(destinations, arrived), largest

    def _local_sums(self, left_s: Callable[[], float]) -> tuple[Side, Side, dict[str, float]]:
        pairs = _all(self.source.execute_all_async("weight_sums"), left_s)
        ours, theirs = zip(*pairs, strict=True)
        return _side_of(ours), _side_of(theirs), {}

    def _open_reader(self, rank: int) -> Answer:
        assert self._plan is not None
        return self.destination.execute_rank_async(rank, "open_weight_transfer", self._plan.reader)

    def _connected(self) -> None:
        if self._plan is None:
            raise WeightTransferError("the sharding manager is not connected: call connect() first")

    @contextmanager
    def _stage(self, stage: str) -> Iterator[Callable[[], float]]:
        """Give the seconds that are left at any moment; an error that passes is told where it happened."""
        end_s = time.monotonic() + self.deadline_s
        try:
            yield lambda: max(0.01, end_s - time.monotonic())
        except Exception as error:
            error.add_note(f"weight transfer: {stage}; engines that did not complete it stay quarantined")
            raise


class FSDPHFShardingManager(ShardingManager):
    """FSDP trainer to transformers rollout: boxes are dim-0 shards on one side and whole tensors on the other."""


def _all(answers: Sequence[Answer], left_s: Callable[[], float]) -> list[Any]:
    return [answer.get(left_s()) for answer in answers]


def _numbered(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """Layouts under their ranks in the group, which is how the group is called."""
    return [replace(layout, rank=rank) for rank, layout in enumerate(layouts)]


def _one_checksum(moved: Sequence[Moved]) -> str:
    checksums = {part.checksum for part in moved}
    if len(checksums) != 1:
        raise WeightTransferError(f"the rollout ranks report different checksums: {sorted(checksums)}")
    return checksums.pop()


def _side_of(ranks: Sequence[LayoutSums]) -> Side:
    return Side(_numbered([rank.layout for rank in ranks]), [rank.sums for rank in ranks])
