"""What only watches a run never ends it: a full disk or a lost server costs records, not training."""

from collections.abc import Callable
from typing import TypeVar

from rlsys.telemetry.log import get_logger

T = TypeVar("T")
log = get_logger(__name__)


class BestEffort:
    """Calls recorders; an error of one is counted in `num_errors`, logged the first time, and answered with None."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._reported: set[str] = set()

    def __call__(self, recorder: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # a recorder may raise anything; training continues and the count shows it
            self.num_errors += 1
            if recorder not in self._reported:
                self._reported.add(recorder)
                log.warning("%s failed, its record is incomplete: %r", recorder, error)
            return None
