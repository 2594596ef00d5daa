"""The roles on a training device as memory sees them, read from the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlsys.config import PPOConfig
from rlsys.config.plan import BatchPlan, RolePlan
from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.config.schema.megatron import MegatronConfig, MegatronRoleConfig
from rlsys.config.schema.model import FSDPConfig, ShardConfig
from rlsys.models.lora import LoraSettings
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.planning import footprint as fp
from rlsys.planning.roles import (
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
    Bytes,
    Computing,
    FsdpRole,
    Pass,
    Role,
    filled_pass,
    fixed_pass,
    megatron_role,
)
from workers.build import lora_settings

Facts = Mapping[str, Any]
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and response, and of both in a row on average."""

    prompt: int
    response: int
    mean_prompt: int
    mean_response: int

    @classmethod
    def longest(cls, cfg: PPOConfig) -> Lengths:
        """Every row as long as it may be."""
        prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
        return cls(prompt, response, prompt, response)


@dataclass(frozen=True)
class Job:
    """What planning reads: the configuration, its arithmetic, lengths, the device and the pipeline stage looked at."""

    cfg: PPOConfig
    plan: BatchPlan
    lengths: Lengths
    device: Device
    pp_rank: int


@dataclass(frozen=True)
class DeviceRole:
    """A role, the owners that leave the device while others run, and its stages: (name, whether it trains, pass)."""

    role: Role
    leaves: frozenset[str]
    stages: tuple[tuple[str, bool, Pass], ...]

    def waiting(self, *, but: frozenset[str] = frozenset()) -> Bytes:
        """What is on the device while another role runs."""
        return {owner: size for owner, size in self.role.held().items() if owner not in self.leaves - but}


def device_roles(job: Job, actor: Facts, critic: Facts, reward_model: Facts | None) -> list[DeviceRole]:
    """All roles of a training device, the actor first."""
    found = [_actor(job, actor), *_reference(job, actor)]
    if job.plan.critic is not None:
        found.append(_critic(job, job.plan.critic, critic))
    if reward_model is not None and not job.plan.pools.reward_model_ranks:
        found.append(_reward_model(job, reward_model))
    return found


def width_of(dtype: str, device: Device) -> int:
    """Bytes of an element."""
    narrow = dtype in ("bfloat16", "float16") or (dtype == "auto" and device == "cuda")
    return 2 if narrow else fp.WIDE


def _actor(job: Job, facts: Facts) -> DeviceRole:
    policy, rollout = job.cfg.actor_rollout_ref, job.cfg.actor_rollout_ref.rollout
    actor, model = policy.actor, policy.model
    sharing = _sharing(actor)
    scored = _pass(
        job,
        job.plan.samples // job.plan.actor.dp_size,
        rows=rollout.log_prob_micro_batch_size_per_gpu,
        max_tokens=rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None,
        sharing=sharing,
    )
    stages = [("update_actor", True, _training(job, job.plan.actor, sharing))]
    if not job.cfg.algorithm.rollout_correction.bypass_mode:
        stages.append(("old_log_prob", False, scored))
    if job.plan.use_reference and model.lora_rank:
        stages.append(("ref", False, scored))
    settings = actor.megatron if actor.strategy == "megatron" else actor.fsdp_config
    role = _role(
        job,
        facts,
        settings,
        recompute=model.enable_gradient_checkpointing,
        entropy=actor.entropy_coeff != 0 or actor.calculate_entropy,
        lora=lora_settings(model, seed=0),
    )
    return DeviceRole(role, _leaving(settings), tuple(stages))


def _reference(job: Job, facts: Facts) -> Iterator[DeviceRole]:
    policy, ref = job.cfg.actor_rollout_ref, job.cfg.actor_rollout_ref.ref
    if not job.plan.use_reference or policy.model.lora_rank:
        return
    megatron = policy.actor.strategy == "megatron"
    settings = ref.megatron if megatron else ref.fsdp_config
    scored = _pass(
        job,
        job.plan.samples // job.plan.actor.dp_size,
        rows=ref.log_prob_micro_batch_size_per_gpu,
        max_tokens=ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
        sharing=ref.megatron.context_parallel_size if megatron else ref.ulysses_sequence_parallel_size,
    )
    leaves = frozenset([PARAMETERS] * settings.param_offload)
    yield DeviceRole(_role(job, facts, settings, trained=False), leaves, (("ref", False, scored),))


def _critic(job: Job, plan: RolePlan, facts: Facts) -> DeviceRole:
    critic = job.cfg.critic
    settings = critic.megatron if critic.strategy == "megatron" else critic.fsdp
    scored = _pass(
        job,
        job.plan.samples // plan.dp_size,
        rows=critic.forward_micro_batch_size_per_gpu,
        max_tokens=critic.forward_max_token_len_per_gpu if critic.use_dynamic_bsz else None,
        sharing=_sharing(critic),
    )
    recompute = critic.model.enable_gradient_checkpointing
    role = _role(job, facts, settings, lm=False, recompute=recompute, lora=lora_settings(critic.model, seed=0))
    trained = _training(job, plan, _sharing(critic))
    return DeviceRole(role, _leaving(settings), (("values", False, scored), ("update_critic", True, trained)))


def _reward_model(job: Job, facts: Facts) -> DeviceRole:
    grader, ranks = job.cfg.reward.reward_model, job.plan.pools.train_ranks
    scored = _pass(
        job,
        job.plan.samples // ranks,
        rows=grader.micro_batch_size_per_gpu,
        max_tokens=grader.forward_max_token_len_per_gpu if grader.use_dynamic_bsz else None,
        sharing=1,
    )
    how = Computing(width_of(grader.dtype, job.device), job.device, recompute=False)
    role = FsdpRole(fp.decoder_of(facts, head="value"), how, ranks, master=fp.WIDE, trained=False, lm=False)
    return DeviceRole(role, frozenset(), (("reward_model", False, scored),))


def _sharing(role: ActorConfig | CriticConfig) -> int:
    """Ranks that share the tokens of a pack."""
    megatron = role.strategy == "megatron"
    return role.megatron.context_parallel_size if megatron else role.ulysses_sequence_parallel_size


def _pass(job: Job, num_rows: int, *, rows: int | None, max_tokens: int | None, sharing: int) -> Pass:
    prompt, response = job.lengths.mean_prompt, job.lengths.mean_response
    if max_tokens is not None:
        return filled_pass(num_rows, max_tokens, prompt=prompt, response=response, sharing=sharing)
    return fixed_pass(num_rows, rows or num_rows, prompt=prompt, response=response, sharing=sharing)


def _training(job: Job, plan: RolePlan, sharing: int) -> Pass:
    rows = plan.micro_batch_samples
    return _pass(job, plan.rank_samples, rows=rows, max_tokens=plan.max_tokens, sharing=sharing)


def _role(
    job: Job,
    facts: Facts,
    settings: ShardConfig | MegatronRoleConfig,
    *,
    trained: bool = True,
    lm: bool = True,
    recompute: bool = False,
    entropy: bool = False,
    lora: LoraSettings | None = None,
) -> Role:
    head, ranks = "lm" if lm else "value", job.plan.pools.train_ranks
    how = Computing(width_of(settings.dtype, job.device), job.device, recompute and trained, entropy)
    if isinstance(settings, MegatronRoleConfig):
        return megatron_role(
            facts,
            how,
            ParallelSizes.from_config(settings),
            ranks=ranks,
            pp_rank=job.pp_rank,
            head=head,
            trained=trained,
            fused=job.device == "cuda",
            lora=lora,
        )
    return FsdpRole(
        fp.decoder_of(facts, head=head),
        how,
        ranks=settings.fsdp_size if settings.fsdp_size > 0 else ranks,
        master=width_of(settings.model_dtype, job.device),
        trained=trained,
        lm=lm,
        on_host=settings.offload_policy and job.device == "cuda",
        lora_rank=lora.rank if lora is not None else 0,
    )


def _leaving(settings: FSDPConfig | MegatronConfig) -> frozenset[str]:
    """Owners that are offloaded; Megatron's optimizer has the masters."""
    optimizer = [OPTIMIZER, MASTERS] * settings.optimizer_offload
    grads = [GRADIENTS] * (isinstance(settings, MegatronConfig) and settings.grad_offload)
    return frozenset([PARAMETERS] * settings.param_offload + optimizer + grads)
