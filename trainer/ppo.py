"""RayPPOTrainer: the controller of PPO, GRPO and related algorithms.

`fit` is the algorithm. Around it: `residency` decides which role holds memory, `source` when batches are made, the
fleet retries, telemetry reports, `loop` saves and resumes. A notebook builds the same object and calls `step`.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.agent.collate import first_rows, with_branches
from rlsys.config import PPOConfig, plan_batches
from rlsys.config.schema.trainer import TrainerConfig
from rlsys.data.dataset import PromptDataset
from rlsys.data.rl_sampler import SAMPLER_LOCK, AbstractCurriculumSampler, create_rl_sampler
from rlsys.interfaces import ExperienceSource
from rlsys.protocol import DataProto
from rlsys.single_controller.base import ClassWithInitArgs, WorkerGroup
from rlsys.single_controller.resource_pool import ResourcePoolManager
from rlsys.telemetry.log import get_logger
from rlsys.types import TransferReport
from rlsys.utils.errors import ConfigError, ParityError, RolloutError
from trainer.assembly import Inputs, TrainerParts, assemble, offloaded_parts
from trainer.checkpoint import TrainerState
from trainer.dumps import BackgroundDumps, dump, sample_rows
from trainer.groups import EngineGroup, Role, WorkerGroups, start_groups
from trainer.loop import CheckpointedLoop
from trainer.parity import ParityReport
from trainer.prompts import num_steps
from trainer.reporting import Reporter
from trainer.residency import SYNC
from trainer.run_folder import run_folder
from trainer.source import Prompts

log = get_logger(__name__)


def num_checkpoints(run: TrainerConfig, *, has_critic: bool) -> dict[str, int | None]:
    """How many of its latest checkpoints each trained role keeps; None: all."""
    return {"actor": run.max_actor_ckpt_to_keep} | ({"critic": run.max_critic_ckpt_to_keep} if has_critic else {})


class RayPPOTrainer(CheckpointedLoop):
    """Schedules the worker groups; holds no tensor longer than a step."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Tokenizer,
        role_worker_mapping: Mapping[Role, ClassWithInitArgs],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: Callable[..., WorkerGroup],
        processor: object = None,
        train_dataset: PromptDataset | None = None,
        val_dataset: PromptDataset | None = None,
        collate_fn: object = None,
        train_sampler: Prompts | Sampler[int] | None = None,
        device_name: str | None = None,
    ) -> None:
        """verl's signature. `train_sampler` is a PyTorch sampler of `train_dataset` or a cursor over it; None takes the
        configured one.

        ConfigError without a `train_dataset`, and for a `processor` or a `collate_fn`: the datasets have them, and
        give prompts, not batches.
        """
        for name, value in (("processor", processor), ("collate_fn", collate_fn)):
            if value is not None:
                raise ConfigError(f"RayPPOTrainer takes no {name}; make rows of your own by data.custom_cls")
        if train_dataset is None:
            raise ConfigError("RayPPOTrainer needs a train_dataset")
        run, self.plan = config.trainer, plan_batches(config)
        reporter = Reporter(run, config.model_dump(mode="json"), num_devices=self.plan.pools.total_ranks)
        super().__init__(run, reporter, keep=num_checkpoints(run, has_critic=self.plan.critic is not None))
        self.cfg, self.open_folder = config, partial(run_folder, config)
        train_sampler = train_sampler or create_rl_sampler(config.data, train_dataset)
        self.inputs = Inputs(tokenizer, train_dataset, val_dataset, train_sampler, device_name or "cpu")
        workers, manager, offloaded = role_worker_mapping, resource_pool_manager, offloaded_parts(config)
        self._start_groups = partial(
            start_groups, workers, manager, group_cls=ray_worker_group_cls, offloaded=offloaded, deadlines=run.deadlines
        )
        self.dumps = BackgroundDumps(run, tokenizer)
        self.total_steps = num_steps(config, train_dataset)
        self.steps_per_epoch = len(train_dataset) // config.data.gen_batch_size
        self.weight_version = -1
        self._groups: WorkerGroups | None = None
        self._parts: TrainerParts | None = None
        self._is_reported = True

    @property
    def groups(self) -> WorkerGroups:
        assert self._groups is not None, "call init_workers() first"
        return self._groups

    @property
    def parts(self) -> TrainerParts:
        assert self._parts is not None, "call init_workers() first"
        return self._parts

    @property
    def source(self) -> ExperienceSource:
        """Makes training batches: `source.next()`."""
        return self.parts.source

    def init_workers(self) -> None:
        """Start the worker groups, load their models and connect weights, rollouts, rewards and data."""
        self.begin = self.folder.enter_context(self.open_folder())
        self.global_step, self.weight_version = 0, -1
        with self.stage("start_workers"):
            self._groups = WorkerGroups(**self._start_groups())
        self.check_folder(self._groups.trained)
        with self.stage("connect"):
            self._parts = assemble(
                self.cfg, self._groups, self.inputs, reporter=self.reporter, on_validation=self.dump_validation
            )
            self._parts.weights.fleet.push = self.push_weights

    def fit(self) -> None:
        """Train until the last step; resumes where the latest checkpoint left off."""
        run = self.cfg.trainer
        with closing(self):
            if self._parts is None:
                self.init_workers()
            self.resume()
            self.push_weights()
            if self.cfg.actor_rollout_ref.rollout.parity.is_enabled:
                self.parity_probe(record=self.global_step == 0)
            if (run.val_before_train and self.global_step == 0) or run.val_only:
                self.evaluate()
            while not run.val_only and not self.is_last:
                with self.profiled(self.cfg.global_profiler, self.groups.all), self.stage("step"):
                    self.step(self.next_batch())
                self.finish_step()

    def next_batch(self) -> DataProto:
        """The next graded batch from the rollouts."""
        with self.parts.steps.residency.hold(Role.Rollout, "source"):
            batch = self.source.next()
        return with_branches(batch, max_rows=self.cfg.actor_rollout_ref.rollout.agent.max_rows)

    def step(self, batch: DataProto) -> DataProto:
        """Train on one batch and push the new weights; returns the batch with everything computed on it.

        Its metrics are written by `finish_step`, or with the next step or `close`.
        """
        self._report()
        self.global_step += 1
        start_s, steps = time.monotonic(), self.parts.steps
        batch = steps.balance(batch, self.global_step)
        batch = steps.old_log_probs(batch)
        batch = steps.reference_log_probs(batch)
        batch = steps.teacher_log_probs(batch)
        batch = steps.reward_model_scores(batch)
        batch = steps.values(batch)
        batch = steps.advantages(batch)
        steps.update_critic(batch)
        if self.global_step > self.cfg.trainer.critic_warmup:
            steps.update_actor(batch)
        record = partial(self._record, batch)
        if self.due(self.cfg.trainer.sync_freq) or self.test_due or self.save_due:
            self.push_weights(meanwhile=record)
        else:
            record()
        if self.parts.advisor is not None:
            advise = partial(self.parts.advisor.add, batch, time.monotonic() - start_s)
            self.reporter.best_effort("staleness.txt", advise)
        if self.due(self.cfg.actor_rollout_ref.rollout.parity.freq) and self.weight_version == self.global_step:
            self.parity_probe()
        self._is_reported = False
        return batch

    def _record(self, batch: DataProto) -> None:
        """What the controller alone does with a batch that was trained on."""
        self.reporter.token_counts(batch)
        self.reporter.batch_metrics(first_rows(batch))
        self.reporter.add(self.inputs.train_dataset.metrics())
        if self.due(self.cfg.trainer.rollout_data_freq):
            with self.stage("dump_rollouts"):
                self.reporter.best_effort("rollouts", partial(self.dumps.write, first_rows(batch), self.global_step))
        if isinstance(self.inputs.sampler, AbstractCurriculumSampler):
            with SAMPLER_LOCK:
                self.inputs.sampler.update(first_rows(batch))

    def finish_step(self) -> None:
        """Evaluate, report and save what is due after a step."""
        self.finish_save(wait=False)
        if self.test_due:
            self.evaluate()
        self._report()
        if self.save_due:
            self.save()

    def _report(self) -> None:
        """Write the metrics of the last step, unless that was done or the step failed."""
        if not self._is_reported:
            self._is_reported = True
            self.reporter.add_stages(self.groups.drain_stages())
            self.reporter.finish_step(self.global_step)

    def push_weights(self, *, meanwhile: Callable[[], object] = lambda: None) -> TransferReport:
        """Reshard the actor's weights into the rollout engines; they serve version `global_step` afterwards.

        Where workers are processes the controller does `meanwhile` at the same time, else afterwards.
        """
        self.source.settle()
        self.parts.steps.residency.enter(SYNC)
        push = partial(self.parts.weights.push, self.global_step)
        if self.cfg.trainer.backend == "local":
            with self.stage("update_weights"):
                report = push()
            meanwhile()
        else:
            with ThreadPoolExecutor(1, "push") as pool:
                running = pool.submit(push)
                meanwhile()
                with self.stage("update_weights"):
                    report = running.result()
        self.weight_version = report.version
        self.source.published(report.version)
        self.reporter.add(
            {
                "weights/bytes": float(report.num_bytes),
                "weights/network_bytes": float(sum(report.network_bytes.values())),
                "weights/seconds": report.seconds,
                "weights/version": report.version,
                **{f"weights/seconds_{stage}": seconds for stage, seconds in report.stage_s.items()},
            }
        )
        return report

    def parity_probe(self, *, record: bool = True) -> ParityReport:
        """Score a few answers by the actor and by the rollout, which must hold the same weights; changes nothing.

        With `record` the result is among the metrics of the current step. Above the limits of rollout.parity it warns,
        or raises ParityError with policy=stop. RolloutError if weights have not been pushed since the last update.
        """
        if self.weight_version != self.global_step:
            served = f"the rollout serves weights of step {self.weight_version}, the actor is at {self.global_step}"
            raise RolloutError(f"{served}: call push_weights() before parity_probe()")
        self.source.settle()
        report = self.parts.parity.run(self.weight_version)
        if record:
            self.reporter.add(report.metrics())
        if report.problem and self.cfg.actor_rollout_ref.rollout.parity.policy == "stop":
            raise ParityError(report.problem)
        if report.problem:
            log.warning("%s", report.problem)
        return report

    def evaluate(self) -> dict[str, float]:
        """Answer and grade the validation prompts with the weights now served."""
        if self.parts.validation is None:
            return {}
        self.source.settle()
        with self.parts.steps.residency.hold(Role.Rollout, "testing"):
            metrics = self.parts.validation.run(self.global_step)
        self.reporter.add(metrics)
        self.reporter.report_validation(metrics, self.global_step)
        return metrics

    def saving_groups(self) -> list[EngineGroup]:
        sections = {"actor": self.cfg.actor_rollout_ref.actor, "critic": self.cfg.critic}
        return [group for name, group in self.groups.trained.items() if sections[name].checkpoint.async_save]

    def save_parts(self, folder: Path) -> TrainerState:
        self.reporter.best_effort("rollouts", self.dumps.settle)
        self.groups.save(folder, self.parts.steps.residency.enter_to_save, background=self.saving_groups())
        return TrainerState(self.global_step, self.parts.steps.kl_ctrl.state_dict(), self.source.save(folder))

    def load_parts(self, folder: Path, state: TrainerState) -> None:
        self.source.load(state.source, folder)  # first: it refuses other rows
        self.groups.load(folder)
        self.parts.steps.kl_ctrl.load_state_dict(state.kl_ctrl)

    def resume(self) -> None:
        """Load the checkpoint that trainer.resume_mode asks for, if there is one, onto devices without other roles."""
        self.parts.steps.residency.offload_all()
        super().resume()

    def dump_validation(self, batch: DataProto, step: int) -> None:
        """Write the validation answers where the configuration asks for them."""
        tokenizer, folder = self.inputs.tokenizer, self.cfg.trainer.validation_data_dir
        if folder is not None:
            self.reporter.best_effort("validation answers", partial(dump, batch, step, Path(folder), tokenizer))
        shown = sample_rows(batch, tokenizer, self.cfg.trainer.log_val_generations, seed=self.cfg.data.seed)
        self.reporter.generations(shown, step)

    def close(self) -> None:
        """Stop everything this trainer started; safe to call twice."""
        self.close_save()
        self.reporter.best_effort("the last step", self._report)
        parts, self._parts = self._parts, None
        groups, self._groups = self._groups, None
        with self.folder as stack:
            stack.callback(self.reporter.close)
            stack.callback(self.reporter.best_effort, "rollouts", self.dumps.settle)
            if groups is not None:
                stack.callback(lambda: self.reporter.add_stages(groups.drain_stages()))
                stack.callback(groups.close)
            if parts is not None:
                stack.callback(parts.close)

    @property
    def test_due(self) -> bool:
        return self.due(self.cfg.trainer.test_freq) or (self.is_last and self.every(self.cfg.trainer.test_freq) > 0)
