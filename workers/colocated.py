"""The rollout engine of this process, for an actor beside it, and layouts learned from an engine's loader."""

from functools import partial

from rlsys.interfaces import RolloutEngine
from rlsys.rollout.engine_weights import EngineWeights
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.learn import IN_FLOAT8, learn_layout

log = get_logger(__name__)
_local_rollouts: list[RolloutEngine] = []


def set_local_rollout(engine: RolloutEngine) -> None:
    """Let the actor of this process use the rollout engine; a newer engine replaces an older one."""
    _local_rollouts[:] = [engine]


def local_rollout() -> RolloutEngine:
    """The rollout engine of this process; WeightTransferError where there is none."""
    if not _local_rollouts:
        raise WeightTransferError("the actor's process has no rollout engine: the two roles have separate pools")
    return _local_rollouts[0]


def learn_engine_layout(weights: EngineWeights, *, keep: bool) -> None:
    """Learn from the engine's own loader which HF tensors are where in its parameters."""
    learn = partial(learn_layout, weights.load, weights.parameters, aliases=weights.aliases, keep=keep)
    learned = learn(weights.shapes, weights.dtypes)
    if float8 := [name for name, reason in learned.loader_only.items() if reason.endswith(IN_FLOAT8)]:
        weights.quantise(float8)
        learned = learn(weights.shapes, weights.dtypes)
    for name, reason in learned.loader_only.items():
        log.info("'%s' is loaded by the rollout engine's own loader: %s", name, reason)
    weights.adopt(learned.layout, learned.tensors)
