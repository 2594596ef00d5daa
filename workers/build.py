"""From sections of the configuration to engines and loss settings: the one place where workers read both."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlsys.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.config.schema.actor import ActorConfig, ActorRolloutRefConfig, CriticConfig
from rlsys.config.schema.algorithm import RewardModelConfig
from rlsys.config.schema.jobs import SupervisedConfig
from rlsys.config.schema.megatron import MegatronShardConfig
from rlsys.config.schema.model import ModelConfig, PolicyModelConfig, ShardConfig
from rlsys.engines import rng
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.fsdp.sharding import tensor_parallel_plan
from rlsys.engines.mesh import ensure_process_group
from rlsys.interfaces import TrainEngine
from rlsys.models.flops import MfuMeter, peak_flops
from rlsys.models.hf import Head, build, dtype_name, read_config
from rlsys.models.megatron.family import decoder_family, need_packed_delta
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.utils.errors import ConfigError, raised_as
from rlsys.utils.hub import ensure_downloaded, is_hub_id
from rlsys.utils.plugins import import_libraries

if TYPE_CHECKING:
    from rlsys.engines.megatron.engine import MegatronEngine

    Engine = FSDPEngine | MegatronEngine
Shard = ShardConfig | MegatronShardConfig


@dataclass(frozen=True)
class EngineRun:
    """Facts of the run that no section of the configuration has.

    `rollout_n` are the rows of each prompt; `actor_steps` and `critic_steps` are the training steps of the whole run,
    `actor_updates` and `critic_updates` the optimizer steps of each.
    """

    device: str
    nccl_timeout_s: float
    rollout_n: int = 1
    actor_steps: int = -1
    critic_steps: int = -1
    actor_updates: int = 1
    critic_updates: int = 1
    offload_on_sleep: bool = True
    """Whether rollout engines keep weights on the host while they sleep; else the next push sends them again."""
    external_libs: tuple[tuple[str, str], ...] = ()
    """(configuration key, module name or absolute path of a .py file) to import before a model is built."""


def make_mfu_meter(model: ModelConfig, engine: TrainEngine, run: EngineRun, *, lm_head: bool = True) -> MfuMeter:
    """The MFU meter of a rank of an engine."""
    peak = peak_flops(torch.device(run.device)) * (dist.get_world_size() // engine.dp_size)
    return MfuMeter(read_config(model), peak, lm_head)


def _engine(model: ModelConfig, section: Shard, run: EngineRun, *, sp_size: int, **options: Any) -> "Engine":
    """The engine configured by `section`, after this process has joined the process group and is seeded.

    `options` are common to both engines. `full_determinism` applies to all that this process computes from now on.
    """
    import_libraries(run.external_libs)
    if section.full_determinism:
        rng.repeat_bitwise()
    ensure_process_group(run.device, timeout_s=run.nccl_timeout_s)
    rng.seed_all(dist.get_rank())
    for path in (model.path, model.lora_adapter_path):
        ensure_downloaded(path)
    engine_options = TrainEngineOptions(device=run.device, **options)
    if isinstance(section, MegatronShardConfig):
        from rlsys.engines.megatron.engine import MegatronEngine

        return MegatronEngine(model, engine_options, megatron=section)
    return FSDPEngine(model, engine_options, shard=section, sp_size=sp_size)


def check_model(
    key: str, model: ModelConfig, section: Shard, *, head: Head = "lm", device: str = "auto", is_here: bool = True
) -> None:
    """ConfigError that names `key` unless the engine of `section` trains the model as configured; reads config.json
    only. A dtype that depends on the `device` is not compared where that is "auto", and packages that the model needs
    are only looked for if the engine `is_here`."""
    with raised_as(ConfigError, key, ConfigError):
        config = read_config(model)
        if isinstance(section, MegatronShardConfig):
            family, hf_config = decoder_family(config)
            if family.linear and is_here:
                need_packed_delta()
            family.check(hf_config, RankPlace(ParallelSizes.from_config(section)))
            dtype = None if section.dtype == device == "auto" else dtype_name(section.dtype, device)
            family.free_overrides(section, family.transformer_config(hf_config, dtype))
        else:
            built = build(config, head=head, packed=model.use_remove_padding, trust_remote_code=model.trust_remote_code)
            if section.tensor_parallel_size > 1:
                tensor_parallel_plan(built, model, section.tensor_parallel_size)


def check_models(config: PPOConfig | SupervisedConfig, *, all_here: bool = True, is_here: bool = True) -> None:
    """ConfigError, before any worker starts, for a model that its engine cannot train as configured.

    Unless they are `all_here`, those that are not set or downloaded yet are left out; `is_here` as in `check_model`.
    """
    for key, model, section, head in _models(config):
        if all_here or not (model.path is None or is_hub_id(model.path)):
            check_model(key, model, section, head=head, device=config.trainer.device, is_here=is_here)


def _models(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, ModelConfig, Shard, Head]]:
    """The models on training engines, with the keys and sections of these and their heads."""
    if isinstance(config, SupervisedConfig):
        yield "engine", config.model, config.engine.shard, "scalar" if isinstance(config, RMConfig) else "lm"
        return
    policy = config.actor_rollout_ref
    section = "megatron" if policy.actor.strategy == "megatron" else "fsdp_config"
    yield f"actor_rollout_ref.actor.{section}", policy.model, policy.actor.shard, "lm"
    frozen = [(policy.reference_model, policy)] if config.use_reference else []
    for model, settings in [*frozen, *((teacher, config.teacher_policy) for teacher in config.teachers.values())]:
        yield f"actor_rollout_ref.ref.{section}", model, settings.ref_shard, "lm"
    if config.use_critic:
        section = "megatron" if config.critic.strategy == "megatron" else "fsdp"
        yield f"critic.{section}", config.critic.model, config.critic.shard, "scalar"


def _trained(
    role: ActorConfig | CriticConfig, model: ModelConfig, run: EngineRun, updates: int, **options: object
) -> "Engine":
    options |= {"optim": role.optim, "grad_clip": role.grad_clip, "updates_per_step": updates}
    options |= {"training": role.training, "checkpoint": role.checkpoint}
    return _engine(model, role.shard, run, sp_size=role.ulysses_sequence_parallel_size, **options)


def build_actor_engine(cfg: ActorRolloutRefConfig, run: EngineRun) -> "Engine":
    """The actor's engine with its optimizer."""
    options = {"scoring": cfg.rollout.scoring, "freeze_vision_tower": cfg.actor.freeze_vision_tower}
    return _trained(cfg.actor, cfg.model, run, run.actor_updates, total_steps=run.actor_steps, **options)


def build_critic_engine(cfg: CriticConfig, run: EngineRun) -> "Engine":
    """The critic's engine with its optimizer and a scalar head."""
    options = {"scoring": cfg.scoring, "total_steps": run.critic_steps}
    return _trained(cfg, cfg.model, run, run.critic_updates, head="scalar", **options)


def build_reference_engine(
    cfg: ActorRolloutRefConfig, run: EngineRun, model: PolicyModelConfig | None = None
) -> "Engine":
    """The engine of the reference, or of another frozen `model`, which only computes."""
    sp_size = cfg.ref.ulysses_sequence_parallel_size
    return _engine(model or cfg.reference_model, cfg.ref_shard, run, sp_size=sp_size, training=cfg.ref.scoring)


def build_reward_engine(cfg: RewardModelConfig, run: EngineRun) -> "Engine":
    """A reward model's engine, which only computes; a head that its checkpoint lacks is drawn from seed 0."""
    model = ModelConfig(path=cfg.model_path, trust_remote_code=cfg.trust_remote_code)
    return _engine(model, ShardConfig(dtype=cfg.dtype, seed=0), run, sp_size=1, head="scalar", training=cfg.scoring)


def build_supervised_engine(cfg: SFTConfig | RMConfig | DPOConfig, run: EngineRun, *, frozen: bool = False) -> "Engine":
    """The engine of supervised training: a language model, or a reward model; `frozen` it only computes."""
    head = "scalar" if isinstance(cfg, RMConfig) else "lm"
    options: dict[str, object] = {"head": head, "training": cfg.data.training, "checkpoint": cfg.checkpoint}
    if not frozen:
        options |= {"optim": cfg.optim, "grad_clip": cfg.optim.clip_grad, "total_steps": run.actor_steps}
    return _engine(cfg.model, cfg.engine.shard, run, sp_size=cfg.engine.ulysses_sequence_parallel_size, **options)
