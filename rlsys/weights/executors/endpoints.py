"""The two sides of a transfer inside their workers, and what the controller calls on the groups of those workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.cuda_ipc import Lender, LendSpec, Puller, PullSpec
from rlsys.weights.executors.disk import DiskReader, DiskSpec, DiskWriter
from rlsys.weights.executors.gather import Gatherer, GatherSpec, Loader
from rlsys.weights.executors.nccl import Receiver, ReceiveSpec, Sender, SendSpec
from rlsys.weights.executors.shm import Moved, ShmReader, ShmSpec, ShmWriter
from rlsys.weights.layout import device_of
from rlsys.weights.target import with_staging
from rlsys.weights.verify import BoxSum, box_sums

Spec = ShmSpec | LendSpec | PullSpec | SendSpec | ReceiveSpec | DiskSpec | GatherSpec
SENDERS: dict[type, Callable[[Any, TrainEngine], Any]] = {
    ShmSpec: ShmWriter,
    LendSpec: Lender,
    SendSpec: Sender,
    DiskSpec: DiskWriter,
    GatherSpec: Gatherer,
}
RECEIVERS: dict[type, Callable[[Any, RolloutEngine], Any]] = {
    ShmSpec: ShmReader,
    PullSpec: Puller,
    ReceiveSpec: Receiver,
    DiskSpec: DiskReader,
    GatherSpec: Loader,
}
STEPS = ("join", "confirm", "prepare", "commit", "bucket", "finish")


class Answer(Protocol):
    """The answer of one rank, not waited for yet."""

    def get(self, deadline_s: float | None = None) -> Any: ...


class WeightGroup(Protocol):
    """A group of workers as the sharding manager calls it; a WorkerGroup is one.

    The trainer's workers have the methods of `WeightSender`, the rollout workers those of `WeightReceiver`, under the
    same names. Workers that have both engines in one process have `reshard_weights(version)` and `weight_sums()`
    instead, which are `reshard_local` and `local_sums`.
    """

    @property
    def world_size(self) -> int: ...
    def execute_all_async(self, method: str, *args: Any) -> Sequence[Answer]: ...
    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Answer: ...


class _Side:
    """One rank's end of a transfer, whichever executor it belongs to."""

    ends: Mapping[type, Callable[[Any, Any], Any]]

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._end: Any = None

    def weight_layout(self) -> WeightLayout:
        device = device_of(self._engine.local_tensors()).type
        layout = replace(with_staging(self._engine.weight_layout()), device=device, digest="")
        text = repr(replace(layout, rank=0, host="")).encode()
        return replace(layout, digest=blake2b(text, digest_size=16).hexdigest())

    def open_weight_transfer(self, spec: Spec) -> Any:
        """Join a transfer (leaving an earlier one); returns what the others need to find it."""
        self.close_weight_transfer()
        self._end = self.ends[type(spec)](spec, self._engine)
        return getattr(self._end, "address", None)

    def weight_step(self, step: str, *args: Any) -> Any:
        """A further step of the executor's own, one of STEPS."""
        if step not in STEPS:
            raise ValueError(f"'{step}' is no step of a weight transfer: {', '.join(STEPS)}")
        return getattr(self._joined(), step)(*args)

    def weight_checksum(self, dtypes: Mapping[str, str] | None = None) -> tuple[BoxSum, ...]:
        """Checksums of this rank's boxes, each cast first to the dtype named for its tensor."""
        return box_sums(self._engine.weight_layout(), self._engine.local_tensors(), dtypes)

    def close_weight_transfer(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _joined(self) -> Any:
        if self._end is None:
            raise WeightTransferError("this rank has joined no weight transfer: connect first")
        return self._end


class WeightSender(_Side):
    """The trainer's side of one rank."""

    ends = SENDERS

    def send_weights(self, version: int) -> Any:
        return self._joined().send(version)


class WeightReceiver(_Side):
    """The rollout's side of one rank."""

    ends = RECEIVERS

    def receive_weights(self, version: int, *news: Any) -> Moved:
        return self._joined().receive(version, *news)

    def weight_difference(self) -> dict[str, float]:
        """Largest absolute difference to what the trainer last sent, by rollout tensor; empty where nobody can tell."""
        return self._end.differences() if hasattr(self._end, "differences") else {}
