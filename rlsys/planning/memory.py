"""The memory planner: bytes of every stage of a PPO run on one device, by owner, from its configuration alone.

`plan_memory` is a pure function of the configuration, the models' config.json and the lengths of rows. What is counted
is what torch allocates; the CUDA context, NCCL's buffers and unused room of the allocator come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config import PPOConfig, plan_batches
from rlsys.engines.export import FILE_BYTES
from rlsys.planning import footprint as fp
from rlsys.planning.roles import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, Bytes, FsdpRole, MegatronRole, together
from rlsys.planning.sizes import Device, DeviceRole, Facts, Job, Lengths, device_roles, width_of

ROLLOUT_WEIGHTS, CACHE, DRAWING, STAGING = "rollout weights", "cache", "drawing", "staging"
RESIDENT = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER, ROLLOUT_WEIGHTS)
CHECKSUM_WORDS_BYTES = 64 << 20
"""What the checksum of a tensor takes beside a copy of it on a GPU (`rlsys.weights.checksum`)."""
ORDER = (
    *("start", "rollout", "old_log_prob", "ref", "reward_model", "values"),
    *("update_critic", "update_actor", "update_weights", "save_checkpoint"),
)


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

    Of pipeline stages the one that needs most is told. vLLM takes its share of `device_bytes`, SGLang of what the
    actor leaves of them. ConfigError for a model without a table.
    """
    policy, plan, given = cfg.actor_rollout_ref.actor, plan_batches(cfg), lengths or Lengths.longest(cfg)
    stages = policy.megatron.pipeline_model_parallel_size if policy.strategy == "megatron" else 1
    here = plan.pools.colocated and not plan.pools.external
    found = []
    for pp_rank in range(stages):
        job = Job(cfg, plan, given, device, pp_rank)
        roles = device_roles(job, actor, critic or actor, reward_model)
        engine = _engine(job, actor, device_bytes, roles[0].role.held()) if here else {}
        found.append(_training_stages(job, actor, roles, engine))
    train = max(found, key=lambda stages: max(stage.total for stage in stages))
    if plan.pools.colocated or plan.pools.external:
        return MemoryPlan(train)
    return MemoryPlan(train, _rollout_stages(_engine(Job(cfg, plan, given, device, 0), actor, device_bytes, {})))


def _training_stages(job: Job, facts: Facts, roles: list[DeviceRole], engine: Bytes) -> tuple[Stage, ...]:
    """`engine` is the rollout's where it lives here: on CUDA it sleeps while roles run, unless it keeps its memory."""
    rollout = job.cfg.actor_rollout_ref.rollout
    keeps = job.device == "cuda" and not rollout.free_cache_engine and rollout.name != "hf"
    weights = engine if keeps else _only(engine, ROLLOUT_WEIGHTS)
    beside = {} if job.device == "cuda" and rollout.free_cache_engine else weights
    first = engine if rollout.name == "vllm" else weights
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


def _only(found: Bytes, owner: str) -> Bytes:
    return {owner: found[owner]} if owner in found else {}


def _engine(job: Job, facts: Facts, device_bytes: int, beside: Bytes) -> Bytes:
    """The rollout's engine while it generates, started where `beside` was already."""
    rollout, d = job.cfg.actor_rollout_ref.rollout, fp.decoder_of(facts)
    c = width_of(rollout.dtype, job.device)
    weights = c * d.parameters // rollout.tensor_model_parallel_size
    if rollout.name != "hf":
        there = device_bytes - (sum(beside.values()) if rollout.name == "sglang" else 0)
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


def _staging(job: Job, facts: Facts, actor: DeviceRole) -> int:
    """What a push takes beside both sides: copies for checksums, merged adapters, buckets of the gathering way."""
    role, engine = actor.role, job.cfg.actor_rollout_ref.rollout.checkpoint_engine
    found = 2 * fp.decoder_of(facts).largest + CHECKSUM_WORDS_BYTES if job.device == "cuda" else 0
    if isinstance(role, FsdpRole) and role.lora_rank:
        found += role.master * role.model.parameters // role.ranks
    if isinstance(role, MegatronRole) and role.adapters:
        found += role.how.c * role.held_here.parameters
    if engine.backend == "gather":
        found += min(engine.update_weights_bucket_megabytes << 20, fp.WIDE * fp.decoder_of(facts).parameters)
    return found


def _export(job: Job, facts: Facts) -> int:
    """A Hugging Face export gathers whole tensors, a file of them at a time; other checkpoints take nothing."""
    actor, d = job.cfg.actor_rollout_ref.actor, fp.decoder_of(facts)
    if "hf_model" not in actor.checkpoint.save_contents:
        return 0
    dtype = actor.megatron.dtype if actor.strategy == "megatron" else actor.fsdp_config.model_dtype
    width = width_of(dtype, job.device)
    return min(FILE_BYTES, width * d.parameters) + width * d.largest
