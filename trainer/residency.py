"""Which role holds device memory now, and the legal moves between roles.

Roles that share processes take turns: the resident that leaves gives its memory back (parameters and optimizer state to
the host, the rollout's weights and cache released), the next one takes it. Weights are pushed in the state SYNC, with
the actor's parameters and the rollout's weights on the device and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal

from rlsys.telemetry.metrics import StageTimer
from trainer.groups import Role

SYNC: Final = "sync"
Resident = Role | Literal["sync"]
"""Who holds the memory of a shared pool."""


@dataclass(frozen=True)
class Moves:
    """What a resident does when it enters and leaves the device."""

    enter: Sequence[Callable[[], object]] = ()
    leave: Sequence[Callable[[], object]] = ()


class Residency:
    """Tracks the resident and runs the moves from one to the next as the stage `switch`, where there are any."""

    refill: Callable[[], object] | None = None
    """Pushes the served weights again, for a rollout that drops them when it leaves."""

    def __init__(self, moves: Mapping[Resident, Moves], stage: StageTimer) -> None:
        self._moves: dict[Resident | None, Moves] = {**moves}
        self._stage = stage
        self._lost = False
        self.resident: Resident | None = None

    @contextmanager
    def hold(self, resident: Resident, stage: str) -> Iterator[None]:
        """Run a stage of the step while `resident` holds memory; moving is not part of the stage's time."""
        self.enter(resident)
        with self._stage(stage):
            yield

    def offload_all(self) -> None:
        """Give back what every role holds; `push_weights` comes next."""
        for resident in Role:
            for move in self._moves.get(resident, Moves()).leave:
                move()
        self.resident = None

    def enter_to_save(self, role: Role) -> None:
        """Make a role the one that holds memory if it has parts that leave, since those must be back to be saved."""
        if role in self._moves:
            self.enter(role)

    def enter(self, resident: Resident) -> None:
        """Make `resident` the one that holds memory; to roll out before any weights were pushed is a mistake."""
        if resident == self.resident:
            return
        if resident is Role.Rollout and self._lost and self.refill is not None:
            self.enter(SYNC)
            self.refill()
        left = self.resident
        assert left is not None or resident is not Role.Rollout, "call push_weights() before the rollout is used"
        leave, enter = self._moves.get(left, Moves()).leave, self._moves.get(resident, Moves()).enter
        with self._stage("switch") if leave or enter else nullcontext():
            for move in leave:
                move()
            self.resident = None
            for move in enter:
                move()
        self._lost = resident != SYNC and (self._lost or left is Role.Rollout)
        self.resident = resident
