"""The memory planner: bytes of every stage of a PPO run on one device, by owner, from its configuration alone.

`plan_memory` is a pure function of the configuration, the models' config.json and the lengths of rows. What is counted
is what torch allocates; the CUDA context, NCCL's buffers and unused room of the allocator come on top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlsys.config import PPOConfig, plan_batches
from rlsys.config.checks.batches import sequence_ranks
from rlsys.config.checks.files import model_facts
from rlsys.config.engines import rollout_backend
from rlsys.config.plan import BatchPlan, RolePlan
from rlsys.config.schema.megatron import MegatronConfig, MegatronRoleConfig
from rlsys.config.schema.model import FSDPConfig, ModelConfig, OptimConfig, ShardConfig
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
    MegatronRole,
    Pass,
    Role,
    largest_pass,
    megatron_role,
    together,
)
from rlsys.types import EXPORT_FILE_BYTES

if TYPE_CHECKING:
    from rlsys.models.lora import LoraSettings

ROLLOUT_WEIGHTS, CACHE, DRAWING, STAGING = "rollout weights", "cache", "drawing", "staging"
RESIDENT = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER, ROLLOUT_WEIGHTS)
CHECKSUM_WORDS_BYTES = 64 << 20
"""What the checksum of a tensor takes beside a copy of it on a GPU (`rlsys.weights.checksum`)."""
ORDER = (
    *("start", "rollout", "old_log_prob", "ref", "teacher", "reward_model", "values"),
    *("update_critic", "update_actor", "update_weights", "save_checkpoint"),
)
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
    def longest(cls, cfg: PPOConfig) -> "Lengths":
        """Every row as long as it may be."""
        prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
        return cls(prompt, response, prompt, response)


@dataclass(frozen=True)
class PlanInputs:
    """What planning reads: the configuration, its batch plan, lengths, the device and the rank's pipeline stage."""

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


@dataclass(frozen=True)
class Stage:
    """A stage of a step and its bytes at their highest, by owner."""

    name: str
    bytes: Bytes

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def sum_of(self, *owners: str) -> int:
        return sum(self.bytes.get(owner, 0) for owner in owners)


@dataclass(frozen=True)
class MemoryPlan:
    """Stages of a training device and, where the rollout has devices of its own, of one of those."""

    train: tuple[Stage, ...]
    rollout: tuple[Stage, ...] = ()


def plan_memory(
    cfg: PPOConfig,
    actor: Facts,
    *,
    critic: Facts | None = None,
    reward_model: Facts | None = None,
    lengths: Lengths | None = None,
    device: Device = "cuda",
    device_bytes: int = 141 << 30,
) -> MemoryPlan:
    """The memory of every stage; `actor`, `critic` and `reward_model` are the models' config.json.

    Of pipeline stages the one that needs most is returned. vLLM takes its share of `device_bytes`, SGLang of what the
    actor leaves of them. ConfigError for a model without a table.
    """
    policy, plan, given = cfg.actor_rollout_ref.actor, plan_batches(cfg), lengths or Lengths.longest(cfg)
    stages = policy.megatron.pipeline_model_parallel_size if policy.strategy == "megatron" else 1
    here = plan.pools.colocated and not plan.pools.external
    by_stage = []
    for pp_rank in range(stages):
        job = PlanInputs(cfg, plan, given, device, pp_rank)
        roles = device_roles(job, actor, critic or actor, reward_model)
        engine = _engine(job, actor, device_bytes, roles[0].role.held()) if here else {}
        by_stage.append(_training_stages(job, actor, roles, engine))
    train = max(by_stage, key=lambda stages: max(stage.total for stage in stages))
    if plan.pools.colocated or plan.pools.external:
        return MemoryPlan(train)
    return MemoryPlan(train, _rollout_stages(_engine(PlanInputs(cfg, plan, given, device, 0), actor, device_bytes, {})))


def _training_stages(job: PlanInputs, facts: Facts, roles: list[DeviceRole], engine: Bytes) -> tuple[Stage, ...]:
    """`engine` is the rollout's where it lives here: on CUDA it sleeps while roles run, unless it keeps its memory."""
    rollout = job.cfg.actor_rollout_ref.rollout
    cache_share_of = rollout_backend(rollout.name).cache_share_of
    keeps = job.device == "cuda" and not rollout.free_cache_engine and cache_share_of is not None
    weights = engine if keeps else _only(engine, ROLLOUT_WEIGHTS)
    beside = {} if job.device == "cuda" and rollout.free_cache_engine else weights
    first = engine if cache_share_of == "device" else weights
    waiting = [role.waiting() for role in roles]
    stages = [Stage("start", together([*(role.role.held() for role in roles), first]))]
    if engine:
        stages.append(Stage("rollout", together([*waiting, engine])))
    for number, role in enumerate(roles):
        others = [left for at, left in enumerate(waiting) if at != number]
        for name, trains, size in role.stages:
            passing = role.role.training(size) if trains else role.role.scoring(size)
            stages.append(Stage(name, together([*others, role.role.held(), passing, beside])))
    synced = together([roles[0].waiting(but=frozenset([PARAMETERS])), *waiting[1:], weights])
    stages.append(Stage("update_weights", together([synced, {STAGING: _staging(job, facts, roles[0])}])))
    stages.append(Stage("save_checkpoint", together([synced, {STAGING: _export(job, facts)}])))
    return tuple(sorted(stages, key=lambda stage: ORDER.index(stage.name)))


def _rollout_stages(engine: Bytes) -> tuple[Stage, ...]:
    """A device that only generates."""
    weights = _only(engine, ROLLOUT_WEIGHTS)
    pushed = together([weights, {STAGING: CHECKSUM_WORDS_BYTES}])
    return Stage("start", weights), Stage("rollout", engine), Stage("update_weights", pushed)


def _only(engine: Bytes, owner: str) -> Bytes:
    return {owner: engine[owner]} if owner in engine else {}


def _engine(job: PlanInputs, facts: Facts, device_bytes: int, beside: Bytes) -> Bytes:
    """The rollout's engine while it generates, started where `beside` was already."""
    rollout, d = job.cfg.actor_rollout_ref.rollout, fp.decoder_of(facts)
    c = width_of(rollout.dtype, job.device)
    weights = c * d.parameters // rollout.tensor_model_parallel_size
    if (cache_share_of := rollout_backend(rollout.name).cache_share_of) is not None:
        there = device_bytes - (sum(beside.values()) if cache_share_of == "free" else 0)
        share = int(there * rollout.gpu_memory_utilization) - weights
        return {ROLLOUT_WEIGHTS: weights, CACHE: max(0, share) if job.device == "cuda" else rollout.kv_cache_gib << 30}
    rows = min(rollout.max_num_seqs, -(-job.cfg.data.gen_batch_size * rollout.n // job.plan.pools.rollout_ranks))
    prompts = min(-(-rows // rollout.n) * job.lengths.prompt, rollout.max_num_batched_tokens)
    reading = fp.layer_passing_bytes(d, prompts, c=c, backward=False)
    columns = fp.cache_columns(job.lengths.prompt, job.lengths.response)
    return {
        ROLLOUT_WEIGHTS: weights,
        CACHE: fp.cache_bytes(d, rows, columns, c=c),
        DRAWING: max(reading, fp.drawing_bytes(d, rows, c=c)),
    }


def _staging(job: PlanInputs, facts: Facts, actor: DeviceRole) -> int:
    """What a push takes beside both sides: copies for checksums, merged adapters, buckets of the gathering way."""
    role, engine = actor.role, job.cfg.actor_rollout_ref.rollout.checkpoint_engine
    staging = 2 * fp.decoder_of(facts).largest + CHECKSUM_WORDS_BYTES if job.device == "cuda" else 0
    if isinstance(role, FsdpRole) and role.lora_rank:
        staging += role.master * role.model.parameters // role.ranks
    if isinstance(role, MegatronRole) and role.adapters:
        staging += role.how.c * role.held_here.parameters
    if engine.backend == "gather":
        staging += min(engine.update_weights_bucket_megabytes << 20, fp.WIDE * fp.decoder_of(facts).parameters)
    return staging


def _export(job: PlanInputs, facts: Facts) -> int:
    """A Hugging Face export gathers whole tensors, a file of them at a time; other checkpoints take nothing."""
    actor, d = job.cfg.actor_rollout_ref.actor, fp.decoder_of(facts)
    if "hf_model" not in actor.checkpoint.save_contents:
        return 0
    dtype = actor.megatron.dtype if actor.strategy == "megatron" else actor.fsdp_config.model_dtype
    width = width_of(dtype, job.device)
    return min(EXPORT_FILE_BYTES, width * d.parameters) + width * d.largest


def device_roles(job: PlanInputs, actor: Facts, critic: Facts, reward_model: Facts | None) -> list[DeviceRole]:
    """All roles of a training device, the actor first."""
    roles = [_actor(job, actor), *_reference(job, actor)]
    if job.plan.critic is not None:
        roles.append(_critic(job, job.plan.critic, critic))
    if reward_model is not None and not job.plan.pools.reward_model_ranks:
        roles.append(_reward_model(job, reward_model))
    return roles


def width_of(dtype: str, device: Device) -> int:
    """Bytes of an element."""
    narrow = dtype in ("bfloat16", "float16") or (dtype == "auto" and device == "cuda")
    return 2 if narrow else fp.WIDE


def _actor(job: PlanInputs, facts: Facts) -> DeviceRole:
    policy, rollout = job.cfg.actor_rollout_ref, job.cfg.actor_rollout_ref.rollout
    actor, model = policy.actor, policy.model
    sharing = sequence_ranks(actor)
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
    if job.plan.use_reference and not policy.has_reference_weights:
        stages.append(("ref", False, scored))
    settings = actor.megatron if actor.strategy == "megatron" else actor.fsdp_config
    role = _role(
        job,
        facts,
        settings,
        recompute=model.enable_gradient_checkpointing,
        entropy=actor.entropy_coeff != 0 or actor.calculate_entropy,
        lora=_lora(model),
        optim=actor.optim,
    )
    return DeviceRole(role, _leaving(settings), tuple(stages))


def _reference(job: PlanInputs, facts: Facts) -> Iterator[DeviceRole]:
    policy, ref = job.cfg.actor_rollout_ref, job.cfg.actor_rollout_ref.ref
    models = [("ref", policy.reference_model)] if job.plan.use_reference and policy.has_reference_weights else []
    if not job.plan.pools.teacher_ranks:
        models += [("teacher", model) for model in job.cfg.teachers.values()]
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
    for name, model in models:
        own = facts if model is policy.model else model_facts(Path(model.path or "")) or facts
        yield DeviceRole(_role(job, own, settings, trained=False), leaves, ((name, False, scored),))


def _critic(job: PlanInputs, plan: RolePlan, facts: Facts) -> DeviceRole:
    critic = job.cfg.critic
    settings = critic.megatron if critic.strategy == "megatron" else critic.fsdp
    scored = _pass(
        job,
        job.plan.samples // plan.dp_size,
        rows=critic.forward_micro_batch_size_per_gpu,
        max_tokens=critic.forward_max_token_len_per_gpu if critic.use_dynamic_bsz else None,
        sharing=sequence_ranks(critic),
    )
    recompute = critic.model.enable_gradient_checkpointing
    lora = _lora(critic.model)
    role = _role(job, facts, settings, lm=False, recompute=recompute, lora=lora, optim=critic.optim)
    trained = _training(job, plan, sequence_ranks(critic))
    return DeviceRole(role, _leaving(settings), (("values", False, scored), ("update_critic", True, trained)))


def _reward_model(job: PlanInputs, facts: Facts) -> DeviceRole:
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


def _pass(job: PlanInputs, num_rows: int, *, rows: int | None, max_tokens: int | None, sharing: int) -> Pass:
    prompt, response = job.lengths.mean_prompt, job.lengths.mean_response
    return largest_pass(num_rows, rows=rows, max_tokens=max_tokens, prompt=prompt, response=response, sharing=sharing)


def _training(job: PlanInputs, plan: RolePlan, sharing: int) -> Pass:
    rows = plan.micro_batch_samples
    return _pass(job, plan.rank_samples, rows=rows, max_tokens=plan.max_tokens, sharing=sharing)


def _role(
    job: PlanInputs,
    facts: Facts,
    settings: ShardConfig | MegatronRoleConfig,
    *,
    trained: bool = True,
    lm: bool = True,
    recompute: bool = False,
    entropy: bool = False,
    lora: "LoraSettings | None" = None,
    optim: OptimConfig = OptimConfig(),  # noqa: B008
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
        ranks=min(settings.fsdp_size, ranks) if settings.fsdp_size > 0 else ranks,
        master=width_of(settings.model_dtype, job.device),
        trained=trained,
        lm=lm,
        on_host=settings.offload_policy and job.device == "cuda",
        lora_rank=lora.rank if lora is not None else 0,
        optim=optim,
    )


def _leaving(settings: FSDPConfig | MegatronConfig) -> frozenset[str]:
    """Owners that are offloaded; Megatron's optimizer has the masters."""
    optimizer = [OPTIMIZER, MASTERS] * settings.optimizer_offload
    grads = [GRADIENTS] * (isinstance(settings, MegatronConfig) and settings.grad_offload)
    return frozenset([PARAMETERS] * settings.param_offload + optimizer + grads)


def _lora(model: ModelConfig) -> "LoraSettings | None":
    """The adapters of a trained role; only with some does planning import torch."""
    if not model.has_adapters:
        return None
    from rlsys.models.lora import lora_settings

    return lora_settings(model, seed=0)
