"""Exchanges without pauses, for engines that draw a few tokens at each of them."""

import pytest


@pytest.fixture(autouse=True)
def quick_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.fleet.fleet.EXCHANGE_WAIT_S", 0.001)
    monkeypatch.setattr("rlsys.fleet.fleet.BATCH_WAIT_S", 0.01)
