"""The plan of a job in the lines that it prints: memory, and with --gpu seconds and layouts."""

from pathlib import Path
from shutil import disk_usage

from rlsys.config import PPOConfig
from rlsys.config.checks.files import existing_parent, model_facts
from rlsys.data.start_assets import START_MODEL
from rlsys.planning.footprint import WIDE, decoder_of
from rlsys.planning.image_encoder import plan_facts
from rlsys.planning.layouts import propose_layouts
from rlsys.planning.memory import CACHE, Device, Lengths, Machine, PlanInputs, device_roles, plan_memory
from rlsys.planning.sizes import GIB
from rlsys.planning.step_time import GpuCluster, plan_step, step_seconds
from rlsys.utils.errors import ConfigError
from rlsys.utils.gpus import Gpu


def memory_line(cfg: PPOConfig, machine: Machine) -> str:
    """The plan of a configuration in a line: GiB on one device to start, to generate, and at most in the other stages.

    Empty where the model's config.json is not on this machine. An engine that takes a share of the device for its
    cache is counted without it where the device's size is not known.
    """
    size, engine = machine.device_bytes, cfg.actor_rollout_ref.rollout.name
    if not machine.actor:
        return ""
    try:
        plan, parameters = plan_memory(cfg, machine), decoder_of(machine.actor).parameters
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        return f"cannot be planned: {error}"
    stages = {stage.name: stage for stage in plan.train}
    peak = max((s for s in plan.train if s.name not in ("start", "rollout")), key=lambda stage: stage.total)
    own, figures = {stage.name: stage for stage in plan.rollout}, [f"{stages['start'].total / GIB:.1f} to start"]
    if generating := own.get("rollout") or stages.get("rollout"):
        cache = "" if machine.device == "cpu" or generating.bytes.get(CACHE) else f" + {engine}'s cache"
        figures.append(f"{generating.total / GIB:.1f}{cache} to generate{' (on a rollout device)' if own else ''}")
    figures.append(f"{peak.total / GIB:.1f} at most in the other stages ({peak.name})")
    kind = "GPU" if size or cfg.trainer.device == "cuda" else "GPU, where the cluster has them"
    kind = kind if machine.device == "cuda" else "CPU process"
    most = max(stage.total for stage in (*plan.train, *plan.rollout))
    over = f": more than its {size / GIB:.1f}, see docs/oom.md" if 0 < size < most else _disk(cfg, machine)
    return f"{parameters / 1e6:.1f}M parameters; GiB on a {kind}: {', '.join(figures)}{over}"


def _disk(cfg: PPOConfig, machine: Machine) -> str:
    """What the plan says where the disk that all nodes share has no room for what they save of actor and critic."""
    folder, parts = Path(cfg.trainer.default_local_dir).absolute(), cfg.actor_rollout_ref.actor.checkpoint.save_contents
    roles = [one.role for one in device_roles(PlanInputs(cfg, machine, Lengths.longest(cfg))) if one.role.trained]
    size = sum(WIDE * role.model.parameters + (role.moments_bytes() if "optimizer" in parts else 0) for role in roles)
    free = disk_usage(existing_parent(folder)).free
    text = f"; a checkpoint needs {size / GIB:.2f} GiB and the disk of trainer.default_local_dir has {free / GIB:.2f}"
    return text if size > free else ""


def facts_of(cfg: PPOConfig, device: Device, device_bytes: int) -> Machine:
    """A device of a job, with what is on this machine of the config.json of its models."""
    policy = cfg.actor_rollout_ref
    actor, frozen = model_facts(policy.model.path or START_MODEL), policy.actor.freeze_vision_tower
    return Machine(
        device,
        device_bytes,
        actor=plan_facts({**actor, **policy.model.override_config}, freeze_vision_tower=frozen) if actor else {},
        critic=model_facts(cfg.critic.model.path) if cfg.critic.model.path != policy.model.path else None,
        reward_model=model_facts(cfg.reward.reward_model.model_path) if cfg.reward.has_head else None,
    )


def time_facts(cfg: PPOConfig, machine: Machine, gpu: Gpu) -> dict[str, str]:
    """Lines of the plan for rows as long as they may be: seconds of a step, and the fastest layouts that fit."""
    try:
        phases = plan_step(cfg, machine, GpuCluster(gpu, cfg.trainer.n_gpus_per_node))
        layouts = layout_lines(cfg, machine, gpu)
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        return {"time": f"cannot be planned: {error}"}
    parts = ", ".join(f"{phase.name} {phase.total:.1f}" for phase in phases)
    step = f"{step_seconds(cfg, phases):.1f} s a step at full length: {parts}"
    return {"time": step, "layouts": "\n             ".join(layouts)}


def layout_lines(cfg: PPOConfig, machine: Machine, gpu: Gpu) -> list[str]:
    """The fastest three layouts that fit, for rows as long as they may be, and the settings of the first."""
    cluster = GpuCluster(gpu, cfg.trainer.n_gpus_per_node)
    proposals = propose_layouts(cfg, machine, cluster, lengths=Lengths.longest(cfg), most=3)
    lines = [f"{one.seconds:.1f} s, {one.peak_bytes / GIB:.0f} GiB: {one.name}" for one in proposals]
    lines += [f"settings of the first: {one.words(cfg)}" for one in proposals[:1]]
    return lines or ["none fits; use more GPUs, or rollout processes of their own"]
