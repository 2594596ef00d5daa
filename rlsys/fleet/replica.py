"""What a fleet needs of a replica."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rlsys.types import ModelRequest, ResponseDelta


class Replica(Protocol):
    """One serving engine and the process it lives in. Every method answers or raises by its deadline."""

    @property
    def name(self) -> str: ...
    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        """As the engine's `exchange`."""
        ...

    def health(self, deadline_s: float) -> Mapping[str, object]:
        """The engine's `health`; raises if the replica is not alive."""
        ...

    def restart(self, deadline_s: float) -> None:
        """Replace the process, alive or not, by a new one that has loaded its model."""
        ...
