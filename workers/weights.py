"""Who holds which engine in this process, so that weights need not leave it."""

from __future__ import annotations

from rlsys.interfaces import RolloutEngine
from rlsys.utils.errors import WeightTransferError

_rollouts: list[RolloutEngine] = []


def offer_rollout(engine: RolloutEngine) -> None:
    """Let the actor of this process find the rollout engine; a newer engine replaces an older one."""
    _rollouts[:] = [engine]


def rollout_of_this_process() -> RolloutEngine:
    """The rollout engine beside the actor; WeightTransferError where there is none."""
    if not _rollouts:
        raise WeightTransferError("the actor's process holds no rollout engine: the roles have pools of their own")
    return _rollouts[0]
