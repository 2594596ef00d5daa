"""Who holds which engine in this process, so that weights need not leave it, and what an engine's loader teaches."""

from __future__ import annotations

from rlsys.interfaces import RolloutEngine
from rlsys.rollout.engine_weights import LiveWeights
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.learn import learn_layout

log = get_logger(__name__)
_rollouts: list[RolloutEngine] = []


def offer_rollout(engine: RolloutEngine) -> None:
    """Let the actor of this process find the rollout engine; a newer engine replaces an older one."""
    _rollouts[:] = [engine]


def rollout_of_this_process() -> RolloutEngine:
    """The rollout engine beside the actor; WeightTransferError where there is none."""
    if not _rollouts:
        raise WeightTransferError("the actor's process holds no rollout engine: the roles have pools of their own")
    return _rollouts[0]


def learn(weights: LiveWeights, *, keep: bool) -> None:
    """Ask the engine's own loader what of the HF tensors lies where in its parameters."""
    found = learn_layout(
        weights.load, weights.parameters, weights.shapes, weights.dtypes, aliases=weights.aliases, keep=keep
    )
    for name, why in found.odd.items():
        log.info("'%s' goes through the rollout engine's own loader: %s", name, why)
    weights.adopt(found.layout, found.tensors)
