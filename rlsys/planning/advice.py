"""A memory plan as people read it: a line, a table, the stages that do not fit, and what would change that."""

from collections.abc import Callable, Iterator, Sequence

from rlsys.config import PPOConfig
from rlsys.config.checks.files import model_facts
from rlsys.planning.footprint import decoder_of
from rlsys.planning.image_encoder import plan_facts
from rlsys.planning.layouts import propose_layouts
from rlsys.planning.memory import CACHE, Device, Lengths, Machine, MemoryPlan, Stage, plan_memory
from rlsys.planning.roles import together
from rlsys.planning.step_time import GpuCluster, Phase, plan_step, step_seconds
from rlsys.utils.errors import ConfigError
from rlsys.utils.tables import aligned

GIB = 1 << 30
WORTH, HARDLY_ANY_S = 0.99, 0.005
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def memory_line(cfg: PPOConfig, machine: Machine) -> str:
    """The plan of a configuration in a line: GiB on one device to start, to generate, and at most in the other stages.

    Empty where the model's config.json is not on this machine. An engine that takes a share of the device for its
    cache is counted without it where the device's size is not known.
    """
    policy, device = cfg.actor_rollout_ref, machine.device
    if not machine.actor:
        return ""
    try:
        plan = plan_memory(cfg, machine)
        parameters = decoder_of(machine.actor).parameters
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


def facts_of(cfg: PPOConfig, device: Device, device_bytes: int) -> Machine:
    """A device of a job, with what is on this machine of the config.json of its models."""
    policy, grader = cfg.actor_rollout_ref, cfg.reward.reward_model
    actor, frozen = model_facts(policy.model.path), policy.actor.freeze_vision_tower
    return Machine(
        device,
        device_bytes,
        actor=plan_facts({**actor, **policy.model.override_config}, freeze_vision_tower=frozen) if actor else {},
        critic=model_facts(cfg.critic.model.path) if cfg.critic.model.path != policy.model.path else None,
        reward_model=model_facts(grader.model_path) if grader.enable and not cfg.reward.has_judge else None,
    )


def _gib(stage: Stage) -> str:
    return f"{stage.total / GIB:.1f}"


def table(stages: Sequence[Stage], *, room_bytes: int) -> str:
    """A line for each stage, a column for each owner that has anything, in GiB; `left` of `room_bytes` at the end."""
    owners = [owner for owner, size in together([stage.bytes for stage in stages]).items() if size]
    lines = [["stage", *owners, "total", "left"]]
    for stage in stages:
        sizes, left = [*(stage.bytes.get(owner, 0) for owner in owners), stage.total], room_bytes - stage.total
        cells = [f"{size / GIB:.2f}" if size else "" for size in sizes]
        lines.append([stage.name, *cells, f"{left / GIB:.2f}{' !' if left < 0 else ''}"])
    return aligned(lines)


def step_table(phases: Sequence[Phase]) -> str:
    """A line for each phase, a column for each cause, in seconds."""
    causes = sorted({cause for phase in phases for cause, seconds in phase.seconds.items() if seconds >= HARDLY_ANY_S})
    lines = [["seconds", *causes, "total"]]
    for phase in phases:
        seconds = [*(phase.seconds.get(cause, 0.0) for cause in causes), phase.total]
        lines.append([phase.name, *(f"{one:.2f}" if one >= HARDLY_ANY_S else "" for one in seconds)])
    return aligned(lines)


def time_facts(cfg: PPOConfig, machine: Machine, cluster: GpuCluster) -> dict[str, str]:
    """Lines of the plan for rows as long as they may be: seconds of a step, and the fastest layouts that fit."""
    try:
        phases = plan_step(cfg, machine, cluster)
        proposals = propose_layouts(cfg, machine, cluster, lengths=Lengths.longest(cfg), most=3)
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        return {"time": f"cannot be planned: {error}"}
    parts = ", ".join(f"{phase.name} {phase.total:.1f}" for phase in phases)
    lines = [f"{one.seconds:.1f} s, {one.peak_bytes / GIB:.0f} GiB: {one.name}" for one in proposals]
    layouts = lines or ["none fits; use more GPUs, or rollout processes of their own"]
    step = f"{step_seconds(cfg, phases):.1f} s a step at full length: {parts}"
    return {"time": step, "layouts": "\n             ".join(layouts)}


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
        after = _highest(plan, before.name)
        if after.total <= WORTH * before.total:
            fits = f"now {_highest(plan).name} most" if too_large(plan, room_bytes=room_bytes) else "everything fits"
            yield f"{' '.join(change)}: {before.name} {before.total / GIB:.1f} -> {after.total / GIB:.1f} GiB, {fits}"


def _highest(plan: MemoryPlan, name: str = "") -> Stage:
    """The stage, of this name if there is one, that needs most."""
    stages = (stage for stage in (*plan.train, *plan.rollout) if name in ("", stage.name))
    return max(stages, key=lambda stage: stage.total)


def _changes(cfg: PPOConfig) -> list[tuple[str, ...]]:
    """Those first that leave the result alone and cost little speed; what a run has already changes nothing."""
    policy, longest = cfg.actor_rollout_ref, cfg.data.max_prompt_length + cfg.data.max_response_length
    actor, rollout = policy.actor, policy.rollout
    megatron = actor.strategy == "megatron"
    shard, critic = ("megatron", "critic.megatron") if megatron else ("fsdp_config", "critic.fsdp")
    trained = (f"{_ACTOR}.{shard}", critic)
    parts = ("optimizer_offload", "param_offload", *["grad_offload"] * megatron)
    sharing = f"{_ACTOR}.ulysses_sequence_parallel_size={2 * actor.ulysses_sequence_parallel_size}"
    if megatron:
        sharing = f"{_ACTOR}.megatron.context_parallel_size={2 * actor.megatron.context_parallel_size}"
    return [
        (f"{_MODEL}.enable_gradient_checkpointing=true",),
        *((f"{key}.use_dynamic_bsz=true", f"{key}.ppo_max_token_len_per_gpu={longest}") for key in (_ACTOR, "critic")),
        (f"{_ROLLOUT}.max_num_seqs={max(1, rollout.max_num_seqs // 2)}",),
        (f"{_ROLLOUT}.gpu_memory_utilization={max(0.1, round(rollout.gpu_memory_utilization / 2, 2))}",),
        tuple(f"{key}.optimizer_offload=true" for key in trained),
        tuple(f"{key}.{part}=true" for key in trained for part in parts),
        (f"actor_rollout_ref.ref.{shard}.param_offload=true",),
        (f"{_ACTOR}.megatron.tensor_model_parallel_size={2 * actor.megatron.tensor_model_parallel_size}",),
        (sharing,),
        (f"trainer.n_gpus_per_node={2 * cfg.trainer.n_gpus_per_node}",),
        (f"{_MODEL}.lora_rank=16",),
    ]
