"""Who holds device memory now, and the only legal moves.

Roles that share processes take turns: a holder that leaves gives its memory back (parameters and optimizer state to the
host, the rollout's weights and cache released), the next one takes it. Weights are pushed in the state SYNC, where the
actor's parameters and the rollout's weights are present and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

from rlsys.telemetry.metrics import StageTimer


class Holder(StrEnum):
    """The states of a shared pool."""

    NONE = "none"
    ROLLOUT = "rollout"
    SYNC = "sync"
    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD_MODEL = "reward_model"


TRAINED = (Holder.ACTOR, Holder.CRITIC, Holder.REFERENCE, Holder.REWARD_MODEL)

LEGAL: Mapping[Holder, tuple[Holder, ...]] = {
    Holder.NONE: (*TRAINED, Holder.SYNC),
    Holder.ROLLOUT: (*TRAINED, Holder.SYNC),
    Holder.SYNC: (*TRAINED, Holder.ROLLOUT),
    **dict.fromkeys(TRAINED, (*TRAINED, Holder.SYNC, Holder.ROLLOUT)),
}


def _nothing() -> None:
    """A role that need not move."""


@dataclass(frozen=True)
class Moves:
    """What a state does when it is entered and left."""

    enter: Callable[[], None] = _nothing
    leave: Callable[[], None] = _nothing


class Residency:
    """Tracks the holder and runs the moves between holders as the stage `switch`; states without moves cost nothing."""

    def __init__(
        self, moves: Mapping[Holder, Moves], stage: StageTimer, refill: Callable[[], object] | None = None
    ) -> None:
        """`refill` pushes the served weights again; given where a rollout that leaves loses them."""
        self._moves, self._stage, self._refill = moves, stage, refill
        self._lost = False
        self.holder = Holder.NONE

    @contextmanager
    def turn(self, holder: Holder, stage: str) -> Iterator[None]:
        """A stage of the step, run while `holder` holds memory; moving is not part of its time."""
        self.enter(holder)
        with self._stage(stage):
            yield

    def park(self) -> None:
        """Before the first turn: what models took when they were loaded is given back, as if each had had a turn."""
        for holder in TRAINED:
            self._moves.get(holder, Moves()).leave()

    def enter(self, holder: Holder) -> None:
        """Make `holder` the one that holds memory; a move that is not in LEGAL is a programming error."""
        if holder is self.holder:
            return
        if holder is Holder.ROLLOUT and self._lost and self._refill is not None:
            self.enter(Holder.SYNC)
            self._refill()
        if holder not in LEGAL[self.holder]:
            raise AssertionError(f"no move leads from {self.holder} to {holder}; see LEGAL")
        left = self.holder
        leave, enter = self._moves.get(left, Moves()).leave, self._moves.get(holder, Moves()).enter
        with self._stage("switch") if (leave, enter) != (_nothing, _nothing) else nullcontext():
            leave()
            self.holder = Holder.NONE
            enter()
        self._lost = holder is not Holder.SYNC and (self._lost or left is Holder.ROLLOUT)
        self.holder = holder
