"""The run: length, output, devices, processes, deadlines and Ray."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from rlsys.config.schema import types as t
from rlsys.config.schema.base import Section, open_dict, section


class DeadlinesConfig(Section):
    """Deadlines in seconds; after one the run stops with an error that names the process that did not answer."""

    start_s: t.Seconds = 300.0
    """Starting workers and loading models."""
    call_s: t.Seconds = 600.0
    """Any other call (log-probs, values)."""
    update_s: t.Seconds = 3600.0
    """One update of actor or critic."""
    weights_s: t.Seconds = 600.0
    """One push of weights to the rollout."""
    save_s: t.Seconds = 1800.0
    """Saving or loading a checkpoint."""


class GradingDeadlinesConfig(DeadlinesConfig):
    """Deadlines of jobs that generate and grade answers."""

    generate_s: t.Seconds = 3600.0
    """One generation call."""
    reward_s: t.Seconds = 1800.0
    """Grading one batch."""


class RunConfig(Section):
    """Keys of every job."""

    project_name: t.FolderName = "rlsys"
    """Project name in folder names and trackers."""
    experiment_name: t.FolderName = "run"
    """Name of the run within the project."""
    nnodes: t.Count = 1
    """Number of nodes."""
    n_gpus_per_node: t.Count = 1
    """GPUs per node; on CPU worker processes per node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; auto is CUDA if available."""
    backend: Literal["ray", "local"] = "ray"
    """Run workers as Ray actors, or in this process, where a debugger works."""
    default_local_dir: t.LocalPath = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder for checkpoints, metrics and reports."""
    deadlines: DeadlinesConfig = section(DeadlinesConfig)


Ranks = Annotated[tuple[t.CountOrZero, ...], BeforeValidator(t.as_numbers)]


class ProfilerConfig(Section):
    """Profiles of some steps, of all processes that train or generate."""

    tool: Literal["torch", "nsys", "torch_memory"] = "torch"
    """torch: a trace of kernels for each step and rank; nsys: ranges for Nsight Systems, under which you start the
    workers; torch_memory: the history of CUDA's allocations."""
    steps: t.Counts | None = None
    """Steps that are profiled."""
    ranks: Ranks | None = (0,)
    """Ranks that are profiled, of each pool of processes; null is all."""
    save_path: t.LocalPath = "${trainer.default_local_dir}/profile"
    """Folder of the traces."""


class TrainingConfig(RunConfig):
    """Keys of every job that trains."""

    default_hdfs_dir: t.Text | None = None
    """Address that complete checkpoints are copied to, as s3://bucket/run, gs:// or hf://; the newest is resumed."""
    logger: t.Texts = ("console",)
    """Trackers: console, tensorboard, trackio, wandb, mlflow; a JSONL file is always written."""
    total_epochs: t.Count = 30
    """Epochs over the training rows."""
    total_training_steps: t.Count | None = None
    """Total steps; null follows from total_epochs."""
    save_freq: t.Frequency = -1
    """Save every N steps, or after_each_epoch, and after the last step; -1 saves only after the last step."""
    test_freq: t.Frequency = -1
    """Validate every N steps, or after_each_epoch, and after the last step; with -1, PPO does not validate while it
    trains, and SFT and reward-model runs validate only after the last step."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Resume from the latest checkpoint, never, or from resume_from_path."""
    resume_from_path: t.LocalPath | None = None
    """Folder global_step_N to resume from, if resume_mode=resume_path."""
    resume_changed: t.Flag = False
    """Resume a checkpoint although the model, algorithm, reward or rows differ from those of the run that saved it; of
    other rows a new epoch begins."""


class SupervisedRunConfig(TrainingConfig):
    """An SFT or reward-model run."""

    total_epochs: t.Count = 4
    """Epochs over the training rows."""
    max_ckpt_to_keep: t.Count | None = None
    """Number of latest checkpoints to keep; null keeps all."""


class EvalRunConfig(RunConfig):
    """An evaluation."""

    deadlines: GradingDeadlinesConfig = section(GradingDeadlinesConfig)
    validation_data_dir: t.LocalPath | None = None
    """Folder for all answers, as JSON lines."""
    log_val_generations: t.CountOrZero = 0
    """Number of answers shown in trackers."""
    output_path: t.LocalPath | None = None
    """Parquet file for the prompts with their answers, as column responses, and scores; null writes none."""


class TrainerConfig(TrainingConfig):
    """The PPO run."""

    deadlines: GradingDeadlinesConfig = section(GradingDeadlinesConfig)
    balance_batch: t.Flag = True
    """Balance the number of tokens over ranks."""
    val_before_train: t.Flag = True
    """Validate before the first step."""
    val_only: t.Flag = False
    """Validate and stop."""
    log_val_generations: t.CountOrZero = 0
    """Number of validation answers shown in trackers."""
    critic_warmup: t.CountOrZero = 0
    """Initial steps that only train the critic."""
    max_actor_ckpt_to_keep: t.Count | None = None
    """Number of latest actor checkpoints to keep; null keeps all."""
    max_critic_ckpt_to_keep: t.Count | None = None
    """Number of latest critic checkpoints to keep; null keeps all."""
    rollout_data_dir: t.LocalPath | None = "${trainer.default_local_dir}/rollouts"
    """Folder for training answers, {step}.jsonl and a page that shows them; null writes none."""
    rollout_data_freq: t.Count = 1
    """Write the answers of every N-th step."""
    rollout_data_max_mb: t.Positive | None = 8.0
    """Megabytes a step in rollout_data_dir at most: of a bigger batch a sample is kept, its best, its worst and some of
    each prompt; null keeps all."""
    validation_data_dir: t.LocalPath | None = None
    """Folder for all validation answers, {step}.jsonl."""
    max_staleness: t.Versions = 0
    """Weight versions that a token may be behind in training: 0 is synchronous, 1 one step off-policy."""
    lookahead: t.CountOrZero = 0
    """Steps by which a finished prompt may overtake an unfinished one; fewer prompts are then in progress."""
    reproducible: t.Flag = False
    """Make an asynchronous run repeatable to the bit: versions of tokens follow from their position, not from time."""
    max_failed_in_a_row: t.CountOrZero = 8
    """Prompts in a row whose generation may fail before an asynchronous run stops; failed ones are skipped."""
    max_failed_share: t.Fraction = 0.05
    """Share of all prompts whose generation, or all of whose episodes, may fail, once it is more than
    max_failed_in_a_row of them."""
    sync_freq: t.Count = 1
    """Push weights to the rollout every N steps."""
    allocation_mode: t.Text | None = None
    """Processes in AReaL's grammar, e.g. hf:d2+fsdp:d2 (separate) or hf:d2|fsdp:d2 (shared)."""
    rollout_workers: t.CountOrZero = 0
    """Separate processes that only generate; 0 generates in the actor's processes."""


class RayInitConfig(Section):
    """Arguments of ray.init."""

    num_cpus: t.Count | None = None
    """CPUs of a newly started cluster; null is all."""
    address: t.Text | None = None
    """Cluster to join; null joins RAY_ADDRESS if set, else starts one."""
    runtime_env: t.OpenDict = open_dict()
    """Ray runtime environment of the workers, e.g. {env_vars: {A: "1"}}."""


class RayKwargsConfig(Section):
    """Ray."""

    ray_init: RayInitConfig = section(RayInitConfig)
    timeline_json_file: t.LocalPath | None = None
    """File for Ray's timeline."""
