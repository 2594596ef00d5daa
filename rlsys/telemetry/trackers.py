"""Where metrics go: always `metrics.jsonl`, and the trackers named in `trainer.logger`.

The configuration has checked the names and that their libraries are installed (rlsys/config/checks). What only watches
a run never ends it: a full disk or a lost server costs records, not training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rlsys.config.vocabulary import ALWAYS_WRITTEN
from rlsys.telemetry.jsonl import JsonlWriter
from rlsys.telemetry.log import get_logger, redact_tree
from rlsys.telemetry.tracker_adapters import ADAPTERS, Generation, TrackedRun, Tracker
from rlsys.utils.errors import ConfigError

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


class Tracking:
    """All trackers of a run behind one `log`.

    Always writes `metrics.jsonl` in the run's directory (line format: rlsys.telemetry.jsonl); `file` and `jsonl` name
    just that.
    On resume `run.resume_step` is N, the step of the checkpoint, and log step N before its checkpoint is published: the
    file then equals that of an uninterrupted run. `None` starts a new file. A tracker that does not start is a
    ConfigError; one that fails later is logged once, counted in `training/tracker_errors`, and never stops training,
    as is what else uses `best_effort`.
    """

    def __init__(self, run: TrackedRun, *, loggers: Sequence[str], best_effort: BestEffort) -> None:
        self.best_effort = best_effort
        self._run = run = replace(run, config=redact_tree(run.config))
        self._generations: JsonlWriter | None = None
        self._trackers: dict[str, Tracker] = {}
        self._metrics: JsonlWriter | None = JsonlWriter(run.directory / "metrics.jsonl", resume_step=run.resume_step)
        for name in (name for name in dict.fromkeys(loggers) if name not in ALWAYS_WRITTEN):
            try:
                self._trackers[name] = ADAPTERS[name](run)
            except BaseException as error:
                self.close()
                if not isinstance(error, Exception):
                    raise
                raise ConfigError(f"trainer.logger={name!r} did not start: {type(error).__name__}: {error}") from error

    def log(self, data: Mapping[str, object], step: int) -> None:
        """Record the metrics of a step; calling twice for a step gives two lines."""
        if self._metrics is None:
            raise ValueError("the trackers are closed")
        record = {"step": step, **data}
        if self.best_effort.num_errors:
            record["training/tracker_errors"] = self.best_effort.num_errors
        self.best_effort("metrics.jsonl", partial(self._metrics.write, record))
        for name, tracker in self._trackers.items():
            self.best_effort(f"tracker {name}", partial(tracker.log, data, step))

    def log_generations(self, rows: Sequence[Generation], step: int) -> None:
        """Record sample rows (input, output, score) in `val_generations.jsonl` and in the trackers that have tables."""
        self.best_effort("val_generations.jsonl", partial(self._write_generations, rows, step))
        for name, tracker in self._trackers.items():
            self.best_effort(f"tracker {name}", partial(tracker.log_generations, rows, step))

    def _write_generations(self, rows: Sequence[Generation], step: int) -> None:
        if self._generations is None:
            path = self._run.directory / "val_generations.jsonl"
            self._generations = JsonlWriter(path, resume_step=self._run.resume_step)
        for text, output, score in rows:
            self._generations.write({"step": step, "input": text, "output": output, "score": score})

    def close(self) -> None:
        """Flush and close everything; safe to call twice."""
        for name, tracker in self._trackers.items():
            self.best_effort(f"tracker {name}", tracker.close)
        self._trackers = {}
        for writer in (self._metrics, self._generations):
            if writer is not None:
                writer.close()
        self._metrics = self._generations = None
