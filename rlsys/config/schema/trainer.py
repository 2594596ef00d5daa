"""The run itself: length, places, devices, deadlines and Ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsys.config.schema.base import (
    Count,
    CountOrOff,
    CountOrZero,
    Flag,
    LocalPath,
    OpenDict,
    Seconds,
    Section,
    Text,
    Texts,
    open_dict,
)


class DeadlinesConfig(Section):
    """Seconds after which a wait ends with an error that names who did not answer."""

    start_s: Seconds = 300.0
    """Starting workers and loading models."""
    call_s: Seconds = 600.0
    """Any call without a limit of its own (log-probs, values)."""
    generate_s: Seconds = 3600.0
    """One generation call."""
    update_s: Seconds = 3600.0
    """One update of actor or critic."""
    weights_s: Seconds = 600.0
    """One push of weights to the rollout."""
    save_s: Seconds = 1800.0
    """Saving or loading a checkpoint."""
    reward_s: Seconds = 1800.0
    """Grading one batch."""


class RunConfig(Section):
    """Keys of every job."""

    project_name: Text = "rlsys"
    """Project in trackers and in folder names."""
    experiment_name: Text = "run"
    """Name of this run in its project."""
    logger: Texts = ("console",)
    """Where metrics go: console, tensorboard, trackio, wandb, mlflow; a JSONL file is always written."""
    nnodes: Count = 1
    """Nodes."""
    n_gpus_per_node: Count = 1
    """GPUs a node; on CPU: worker processes a node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto takes CUDA where there is one."""
    backend: Literal["ray", "local"] = "ray"
    """Workers as Ray actors, or inside this process (a debugger works there)."""
    default_local_dir: LocalPath = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of checkpoints, metrics and reports."""
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)


class TrainingConfig(RunConfig):
    """Keys of every job that trains."""

    total_epochs: Count = 30
    """Times the training rows are gone through."""
    total_training_steps: Count | None = None
    """Steps in all, where it is not the epochs that say."""
    save_freq: CountOrOff = -1
    """Save each so many steps, and at the end; -1 never saves."""
    test_freq: CountOrOff = -1
    """Validate each so many steps, and at the end; -1 never does."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Go on from the latest checkpoint, never, or from resume_from_path."""
    resume_from_path: LocalPath | None = None
    """Folder global_step_N to go on from."""
    balance_batch: Flag = True
    """Give each rank about the same number of tokens."""


class SupervisedRunConfig(TrainingConfig):
    """An SFT or reward-model run."""

    total_epochs: Count = 4
    """Times the training rows are gone through."""
    max_ckpt_to_keep: Count | None = None
    """Latest checkpoints to keep; null keeps all."""


class EvalRunConfig(RunConfig):
    """An evaluation."""

    validation_data_dir: LocalPath | None = None
    """Folder for all answers, as JSON lines."""
    log_val_generations: CountOrZero = 0
    """Answers shown in trackers."""


class TrainerConfig(TrainingConfig):
    """The PPO run."""

    val_before_train: Flag = True
    """Validate before the first step."""
    val_only: Flag = False
    """Validate and stop."""
    log_val_generations: CountOrZero = 0
    """Validation answers shown in trackers."""
    critic_warmup: CountOrZero = 0
    """Steps that train the critic only."""
    max_actor_ckpt_to_keep: Count | None = None
    """Latest actor checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: Count | None = None
    """Latest critic checkpoints to keep; null keeps all."""
    rollout_data_dir: LocalPath | None = None
    """Folder for all training answers, {step}.jsonl."""
    validation_data_dir: LocalPath | None = None
    """Folder for all validation answers, {step}.jsonl."""
    max_staleness: CountOrZero = 0
    """Weight versions a sample may be behind when it is trained on: 0 is synchronous, 1 one step off."""
    sync_freq: Count = 1
    """Push weights to the rollout each so many steps."""
    allocation_mode: Text | None = None
    """Pools in AReaL's grammar, e.g. hf:d2+fsdp:d2 (split) or hf[r]:d2|fsdp[a]:d2 (shared)."""
    rollout_workers: CountOrZero = 0
    """Processes that only generate, in a pool of their own; 0 lets the actor's generate."""


class RayInitConfig(Section):
    """Arguments of ray.init."""

    num_cpus: Count | None = None
    """CPUs of a cluster started here; null takes all."""
    address: Text | None = None
    """Cluster to join; null joins RAY_ADDRESS where set, else starts one."""
    runtime_env: OpenDict = open_dict()
    """Ray runtime environment of the workers, e.g. {env_vars: {A: "1"}}."""


class RayKwargsConfig(Section):
    """Ray."""

    ray_init: RayInitConfig = Field(default_factory=RayInitConfig)
    timeline_json_file: LocalPath | None = None
    """File for Ray's own timeline."""
