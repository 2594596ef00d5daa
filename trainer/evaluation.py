"""Evaluation without training: answers of a model to validation prompts, graded."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlsys.config import EvalConfig
from rlsys.fleet.group import group_fleet
from rlsys.protocol import DataProto
from rlsys.telemetry.log import setup_logging
from rlsys.telemetry.metrics import StageTimer
from rlsys.telemetry.trackers import check_loggers
from trainer.backend import find_place, load_tokenizer
from trainer.dumps import dump, sample_rows
from trainer.evaluate import Dump, validation
from trainer.generation import Answers, validation_sampling
from trainer.groups import deadlines_of
from trainer.job import exit_on_sigterm, told
from trainer.prompts import load_prompts
from trainer.rewards import reward_manager, reward_pool
from trainer.rollouts import generate_by, printer
from workers.build import EngineRun
from workers.rollout import ROLLOUT_WORKERS


def run_eval(config: EvalConfig) -> int:
    """Answer, grade, and print `val-core/*`; exit code 0, or 1 with one clear error."""
    setup_logging()
    start = time.perf_counter()
    with told(sys.stderr) as outcome:
        check_loggers(config.trainer.logger)
        metrics = evaluate(config)
        root = Path(config.trainer.default_local_dir)
        root.mkdir(parents=True, exist_ok=True)
        (root / "evaluation.json").write_text(json.dumps(metrics, indent=1, sort_keys=True))
        for name, value in sorted(metrics.items()):
            if name.startswith("val-core/"):
                print(f"{name} = {value:.4f}")
        print(f"rlsys: done in {time.perf_counter() - start:.0f} s; all metrics in {root / 'evaluation.json'}")
    return outcome.exit_code


def evaluate(config: EvalConfig) -> dict[str, float]:
    """The metrics of one evaluation; workers are up only meanwhile."""
    model, run = config.actor_rollout_ref.model, config.trainer
    tokenizer = load_tokenizer(model, config.actor_rollout_ref.rollout.padding)
    assert config.data.val_files is not None
    dataset = load_prompts(
        config.data,
        config.data.val_files,
        tokenizer=tokenizer,
        max_samples=config.data.val_max_samples,
        shuffle=False,
        seed=0,
    )
    ranks = run.nnodes * run.n_gpus_per_node
    with ExitStack() as stack:
        place = stack.enter_context(find_place(run.backend, run.device, config.ray_kwargs, ranks=ranks))
        stack.enter_context(exit_on_sigterm())
        engine = EngineRun(device=place.device, nccl_timeout_s=run.deadlines.call_s, num_threads=place.threads)
        rollout = config.actor_rollout_ref.rollout
        made = place.make_class(ROLLOUT_WORKERS[rollout.name], model, rollout, engine, "auto")
        manager = place.make_manager({"rollout": [run.n_gpus_per_node] * run.nnodes}, {"rollout": "rollout"})
        manager.create_resource_pool()
        group: Any = place.group_cls(
            manager.resource_pool_dict["rollout"], made, role="rollout", deadlines=deadlines_of(run.deadlines)
        )
        stack.callback(group.close)
        group.init_model()
        pool = stack.enter_context(reward_pool(config.reward))
        rows = len(dataset) * config.actor_rollout_ref.rollout.val_kwargs.n
        fleet = group_fleet(group, rollout, run.deadlines, num_rows=rows, restartable=True)
        stack.callback(fleet.close)
        answers = Answers(
            generate=generate_by(fleet, printer(rollout, tokenizer)),
            manager=reward_manager(config, tokenizer, pool),
            sampling=validation_sampling(config),
            num_answers=1,
            greedy_baseline=False,
            pad_token_id=tokenizer.pad_token_id,
            stage=StageTimer(),
        )
        return validation(config, dataset, answers, _dump(config, tokenizer), seed=42).run(0)


def _dump(config: EvalConfig, tokenizer: Any) -> Dump:
    folder = config.trainer.validation_data_dir

    def write(batch: DataProto, step: int) -> None:
        if folder is not None:
            dump(batch, step, Path(folder), tokenizer)
        shown = config.trainer.log_val_generations
        for prompt, answer, score in sample_rows(batch, tokenizer, shown, seed=42):
            print(f"--- score {score:g}\n{prompt}\n>>> {answer}")

    return write
