"""Validation prompts answered and graded, with pass@k and maj@k for each data source: in a run and as a job."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.agent.collate import first_rows
from rlsys.config import EvalConfig, GradedJob
from rlsys.config.engines import worker_class
from rlsys.data.collate import collate_prompts
from rlsys.data.dataset import PromptDataset
from rlsys.fleet.group import group_fleet
from rlsys.protocol import DataProto
from rlsys.rewards.manager import reward_items, reward_manager_class
from rlsys.telemetry.jsonl import plain_json
from rlsys.telemetry.log import get_logger
from rlsys.telemetry.metrics import StageTimer
from rlsys.telemetry.progress import Progress
from rlsys.telemetry.report import RunReport
from rlsys.telemetry.validation_metrics import validation_metrics
from trainer.backend import import_external_libs, running_backend
from trainer.dumps import dump, sample_rows
from trainer.episodes import graded_rollout, load_agents, without_episodes
from trainer.generation import GradedRollout, validation_sampling
from trainer.groups import RolloutGroup, start_group
from trainer.local_files import load_tokenizer, with_local_files
from trainer.prompts import load_processor, load_prompts
from trainer.rewards import check_data_sources
from trainer.run_folder import run_folder
from trainer.source import joined
from workers.build import EngineRun

log = get_logger(__name__)
OnValidation = Callable[[DataProto, int], None]
"""Called with the graded answers and the step."""


@dataclass(frozen=True)
class Validation:
    """Answers the prompts of `dataset` as val_kwargs say and grades them; `on_validation` gets all answers."""

    cfg: GradedJob
    dataset: PromptDataset
    rollout: GradedRollout
    on_validation: OnValidation
    seed: int

    def run(self, step: int) -> dict[str, float]:
        """`val-core/*` and `val-aux/*` by verl's names."""
        rollout = replace(
            self.rollout,
            sampling=validation_sampling(self.cfg, self.rollout.sampling.stop_token_ids),
            num_answers=self.cfg.actor_rollout_ref.rollout.val_kwargs.n,
            greedy_baseline=False,
            stage=lambda stage: self.rollout.stage(f"testing_{stage}"),
        )
        graded = [rollout.make(prompts, step=step, call=call)[0] for call, prompts in enumerate(self.batches())]
        whole = first_rows(graded[0] if len(graded) == 1 else joined(graded))
        self.on_validation(whole, step)
        infos = {"reward": whole.tensors["token_level_scores"].sum(-1).tolist(), **numeric_columns(whole)}
        sources, uids = (list(map(str, whole.non_tensor_batch[name])) for name in ("data_source", "uid"))
        return validation_metrics(sources, uids, infos, seed=self.seed)

    def batches(self) -> Iterator[DataProto]:
        """The prompts, data.val_batch_size at a time."""
        size, length = self.cfg.data.val_batch_size or len(self.dataset), self.cfg.data.max_prompt_length
        for start in range(0, len(self.dataset), size):
            rows = [self.dataset[row] for row in range(start, min(start + size, len(self.dataset)))]
            yield collate_prompts(rows, prompt_length=length, pad_token_id=self.rollout.pad_token_id)


def numeric_columns(batch: DataProto) -> dict[str, list[object]]:
    """What graders returned beside the score: columns of numbers, and `pred` for majority votes.

    Numbers that only answers without a score have, as `acc` where no grader gives one, do not count.
    """
    columns = {name: list(batch.non_tensor_batch[name]) for name in batch.meta_info.get("reward_extra_keys", ())}
    numbers = (int, float, np.bool_, np.number)
    lost = {row for row, status in enumerate(batch.non_tensor_batch.get("reward_status", ())) if status != "ok"}
    scored = {n: [v for row, v in enumerate(values) if row not in lost] for n, values in columns.items()}
    return {n: columns[n] for n in columns if n == "pred" or any(isinstance(v, numbers) for v in scored[n])}


def write_answers(batch: DataProto, path: Path, tokenizer: Any) -> None:
    """The prompts as rows of a parquet file with their `responses` and `scores`, as verl's main_generation does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: dict[str, dict[str, Any]] = {}
    columns, scores = batch.non_tensor_batch, batch.tensors["token_level_scores"].sum(-1).tolist()
    for at, answer in enumerate(reward_items(batch, tokenizer)):
        row = {name: columns[name][at] or None for name in ("data_source", "reward_model", "extra_info")}
        row = rows.setdefault(columns["uid"][at], {"prompt": columns["raw_prompt"][at], **row})
        row.setdefault("responses", []).append(answer.solution)
        row.setdefault("scores", []).append(scores[at])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pq.write_table(pa.Table.from_pylist(list(rows.values())), path)
    except pa.ArrowException:  # values of several types in one column: as JSON text, but for what is ours
        for row in rows.values():
            row |= {name: json.dumps(plain_json(row[name])) for name in row.keys() - {"responses", "scores"}}
        pq.write_table(pa.Table.from_pylist(list(rows.values())), path)


def run_evaluation(config: EvalConfig) -> None:
    """The job of main_eval: print `val-core/*` and write all metrics to evaluation.json."""
    with run_folder(config) as begin:
        metrics = evaluate(config)
        begin()
    path = Path(config.trainer.default_local_dir) / "evaluation.json"
    path.write_text(json.dumps(metrics, indent=1, sort_keys=True))
    RunReport(path.parent, config.trainer.experiment_name).write()
    for name, value in sorted(metrics.items()):
        if name.startswith("val-core/"):
            print(f"{name} = {value:.4f}")


def evaluate(config: EvalConfig) -> dict[str, float]:
    """The metrics of one evaluation; its workers are closed afterwards."""
    config = with_local_files(config)
    model, run, rollout = config.actor_rollout_ref.model, config.trainer, config.actor_rollout_ref.rollout
    external_libs = import_external_libs({"actor_rollout_ref.model": model})
    reward_manager_class(config.reward)
    tokenizer = load_tokenizer(model, rollout.padding)
    agents, data = load_agents(config, tokenizer), config.data
    assert data.val_files is not None, "checked with the configuration"
    processor = load_processor(config, tokenizer)
    dataset = load_prompts(config, tokenizer, data.val_files, max_samples=data.val_max_samples, processor=processor)
    config = without_episodes(config, agents, dataset)
    check_data_sources(config.reward, dataset.data_sources, may_score=bool(agents and agents.workflow.may_score))
    log.info("evaluating %s: %d prompts, %d answers each", model.path, len(dataset), rollout.val_kwargs.n)
    with ExitStack() as stack:
        backend = stack.enter_context(running_backend(run, config.ray_kwargs))
        engine = EngineRun(device=backend.device, nccl_timeout_s=run.deadlines.call_s, external_libs=external_libs)
        worker = worker_class(rollout.name)
        group: RolloutGroup = start_group(backend, run, "rollout", worker, model, rollout, engine, "auto")
        stack.callback(group.close)
        num_rows = len(dataset) * rollout.val_kwargs.n
        fleet = group_fleet(group, rollout, run.deadlines, num_rows=num_rows, restartable=True)
        stack.callback(fleet.close)
        counts = {"gen": lambda: (fleet.counts["answered"], fleet.counts["issued"])}
        progress = stack.enter_context(Progress(total_steps=1, title=run.experiment_name, counts=counts))
        graded = graded_rollout(config, fleet, tokenizer, stack, StageTimer(progress.stage))

        def show(batch: DataProto, step: int) -> None:
            if run.validation_data_dir is not None:
                dump(batch, step, Path(run.validation_data_dir), tokenizer)
            if run.output_path is not None:
                write_answers(batch, Path(run.output_path), tokenizer)
            for prompt, answer, score in sample_rows(batch, tokenizer, run.log_val_generations, seed=42):
                print(f"--- score {score:g}\n{prompt}\n>>> {answer}")

        metrics = Validation(config, dataset, graded, show, seed=42).run(0)
        progress.step_done(1)
        return metrics
