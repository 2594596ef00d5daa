"""RayPPOTrainer: the controller of PPO, GRPO and their kin.

`fit` is the algorithm; what surrounds it lives elsewhere: who holds memory in residency, when batches are made in
source, retries in the fleet, what a person sees in telemetry. A notebook builds the same object and calls `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlsys.config import PPOConfig, plan_batches
from rlsys.data.dataset import PromptDataset
from rlsys.protocol import DataProto
from rlsys.telemetry.log import get_logger
from rlsys.types import TransferReport
from rlsys.utils.errors import ConfigError, ParityError, RolloutError
from trainer.assembly import Runtime, assemble
from trainer.checkpoint import CheckpointStore, TrainerState, load_state, save_state
from trainer.dumps import BackgroundDumps, dump, sample_rows
from trainer.groups import Role, WorkerGroups, deadlines_of, start_groups
from trainer.parity import ParityReport
from trainer.prompts import steps_of
from trainer.reporting import Reporter
from trainer.residency import Holder

log = get_logger(__name__)


class RayPPOTrainer:
    """Schedules the worker groups; holds no tensor longer than a step."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, Any],
        resource_pool_manager: Any,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        """verl's signature. `train_sampler` is a cursor over `train_dataset`; None takes the configured one.

        ConfigError for a `processor` or a `collate_fn`: rows are text, and datasets give prompts, not batches.
        """
        if processor is not None or collate_fn is not None:
            what = "processor" if processor is not None else "collate_fn"
            raise ConfigError(
                f"RayPPOTrainer has no use for {what}: leave it out; data.custom_cls makes rows its own way"
            )
        self.cfg = config
        self.plan = plan_batches(config)
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.train_sampler = train_sampler
        self.device_name = device_name or "cpu"
        self.root = Path(config.trainer.default_local_dir)
        self.store = CheckpointStore(
            self.root,
            keep={"actor": config.trainer.max_actor_ckpt_to_keep}
            | ({"critic": config.trainer.max_critic_ckpt_to_keep} if self.plan.critic else {}),
        )
        self.reporter = Reporter(
            config.trainer, config.model_dump(mode="json"), num_devices=self.plan.pools.total_ranks
        )
        self.stage = self.reporter.stage
        folder = config.trainer.rollout_data_dir
        wait_s = config.trainer.deadlines.save_s
        self.dumps = None if folder is None else BackgroundDumps(Path(folder), tokenizer, deadline_s=wait_s)
        self.global_step = 0
        self.weight_version = -1
        self.total_steps = 0
        self._groups: WorkerGroups | None = None
        self._runtime: Runtime | None = None

    @property
    def groups(self) -> WorkerGroups:
        assert self._groups is not None, "call init_workers() first"
        return self._groups

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "call init_workers() first"
        return self._runtime

    @property
    def source(self) -> Any:
        """Makes training batches: `source.next()`."""
        return self.runtime.source

    def init_workers(self) -> None:
        """Start the worker groups, load their models and connect weights, rollouts, rewards and data."""
        with self.stage("start_workers"):
            self._groups = start_groups(
                self.role_worker_mapping,
                self.resource_pool_manager,
                group_cls=self.ray_worker_group_cls,
                deadlines=deadlines_of(self.cfg.trainer.deadlines),
            )
        with self.stage("connect"):
            self._runtime = assemble(self)
        self.total_steps = steps_of(self.cfg, self.train_dataset)

    def fit(self) -> None:
        """Train until the last step; resumes where the latest checkpoint left off."""
        with self.session():
            self.resume()
            self.push_weights()
            if self.cfg.actor_rollout_ref.rollout.parity.freq >= 0:
                self.parity_probe(record=self.global_step == 0)
            if (self.cfg.trainer.val_before_train and self.global_step == 0) or self.cfg.trainer.val_only:
                self.evaluate()
            while not self.cfg.trainer.val_only and self.global_step < self.total_steps:
                with self.stage("step"):
                    self.step(self.next_batch())
                self.finish_step()

    def nothing_left(self) -> bool:
        """Whether the checkpoint to resume from is that of the last step; no worker is needed to know."""
        run = self.cfg.trainer
        self.store.sweep()
        folder = self.store.to_resume(run.resume_mode, run.resume_from_path)
        if folder is None or run.val_only:
            return False
        return load_state(folder).global_step >= steps_of(self.cfg, self.train_dataset)

    def next_batch(self) -> DataProto:
        """The next graded batch from the rollouts."""
        with self.runtime.residency.turn(Holder.ROLLOUT, "source"):
            return self.source.next()

    def step(self, batch: DataProto) -> DataProto:
        """Train on one batch and push the new weights; returns the batch with everything computed on it."""
        self.global_step += 1
        steps = self.runtime.steps
        batch = steps.balance(batch, self.global_step)
        batch = steps.old_log_probs(batch)
        batch = steps.reference_log_probs(batch)
        batch = steps.reward_model_scores(batch)
        batch = steps.values(batch)
        batch = steps.advantages(batch)
        steps.update_critic(batch)
        if self.global_step > self.cfg.trainer.critic_warmup:
            steps.update_actor(batch)
        if self._due(self.cfg.trainer.sync_freq) or self._test_due or self._save_due:
            self.push_weights()
        if self._due(self.cfg.actor_rollout_ref.rollout.parity.freq) and self.weight_version == self.global_step:
            self.parity_probe()
        self.reporter.batch_metrics(batch)
        if isinstance(self.train_dataset, PromptDataset):
            self.reporter.add(self.train_dataset.metrics())
        if self.dumps is not None:
            with self.stage("dump_rollouts"):
                self.dumps.write(batch, self.global_step)
        return batch

    def finish_step(self) -> None:
        """Evaluate, report and save what is due after a step."""
        if self._test_due:
            self.evaluate()
        self.reporter.add_stages(self.groups.drain_stages())
        self.reporter.finish_step(self.global_step)
        if self._save_due:
            self.save()

    def push_weights(self) -> TransferReport:
        """Reshard the actor's weights into the rollout engines; they serve version `global_step` afterwards."""
        self.source.settle()
        with self.runtime.residency.turn(Holder.SYNC, "update_weights"):
            report = self.runtime.push(self.global_step)
        self.weight_version = report.version
        self.reporter.add(
            {
                "weights/bytes": float(report.num_bytes),
                "weights/seconds": report.seconds,
                "weights/version": report.version,
            }
        )
        return report

    def parity_probe(self, *, record: bool = True) -> ParityReport:
        """Score a few answers by the actor and by the rollout, which must hold the same weights; changes nothing.

        With `record` the metrics of the step in hand get the result. Above the limits of rollout.parity it warns, or
        raises ParityError where its policy is stop. RolloutError where weights have not been pushed since the update.
        """
        if self.weight_version != self.global_step:
            served = f"the rollout serves weights of step {self.weight_version}, the actor is at {self.global_step}"
            raise RolloutError(f"{served}: call push_weights() before parity_probe()")
        self.source.settle()
        report = self.runtime.parity.run(self.weight_version)
        if record:
            self.reporter.add(report.metrics())
        if report.problem and self.cfg.actor_rollout_ref.rollout.parity.policy == "stop":
            raise ParityError(report.problem)
        if report.problem:
            log.warning("%s", report.problem)
        return report

    def evaluate(self) -> dict[str, float]:
        """Answer and grade the validation prompts with the weights now served."""
        if self.runtime.evaluator is None:
            return {}
        self.source.settle()
        with self.runtime.residency.turn(Holder.ROLLOUT, "testing"):
            metrics = self.runtime.evaluator.run(self.global_step)
        self.reporter.add(metrics)
        self.reporter.validated(metrics, self.global_step)
        return metrics

    def save(self) -> Path:
        """Write checkpoint `global_step`; the pointer names it only when it is complete."""
        with self.stage("save_checkpoint"), self.store.writing(self.global_step) as folder:
            if self.dumps is not None:
                self.dumps.settle()
            self.groups.save(folder)
            self.source.save_pending(folder)
            state = TrainerState(
                global_step=self.global_step,
                weight_version=self.weight_version,
                kl_ctrl=self.runtime.steps.kl_ctrl.state_dict(),
                source=self.source.state_dict(),
            )
            save_state(folder, state)
        return self.root / f"global_step_{self.global_step}"

    def resume(self) -> None:
        """Take up the checkpoint that trainer.resume_mode asks for, if there is one; then offload what is to be."""
        self.store.sweep()
        folder = self.store.to_resume(self.cfg.trainer.resume_mode, self.cfg.trainer.resume_from_path)
        if folder is not None:
            with self.stage("load_checkpoint"):
                state = load_state(folder)
                self.groups.load(folder)
                self.source.load(state.source, folder)
                self.runtime.steps.kl_ctrl.load_state_dict(dict(state.kl_ctrl))
                self.global_step = state.global_step
            log.info("resumed from %s", folder)
        self.runtime.residency.park()
        self.reporter.start(self.global_step, self.total_steps)

    def dump_validation(self, batch: DataProto, step: int) -> None:
        """Write the validation answers where the configuration asks for them."""
        folder = self.cfg.trainer.validation_data_dir
        if folder is not None:
            dump(batch, step, Path(folder), self.tokenizer)
        shown = sample_rows(batch, self.tokenizer, self.cfg.trainer.log_val_generations, seed=self.cfg.data.seed)
        self.reporter.generations(shown, step)

    def close(self) -> None:
        """Stop everything this trainer started; safe to call twice."""
        runtime, self._runtime = self._runtime, None
        groups, self._groups = self._groups, None
        with ExitStack() as stack:
            stack.callback(self.reporter.close)
            if self.dumps is not None:
                stack.callback(self.dumps.close)
            if groups is not None:
                stack.callback(lambda: self.reporter.add_stages(groups.drain_stages()))
                stack.callback(groups.close)
            if runtime is not None:
                stack.callback(runtime.close)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Workers are up inside and gone afterwards, whatever happens."""
        try:
            if self._runtime is None:
                self.init_workers()
            yield
        finally:
            self.close()

    @property
    def _last(self) -> bool:
        return self.global_step >= self.total_steps

    @property
    def _save_due(self) -> bool:
        return self._last or self._due(self.cfg.trainer.save_freq)

    @property
    def _test_due(self) -> bool:
        return self._due(self.cfg.trainer.test_freq) or (self._last and self.cfg.trainer.test_freq > 0)

    def _due(self, every: int) -> bool:
        return every > 0 and self.global_step % every == 0
