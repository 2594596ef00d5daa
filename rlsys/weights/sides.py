"""The two sides of a transfer inside their workers, and what the controller calls on the groups of those workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.shm import Moved, ShmReader, ShmSpec, ShmWriter
from rlsys.weights.verify import BoxSum, box_sums


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


class WeightSender:
    """The trainer's side of one rank."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._writer: ShmWriter | None = None

    def weight_layout(self) -> WeightLayout:
        return self._engine.weight_layout()

    def open_weight_transfer(self, spec: ShmSpec) -> str:
        """Join a transfer (leaving an earlier one); returns where the others find it."""
        self.close_weight_transfer()
        self._writer = ShmWriter(spec, self._engine)
        return self._writer.path

    def send_weights(self, version: int) -> Moved:
        if self._writer is None:
            raise WeightTransferError("this trainer rank has joined no weight transfer: connect first")
        return self._writer.write(version)

    def weight_checksum(self, dtypes: Mapping[str, str] | None = None) -> tuple[BoxSum, ...]:
        """Checksums of this rank's boxes, each cast first to the dtype named for its tensor."""
        return box_sums(self._engine.weight_layout(), self._engine.local_tensors(), dtypes)

    def close_weight_transfer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightReceiver:
    """The rollout's side of one rank."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._reader: ShmReader | None = None

    def weight_layout(self) -> WeightLayout:
        return self._engine.weight_layout()

    def open_weight_transfer(self, spec: ShmSpec) -> str:
        """Join a transfer (leaving an earlier one); returns where it is."""
        self.close_weight_transfer()
        self._reader = ShmReader(spec, self._engine)
        return self._reader.path

    def receive_weights(self, version: int) -> Moved:
        if self._reader is None:
            raise WeightTransferError("this rollout rank has joined no weight transfer: connect first")
        return self._reader.read(version)

    def weight_checksum(self, dtypes: Mapping[str, str] | None = None) -> tuple[BoxSum, ...]:
        return box_sums(self._engine.weight_layout(), self._engine.local_tensors(), dtypes)

    def weight_difference(self) -> dict[str, float]:
        """Largest absolute difference to what the trainer last sent, by rollout tensor."""
        return {} if self._reader is None else self._reader.differences()

    def close_weight_transfer(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
