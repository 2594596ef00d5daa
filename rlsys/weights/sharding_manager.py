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
from rlsys.weights.executors.base import (
    DiskExchange,
    Exchange,
    GatherExchange,
    LocalExchange,
    NcclExchange,
    PullExchange,
    ShmExchange,
    all_of,
)
from rlsys.weights.executors.endpoints import WeightGroup
from rlsys.weights.plan import resolve_names
from rlsys.weights.target import Moved
from rlsys.weights.verify import LayoutSums, Side, TensorCheck, compare, write_report

log = logging.getLogger(__name__)

Executor = Literal["auto", "shm", "local", "ipc", "nccl", "disk", "gather"]
EXCHANGES: dict[str, Any] = {
    "shm": ShmExchange,
    "ipc": PullExchange,
    "nccl": NcclExchange,
    "disk": DiskExchange,
    "gather": GatherExchange,
    "local": LocalExchange,
}


class ShardingManager:
    """Moves weights from a trainer group into a rollout group; a WeightTransfer.

    `executor`: "shm" shared memory of one host; "ipc" engines of one host pull from the trainer's memory; "nccl" the
    trainer sends, over NCCL or gloo; "disk" a directory for each version below `disk_root`; "gather" full tensors
    through the engines' loaders; "local" one group whose workers hold both engines, passed as both. "auto" chooses by
    where the ranks are (see `choose`). Every call answers or raises within `deadline_s`; a failed push leaves the
    engines that did not complete quarantined, and the next good one heals them. `validate` writes into `report_dir`.
    """

    def __init__(
        self,
        source: WeightGroup,
        destination: WeightGroup,
        *,
        executor: Executor = "auto",
        deadline_s: float = 300.0,
        report_dir: str | Path | None = None,
        disk_root: str | Path | None = None,
        disk_assets: str | Path = "",
        bucket_bytes: int = 256 << 20,
    ) -> None:
        if executor == "local" and source is not destination:
            raise ValueError("the local executor needs one group whose workers hold both engines")
        if (executor == "disk") != (disk_root is not None):
            raise ValueError("the disk executor, and no other, needs disk_root")
        self.source, self.destination = source, destination
        self.executor: Executor = "local" if executor == "auto" and source is destination else executor
        self.deadline_s = deadline_s
        self.report_dir = None if report_dir is None else Path(report_dir)
        self.version: int | None = None
        self._settings: dict[str, dict[str, Any]] = {
            "disk": {"root": disk_root, "assets": disk_assets},
            "gather": {"bucket_bytes": bucket_bytes},
        }
        self._exchange: Exchange | None = None
        self._layouts: tuple[list[WeightLayout], list[WeightLayout]] = ([], [])

    def connect(self) -> None:
        """Exchange layouts, compile the plan and join; WeightTransferError when the sides do not fit."""
        with self._stage("connect") as left_s:
            if self.executor != "local":
                self._layouts = (
                    _numbered(all_of(self.source.execute_all_async("weight_layout"), left_s)),
                    _numbered(all_of(self.destination.execute_all_async("weight_layout"), left_s)),
                )
            if self.executor == "auto":
                self.executor = choose(*self._layouts)
            settings = self._settings.get(self.executor, {})
            exchange = EXCHANGES[self.executor](self.source, self.destination, timeout_s=self.deadline_s, **settings)
            exchange.connect(*self._layouts, left_s)
            if exchange.unused:
                log.warning("no rollout engine wants the trainer's tensors %s", ", ".join(exchange.unused))
            self._exchange = exchange

    def push(self, version: int) -> TransferReport:
        """Bring every rollout engine to the trainer's weights, under this version."""
        started_s = time.monotonic()
        with self._stage(f"push of version {version}") as left_s:
            moved = self._connected().push(version, left_s)
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
        """Bring a restarted rollout rank to the last pushed version, where the executor still has it.

        "shm" and "disk" do without the trainer; "ipc" asks its memory, which must not have changed since the push.
        """
        with self._stage(f"restore of rollout rank {rank}") as left_s:
            exchange = self._connected()
            if self.version is None:
                raise WeightTransferError(f"rollout rank {rank} cannot be restored before the first push")
            exchange.restore(rank, self.version, left_s)

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
        """Leave the transfer on all ranks; what they shared goes with the last of them."""
        exchange, self._exchange = self._exchange, None
        if exchange is None or self.executor == "local":
            return
        with self._stage("close") as left_s:
            for group in (self.destination, self.source):
                all_of(group.execute_all_async("close_weight_transfer"), left_s)

    def _sums(self, left_s: Callable[[], float]) -> tuple[Side, Side, dict[str, float]]:
        """The checksums of both sides, and the largest differences to what was sent, where they are known."""
        self._connected()
        sources, destinations = self._layouts
        names = resolve_names(sources, destinations)
        dtypes = {names[name]: dtype for layout in reversed(destinations) for name, dtype in layout.dtypes.items()}
        sent = all_of(self.source.execute_all_async("weight_checksum", dtypes), left_s)
        arrived = all_of(self.destination.execute_all_async("weight_checksum"), left_s)
        apart = all_of(self.destination.execute_all_async("weight_difference"), left_s)
        largest = {name: max(f.get(name, 0.0) for f in apart) for name in {n for found in apart for n in found}}
        return Side(sources, sent), Side(destinations, arrived), largest

    def _local_sums(self, left_s: Callable[[], float]) -> tuple[Side, Side, dict[str, float]]:
        pairs = all_of(self.source.execute_all_async("weight_sums"), left_s)
        ours, theirs = zip(*pairs, strict=True)
        return _side_of(ours), _side_of(theirs), {}

    def _connected(self) -> Exchange:
        if self._exchange is None:
            raise WeightTransferError("the sharding manager is not connected: call connect() first")
        return self._exchange

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


class FSDPVLLMShardingManager(ShardingManager):
    """FSDP trainer to vLLM: the engine's fused and cut parameters are learned from its own loader."""


class FSDPSGLangShardingManager(ShardingManager):
    """FSDP trainer to SGLang: the engine's fused and cut parameters are learned from its own loader."""


class MegatronHFShardingManager(ShardingManager):
    """Megatron trainer to transformers rollout: whole tensors out of tensor, pipeline and expert parallel shards."""


class MegatronVLLMShardingManager(ShardingManager):
    """Megatron trainer to vLLM: shards to fused shards."""


class MegatronSGLangShardingManager(ShardingManager):
    """Megatron trainer to SGLang: shards to fused shards."""


def choose(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> Executor:
    """The executor for ranks in these places: on one host "ipc" between GPUs and "shm" else, over hosts "nccl"."""
    layouts = (*sources, *destinations)
    if len({layout.host for layout in layouts}) > 1:
        return "nccl"
    return "ipc" if {layout.device for layout in layouts} == {"cuda"} else "shm"


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
