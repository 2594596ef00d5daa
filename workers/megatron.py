"""MegatronPPOWorker: the actor on Megatron-Core, under the name that other frameworks use."""

from workers.actor import ActorWorker


class MegatronPPOWorker(ActorWorker):
    """One rank of an actor whose `strategy` is megatron."""
