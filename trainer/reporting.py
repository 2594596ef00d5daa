"""What a run shows: progress, metrics, timeline, memory and generated text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rlsys.config.schema.trainer import TrainingConfig
from rlsys.protocol import DataProto
from rlsys.telemetry.log import get_logger
from rlsys.telemetry.memory import MemoryRecord, by_stage, memory_metrics, memory_table
from rlsys.telemetry.metrics import StageTimer, data_metrics, reduce_metrics, throughput_metrics, timing_metrics
from rlsys.telemetry.progress import Progress
from rlsys.telemetry.recorder import StageRecorder, StageReport
from rlsys.telemetry.trace import Timeline
from rlsys.telemetry.trackers import Tracking

log = get_logger(__name__)


class Reporter:
    """Collects the metrics of a step and writes them once, when the step is finished."""

    def __init__(self, trainer: TrainingConfig, resolved: Mapping[str, Any], *, num_devices: int) -> None:
        self._cfg, self._resolved = trainer, resolved
        self.root = Path(trainer.default_local_dir)
        self._num_devices = num_devices
        self._progress: Progress | None = None
        self._tracking: Tracking | None = None
        self._stack = ExitStack()
        self._stages = StageRecorder("controller", self._shown)
        self._timeline: Timeline | None = None
        self._memory: list[MemoryRecord] = []
        self._ledger: list[MemoryRecord] = []
        self._metrics: dict[str, float] = {}
        self._tokens = (0, 0)

    @property
    def ledger(self) -> list[MemoryRecord]:
        """Memory of every stage so far; memory.txt shows it."""
        return list(self._ledger)

    @property
    def stage(self) -> StageTimer:
        """`with stage("update_actor"):` times a stage, shows it and puts it on the timeline."""
        return self._stages.stage

    def start(self, step: int, total_steps: int) -> None:
        """Open trackers and progress; `step` is the last one already done."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._timeline = self._stack.enter_context(Timeline(self.root / "timeline.json"))
        self._tracking = self._stack.enter_context(
            Tracking(
                self._cfg.project_name,
                self._cfg.experiment_name,
                loggers=self._cfg.logger,
                config=self._resolved,
                default_dir=self.root,
                resume_step=step or None,
            )
        )
        self._progress = self._stack.enter_context(
            Progress(total_steps=total_steps, first_step=step, title=self._cfg.experiment_name)
        )

    def add(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)

    def add_stages(self, report: StageReport) -> None:
        """Add stages of workers: spans to the timeline now, memory to the metrics of this step."""
        if self._timeline is not None:
            self._timeline.add(report.events)
        self._memory += report.memory

    def add_lists(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics collected from ranks: each list becomes one number."""
        self._metrics.update(reduce_metrics(metrics))

    def batch_metrics(self, batch: DataProto) -> None:
        """Add the metrics of the trained batch."""
        rows = batch.tensors
        self.token_counts(batch)
        self.add(
            data_metrics(
                attention_mask=rows["attention_mask"],
                response_mask=rows["response_mask"],
                token_level_scores=rows["token_level_scores"],
                token_level_rewards=rows["token_level_rewards"],
                advantages=rows["advantages"],
                returns=rows["returns"],
                values=rows.get("values"),
            )
        )
        versions = rows["weight_versions"][rows["weight_versions"] >= 0]
        if versions.numel():
            step = int(batch.meta_info["global_steps"])
            self.add({"training/staleness": float(step - 1 - versions.double().mean())})

    def token_counts(self, batch: DataProto) -> None:
        """Count prompt and response tokens, for rates."""
        mask = batch.tensors["attention_mask"]
        response = int(mask[:, -batch.tensors["responses"].shape[1] :].sum())
        self._tokens = (int(mask.sum()) - response, response)

    def add_entropy(self, entropy: torch.Tensor, mask: torch.Tensor) -> None:
        count = mask.sum().clamp(min=1)
        self.add({"actor/entropy": float((entropy.double() * mask).sum() / count)})

    def finish_step(self, step: int) -> dict[str, float]:
        """Write the step's metrics to all trackers; publish a checkpoint of the step only after this."""
        seconds = self.stage.drain()
        self.add_stages(self._stages.drain())
        memory = self._memory
        self._memory = []
        self._write_ledger(memory)
        prompt, response = self._tokens
        metrics = {
            **self._metrics,
            **timing_metrics(seconds, num_prompt_tokens=prompt, num_response_tokens=response),
            **throughput_metrics(
                num_tokens=prompt + response, step_s=seconds.get("step", 0.0), num_devices=self._num_devices
            ),
            **memory_metrics(memory),
            "training/global_step": float(step),
        }
        self._metrics = {}
        if self._tracking is not None:
            self._tracking.log(metrics, step)
        if self._progress is not None:
            self._progress.step_done(
                step,
                reward=metrics.get("critic/score/mean"),
                tokens_per_s=metrics["perf/throughput"],
                staleness=metrics.get("training/staleness"),
            )
        return metrics

    def generations(self, rows: list[tuple[str, str, float]], step: int) -> None:
        if self._tracking is not None and rows:
            self._tracking.log_generations(rows, step)

    def report_validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the validation result at once; the trackers get it with the step, or now before the first one."""
        means = {name: value for name, value in metrics.items() if name.startswith("val-core/") and "/mean@" in name}
        log.info("validation at step %d: %s", step, "  ".join(f"{k}={v:.3f}" for k, v in sorted(means.items())))
        if step == 0 and self._tracking is not None:
            self._tracking.log(self._metrics, 0)
            self._metrics = {}

    def close(self) -> None:
        """Close everything; safe to call twice."""
        with self._stack:
            self.add_stages(self._stages.drain())
            self._write_ledger(self._memory)
        self._progress = self._tracking = self._timeline = None

    def _write_ledger(self, memory: list[MemoryRecord]) -> None:
        if self._timeline is not None:
            self._ledger = by_stage([*self._ledger, *memory])
            (self.root / "memory.txt").write_text(memory_table(self._ledger) + "\n")

    @contextmanager
    def _shown(self, stage: str) -> Iterator[None]:
        if self._progress is None:
            yield
        else:
            with self._progress.stage(stage):
                yield
