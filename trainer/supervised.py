"""Training on rows with known answers, on the same groups and engine: SFT on texts, reward models and DPO on pairs."""

from pathlib import Path

from rlsys.config import SFTConfig
from rlsys.config.plan import shared_by, total_steps
from rlsys.data.collate import collate_texts
from rlsys.data.cursor import Cursor
from rlsys.data.dataset import RowStream
from rlsys.data.supervised import fingerprint
from rlsys.protocol import DataProto, pad_dataproto_to_divisor
from rlsys.roles.lm import RankSums, mean_over_ranks
from rlsys.utils.run_folders import HUGGINGFACE
from trainer.backend import WorkerBackend, import_external_libs, running_backend
from trainer.checkpoint import TrainerState
from trainer.groups import EngineGroup, SupervisedGroup, start_group
from trainer.local_files import load_tokenizer, with_local_files
from trainer.loop import CheckpointedLoop, completed
from trainer.reporting import Reporter
from trainer.run_folder import run_folder
from trainer.texts import Config, Texts, load_rows
from workers.build import EngineRun, check_models
from workers.sft import SupervisedWorker


def train(config: Config) -> str | None:
    """The job of main_sft, main_rm and main_dpo; returns a message where an earlier run completed all steps."""
    trainer = SupervisedTrainer(config)
    if message := completed(trainer.store, config.trainer, trainer.total_steps):
        return message
    with running_backend(config.trainer, config.ray_kwargs) as backend:
        try:
            trainer.start_workers(backend)
            trainer.fit()
        finally:
            trainer.close()
    return None


class SupervisedTrainer(CheckpointedLoop):
    """The loop of SFT, reward-model training and DPO: batch, step, evaluate, save."""

    def __init__(self, config: Config) -> None:
        config = with_local_files(config)
        run = config.trainer
        num_ranks = run.nnodes * run.n_gpus_per_node
        reporter = Reporter(run, config.model_dump(mode="json"), num_devices=num_ranks)
        super().__init__(run, reporter, keep={"model": run.max_ckpt_to_keep})
        self.cfg = config
        self.group: SupervisedGroup | None = None
        self.external_libs = import_external_libs({"model": config.model})
        check_models(config)
        self.tokenizer = load_tokenizer(config.model)
        self.train_rows, self.val_rows = load_rows(config, self.tokenizer)
        num_rows, size = len(self.train_rows), config.data.train_batch_size
        if isinstance(self.train_rows, RowStream):
            self.cursor: Cursor | RowStream = self.train_rows
        else:
            options = {"batch_size": size, "seed": config.data.seed, "shuffle": config.data.shuffle}
            self.cursor = Cursor(num_rows, **options, dataset=fingerprint(self.train_rows), restarts=run.resume_changed)
        self.steps_per_epoch = num_rows // size
        self.total_steps = total_steps(num_rows, size, run.total_epochs, run.total_training_steps)
        self.dp_size = num_ranks // shared_by(config.engine)

    def start_workers(self, backend: WorkerBackend) -> None:
        """Start the worker group and load its model."""
        self.begin = self.folder.enter_context(run_folder(self.cfg))
        engine_run = EngineRun(
            backend.device, self.cfg.nccl_timeout, actor_steps=self.total_steps, external_libs=self.external_libs
        )
        with self.stage("start_workers"):
            self.group = start_group(backend, self.run, "train", SupervisedWorker, self.cfg, engine_run)
        self.check_folder({"model": self.group})

    @property
    def workers(self) -> SupervisedGroup:
        assert self.group is not None, "call start_workers() first"
        return self.group

    def fit(self) -> None:
        """Train until the last step; resumes where the latest checkpoint left off."""
        self.resume()
        while not self.is_last:
            with self.profiled(self.cfg.global_profiler, [self.workers]), self.stage("step"):
                self.global_step += 1
                rows = [self.train_rows[row] for row in self.cursor.next().rows]
                batch, num_cut = self.collate(rows), sum(text.is_truncated for row in rows for text in row)
                self.reporter.add({"data/truncated_texts": float(num_cut)})
                batch.meta_info["global_steps"] = self.global_step
                with self.stage("update_actor"):
                    updated = self.workers.train_batch(batch)
                self.reporter.add_lists(updated.meta_info["metrics"])
                self.reporter.token_counts(batch)
            self.finish_save(wait=False)
            if self.due(self.run.test_freq) or self.is_last:
                self.evaluate()
            self.reporter.add_stages(self.workers.drain_stages())
            self.reporter.finish_step(self.global_step)
            if self.save_due:
                self.save()

    def evaluate(self) -> dict[str, float]:
        """Exact means over all validation rows."""
        rows = self.val_rows
        if rows is None:
            return {}
        texts_per_row = 1 if isinstance(self.cfg, SFTConfig) else 2
        sums: list[RankSums] = []
        with self.stage("testing"):
            for start in range(0, len(rows), self.cfg.data.train_batch_size):
                batch = self.collate(rows[start : start + self.cfg.data.train_batch_size])
                sums += self.workers.eval_batch(pad_with_empty_rows(batch, self.dp_size * texts_per_row))
        metrics = mean_over_ranks(sums)
        self.reporter.add(metrics)
        return metrics

    def collate(self, rows: Texts) -> DataProto:
        """A batch of the usual layout."""
        return collate_texts(rows, pad_token_id=self.tokenizer.pad_token_id)

    def saving_groups(self) -> list[EngineGroup]:
        return [self.workers] if self.cfg.checkpoint.async_save else []

    def save_parts(self, folder: Path) -> TrainerState:
        """The state to resume from, with the model as a Hugging Face folder beside it."""
        self.workers.save_checkpoint(str(folder / "model"), self.cfg.checkpoint.async_save)
        self.workers.export(str(folder / HUGGINGFACE))
        return TrainerState(self.global_step, source={"cursor": self.cursor.state_dict()})

    def load_parts(self, folder: Path, state: TrainerState) -> None:
        self.cursor.load_state_dict(state.source["cursor"])
        self.workers.load_checkpoint(str(folder / "model"))

    def close(self) -> None:
        """End the workers; safe to call twice."""
        self.close_save()
        with self.folder:
            if self.group is not None:
                self.group.close()
                self.reporter.add_stages(self.group.drain_stages())
            self.reporter.close()


def pad_with_empty_rows(batch: DataProto, multiple: int) -> DataProto:
    """The batch with rows added up to a multiple; their responses are empty, so they do not count in any metric."""
    padded, num_padding = pad_dataproto_to_divisor(batch, multiple)
    if num_padding == 0:
        return batch
    rows = padded.tensors.clone()
    rows["response_mask"][-num_padding:] = 0
    rows["attention_mask"][-num_padding:, -rows["responses"].shape[1] :] = 0
    return DataProto(rows, padded.non_tensor_batch, padded.meta_info)
