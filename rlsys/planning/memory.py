"""The memory planner: bytes of every stage of a PPO run on one device, by owner, from its configuration alone.

`plan_memory` is a pure function of the configuration, the models' config.json and the lengths of rows. What is counted
is what torch allocates; the CUDA context, NCCL's buffers and unused room of the allocator come on top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rlsys.config import PPOConfig, plan_batches
from rlsys.config.checks.batches import sequence_ranks
from rlsys.config.checks.files import model_facts
from rlsys.config.engines import rollout_backend
from rlsys.config.plan import BatchPlan, RolePlan
from rlsys.config.schema.megatron import MegatronConfig, MegatronRoleConfig
from rlsys.config.schema.model import FSDPConfig, ModelConfig, OptimConfig, ShardConfig
from rlsys.config.schema.types import MicroBatches
from rlsys.models.megatron.family import Head
from rlsys.models.megatron.parallel import ParallelSizes, with_recompute
from rlsys.planning import footprint as fp
from rlsys.planning import roles as ro
from rlsys.planning.image_encoder import plan_facts
from rlsys.types import EXPORT_FILE_BYTES, LARGEST_IMAGE

if TYPE_CHECKING:
    from rlsys.models.lora import LoraSettings

ROLLOUT_WEIGHTS, CACHE, DRAWING, STAGING = "rollout weights", "cache", "drawing", "staging"
FP8_WEIGHTS = "fp8 weights"
"""What a trainer rank keeps between pushes to engines that serve FP8 (rlsys/weights/fp8.py)."""
CHECKSUM_WORDS_BYTES = 64 << 20
"""What the checksum of a tensor takes beside a copy of it on a GPU (`rlsys.weights.checksum`)."""
ORDER = (
    *("start", "rollout", "old_log_prob", "ref", "teacher", "reward_model", "values"),
    *("update_critic", "update_actor", "update_weights", "save_checkpoint"),
)
RESERVED, RESERVED_SHARE = {"cuda": 3 << 30, "cpu": 0}, 0.08
"""For CUDA contexts, NCCL, a sleeping engine and fragments."""
LEARNED_COPIES = 6
"""Of a rank's part of a tensor: what it held, a load to compare with, and the numbers of its elements."""
RELAYED_BYTES = 256 << 20
"""What a rank stages of a push between hosts (rlsys/weights/executors/relay.py)."""
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
class Machine:
    """A device of the job, and the config.json of its models; without the actor's nothing can be planned."""

    device: Device
    device_bytes: int
    actor: Facts
    critic: Facts | None = None
    reward_model: Facts | None = None

    @property
    def room_bytes(self) -> int:
        """What tensors may take."""
        return int(self.device_bytes * (1 - RESERVED_SHARE)) - RESERVED[self.device]


@dataclass(frozen=True)
class PlanInputs:
    """What planning reads: the configuration, a device with the models, lengths, and the rank's pipeline stage."""

    cfg: PPOConfig
    machine: Machine
    lengths: Lengths
    stage: tuple[int, int] = (0, 1)
    """The planned stage and their number in the role that has most; other roles have a smaller one on its ranks."""

    @cached_property
    def plan(self) -> BatchPlan:
        return plan_batches(self.cfg)

    @cached_property
    def image_tokens(self) -> int:
        """Those of a prompt at most: all that it has, or as many images as it may have, of the largest size."""
        of = fp.encoder_of(self.machine.actor)
        largest = self.cfg.data.mm_processor_kwargs.get("max_pixels", of.pixels * LARGEST_IMAGE) // max(of.pixels, 1)
        prompt, limit = self.lengths.mean_prompt, self.cfg.actor_rollout_ref.rollout.limit_images
        return min(prompt, prompt if limit is None else limit * largest) if of.pixels else 0


@dataclass(frozen=True)
class DeviceRole:
    """A role, the owners that leave the device while others run, and its stages: (name, whether it trains, pass)."""

    role: ro.Role
    leaves: frozenset[str]
    stages: tuple[tuple[str, bool, ro.Pass], ...]

    def waiting(self, *, but: frozenset[str] = frozenset()) -> ro.Bytes:
        """What is on the device while another role runs."""
        return {owner: size for owner, size in self.role.held().items() if owner not in self.leaves - but}


@dataclass(frozen=True)
class Stage:
    """A stage of a step and its bytes at their highest, by owner."""

    name: str
    bytes: ro.Bytes

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Stages of a training device and, where the rollout has devices of its own, of one of those."""

    train: tuple[Stage, ...]
    rollout: tuple[Stage, ...] = ()


def plan_memory(cfg: PPOConfig, machine: Machine, *, lengths: Lengths | None = None) -> MemoryPlan:
    """The memory of every stage, by default of rows as long as they may be.

    Of pipeline stages the one that needs most is returned. vLLM and a SGLang of one process take their share
    of the device, ranks of a larger SGLang of what is free when it starts. ConfigError for a model without a table.
    """
    job = PlanInputs(cfg, machine, lengths or Lengths.longest(cfg))
    pools, by_stage = job.plan.pools, list[tuple[Stage, ...]]()
    stages = max(getattr(one.role, "sizes", ParallelSizes()).pp for one in device_roles(job))
    for at_stage in (replace(job, stage=(stage, stages)) for stage in range(stages)):
        roles = device_roles(at_stage)
        engine = _engine(at_stage, ro.together([role.waiting() for role in roles])) if pools.colocated else {}
        by_stage.append(_training_stages(at_stage, roles, engine))
    train = max(by_stage, key=lambda stages: max(stage.total for stage in stages))
    return MemoryPlan(train, () if pools.colocated or pools.external else _rollout_stages(_engine(job, {})))


def _training_stages(job: PlanInputs, roles: list[DeviceRole], engine: ro.Bytes) -> tuple[Stage, ...]:
    """The stages of a device that trains, in their order.

    `engine` is what the rollout's engine takes where it is on this device, else empty. On CUDA it sleeps while roles
    run, unless it keeps its memory.
    """
    rollout = job.cfg.actor_rollout_ref.rollout
    cache_share_of = rollout_backend(rollout.name).cache_share_of
    keeps = job.machine.device == "cuda" and not rollout.free_cache_engine and cache_share_of is not None
    weights = engine if keeps else {ROLLOUT_WEIGHTS: engine.get(ROLLOUT_WEIGHTS, 0)}  # during a push, cache asleep
    beside = {} if job.machine.device == "cuda" and rollout.free_cache_engine else weights
    first = engine if cache_share_of == "device" else weights  # what the engine has as soon as it is started
    waiting = [role.waiting() for role in roles]
    # the engine starts beside all roles; before that these are loaded one after another, and all teachers at once
    starts = [ro.together([*waiting, first, {STAGING: _learning(job) if engine and cache_share_of is not None else 0}])]
    for at, role in enumerate(roles, 1):
        loading = [one.role.held() if one.stages[0][0] == role.stages[0][0] else one.waiting() for one in roles[:at]]
        starts.append(ro.together(loading))
    stages = [Stage("start", max(starts, key=lambda owners: sum(owners.values())))]
    if engine:
        stages.append(Stage("rollout", ro.together([*waiting, engine])))
    for number, role in enumerate(roles):
        others = [left for at, left in enumerate(waiting) if at != number]
        for name, trains, size in role.stages:
            passing = role.role.training(size) if trains else role.role.scoring(size)
            stages.append(Stage(name, ro.together([*others, role.role.held(), passing, beside])))
    pushed, saved = roles[0].waiting(but=frozenset([ro.PARAMETERS])), roles[0].role.held()
    last = [("update_weights", pushed, _staging(job, roles[0].role)), ("save_checkpoint", saved, _export(job))]
    stages += [Stage(name, ro.together([own, *waiting[1:], weights, {STAGING: size}])) for name, own, size in last]
    if rollout.quantization:
        kept = {FP8_WEIGHTS: _float8_bytes(roles[0].role, job)}
        stages[1:] = [Stage(stage.name, ro.together([stage.bytes, kept])) for stage in stages[1:]]
    return tuple(sorted(stages, key=lambda stage: ORDER.index(stage.name)))


def _float8_bytes(role: ro.Role, job: PlanInputs) -> int:
    """Of the matrices of a trainer rank; all scales are on every rank."""
    whole = role.model.in_dense + role.model.in_experts
    if isinstance(role, ro.FsdpRole):
        held = whole // role.ranks
    else:
        here = role.held_here
        held = role.model.in_dense * here.num_layers // (role.model.num_layers * role.sizes.tp) + here.experts
    return held + fp.scale_bytes(whole, job.machine.actor, job.cfg.actor_rollout_ref.rollout)


def _rollout_stages(engine: ro.Bytes) -> tuple[Stage, ...]:
    """A device that only generates."""
    weights = {ROLLOUT_WEIGHTS: engine[ROLLOUT_WEIGHTS]}
    pushed = Stage("update_weights", weights | {STAGING: CHECKSUM_WORDS_BYTES})
    return Stage("start", weights), Stage("rollout", engine), pushed


def _engine(job: PlanInputs, beside: ro.Bytes) -> ro.Bytes:
    """The rollout's engine while it generates, started where `beside` was already."""
    rollout, d = job.cfg.actor_rollout_ref.rollout, fp.decoder_of(job.machine.actor)
    c = width_of(rollout.dtype, job.machine.device)
    weights = fp.served_bytes(job.machine.actor, rollout, c=c)
    if rollout_backend(rollout.name).cache_share_of is not None:
        cache = max(0, fp.engine_bytes(rollout, job.machine.device_bytes, sum(beside.values())) - weights)
        return {ROLLOUT_WEIGHTS: weights, CACHE: cache if job.machine.device == "cuda" else rollout.kv_cache_gib << 30}
    rows = min(rollout.max_num_seqs, -(-job.cfg.data.gen_batch_size * rollout.n // job.plan.pools.rollout_ranks))
    prompts = min(-(-rows // rollout.n) * job.lengths.prompt, rollout.max_num_batched_tokens)
    images, encoding = fp.image_bytes(d, min(prompts, -(-rows // rollout.n) * job.image_tokens), c=c, trained=False)
    reading = images + max(encoding, fp.layer_passing_bytes(d, prompts, c=c, backward=False))
    return {
        ROLLOUT_WEIGHTS: weights,
        CACHE: fp.cache_bytes(d, rows, fp.cache_columns(job.lengths.prompt, job.lengths.response), c=c),
        DRAWING: max(reading, fp.drawing_bytes(d, rows, c=c)),
    }


def _learning(job: PlanInputs) -> int:
    """What learning where an engine has its largest tensor takes beyond what is reserved: nothing is in pieces yet."""
    size = 2 * fp.decoder_of(job.machine.actor).largest if job.machine.device == "cuda" else 0
    taken = size + LEARNED_COPIES * size // job.cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    return max(0, taken - (job.machine.device_bytes - job.machine.room_bytes))


def _staging(job: PlanInputs, role: ro.Role) -> int:
    """What a push takes beside both sides: copies for checksums, merged adapters, buckets of the gathering way."""
    d, engine = fp.decoder_of(job.machine.actor), job.cfg.actor_rollout_ref.rollout.checkpoint_engine
    staging = 2 * d.largest + CHECKSUM_WORDS_BYTES if job.machine.device == "cuda" else 0
    if isinstance(role, ro.FsdpRole) and role.lora_rank:
        staging += role.master * role.model.parameters // role.ranks
    if isinstance(role, ro.MegatronRole) and role.adapters:
        staging += role.how.c * role.held_here.parameters
    if engine.backend == "gather":
        staging += min(engine.update_weights_bucket_megabytes << 20, fp.WIDE * d.parameters)
    if job.plan.pools.colocated and job.cfg.trainer.nnodes > 1:
        staging += min(engine.update_weights_bucket_megabytes << 20, RELAYED_BYTES)
    return staging


def _export(job: PlanInputs) -> int:
    """A Hugging Face export gathers whole tensors, a file of them at a time; other checkpoints take nothing."""
    actor, d = job.cfg.actor_rollout_ref.actor, fp.decoder_of(job.machine.actor)
    if "hf_model" not in actor.checkpoint.save_contents:
        return 0
    dtype = actor.megatron.dtype if actor.strategy == "megatron" else actor.fsdp_config.model_dtype
    width = width_of(dtype, job.machine.device)
    return min(EXPORT_FILE_BYTES, width * d.parameters) + width * d.largest


def device_roles(job: PlanInputs) -> list[DeviceRole]:
    """All roles of a training device, in the order in which they start."""
    roles = [_actor(job), *([] if job.plan.critic is None else [_critic(job, job.plan.critic)]), *_reference(job)]
    if job.machine.reward_model is not None and not job.plan.pools.reward_model_ranks:
        roles.append(_reward_model(job, job.machine.reward_model))
    return roles


def width_of(dtype: str, device: Device) -> int:
    """Bytes of an element."""
    return 2 if dtype in ("bfloat16", "float16") or (dtype == "auto" and device == "cuda") else fp.WIDE


def _actor(job: PlanInputs) -> DeviceRole:
    policy = job.cfg.actor_rollout_ref
    actor, sharing = policy.actor, sequence_ranks(policy.actor)
    scored = _pass(job, job.plan.samples // job.plan.actor.dp_size, policy.rollout.scoring, sharing)
    stages = [("update_actor", True, _pass(job, job.plan.actor.rank_samples, job.plan.actor.size, sharing))]
    if not job.cfg.algorithm.rollout_correction.bypass_mode:
        stages.append(("old_log_prob", False, scored))
    if job.cfg.use_reference and not policy.has_reference_weights:
        stages.append(("ref", False, scored))
    entropy = actor.entropy_coeff != 0 or actor.calculate_entropy
    role = _role(job, job.machine.actor, actor.shard, policy.model, entropy=entropy, optim=actor.optim)
    return DeviceRole(role, _leaving(actor.shard), tuple(stages))


def _reference(job: PlanInputs) -> Iterator[DeviceRole]:
    policy, settings = job.cfg.actor_rollout_ref, job.cfg.actor_rollout_ref.ref_shard
    models = [("ref", policy.reference_model)] if job.cfg.use_reference and policy.has_reference_weights else []
    if not job.plan.pools.teacher_ranks:
        models += [("teacher", model) for model in job.cfg.teachers.values()]
    is_megatron = isinstance(settings, MegatronRoleConfig)
    sharing = settings.context_parallel_size if is_megatron else policy.ref.ulysses_sequence_parallel_size
    scored = _pass(job, job.plan.samples // job.plan.actor.dp_size, policy.ref.scoring, sharing)
    leaves = frozenset([ro.PARAMETERS] if settings.param_offload else [])
    for name, model in models:
        facts = job.machine.actor
        own = facts if model is policy.model else plan_facts(model_facts(model.path)) or facts
        yield DeviceRole(_role(job, own, settings), leaves, ((name, False, scored),))


def _critic(job: PlanInputs, plan: RolePlan) -> DeviceRole:
    critic, facts, sharing = job.cfg.critic, job.machine.critic or job.machine.actor, sequence_ranks(job.cfg.critic)
    role = _role(job, facts, critic.shard, critic.model, head="value", optim=critic.optim)
    values = ("values", False, _pass(job, job.plan.samples // plan.dp_size, critic.scoring, sharing))
    update = ("update_critic", True, _pass(job, plan.rank_samples, plan.size, sharing))
    return DeviceRole(role, _leaving(critic.shard), (values, update))


def _reward_model(job: PlanInputs, facts: Facts) -> DeviceRole:
    grader = job.cfg.reward.reward_model
    scored = largest_pass(job.lengths, job.plan.samples // job.plan.pools.train_ranks, grader.scoring)
    role = _role(job, facts, ShardConfig(dtype=grader.dtype), head="value")
    return DeviceRole(role, frozenset(), (("reward_model", False, scored),))


def largest_pass(lengths: Lengths, num_rows: int, size: MicroBatches, sharing: int = 1, images: int = 0) -> ro.Pass:
    """The largest micro-batch of rows of mean length with tokens of `images`, balanced; `sharing` ranks share it."""
    row, rows = lengths.mean_prompt + lengths.mean_response, size.rows
    if size.max_tokens is not None:
        rows = -(-num_rows // -(-num_rows // max(1, size.max_tokens * sharing // row)))
    micro = max(1, min(num_rows, rows or num_rows))
    responses = micro * lengths.mean_response // sharing
    return ro.Pass(micro * row // sharing, responses, -(-num_rows // micro), micro * images)


def _pass(job: PlanInputs, num_rows: int, size: MicroBatches, sharing: int) -> ro.Pass:
    return largest_pass(job.lengths, num_rows, size, sharing, job.image_tokens)


def _role(
    job: PlanInputs,
    facts: Facts,
    settings: ShardConfig | MegatronRoleConfig,
    trained: ModelConfig | None = None,
    *,
    head: Head = "lm",
    entropy: bool = False,
    optim: OptimConfig = OptimConfig(),  # noqa: B008
) -> ro.Role:
    """`trained` is the model of a trained role; a frozen one has none."""
    ranks, recompute = job.plan.pools.train_ranks, trained is not None and trained.enable_gradient_checkpointing
    device, lora = job.machine.device, _lora(trained)
    how = ro.Computing(width_of(settings.dtype, device), device, recompute, entropy)
    if isinstance(settings, MegatronRoleConfig):
        sizes, fused = ParallelSizes.from_config(settings), device == "cuda"
        moments = 0 if optim.override_optimizer_config.optimizer_cpu_offload else 2
        pp_rank = job.stage[0] * sizes.pp // job.stage[1]
        again = with_recompute(settings.override_transformer_config, layers=recompute)
        how = replace(how, recompute=again.get("recompute_granularity") == "full")
        return ro.MegatronRole(
            facts, how, sizes, ranks, pp_rank, head, trained is not None, fused, lora, moments, again
        )
    return ro.FsdpRole(
        fp.decoder_of(facts, head=head),
        replace(how, compiled=settings.use_torch_compile),
        ranks=min(settings.fsdp_size, ranks) if settings.fsdp_size > 0 else ranks,
        master=width_of(settings.model_dtype, device),
        trained=trained is not None,
        head=head,
        on_host=settings.offload_policy and device == "cuda",
        lora_rank=lora.rank if lora is not None else 0,
        optim=optim,
        tp=settings.tensor_parallel_size,
        reshards=settings.reshard_after_forward,
    )


def _leaving(settings: FSDPConfig | MegatronConfig) -> frozenset[str]:
    """Owners that are offloaded; Megatron's optimizer has the masters."""
    parameters = {ro.PARAMETERS} if settings.param_offload else set()
    optimizer = {ro.OPTIMIZER, ro.MASTERS} if settings.optimizer_offload else set()
    grads = {ro.GRADIENTS} if isinstance(settings, MegatronConfig) and settings.grad_offload else set()
    return frozenset(parameters | optimizer | grads)


def _lora(trained: ModelConfig | None) -> "LoraSettings | None":
    """The adapters of a trained role; only with some does planning import torch."""
    if trained is None or not trained.has_adapters:
        return None
    from rlsys.models.lora import lora_settings

    return lora_settings(trained, seed=0)
