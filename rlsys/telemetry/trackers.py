"""Where metrics go: always `metrics.jsonl`, and the trackers named in `trainer.logger`.

The configuration has checked the names and that their libraries are installed (rlsys/config/checks). What only watches
a run never ends it: a full disk or a lost server costs records, not training. One small class per tracker imports its
library when it is made; none is imported otherwise.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlsys.config.vocabulary import ALWAYS_WRITTEN, TRACKERS
from rlsys.telemetry.jsonl import JsonlWriter
from rlsys.telemetry.log import FILE_ONLY, get_logger, redact_tree
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError, DeadlineError, raised_as, result_within

Generation = tuple[str, str, float]
"""(input, output, score) of one sampled response."""

T = TypeVar("T")
log = get_logger(__name__)
CALL_S = 120.0
"""Seconds for a call of a tracker, of which wandb takes up to 90 to give up a start itself."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records; `Tracking` frees its `config` of secrets."""

    project: str
    experiment: str
    config: Mapping[str, object]
    directory: Path
    resume_step: int | None

    def remembered_id(self, tracker: str) -> str | None:
        """The tracker's own id of the run being resumed, None for a new run."""
        path = self._id_path(tracker)
        return path.read_text().strip() if self.resume_step is not None and path.exists() else None

    def remember_id(self, tracker: str, run_id: str) -> None:
        self._id_path(tracker).write_text(run_id)

    def _id_path(self, tracker: str) -> Path:
        return self.directory / f".{tracker}_run_id"


class Tracker(Protocol):
    """What `Tracking` needs of a tracker."""

    def log(self, data: Mapping[str, object], step: int) -> None: ...
    def log_generations(self, rows: Sequence[Generation], step: int) -> None: ...
    def close(self) -> None: ...


class ConsoleTracker(Tracker):
    """A table on stdout: a row per step with the headline metrics, their names above every 25 rows.

    KL that was always 0, as with one update a step, has no column. A step without headline metrics prints its others.
    """

    _HEADLINES = read_table(__file__, "console.toml")["columns"]
    _ROWS_PER_HEAD = 25
    _WIDTH = 8

    def __init__(self, run: TrackedRun) -> None:
        self._columns: list[str] = []
        self._rows = 0

    def log(self, data: Mapping[str, object], step: int) -> None:
        numbers = _numbers(data)
        cells = {label: format(numbers[name], form) for label, name, form in self._HEADLINES if name in numbers}
        if "ppo_kl" not in self._columns and not numbers.get("actor/ppo_kl"):
            cells.pop("ppo_kl", None)
        if not cells:
            if not any(name.startswith("val-") for name in data):
                self._print(f"step {step}: " + "  ".join(f"{name} {number:.4g}" for name, number in numbers.items()))
            return
        columns = [label for label in dict.fromkeys(h[0] for h in self._HEADLINES) if label in {*cells, *self._columns}]
        if columns != self._columns or self._rows % self._ROWS_PER_HEAD == 0:
            self._columns, self._rows = columns, 0
            self._print("    step" + "".join(f"  {label:>{self._WIDTH}}" for label in columns))
        self._rows += 1
        self._print(f"{step:>8}" + "".join(f"  {cells.get(label, ''):>{self._WIDTH}}" for label in columns))

    def _print(self, line: str) -> None:
        print(line, flush=True)
        get_logger(FILE_ONLY).info(line)


class TensorboardTracker:
    """Scalars and sample texts; `TENSORBOARD_DIR` or `{default_local_dir}/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = os.environ.get("TENSORBOARD_DIR", str(run.directory / "tensorboard"))
        self._writer = SummaryWriter(directory, purge_step=None if run.resume_step is None else run.resume_step + 1)
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2, default=str)}\n```", 0)

    def log(self, data: Mapping[str, object], step: int) -> None:
        for name, value in _numbers(data).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, rows: Sequence[Generation], step: int) -> None:
        for i, (text, output, score) in enumerate(rows):
            self._writer.add_text(f"val/generation_{i}", f"score {score}\n\n```\n{text}\n---\n{output}\n```", step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases; the run id is stored beside the checkpoints, so a resumed run stays one run."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = import_module("wandb").init(
            project=run.project,
            name=run.experiment,
            config=dict(run.config),
            dir=str(run.directory),
            id=run.remembered_id("wandb"),
            resume="allow",
        )
        run.remember_id("wandb", self._run.id)

    def log(self, data: Mapping[str, object], step: int) -> None:
        self._run.log(_numbers(data), step=step)

    def log_generations(self, rows: Sequence[Generation], step: int) -> None:
        self._run.log({"val/generations": self._table(rows, step)}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _table(self, rows: Sequence[Generation], step: int) -> object:
        columns = ["step", "input", "output", "score"]
        return import_module("wandb").Table(columns=columns, data=[[step, *row] for row in rows])


class MlflowTracker:
    """MLflow at `MLFLOW_TRACKING_URI`, else in `{default_local_dir}/mlflow.db` (`mlflow ui` reads it).

    Its active run is that of a thread, so that calls name theirs.
    """

    _MAX_PARAM_CHARS = 500

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            directory = run.directory.resolve()
            mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
            if mlflow.get_experiment_by_name(run.project) is None:
                mlflow.create_experiment(run.project, artifact_location=(directory / "mlflow_artifacts").as_uri())
        mlflow.set_experiment(run.project)
        self._id = mlflow.start_run(run_id=run.remembered_id("mlflow"), run_name=run.experiment).info.run_id
        if run.remembered_id("mlflow") is None:
            params = [(_mlflow_name(k), str(v)[: self._MAX_PARAM_CHARS]) for k, v in flat_settings(run.config).items()]
            for start in range(0, len(params), 100):
                mlflow.log_params(dict(params[start : start + 100]))
        run.remember_id("mlflow", self._id)

    def log(self, data: Mapping[str, object], step: int) -> None:
        self._mlflow.log_metrics({_mlflow_name(k): v for k, v in _numbers(data).items()}, step, run_id=self._id)

    def log_generations(self, rows: Sequence[Generation], step: int) -> None:
        named = [dict(zip(("input", "output", "score"), row)) for row in rows]
        self._mlflow.log_dict({"step": step, "rows": named}, f"val_generations/{step}.json", self._id)

    def close(self) -> None:
        self._mlflow.start_run(self._id, log_system_metrics=False)  # in this thread, which has none to end
        self._mlflow.end_run()


class TrackioTracker(WandbTracker):
    """Trackio, local first; `trackio show` shows the runs."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = import_module("trackio")
        resume = "never" if run.resume_step is None else "allow"
        self._run.init(project=run.project, name=run.experiment, config=dict(run.config), resume=resume)

    def _table(self, rows: Sequence[Generation], step: int) -> object:
        import pandas as pd

        return self._run.Table(dataframe=pd.DataFrame(rows, columns=["input", "output", "score"]))


ADAPTERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "console": ConsoleTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
assert set(ADAPTERS) == set(TRACKERS)


def _numbers(data: Mapping[str, object]) -> dict[str, float]:
    """The metrics that trackers can draw."""
    return {k: float(v) for k, v in data.items() if isinstance(v, Real) and not (isinstance(v, bool) or math.isnan(v))}


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


def flat_settings(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by their keys with dots."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


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
                cause = f"{type(error).__name__}: {error}".partition("\n")[0]
                log.warning("%s failed, its record is incomplete: %s", recorder, cause)


class Tracking:
    """All trackers of a run behind one `log`.

    Always writes `metrics.jsonl` in the run's directory (line format: rlsys.telemetry.jsonl); `file` and `jsonl` name
    just that.
    On resume `run.resume_step` is N, the step of the checkpoint, and log step N before its checkpoint is published: the
    file then equals that of an uninterrupted run. `None` starts a new file. A tracker that does not start is a
    ConfigError; one that fails later is logged once, counted in `training/tracker_errors`, and never stops training,
    as is what else uses `best_effort`. One that does not answer within CALL_S is counted too, and left out from then
    on. Each call is made in a thread of its own, and but for the console's in the tracker's context, which has its
    library's variables.
    """

    def __init__(self, run: TrackedRun, *, loggers: Sequence[str], best_effort: BestEffort) -> None:
        self.best_effort = best_effort
        self._run = run = replace(run, config=redact_tree(run.config))
        self._trackers: dict[str, Tracker] = {}
        self._contexts: dict[str, Context] = {}
        self._metrics = JsonlWriter(run.directory / "metrics.jsonl", resume_step=run.resume_step)
        with ExitStack() as stack:
            stack.callback(self.close)
            for name in (name for name in dict.fromkeys(loggers) if name not in ALWAYS_WRITTEN):
                with raised_as(ConfigError, f"trainer.logger={name!r} did not start"):
                    self._trackers[name] = self._answer(name, "start", ADAPTERS[name], run)
            stack.pop_all()

    def log(self, data: Mapping[str, object], step: int) -> None:
        """Record the metrics of a step; calling twice for a step gives two lines."""
        errors = {"training/tracker_errors": num} if (num := self.best_effort.num_errors) else {}
        self.best_effort("metrics.jsonl", partial(self._metrics.write, {"step": step, **data, **errors}))
        self._call_all("log", data, step)

    def log_generations(self, rows: Sequence[Generation], step: int) -> None:
        """Record sample rows (input, output, score) in `val_generations.jsonl` and in the trackers that have tables."""
        self.best_effort("val_generations.jsonl", partial(self._write_generations, rows, step))
        self._call_all("log_generations", rows, step)

    def _call_all(self, method: str, *args: object) -> None:
        for name, tracker in [*self._trackers.items()]:
            self.best_effort(f"tracker {name}", partial(self._answer, name, method, getattr(tracker, method), *args))

    def _answer(self, name: str, stage: str, call: Callable[..., T], *arguments: object) -> T:
        """What a call of a tracker returns; DeadlineError after CALL_S, and the tracker is left out."""
        # a notebook shows what is printed in the cell of the caller's context
        context = copy_context() if name == "console" else self._contexts.setdefault(name, copy_context())
        answer = in_daemon_thread(partial(context.run, call, *arguments), name=f"tracker-{name}")
        try:
            return result_within(answer, CALL_S, who=f"tracker {name}", stage=stage)
        except DeadlineError as error:
            if self._trackers.pop(name, None) is not None:  # without one that does not start no run does
                log.warning("%s: the run continues without it", error)
            raise

    @cached_property
    def _generations(self) -> JsonlWriter:
        return JsonlWriter(self._run.directory / "val_generations.jsonl", resume_step=self._run.resume_step)

    def _write_generations(self, rows: Sequence[Generation], step: int) -> None:
        for text, output, score in rows:
            self._generations.write({"step": step, "input": text, "output": output, "score": score})

    def close(self) -> None:
        """Flush and close everything; safe to call twice."""
        self._call_all("close")
        self._trackers = {}
        self._metrics.close()
        if "_generations" in vars(self):
            self._generations.close()
