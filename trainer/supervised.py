"""Training on rows with known answers, on the same groups and engine: SFT on texts, reward models on pairs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlsys.config import RMConfig, SFTConfig
from rlsys.config.plan import total_steps
from rlsys.data.collate import collate_pairs, collate_texts
from rlsys.data.cursor import Cursor
from rlsys.data.dataset import load_custom_dataset
from rlsys.data.supervised import SupervisedDataset, TextFormat, load_pairs, load_texts
from rlsys.protocol import DataProto, pad_dataproto_to_divisor
from rlsys.roles.lm import RankSums, mean_over_ranks
from rlsys.telemetry.log import setup_logging
from rlsys.telemetry.trackers import check_loggers
from trainer.backend import Place, find_place, load_tokenizer
from trainer.checkpoint import CheckpointStore, TrainerState, load_state, save_state
from trainer.groups import deadlines_of
from trainer.job import exit_on_sigterm, told
from trainer.reporting import Reporter
from workers.build import EngineRun
from workers.sft import SupervisedWorker

Kind = Literal["lm", "rm"]


def run_sft(config: SFTConfig) -> int:
    """Fine-tune a language model; exit code 0, or 1 with one clear error."""
    return _run(config, "lm")


def run_rm(config: RMConfig) -> int:
    """Train a reward model; exit code 0, or 1 with one clear error."""
    return _run(config, "rm")


def _run(config: SFTConfig | RMConfig, kind: Kind) -> int:
    setup_logging()
    start = time.perf_counter()
    with told(sys.stderr) as outcome:
        check_loggers(config.trainer.logger)
        run = config.trainer
        ranks = run.nnodes * run.n_gpus_per_node
        with find_place(run.backend, run.device, config.ray_kwargs, ranks=ranks) as place, exit_on_sigterm():
            trainer = SupervisedTrainer(config, kind, place)
            try:
                trainer.fit()
            finally:
                trainer.close()
        print(trainer.reporter.farewell(seconds=time.perf_counter() - start))
    return outcome.exit_code


@dataclass(frozen=True)
class Rows:
    """Training and validation rows of a kind, as batches of the usual layout."""

    kind: Kind
    train: SupervisedDataset[Any]
    val: SupervisedDataset[Any] | None
    pad_token_id: int

    def collate(self, rows: list[Any]) -> DataProto:
        make: Any = collate_texts if self.kind == "lm" else collate_pairs
        return make(rows, pad_token_id=self.pad_token_id)


def load_rows(config: SFTConfig | RMConfig, tokenizer: Any) -> Rows:
    """The configured files."""
    data = config.data
    assert data.train_files is not None
    if isinstance(config, SFTConfig):
        names: dict[str, Any] = {"messages_key": config.data.messages_key, "response_key": config.data.response_key}
    else:
        names = {"chosen_key": config.data.chosen_key, "rejected_key": config.data.rejected_key}
    form = TextFormat(
        prompt_key=config.data.prompt_key,
        max_length=data.max_length,
        truncation=data.truncation,
        template_kwargs=data.apply_chat_template_kwargs,
        **names,
    )
    load: Any = load_texts if isinstance(config, SFTConfig) else load_pairs
    options: dict[str, Any] = {"seed": data.seed, "bad_rows": data.bad_rows}

    def rows(files: Sequence[str], max_samples: int, *, shuffle: bool) -> SupervisedDataset[Any]:
        own, found = data.custom_cls, list(files)
        if own.path is not None and own.name is not None:
            how = {"config": data, "max_samples": max_samples}
            found = load_custom_dataset(own.path, own.name, data_files=files, tokenizer=tokenizer, **how)
        return load(found, tokenizer, form, max_samples=max_samples, shuffle=shuffle, **options)

    train = rows(data.train_files, data.train_max_samples, shuffle=data.shuffle)
    val = rows(data.val_files, data.val_max_samples, shuffle=False) if data.val_files else None
    return Rows("lm" if isinstance(config, SFTConfig) else "rm", train, val, tokenizer.pad_token_id)


class SupervisedTrainer:
    """The loop of SFT and reward-model training: batch, step, evaluate, save."""

    def __init__(self, config: SFTConfig | RMConfig, kind: Kind, place: Place) -> None:
        self.cfg, run = config, config.trainer
        tokenizer = load_tokenizer(config.model)
        self.rows = load_rows(config, tokenizer)
        self.cursor = Cursor(
            len(self.rows.train),
            batch_size=config.data.train_batch_size,
            seed=config.data.seed,
            shuffle=config.data.shuffle,
        )
        self.total_steps = total_steps(
            len(self.rows.train), config.data.train_batch_size, run.total_epochs, run.total_training_steps
        )
        ranks = run.nnodes * run.n_gpus_per_node
        self.dp_size = ranks // config.engine.ulysses_sequence_parallel_size
        self.root = Path(run.default_local_dir)
        self.store = CheckpointStore(self.root, keep={"model": run.max_ckpt_to_keep})
        self.reporter = Reporter(run, config.model_dump(mode="json"), num_devices=ranks)
        engine_run = EngineRun(
            device=place.device,
            nccl_timeout_s=config.nccl_timeout,
            samples=config.data.train_batch_size * 2,
            actor_steps=self.total_steps,
            num_threads=place.threads,
        )
        made = place.make_class(SupervisedWorker, config, engine_run, kind)
        manager = place.make_manager({"train": [run.n_gpus_per_node] * run.nnodes}, {"train": "train"})
        manager.create_resource_pool()
        with self.reporter.stage("start_workers"):
            group: Any = place.group_cls(
                manager.resource_pool_dict["train"], made, role="train", deadlines=deadlines_of(run.deadlines)
            )
            self.group = group
            group.init_model()
        self.step = 0

    def fit(self) -> None:
        """Train until the last step; resumes where the latest checkpoint left off."""
        self.resume()
        while self.step < self.total_steps:
            with self.reporter.stage("step"):
                self.step += 1
                batch = self.rows.collate([self.rows.train[index] for index in self.cursor.next().rows])
                batch.meta_info["global_steps"] = self.step
                with self.reporter.stage("update_actor"):
                    done = self.group.train_batch(batch)
                self.reporter.add_lists(done.meta_info["metrics"])
                self.reporter.token_counts(batch)
            if self._due(self.cfg.trainer.test_freq) or self._last:
                self.evaluate()
            self.reporter.add_stages(self.group.drain_stages())
            self.reporter.finish_step(self.step)
            if self._due(self.cfg.trainer.save_freq) or self._last:
                self.save()

    def evaluate(self) -> dict[str, float]:
        """Exact means over all validation rows."""
        if self.rows.val is None:
            return {}
        size = self.cfg.data.train_batch_size
        sums: list[RankSums] = []
        with self.reporter.stage("testing"):
            for start in range(0, len(self.rows.val), size):
                stop = min(start + size, len(self.rows.val))
                rows = self.rows.collate([self.rows.val[index] for index in range(start, stop)])
                sums += self.group.eval_batch(without_effect(rows, self.dp_size * (2 if self.rows.kind == "rm" else 1)))
        metrics = mean_over_ranks(sums)
        self.reporter.add(metrics)
        return metrics

    def save(self) -> Path:
        """A checkpoint to go on from, with the model as a Hugging Face folder beside it."""
        with self.reporter.stage("save_checkpoint"), self.store.writing(self.step) as folder:
            self.group.save_checkpoint(str(folder / "model"))
            self.group.export(str(folder / "huggingface"))
            save_state(folder, TrainerState(self.step, self.step, source={"cursor": self.cursor.state_dict()}))
        return self.root / f"global_step_{self.step}"

    def resume(self) -> None:
        self.store.sweep()
        run = self.cfg.trainer
        folder = self.store.to_resume(run.resume_mode, run.resume_from_path)
        if folder is not None:
            state = load_state(folder)
            self.group.load_checkpoint(str(folder / "model"))
            self.cursor.load_state_dict(state.source["cursor"])
            self.step = state.global_step
        self.reporter.start(self.step, self.total_steps)

    def close(self) -> None:
        """End the workers; safe to call twice."""
        self.group.close()
        self.reporter.add_stages(self.group.drain_stages())
        self.reporter.close()

    @property
    def _last(self) -> bool:
        return self.step >= self.total_steps

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0


def without_effect(batch: DataProto, multiple: int) -> DataProto:
    """The batch with rows added until it divides; the added ones have empty responses and count nowhere."""
    padded, num_padding = pad_dataproto_to_divisor(batch, multiple)
    if num_padding == 0:
        return batch
    rows = padded.tensors.clone()
    width = rows["responses"].shape[1]
    rows["response_mask"][-num_padding:] = 0
    rows["attention_mask"][-num_padding:, -width:] = 0
    return DataProto(rows, padded.non_tensor_batch, padded.meta_info)
