"""What all executors share: the groups of workers they drive, and the steps of a push as the controller runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.telemetry.metrics import StageTimer
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError

RemainingTime = Callable[[], float]
"""The seconds left until the deadline of the running stage."""
Layouts = Sequence[WeightLayout]


@dataclass(frozen=True)
class TransferOptions:
    """The settings of executors: `bucket_bytes` is for gather, `disk_root` and `disk_assets` are for disk.

    With `offloads` the memory that the trainer gives from is freed between two pushes: parameters leave the device, or
    are merged for each push.
    """

    timeout_s: float
    bucket_bytes: int = 256 << 20
    disk_root: str | Path | None = None
    disk_assets: str = ""
    offloads: bool = False


class RankFuture(Protocol):
    """The result of one rank, not waited for yet."""

    def get(self, deadline_s: float | None = None) -> Any: ...


class WeightGroup(Protocol):
    """A group of workers as the sharding manager calls it; a WorkerGroup is one.

    Trainer workers have the methods of `WeightSender`, rollout workers those of `WeightReceiver`. Trainer workers in
    one process with a rollout engine also have `reshard_weights(version)`, see `LocalReshard`.
    """

    @property
    def world_size(self) -> int: ...
    def execute_all_async(self, method: str, *args: object) -> Sequence[RankFuture]: ...
    def execute_rank_async(self, rank: int, method: str, *args: object) -> RankFuture: ...


def wait_all(futures: Sequence[RankFuture], remaining_s: RemainingTime) -> list[Any]:
    """The results of all ranks."""
    return [future.get(remaining_s()) for future in futures]


class Executor:
    """The controller's side of one transport between two groups; layouts are numbered by the ranks of their groups."""

    unused: tuple[str, ...] = ()
    """The trainer's tensors that no engine wants."""

    def __init__(self, source: WeightGroup, destination: WeightGroup, options: TransferOptions) -> None:
        self.source, self.destination, self.options = source, destination, options
        self.network_bytes: dict[str, int] = {}
        self.stage = StageTimer()
        """The seconds of a push in which the controller waits for each stage."""

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        """Plan the transfer and let all ranks join it."""
        raise NotImplementedError

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        """Bring all engines to a version; the bytes that their ranks wrote, and one checksum over all HF tensors."""
        raise NotImplementedError

    def restore(self, rank: int, version: int, remaining_s: RemainingTime) -> None:
        """Bring one restarted rollout rank to the version that was pushed last."""
        raise WeightTransferError(f"this executor cannot restore rollout rank {rank}: push again")

    def open(self, group: WeightGroup, specs: Sequence[object], remaining_s: RemainingTime) -> list[Any]:
        """Let all ranks join, each with its spec; returns what their peers need to reach them."""
        calls = [group.execute_rank_async(rank, "open_weight_transfer", spec) for rank, spec in enumerate(specs)]
        return wait_all(calls, remaining_s)

    def step(self, group: WeightGroup, remaining_s: RemainingTime, step: str, *args: object) -> list[Any]:
        """Run one of the executor's own steps on all ranks of a group."""
        with self.stage(step):
            return wait_all(group.execute_all_async("weight_step", step, *args), remaining_s)

    def send(self, version: int, remaining_s: RemainingTime) -> list[Any]:
        with self.stage("send"):
            return wait_all(self.source.execute_all_async("send_weights", version), remaining_s)

    def receive(self, version: int, remaining_s: RemainingTime, *args: object) -> int:
        with self.stage("receive"):
            return sum(wait_all(self.destination.execute_all_async("receive_weights", version, *args), remaining_s))

    def reopen(self, rank: int, version: int, spec: object, remaining_s: RemainingTime) -> None:
        """Let one rollout rank join again and receive a version that is still there."""
        for method, argument in (("open_weight_transfer", spec), ("receive_weights", version)):
            self.destination.execute_rank_async(rank, method, argument).get(remaining_s())
