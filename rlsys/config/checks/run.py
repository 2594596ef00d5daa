"""Whether trackers, names, processes, weight pushes and checkpoints of a run fit together."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlsys.config.checks.findings import note, wrong
from rlsys.config.checks.rollout import check_ppo_rollout, check_rollout
from rlsys.config.engines import rollout_backend
from rlsys.config.pools import generates_ahead, resolve_pools
from rlsys.config.schema.actor import TrainedRoleConfig
from rlsys.config.schema.jobs import PPOConfig, SupervisedConfig
from rlsys.config.vocabulary import ALWAYS_WRITTEN, TRACKERS
from rlsys.utils.hub import is_rows_id

ROLLOUT, WORKERS, STALENESS = "actor_rollout_ref.rollout", "trainer.rollout_workers", "trainer.max_staleness"
ENGINE = f"{ROLLOUT}.checkpoint_engine.backend"


def check_run(cfg: PPOConfig | SupervisedConfig, *, is_here: bool) -> Iterator[str]:
    """Trackers, for a run that `is_here` installed ones, streams, resume and profiled steps."""
    for name in cfg.trainer.logger:
        known, extra = (*TRACKERS, *ALWAYS_WRITTEN), TRACKERS.get(name)
        if name not in known:
            yield wrong(cfg, "trainer.logger", f"unknown tracker '{name}'; choose from {', '.join(known)}")
        elif extra and is_here and importlib.util.find_spec(name) is None:
            yield wrong(cfg, "trainer.logger", f"{name} is not installed; pip install -e '.[{extra}]' or remove {name}")
    if cfg.data.streaming and cfg.data.val_max_samples < 1 and any(map(is_rows_id, cfg.data.val_files or ())):
        yield wrong(cfg, "data.val_max_samples", "a stream has no length; its first rows are taken", "<rows>")
    if (path := cfg.trainer.resume_from_path) is not None:
        key, is_used = "trainer.resume_from_path", cfg.trainer.resume_mode == "resume_path"
        if re.search(r"global_step_\d+/*$", path) is None:
            name = "the folder of one checkpoint ends in global_step_<N>"
            unused = f"not used with trainer.resume_mode={cfg.trainer.resume_mode}; {name}"
            yield wrong(cfg, key, f"set another folder; {name}") if is_used else note(cfg, key, unused)
        elif not is_used:
            yield wrong(cfg, key, "only one mode uses it; set trainer.resume_mode=resume_path")
        elif "://" not in path and not Path(path).is_dir():
            yield wrong(cfg, key, "folder not found")
    if cfg.global_profiler.steps:
        yield from _profiled(cfg, cfg.global_profiler.steps)


def _profiled(cfg: PPOConfig | SupervisedConfig, steps: Sequence[int]) -> Iterator[str]:
    """Whether the run has the steps and the ranks that are profiled."""
    last = cfg.trainer.total_training_steps
    most = max(cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node, getattr(cfg.trainer, "rollout_workers", 0))
    if last and max(steps) > last:
        yield note(cfg, "global_profiler.steps", f"the run ends with step {last}; later ones are not profiled")
    if cfg.global_profiler.ranks is not None and min(cfg.global_profiler.ranks, default=most) >= most:
        yield note(cfg, "global_profiler.ranks", f"no process is profiled: ranks are below {most}; null is all")


def check_ppo_run(cfg: PPOConfig) -> Iterator[str]:
    """Pools and staleness, checkpoints of both roles, and validation."""
    policy = cfg.actor_rollout_ref
    yield from check_rollout(cfg, resolve_pools(cfg).rollout_ranks)
    for check in (check_ppo_rollout, _pools, _staleness, _weights):
        yield from check(cfg)
    yield from check_training(cfg, "actor_rollout_ref.actor.", policy.actor)
    if policy.model.lora_rank and "hf_model" not in policy.actor.checkpoint.save_contents:
        why = "adapters cannot be merged later; add hf_model for a model, and lora_adapter/, that other tools load"
        yield note(cfg, "actor_rollout_ref.actor.checkpoint.save_contents", why)
    if cfg.use_critic:
        yield from check_training(cfg, "critic.", cfg.critic)
    validates = cfg.trainer.val_only or cfg.trainer.test_freq not in (-1, 0)
    if cfg.data.val_files is None and cfg.data.train_files is not None and validates:
        report, key = (wrong, "trainer.val_only") if cfg.trainer.val_only else (note, "trainer.test_freq")
        yield report(cfg, key, "there are no validation rows; set data.val_files=<file>")


def _pools(cfg: PPOConfig) -> Iterator[str]:
    workers, hybrid = cfg.trainer.rollout_workers, cfg.actor_rollout_ref.hybrid_engine
    if hybrid is not None and hybrid != resolve_pools(cfg).colocated:
        yield wrong(cfg, "actor_rollout_ref.hybrid_engine", f"conflicts with {WORKERS}={workers}; remove it")


def _staleness(cfg: PPOConfig) -> Iterator[str]:
    """Whether samples can be as old as is asked for, and no older."""
    trainer, pools, rollout = cfg.trainer, resolve_pools(cfg), cfg.actor_rollout_ref.rollout
    oldest = trainer.sync_freq - 1
    if trainer.max_staleness < oldest:
        why = f"with trainer.sync_freq={trainer.sync_freq} samples are up to {oldest} versions behind"
        yield wrong(cfg, STALENESS, why, oldest)
    if not generates_ahead(cfg):
        return
    if pools.colocated and not (trainer.backend == "local" and trainer.device == "cpu" and rollout.name == "hf"):
        yield wrong(cfg, STALENESS, "generating ahead needs separate rollout processes; set trainer.rollout_workers=1")
    if cfg.algorithm.adv_estimator == "remax":
        yield wrong(cfg, STALENESS, "the baselines of adv_estimator=remax are not generated ahead", 0)
    if rollout.over_sample_rate:
        yield wrong(cfg, f"{ROLLOUT}.over_sample_rate", "an asynchronous run waits for no batch as a whole", 0)
    if trainer.lookahead > (most := max(0, trainer.max_staleness - max(1, oldest))):
        of = f"{STALENESS}={trainer.max_staleness} and trainer.sync_freq={trainer.sync_freq}"
        yield wrong(cfg, "trainer.lookahead", f"the last step before a push gets no prompts with {of}", most)
    if trainer.reproducible:
        yield from _reproducible(cfg)
    correction = cfg.algorithm.rollout_correction
    if not correction.corrects and not correction.bypass_mode:
        ways = "bypass_mode=true to clip around those, or rollout_is=token for decoupled PPO"
        yield note(cfg, STALENESS, f"the loss ignores older weights; set algorithm.rollout_correction.{ways}")


def _reproducible(cfg: PPOConfig) -> Iterator[str]:
    """Whether a run with the schedule of trainer.epochs can give the same bits again, and keeps its replicas busy."""
    rollout = cfg.actor_rollout_ref.rollout
    rows = (cfg.trainer.max_staleness - cfg.trainer.lookahead) * cfg.data.train_batch_size * rollout.n
    replicas = resolve_pools(cfg).rollout_ranks // rollout.replica_size
    if replicas > 1 and rollout.max_replica_seqs * (replicas - 1) >= rows:
        why = f"fixed batches of this size leave some of {replicas} replicas without work"
        fewer = rows // replicas // rollout.data_parallel_size
        yield note(cfg, f"{ROLLOUT}.max_num_seqs", f"{why}; set {max(1, fewer)}")
    if not rollout.is_external and rollout.name != "hf" and not rollout.full_determinism:
        why = f"it needs batch-invariant engines; set {ROLLOUT}.full_determinism=true"
        yield wrong(cfg, "trainer.reproducible", why)


def _weights(cfg: PPOConfig) -> Iterator[str]:
    """Whether weights can be pushed this way; SGLang's are in a separate process."""
    pools, rollout = resolve_pools(cfg), cfg.actor_rollout_ref.rollout
    in_child = rollout_backend(rollout.name).weights_in == "child"
    if rollout.checkpoint_engine.backend == "local" and (not pools.colocated or in_child):
        yield wrong(cfg, ENGINE, "the rollout's weights are in a separate process", "auto")
    elif rollout.checkpoint_engine.backend == "nccl" and pools.colocated:
        yield wrong(cfg, ENGINE, f"a process cannot send to itself with NCCL; set {ENGINE}=auto, or {WORKERS}=1")


def check_training(
    cfg: PPOConfig | SupervisedConfig, prefix: str, role: TrainedRoleConfig | SupervisedConfig
) -> Iterator[str]:
    """Whether checkpoints of a trained model hold what is loaded.

    `prefix` begins the names of the role's keys.
    """
    saved = role.checkpoint.save_contents
    for name, parts in (("save_contents", saved), ("load_contents", role.checkpoint.load_contents)):
        if doubled := [part for part in parts if parts.count(part) > 1]:
            yield wrong(cfg, f"{prefix}checkpoint.{name}", f"'{doubled[0]}' is listed twice; list it once")
    missing = [part for part in role.checkpoint.load_contents if part not in saved]
    if missing and cfg.trainer.resume_mode == "auto":
        why = f"{', '.join(missing)} would not be in {prefix}checkpoint.save_contents={list(saved)}; set the same parts"
        yield wrong(cfg, f"{prefix}checkpoint.load_contents", why)
    if cfg.trainer.resume_mode != "disable" and not missing and {"model", "optimizer", "extra"} - set(saved):
        why = "a resumed run will differ from an uninterrupted one; for equal runs save model, optimizer and extra"
        yield note(cfg, f"{prefix}checkpoint.save_contents", why)
