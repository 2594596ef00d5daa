"""The workers' ends of a weight push (interim: one process holds actor and rollout)."""

from __future__ import annotations

import hashlib
from typing import Any

from rlsys.interfaces import RolloutEngine, TrainEngine

_SOURCES: dict[str, TrainEngine] = {}


class WeightSender:
    def __init__(self, engine: TrainEngine) -> None:
        _SOURCES["actor"] = engine

    def open(self, spec: Any, rank: int) -> Any:
        return None

    def send(self, version: int) -> Any:
        return None

    def close(self) -> None:
        _SOURCES.pop("actor", None)


class WeightReceiver:
    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def open(self, spec: Any, rank: int) -> Any:
        return None

    def receive(self, version: int) -> Any:
        self.engine.begin_update()
        digest, num_bytes = hashlib.blake2b(digest_size=8), 0
        for bucket in _SOURCES["actor"].weights(1 << 28):
            self.engine.load(bucket)
            num_bytes += sum(t.numel() * t.element_size() for _, t in bucket)
        self.engine.finish_update(version)
        return num_bytes, digest.hexdigest()

    def close(self) -> None:
        pass
