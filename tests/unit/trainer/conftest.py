"""Exchanges without pauses, as for tests of the fleet."""

from tests.unit.fleet.conftest import quick_exchanges

__all__ = ["quick_exchanges"]
