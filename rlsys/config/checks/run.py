"""Whether trackers, names, processes, weight pushes and checkpoints of a run fit together."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from rlsys.config.checks.findings import note, wrong
from rlsys.config.checks.rollout import check_engine
from rlsys.config.engines import rollout_backend
from rlsys.config.pools import is_external, resolve_pools
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.schema.model import CheckpointConfig, ModelConfig
from rlsys.config.schema.trainer import RunConfig, TrainingConfig
from rlsys.config.vocabulary import ALWAYS_WRITTEN, TRACKERS

MAX_STALENESS = 1


def check_run(trainer: RunConfig) -> Iterator[str]:
    """Trackers, names, backend and resume."""
    yield from _trackers(trainer.logger)
    for key in ("project_name", "experiment_name"):
        name = getattr(trainer, key)
        if not re.fullmatch(r"[\w.@+=,: -]+", name) or name in (".", ".."):
            yield wrong(f"trainer.{key}", name, "it becomes a folder name; use letters, digits, '-', '_' and '.'")
    if trainer.backend == "local" and trainer.nnodes * trainer.n_gpus_per_node > 1:
        why = "everything runs in this one process; set trainer.n_gpus_per_node=1 or trainer.backend=ray"
        yield wrong("trainer.backend", "local", why)
    path = trainer.resume_from_path if isinstance(trainer, TrainingConfig) else None
    if path is not None and not re.search(r"global_step_\d+/*$", path):
        yield wrong("trainer.resume_from_path", path, "set the folder of one checkpoint; it ends in global_step_<N>")


def _trackers(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        known, extra = (*TRACKERS, *ALWAYS_WRITTEN), TRACKERS.get(name)
        if name not in known:
            yield wrong("trainer.logger", list(names), f"unknown tracker '{name}'; choose from {', '.join(known)}")
        elif extra and importlib.util.find_spec(name) is None:
            why = f"{name} is not installed; pip install -e '.[{extra}]', or remove {name}"
            yield wrong("trainer.logger", list(names), why)


def check_ppo_run(cfg: PPOConfig) -> Iterator[str]:
    """Pools and staleness, checkpoints of both roles, validation and adapters."""
    trainer, policy = cfg.trainer, cfg.actor_rollout_ref
    yield from _pools(cfg)
    yield from check_checkpoints("actor_rollout_ref.actor.", policy.actor.checkpoint, trainer.resume_mode)
    yield from check_adapters("actor_rollout_ref.model", policy.model)
    if cfg.use_critic:
        yield from check_checkpoints("critic.", cfg.critic.checkpoint, trainer.resume_mode)
        yield from check_adapters("critic.model", cfg.critic.model)
    data = cfg.data
    if data.val_files is None and data.train_files is not None:
        why = "there are no validation rows; set data.val_files=<file>"
        if trainer.val_only:
            yield wrong("trainer.val_only", True, why)
        elif trainer.test_freq > 0:
            yield note("trainer.test_freq", trainer.test_freq, why)


def _pools(cfg: PPOConfig) -> Iterator[str]:
    trainer, hybrid = cfg.trainer, cfg.actor_rollout_ref.hybrid_engine
    split = trainer.rollout_workers > 0
    if trainer.max_staleness > MAX_STALENESS:
        why = (
            f"only 0 (synchronous) and {MAX_STALENESS} (one step off-policy) are supported; "
            f"set trainer.max_staleness={MAX_STALENESS}"
        )
        yield wrong("trainer.max_staleness", trainer.max_staleness, why)
    external = is_external(cfg.actor_rollout_ref.rollout.name)
    yield from _servers(cfg, external)
    rollout = cfg.actor_rollout_ref.rollout
    yield from check_engine(rollout, rollout.name, resolve_pools(cfg).rollout_ranks)
    if trainer.max_staleness > 0 and not (split or external):
        why = "generating ahead needs separate rollout processes; set trainer.rollout_workers=1"
        yield wrong("trainer.max_staleness", trainer.max_staleness, why)
    if hybrid is not None and hybrid == (split or external):
        key = "actor_rollout_ref.hybrid_engine"
        yield wrong(key, hybrid, f"conflicts with trainer.rollout_workers={trainer.rollout_workers}; remove {key}")
    key, executor = "actor_rollout_ref.rollout.checkpoint_engine.backend", rollout.checkpoint_engine.backend
    if split and executor == "local":
        yield wrong(key, "local", f"the rollout runs in separate processes; set {key}=auto")
    if not (split or external) and executor == "nccl":
        why = f"a process cannot send to itself with NCCL; set {key}=auto, or trainer.rollout_workers=1"
        yield wrong(key, "nccl", why)
    if rollout_backend(rollout.name).weights_in == "child":
        yield from _apart(cfg, colocated=not split)
    if trainer.backend == "local" and split:
        why = "with trainer.backend=local everything runs in this one process; set trainer.rollout_workers=0"
        yield wrong("trainer.rollout_workers", trainer.rollout_workers, why)
    if trainer.sync_freq > 1:
        why = f"samples are up to {trainer.sync_freq - 1} steps older than the weights that they train"
        yield note("trainer.sync_freq", trainer.sync_freq, why)


def _apart(cfg: PPOConfig, *, colocated: bool) -> Iterator[str]:
    """What SGLang does not support because its weights are in a separate process."""
    key, backend = (
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
        cfg.actor_rollout_ref.rollout.checkpoint_engine,
    )
    if colocated and backend.backend == "local":
        yield wrong(key, "local", f"SGLang's weights are in a separate process; set {key}=auto")
    if colocated and cfg.trainer.nnodes > 1:
        why = "on several nodes SGLang needs separate rollout workers; set trainer.rollout_workers=<processes>"
        yield wrong("actor_rollout_ref.rollout.name", "sglang", why)


def _servers(cfg: PPOConfig, external: bool) -> Iterator[str]:
    """Whether the keys of external servers suit the engine."""
    key, rollout, name = "actor_rollout_ref.rollout", cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.name
    servers = rollout.servers
    if not external:
        if servers.urls is not None:
            why = f"{key}.name={name} does not use servers; set {key}.name=vllm_remote or sglang_remote"
            yield wrong(f"{key}.servers.urls", list(servers.urls), why)
        return
    if cfg.trainer.rollout_workers > 0:
        why = f"{key}.name={name} generates on external servers; set trainer.rollout_workers=0"
        yield wrong("trainer.rollout_workers", cfg.trainer.rollout_workers, why)
    if rollout.checkpoint_engine.backend != "auto":
        why = f"external servers load weights from files; set {key}.checkpoint_engine.backend=auto"
        yield wrong(f"{key}.checkpoint_engine.backend", rollout.checkpoint_engine.backend, why)
    if rollout.validate_weight:
        why = f"external servers do not return tensors to compare; set {key}.validate_weight=false"
        yield wrong(f"{key}.validate_weight", True, why)
    if servers.lora_name is not None and not cfg.actor_rollout_ref.model.lora_rank:
        why = "there are no adapters to push; set actor_rollout_ref.model.lora_rank=16, or remove it"
        yield wrong(f"{key}.servers.lora_name", servers.lora_name, why)
    if rollout.top_k > 0 or rollout.top_p < 1:
        full = name == "sglang_remote"
        why = f"the server only returns log-probs of the {'full' if full else 'truncated'} distribution"
        yield note(f"{key}.top_k" if rollout.top_k > 0 else f"{key}.top_p", rollout.top_k or rollout.top_p, why)


def check_checkpoints(role: str, checkpoint: CheckpointConfig, resume_mode: str) -> Iterator[str]:
    """Whether a checkpoint holds the parts that are loaded from it."""
    saved, key = checkpoint.save_contents, f"{role}checkpoint"
    for name, parts in (("save_contents", saved), ("load_contents", checkpoint.load_contents)):
        doubled = sorted({part for part in parts if parts.count(part) > 1})
        if doubled:
            yield wrong(f"{key}.{name}", list(parts), f"'{doubled[0]}' is listed twice; list it once")
    missing = [part for part in checkpoint.load_contents if part not in saved]
    if missing and resume_mode == "auto":
        why = f"{', '.join(missing)} would not be in {key}.save_contents={list(saved)}; set the same parts"
        yield wrong(f"{key}.load_contents", list(checkpoint.load_contents), why)
    if resume_mode != "disable" and not missing and {"model", "optimizer", "extra"} - set(saved):
        why = "a resumed run will differ from an uninterrupted one; for equal runs save model, optimizer and extra"
        yield note(f"{key}.save_contents", list(saved), why)


def check_adapters(key: str, model: ModelConfig) -> Iterator[str]:
    """Whether LoRA settings have adapters to apply to."""
    if model.lora_rank and importlib.util.find_spec("peft") is None:
        yield wrong(f"{key}.lora_rank", model.lora_rank, "peft is not installed; pip install -e '.[lora]'")
    if not model.lora_rank and model.lora_adapter_path is not None:
        yield wrong(f"{key}.lora_rank", 0, f"lora_adapter_path is set; set {key}.lora_rank=16, for example")
