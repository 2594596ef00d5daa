"""Where metrics go: always `metrics.jsonl`, and the trackers named in `trainer.logger`.

The configuration has checked the names and that their libraries are installed (rlsys/config/checks).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rlsys.config.vocabulary import ALWAYS_WRITTEN
from rlsys.telemetry.best_effort import BestEffort
from rlsys.telemetry.jsonl import JsonlWriter
from rlsys.telemetry.log import redact_tree
from rlsys.telemetry.tracker_adapters import ADAPTERS, Generation, TrackedRun, Tracker
from rlsys.utils.errors import ConfigError


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
