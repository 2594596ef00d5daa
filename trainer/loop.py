"""What every training loop does around its steps: due dates, checkpoints, resuming."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rlsys.config.schema.trainer import ProfilerConfig, TrainingConfig
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import CheckpointError, ConfigError, DeadlineError, WorkerError, raised_as
from trainer.checkpoint import LATEST, CheckpointStore, TrainerState, load_failure, load_state, save_state, steps_in
from trainer.groups import EngineGroup, Group
from trainer.reporting import Reporter
from trainer.run_folder import LOG, Begin

log = get_logger(__name__)


def completed(store: CheckpointStore, run: TrainingConfig, total_steps: int) -> str | None:
    """The message for a run that an earlier job has completed; None where steps remain. Cleans up the run's folder."""
    store.sweep()
    folder = store.to_resume(run.resume_mode, run.resume_from_path)
    if folder is None or (done := load_state(folder).global_step) < total_steps:
        return None
    return (
        f"rlsys: This run is already complete (step {done} of {total_steps}).\n"
        "  To train further: raise trainer.total_training_steps (or trainer.total_epochs)\n"
        "  To start over: trainer.resume_mode=disable, or another trainer.default_local_dir"
    )


class CheckpointedLoop(ABC):
    """A loop of `total_steps` steps that saves its state and resumes from it; `global_step` counts those done.

    `begin` records this start in the run's folder: called once the state to resume is loaded, or at the first save.
    """

    def __init__(self, run: TrainingConfig, reporter: Reporter, *, keep: Mapping[str, int | None]) -> None:
        """`keep` maps a role's folder name to how many of its latest checkpoints stay (None: all)."""
        self.run, self.reporter = run, reporter
        self.stage = reporter.stage
        self.folder = ExitStack()
        self.begin: Begin = lambda: None
        self.store = CheckpointStore(Path(run.default_local_dir), keep=keep, remote=run.default_hdfs_dir)
        self._num_failed_uploads = 0
        self._pending: tuple[Path, ExitStack] | None = None
        self.global_step = 0
        self.total_steps = 0
        self.steps_per_epoch = 0

    @abstractmethod
    def save_parts(self, folder: Path) -> TrainerState:
        """Write everything but the returned state into the folder of a checkpoint, or begin to."""

    @abstractmethod
    def saving_groups(self) -> Sequence[EngineGroup]:
        """The groups that save in the background."""

    @abstractmethod
    def load_parts(self, folder: Path, state: TrainerState) -> None:
        """Restore what `save_parts` wrote and returned."""

    def check_folder(self, groups: Mapping[str, EngineGroup]) -> None:
        """ConfigError for a rank whose node does not see the folder of the run."""
        root = self.store.root.absolute()
        for role, group in groups.items() if (root / LOG).exists() else ():
            for rank, call in enumerate(group.execute_all_async("execute_func_rank_zero", Path.exists, root / LOG)):
                if not call.get():
                    raise ConfigError(f"trainer.default_local_dir={root}: {role} rank {rank} does not see it; share it")

    def save(self) -> Path:
        """Write checkpoint `global_step`; the pointer names it only when it is complete.

        Where a role saves in the background that is at the end of a later step; the last checkpoint is waited for.
        """
        self.finish_save()
        self.begin()
        with self.stage("save_checkpoint"), ExitStack() as stack:
            folder = stack.enter_context(self.store.writing(self.global_step))
            save_state(folder, self.save_parts(folder))
            self._pending = self.store.path(self.global_step), stack.pop_all()
        if self.is_last or not self.saving_groups():
            self.finish_save()
        return self.store.path(self.global_step)

    def finish_save(self, *, wait: bool = True) -> None:
        """Complete the checkpoint that is being written; without `wait` only if the workers have written their files.

        CheckpointError if they could not. An upload that fails is logged and counted; later ones are still made.
        """
        if self._pending is None or not (wait or all(all(group.is_saved()) for group in self.saving_groups())):
            return
        (saved, stack), self._pending = self._pending, None
        with self.stage("finish_checkpoint"), stack:
            for group in self.saving_groups():
                group.finish_save()
        if (remote := self.store.remote) is not None:
            with self.stage("upload_checkpoint"):
                try:
                    remote.upload(saved)
                except Exception as error:  # object stores raise errors of their own libraries
                    self._num_failed_uploads += 1
                    log.warning("%s was not uploaded to %s: %r", saved, remote.url, error)
            self.reporter.add({"checkpoint/failed_uploads": float(self._num_failed_uploads)})

    def close_save(self) -> None:
        """Complete a checkpoint that is being written when the run ends; what fails is logged, earlier ones stay."""
        try:
            self.finish_save()
        except (CheckpointError, DeadlineError, WorkerError) as error:
            log.warning("the last checkpoint is not complete: %s", error)

    @contextmanager
    def profiled(self, config: ProfilerConfig, groups: Sequence[Group]) -> Iterator[None]:
        """Profile the processes of these groups in a step that global_profiler.steps names, also if the step fails."""
        step = self.global_step + 1
        chosen = groups if step in (config.steps or ()) else ()
        try:
            for group in chosen:
                self.reporter.best_effort("profile", partial(group.start_profile, config, f"step{step}_{group.role}"))
            yield
        finally:
            for group in chosen:
                self.reporter.best_effort("profile", group.stop_profile)

    def resume(self) -> None:
        """Load the checkpoint that trainer.resume_mode asks for, if there is one, and open the trackers."""
        self.store.sweep()
        if (folder := self.store.to_resume(self.run.resume_mode, self.run.resume_from_path)) is not None:
            with self.stage("load_checkpoint"):
                state = load_state(folder)
                with raised_as(CheckpointError, load_failure(folder), CheckpointError):
                    self.load_parts(folder, state)
                self.global_step = state.global_step
            log.info("resumed from %s", folder)
        elif self.run.resume_mode == "auto" and (steps := steps_in(self.store.root)):
            log.warning("starts over and overwrites: no %s names one of the steps %s", self.store.root / LATEST, steps)
        self.begin()
        self.reporter.start(self.global_step, self.total_steps)

    @property
    def is_last(self) -> bool:
        """Whether all steps are done."""
        return self.global_step >= self.total_steps

    @property
    def save_due(self) -> bool:
        return self.is_last or self.due(self.run.save_freq)

    def due(self, frequency: int | str) -> bool:
        """Whether something done every `frequency` steps, or after_each_epoch, is due after this one."""
        every = self.every(frequency)
        return every > 0 and self.global_step % every == 0

    def every(self, frequency: int | str) -> int:
        """The steps of a setting such as save_freq; not positive for never."""
        return self.steps_per_epoch if isinstance(frequency, str) else frequency
