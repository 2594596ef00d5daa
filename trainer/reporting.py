"""What a run shows: progress, metrics, timeline, memory and generated text."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from rlsys.algorithms.filters import informative_groups
from rlsys.algorithms.groups import group_ids_of
from rlsys.config.schema.trainer import TrainingConfig
from rlsys.protocol import DataProto, response_lengths
from rlsys.telemetry import metrics as compute
from rlsys.telemetry.log import get_logger
from rlsys.telemetry.memory import MemoryRecord, by_stage, memory_metrics, memory_table
from rlsys.telemetry.progress import Counts, Progress
from rlsys.telemetry.recorder import StageRecorder, StageReport
from rlsys.telemetry.report import RunReport
from rlsys.telemetry.trace import Event, Timeline, add_arguments, arrows
from rlsys.telemetry.trackers import BestEffort, TrackedRun, Tracking
from rlsys.utils.atomic import write_whole
from rlsys.utils.errors import OptimizerError

log = get_logger(__name__)
FLAT_STEPS, STUCK_STEPS = 3, 10
"""Steps with equal rewards after which a warning is logged, and steps without an update after which a run ends."""
TIMELINE_GAP_S = 2.0


class Reporter:
    """Collects the metrics of a step and writes them once, when the step is finished.

    `best_effort` guards everything that only watches the run: what cannot be written is reported once and counted.
    `ledger` has the memory of every stage so far; memory.txt shows it.
    """

    def __init__(self, trainer: TrainingConfig, resolved: Mapping[str, object], *, num_devices: int) -> None:
        self._cfg, self._resolved = trainer, resolved
        self.root = Path(trainer.default_local_dir)
        self._num_devices = num_devices
        self._progress: Progress | None = None
        self._tracking: Tracking | None = None
        self._stack = ExitStack()
        self._stages = StageRecorder("controller", self._shown)
        self.stage = self._stages.stage
        """`with stage("update_actor"):` times a stage, shows it and puts it on the timeline."""
        self.best_effort = BestEffort()
        self._timeline: Timeline | None = None
        self._events: list[Event] = []
        self._next_flush_s = 0.0
        self._report: RunReport | None = None
        self._counts: dict[str, Counts] = {}
        self._memory: list[MemoryRecord] = []
        self.ledger: list[MemoryRecord] = []
        self._metrics: dict[str, float] = {}
        self._tokens = (0, 0)
        self._flat_steps, self._stuck_steps, self._max_stuck = 0, 0, STUCK_STEPS

    def count(self, stage: str, counts: Counts) -> None:
        """Show how much of a stage's work is done while it runs; call it before `start`."""
        self._counts[stage] = counts

    def start(self, step: int, total_steps: int) -> None:
        """Open trackers and progress; `step` is the last one already done."""
        cfg, self._max_stuck = self._cfg, min(STUCK_STEPS, total_steps - step)
        self.root.mkdir(parents=True, exist_ok=True)
        self._timeline = self.best_effort("timeline.json", lambda: Timeline(self.root / "timeline.json"))
        if self._timeline is not None:
            self._stack.callback(self._timeline.close)
        run = TrackedRun(cfg.project_name, cfg.experiment_name, self._resolved, self.root, step or None)
        self._tracking = Tracking(run, loggers=cfg.logger, best_effort=self.best_effort)
        self._stack.callback(self._tracking.close)
        folders = {"rollouts": "rollout_data_dir", "validation": "validation_data_dir"}
        given = {name: getattr(cfg, key, None) for name, key in folders.items()}
        links = {name: str(Path(folder).absolute() / "index.html") for name, folder in given.items() if folder}
        self._report = RunReport(self.root, title=cfg.experiment_name, total_steps=total_steps, links=links)
        self._progress = self._stack.enter_context(
            Progress(total_steps=total_steps, first_step=step, title=cfg.experiment_name, counts=self._counts)
        )
        self._flush_timeline()
        self.best_effort("index.html", self._report.update)

    def add(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)

    def add_stages(self, report: StageReport) -> None:
        """Add stages of workers: spans to the timeline, memory to the metrics of this step."""
        self._events += report.events
        self._memory += report.memory

    def add_lists(self, metrics: Mapping[str, object]) -> None:
        """Add metrics collected from ranks: each list becomes one number."""
        self._metrics.update(compute.reduce_metrics(metrics))

    def batch_metrics(self, batch: DataProto) -> None:
        """Add the metrics of the trained batch; a warning after 3 steps whose scores are all equal."""
        rows = batch.tensors
        self.add(compute.data_metrics(rows))
        scores, uids = rows["token_level_scores"].sum(-1), batch.non_tensor_batch.get("uid")
        if uids is not None and len(set(uids)) < len(scores):
            varies = informative_groups(scores, group_ids_of(uids))
            self.add({"critic/score/frac_zero_std": float((~varies).double().mean())})
        self._flat_steps = self._flat_steps + 1 if scores.min() == scores.max() else 0
        if self._flat_steps == FLAT_STEPS:
            why = "there is nothing to learn; look at the answers (docs/debug.md) and at the reward function"
            log.warning("all rewards were %g for %d steps: %s", float(scores[0]), FLAT_STEPS, why)

    def token_counts(self, batch: DataProto) -> None:
        """Count prompt and response tokens, for rates."""
        response = int(response_lengths(batch).sum())
        self._tokens = (int(batch.tensors["attention_mask"].sum()) - response, response)

    def finish_step(self, step: int) -> dict[str, float]:
        """Write the step's metrics to all trackers; publish a checkpoint of the step only after this.

        OptimizerError at the last of STUCK_STEPS steps in a row, or of all that this start has, without an update.
        """
        seconds, memory = self.stage.drain(), self._drain_stages()
        prompt, response = self._tokens
        metrics = {
            **self._metrics,
            **compute.timing_metrics(seconds, num_prompt_tokens=prompt, num_response_tokens=response),
            **compute.throughput_metrics(
                num_tokens=prompt + response, step_s=seconds.get("step", 0.0), num_devices=self._num_devices
            ),
            **memory_metrics(memory),
            "training/global_step": float(step),
        }
        if skipped := [f"{name}={n:g}" for name, n in self._metrics.items() if name.endswith("/skipped_steps") and n]:
            log.warning("step %d: skipped optimizer steps, no tokens or not finite: %s", step, ", ".join(skipped))
        stuck = [name for name, n in self._metrics.items() if name.endswith("/grad_norm") and math.isnan(n)]
        self._stuck_steps = self._stuck_steps + 1 if stuck else 0
        self._metrics = {}
        self._finish_timeline(step, metrics.get("perf/throughput", 0.0))
        self._write_ledger(memory)
        if self._tracking and self._report and self._progress:
            self._tracking.log(metrics, step)
            self.best_effort("index.html", self._report.update)
            self._progress.step_done(step, metrics)
        if stuck and self._stuck_steps >= self._max_stuck:
            why = "gradients were not finite, or no token counted; look at the loss and the rewards (docs/debug.md)"
            raise OptimizerError(f"no optimizer step was applied in {self._stuck_steps} steps ({stuck[0]}): {why}")
        return metrics

    def generations(self, rows: list[tuple[str, str, float]], step: int) -> None:
        if self._tracking is not None and rows:
            self._tracking.log_generations(rows, step)

    def report_validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the validation result at once; the trackers get it with the step, or now before the first one."""
        core = {k.removeprefix("val-core/"): v for k, v in sorted(metrics.items()) if k.startswith("val-core/")}
        shown = {name: value for name, value in core.items() if "/mean@" in name or "/pass@" in name}
        log.info("validation at step %d: %s", step, "  ".join(f"{k} {v:.3f}" for k, v in shown.items()))
        if step == 0 and self._tracking is not None:
            self._tracking.log(self._metrics, 0)
            self._metrics = {}

    def close(self) -> None:
        """Close everything; safe to call twice."""
        with self._stack:
            if self._timeline is not None:
                self._write_ledger(self._drain_stages())
                self.best_effort("timeline.json", partial(self._timeline.add, self._events))
        if self._report is not None:
            self.best_effort("index.html", self._report.write)
        self._progress = self._tracking = self._timeline = self._report = None

    def _drain_stages(self) -> list[MemoryRecord]:
        """Take over the controller's stages; returns the memory of all stages since the last call."""
        self.add_stages(self._stages.drain())
        memory, self._memory = self._memory, list[MemoryRecord]()
        return memory

    def _flush_timeline(self) -> None:
        """Show the stages of the unfinished step, so that the timeline can be opened at any time."""
        if self._timeline is None or time.monotonic() < self._next_flush_s:
            return
        self.add_stages(self._stages.drain())
        self.best_effort("timeline.json", partial(self._timeline.add, (), self._events))
        self._next_flush_s = time.monotonic() + TIMELINE_GAP_S

    def _finish_timeline(self, step: int, tokens_per_s: float) -> None:
        """Write the step's stages with their step and tokens, the speed, and an arrow to each worker's call."""
        prompt, response = self._tokens
        tokens = dict.fromkeys(compute.ALL_TOKEN_STAGES, prompt + response) | {"gen": response}
        add_arguments(self._events, self._stages.tracer.pid, step, tokens)
        self._stages.tracer.counter("tokens/s per device", {"tokens/s": tokens_per_s})
        events = [*self._events, *arrows(self._events, self._stages.tracer.pid)]
        self._events = []
        if self._timeline is not None:
            self.best_effort("timeline.json", partial(self._timeline.add, events))

    def _write_ledger(self, memory: list[MemoryRecord]) -> None:
        if self._timeline is not None:
            self.ledger = by_stage([*self.ledger, *memory])
            table = memory_table(self.ledger) + "\n"
            self.best_effort("memory.txt", partial(write_whole, self.root / "memory.txt", table.encode()))

    @contextmanager
    def _shown(self, stage: str) -> Iterator[None]:
        with nullcontext() if self._progress is None else self._progress.stage(stage):
            yield
        if threading.current_thread() is threading.main_thread():
            self._flush_timeline()
