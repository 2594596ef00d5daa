"""A memory plan as people read it: a line, a table, the stages that do not fit, and what would change that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlsys.config import PPOConfig
from rlsys.config.checks.files import model_facts
from rlsys.config.engines import rollout_backend
from rlsys.planning.footprint import decoder_of
from rlsys.planning.memory import CACHE, Device, Facts, MemoryPlan, Stage, plan_memory
from rlsys.planning.roles import Bytes, together
from rlsys.utils.errors import ConfigError

GIB = 1 << 30
WORTH = 0.99
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def memory_line(cfg: PPOConfig) -> str:
    """The plan of a configuration in a line: GiB on one device to start, to generate, and at most in the other stages.

    Empty where the model's config.json is not on this machine. An engine that takes a share of the device for its
    cache is counted without it.
    """
    policy, grader = cfg.actor_rollout_ref, cfg.reward.reward_model
    actor = _facts(policy.model.path)
    if not actor:
        return ""
    actor = {**actor, **policy.model.override_config}
    device = _device(cfg)
    try:
        plan = plan_memory(
            cfg,
            actor,
            critic=_facts(cfg.critic.model.path) if cfg.critic.model.path != policy.model.path else None,
            reward_model=_facts(grader.model_path) if grader.enable else None,
            device=device,
            device_bytes=0,
        )
        parameters = decoder_of(actor).parameters
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        return f"cannot be planned: {error}"
    stages = {stage.name: stage for stage in plan.train}
    peak = max((s for s in plan.train if s.name not in ("start", "rollout")), key=lambda stage: stage.total)
    own = {stage.name: stage for stage in plan.rollout}
    figures = [f"{_gib(stages['start'])} to start"]
    if generating := own.get("rollout") or stages.get("rollout"):
        where = " (on a rollout device)" if own else ""
        share = device == "cuda" and not generating.bytes.get(CACHE)
        cache = f" + {policy.rollout.name}'s cache" if share else ""
        figures.append(f"{_gib(generating)}{cache} to generate{where}")
    figures.append(f"{_gib(peak)} at most in the other stages ({peak.name})")
    kind = "GPU" if device == "cuda" else "CPU process"
    return f"{parameters / 1e6:.1f}M parameters; GiB on a {kind}: {', '.join(figures)}"


def _facts(path: str | None) -> Facts:
    return model_facts(Path(path)) if path else {}


def _device(cfg: PPOConfig) -> Device:
    """The device that workers will find, as far as can be known before they start: a cluster is taken to have GPUs."""
    run = cfg.trainer
    if run.device != "auto":
        return run.device
    joins = run.backend == "ray" and bool(cfg.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS"))
    return "cuda" if joins or Path("/dev/nvidiactl").exists() else "cpu"


def _gib(stage: Stage) -> str:
    return f"{stage.total / GIB:.1f}"


def table(stages: Sequence[Stage], *, room_bytes: int) -> str:
    """A line for each stage, a column for each owner that has anything, in GiB; `left` of `room_bytes` at the end."""
    whole: Bytes = together([stage.bytes for stage in stages])
    owners = [owner for owner, size in whole.items() if size]
    lines = [["stage", *owners, "total", "left"]]
    for stage in stages:
        cells = [stage.bytes.get(owner, 0) for owner in owners]
        lines.append(
            [
                stage.name,
                *(f"{size / GIB:.2f}" if size else "" for size in (*cells, stage.total)),
                _left(stage, room_bytes),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    )


def _left(stage: Stage, room_bytes: int) -> str:
    left = room_bytes - stage.total
    return f"{left / GIB:.2f}" if left >= 0 else f"{left / GIB:.2f} !"


def too_large(plan: MemoryPlan, *, room_bytes: int) -> list[Stage]:
    """The stages that do not fit, the largest first."""
    stages = [stage for stage in (*plan.train, *plan.rollout) if stage.total > room_bytes]
    return sorted(stages, key=lambda stage: -stage.total)


def remedies(cfg: PPOConfig, replan: Callable[[Sequence[str]], MemoryPlan], *, room_bytes: int) -> Iterator[str]:
    """What makes the stage that needs most need less, each change on its own, and whether everything then fits.

    `replan` plans again with further overrides; what it refuses with a ConfigError is left out.
    """
    before = _highest(replan(()))
    for change in _changes(cfg):
        try:
            plan = replan(change)
        except ConfigError:
            continue
        after = _named(plan, before.name)
        if after.total <= WORTH * before.total:
            fits = (
                "everything fits" if not too_large(plan, room_bytes=room_bytes) else f"now {_highest(plan).name} most"
            )
            yield f"{' '.join(change)}: {before.name} {before.total / GIB:.1f} -> {after.total / GIB:.1f} GiB, {fits}"


def _highest(plan: MemoryPlan) -> Stage:
    return max((*plan.train, *plan.rollout), key=lambda stage: stage.total)


def _named(plan: MemoryPlan, name: str) -> Stage:
    return max((s for s in (*plan.train, *plan.rollout) if s.name == name), key=lambda stage: stage.total)


def _changes(cfg: PPOConfig) -> Iterator[tuple[str, ...]]:
    """Those first that leave the result alone and cost little speed."""
    policy, longest = cfg.actor_rollout_ref, cfg.data.max_prompt_length + cfg.data.max_response_length
    actor, rollout = policy.actor, policy.rollout
    if not policy.model.enable_gradient_checkpointing:
        yield (f"{_MODEL}.enable_gradient_checkpointing=true",)
    for key, role in ((_ACTOR, actor), ("critic", cfg.critic)):
        yield from _smaller(key, longest, role.ppo_max_token_len_per_gpu if role.use_dynamic_bsz else None)
    if rollout_backend(rollout.name).cache_share_of is None:
        yield (f"{_ROLLOUT}.max_num_seqs={max(1, rollout.max_num_seqs // 2)}",)
    else:
        yield (f"{_ROLLOUT}.gpu_memory_utilization={max(0.1, round(rollout.gpu_memory_utilization / 2, 2))}",)
    megatron = actor.strategy == "megatron"
    shard, critic = ("megatron", "critic.megatron") if megatron else ("fsdp_config", "critic.fsdp")
    yield (f"{_ACTOR}.{shard}.optimizer_offload=true", f"{critic}.optimizer_offload=true")
    parts = ("optimizer_offload", "param_offload", *["grad_offload"] * megatron)
    yield tuple(f"{key}.{part}=true" for key in (f"{_ACTOR}.{shard}", critic) for part in parts)
    yield (f"actor_rollout_ref.ref.{shard}.param_offload=true",)
    if megatron:
        for size in ("tensor_model_parallel_size", "context_parallel_size"):
            yield (f"{_ACTOR}.megatron.{size}={2 * getattr(actor.megatron, size)}",)
    yield (f"trainer.n_gpus_per_node={2 * cfg.trainer.n_gpus_per_node}",)
    if not megatron:
        yield (f"{_ACTOR}.ulysses_sequence_parallel_size={2 * actor.ulysses_sequence_parallel_size}",)
    if not policy.model.lora_rank:
        yield (f"{_MODEL}.lora_rank=16",)


def _smaller(key: str, longest: int, tokens: int | None) -> Iterator[tuple[str, ...]]:
    """A budget of half as many tokens, and the least one."""
    budget = f"{key}.ppo_max_token_len_per_gpu"
    if tokens is None:
        yield (f"{key}.use_dynamic_bsz=true", f"{budget}={longest}")
        return
    if tokens // 2 > longest:
        yield (f"{budget}={tokens // 2}",)
    if tokens > longest:
        yield (f"{budget}={longest}",)
