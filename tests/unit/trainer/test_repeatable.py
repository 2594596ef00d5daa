"""The probe of reproducible runs, with replicas that repeat themselves and with ones that do not."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.fleet import RolloutFleet
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import ModelRequest, ResponseDelta
from rlsys.utils.errors import ConfigError
from tests.contracts.rollout_engine import VOCABULARY, tiny_model
from tests.unit.trainer.asynchronous import DEADLINES
from trainer.epochs import check_repeatable


class InThisProcess:
    """A replica whose log-probabilities are off by `error` from its exchange number `from_call` on."""

    def __init__(self, name: str, *, error: float = 0.0, from_call: int = 0) -> None:
        self.name, self.error, self.from_call, self.calls = name, error, from_call, 0
        self.engine = HFRollout(tiny_model(), GenerationConfig(seed=11))

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        self.calls += 1
        error = self.error if self.calls > self.from_call else 0.0
        deltas = self.engine.exchange(new, wait_s=wait_s, cancel=cancel)
        return [replace(delta, logprobs=tuple(value + error for value in delta.logprobs)) for delta in deltas]

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.engine.health()

    def restart(self, deadline_s: float) -> None:
        raise AssertionError("nothing fails here")


@pytest.mark.parametrize(("error", "from_call", "is_refused"), [(0.0, 0, False), (1e-7, 0, True), (1e-7, 1, True)])
def test_a_replica_with_other_bits_is_refused(error: float, from_call: int, is_refused: bool) -> None:
    replicas = [InThisProcess("a"), InThisProcess("b", error=error, from_call=from_call)]
    fleet = RolloutFleet(replicas, chunk_rows=3, deadlines=DEADLINES)
    try:
        if is_refused:
            with pytest.raises(
                ConfigError, match=r"answers to the same batch have other bits.*set trainer.reproducible=false"
            ):
                check_repeatable(fleet, VOCABULARY)
        else:
            check_repeatable(fleet, VOCABULARY)
        assert all(replica.calls for replica in replicas), "every replica is probed"
    finally:
        fleet.close()
        for replica in replicas:
            replica.engine.close()
