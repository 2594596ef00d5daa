"""Seconds of a step by phase, from a configuration, the models' config.json and a GPU's data sheet alone.

A roofline: matrix products, memory and links at a share of the data sheet's rates, and what the host needs to launch
them. The factors were fitted to the runs of docs/performance.md; scripts/bench/step_times.py prints how well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, hypot, inf
from statistics import NormalDist, mean

from rlsys.config import PPOConfig
from rlsys.config.checks.batches import sequence_ranks
from rlsys.config.engines import rollout_backend
from rlsys.planning import footprint as fp
from rlsys.planning.memory import DeviceRole, Lengths, Machine, PlanInputs, device_roles, width_of
from rlsys.planning.roles import OPTIMIZER, FsdpRole, MegatronRole, Pass, Role
from rlsys.utils.gpus import Gpu

MATMUL = 0.75
"""Share of the data sheet's FLOP/s that a layer's matrix products reach; an 8192 product alone reaches 0.79."""
ATTENTION = 0.35
"""The share that attention reaches, as FlashAttention-2 on an H100 (Shah et al. 2024, arXiv:2407.08608)."""
READS, LOGITS_READS = 6.3, 3
"""How often what a layer saves, and logits in float32, go over memory in a pass."""
OPTIMIZER_READS = 6
"""How often an optimizer step moves the bytes of its moments: those, masters and gradients, there and back."""
LAYER_S = {"fsdp": 1.9e-3, "compiled": 1.1e-3, "megatron": 1.3e-3}
"""Seconds in which the host launches a layer's forward pass; a backward pass counts as two."""
MEMORY, LINK, NETWORK = 0.87, 0.85, 0.8
"""Shares of the rates of memory and of NVLink, as plain copies reach them, and of the network, which is assumed."""
DECODE_S = {"vllm": (3.0e-3, 7e-6, 8e-6), "sglang": (5.1e-3, 0.6e-6, 0.0)}
"""What the host needs for a decode step, each answer in it and to schedule each, in part while the GPU computes."""
FP8_MATMUL = 1.25
"""How much faster the layers of a 7B are with weights in FP8, measured with 256 rows (data sheets say 2)."""
HF_LAYER_S = 1.5e-3
"""Seconds of a layer in a decode step of HFRollout."""
ALL_REDUCE_S, ALL_REDUCE_FAR_S = 15e-6, 60e-6
"""Of a few rows, inside a node and over the network; assumed."""
PUSH_S, CHECKSUM_RATE, PCIE_RATE = 0.055, 524e9, 40e9
SWITCH_S = {"vllm": 0.21, "sglang": 0.12}
"""For an engine beside the trainer to give its memory back and take it again: about as long for 135M as for 7B."""
CONTROLLER_ROW_S = 0.5e-3
"""For grading, advantages, metrics and batches."""
TAIL = 1 / 8
"""Answers that still run when fewer than this share does are the tail."""
QUANTILES = 64


@dataclass(frozen=True)
class GpuCluster:
    """GPUs of one kind, `node_size` of them in a node."""

    gpu: Gpu
    node_size: int

    def ring_s(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Each rank holds `num_bytes` after an all-gather, or before a reduce-scatter, over `ranks` that are `stride`
        apart; a node's adapters serve all of its ranks."""
        rate = LINK * self.gpu.peer_rate
        if ranks * stride > self.node_size:
            rate = min(rate, NETWORK * self.gpu.network_rate * max(1, self.node_size // stride))
        return num_bytes * (ranks - 1) / ranks / rate

    def all_to_all_s(self, num_bytes: float, ranks: int) -> float:
        """Each rank sends `num_bytes` in equal parts to `ranks`, itself among them; the slower link decides."""
        near = min(ranks, self.node_size)
        inside = num_bytes * (near - 1) / ranks / (LINK * self.gpu.peer_rate)
        return max(inside, num_bytes * (ranks - near) / ranks / (NETWORK * self.gpu.network_rate))


@dataclass(frozen=True)
class Phase:
    """A phase of a step and its seconds by cause."""

    name: str
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def plan_step(
    cfg: PPOConfig, machine: Machine, cluster: GpuCluster, *, lengths: Lengths | None = None, sigma: float = 0.0
) -> tuple[Phase, ...]:
    """The phases of a step; responses are lognormal with `sigma`, cut at the longest. ConfigError as of plan_memory.

    Adapters are taken to cost what full training does, and graders to be quick.
    """
    job = PlanInputs(cfg, machine, lengths or Lengths.longest(cfg))
    roles = device_roles(job)
    beside = sum(sum(one.waiting().values()) for one in roles) if job.plan.pools.colocated else 0
    rollout = () if job.plan.pools.external else (rollout_phase(job, cluster, sigma, beside),)
    return (*rollout, *training_phases(job, roles, cluster))


def training_phases(job: PlanInputs, roles: Sequence[DeviceRole], cluster: GpuCluster) -> Iterator[Phase]:
    """The phases of the ranks that train, where `roles` are, the weight push and the controller's part."""
    for one in roles:
        for name, trains, size in one.stages:
            trained = job.plan.critic if name == "update_critic" and job.plan.critic else job.plan.actor
            seconds = _passes(job, one.role, size, cluster, trains=trains)
            steps = trained.optimizer_steps if trains else 1
            away = sum(size for owner, size in one.role.held().items() if owner in one.leaves)
            offload = {"offload": 2 * away / PCIE_RATE}
            yield Phase(name, {cause: steps * one for cause, one in seconds.items()} | offload)
    yield Phase("update_weights", _push(job, cluster))
    rollout = job.cfg.actor_rollout_ref.rollout
    if job.plan.pools.colocated and rollout.free_cache_engine and rollout.name in SWITCH_S:
        yield Phase("switch", {"host": SWITCH_S[rollout.name]})
    yield Phase("controller", {"host": CONTROLLER_ROW_S * job.plan.samples})


def step_seconds(cfg: PPOConfig, phases: Sequence[Phase]) -> float:
    """Seconds of a whole step; where other devices generate ahead, of the side that takes longer."""
    rollout = sum(phase.total for phase in phases if phase.name == "rollout")
    others = sum(phase.total for phase in phases) - rollout
    return max(rollout, others) if cfg.trainer.max_staleness and cfg.trainer.rollout_workers else rollout + others


def _passes(job: PlanInputs, role: Role, size: Pass, cluster: GpuCluster, *, trains: bool) -> dict[str, float]:
    """All micro-batches of a rank, and with `trains` the reduction of gradients and the optimizer."""
    d, c, gpu, actor = role.model, role.how.c, cluster.gpu, job.cfg.actor_rollout_ref.actor
    if isinstance(role, MegatronRole):
        kind, tp, pp, vp = "megatron", role.sizes.tp, role.sizes.pp, role.sizes.vp
        parameters, layer_bytes = role.held_here.parameters, role.layer_saved_bytes(size)
    else:
        kind, tp, pp, vp = "compiled" if role.how.compiled else "fsdp", role.tp, 1, 1
        parameters = d.parameters / tp
        layer_bytes = fp.layer_saved_bytes(d, size.tokens, c=c, fused=role.how.compiled, tp=tp)
    is_lm, layers = role.head == "lm", d.num_layers / pp
    forwards = 1 + (trains and role.how.recompute)
    passes = forwards + 2 * trains  # a backward pass is as much work as two forward passes

    row = job.lengths.mean_prompt + job.lengths.mean_response
    blocks = 2.0 * size.tokens * d.active / (pp * tp)
    attention = 2.0 * size.tokens * (d.attended * (row + 1) / 2) / (pp * tp)
    head = 2.0 * size.responses * d.vocab * d.hidden / tp * is_lm
    products = blocks * passes + head * (4 if trains else 1)  # logits are always computed again
    is_fp8 = isinstance(role, MegatronRole) and role.trained and is_lm and actor.megatron.fp8
    compute = products / (MATMUL * (gpu.fp8_flops if is_fp8 else gpu.flops))
    compute += attention * (passes + trains / 2) / (ATTENTION * gpu.flops)

    saved = READS * (forwards + trains) * layers * layer_bytes
    logits = LOGITS_READS * (1 + trains) * fp.WIDE * size.responses * d.vocab / tp * is_lm
    weights = parameters * (c * passes + (c + 2 * fp.WIDE) * trains)  # gradients are added up in float32
    memory = (saved + logits + weights) / (MEMORY * gpu.memory_rate)

    if isinstance(role, MegatronRole):
        sent = sum(_exchanges(role, size, cluster, passes=passes, trains=trains))
    else:
        gathered = d.parameters * (c * (1 + (trains and role.reshards)) + role.master * trains) / tp
        sent = max(0.0, cluster.ring_s(gathered, role.ranks // tp, tp) - compute - memory)
        sent += d.num_layers * 4 * (forwards + trains) * cluster.ring_s(size.tokens * c * d.hidden, tp)
        heads = d.num_layers * 2 * size.tokens * c * (d.q + d.kv)
        sent += passes * cluster.all_to_all_s(heads, sequence_ranks(actor))

    busy, host = compute + memory + sent, LAYER_S[kind] * layers * passes
    lasts = hypot(busy, host)  # the longer of the two, and up to 1.4 times as long where neither hides the other
    times = {"compute": compute, "memory": memory, "communication": sent, "host": lasts - busy}
    seconds = {cause: size.count * one for cause, one in times.items()} | {"bubble": (pp - 1) / vp * lasts}
    if trains:
        seconds["memory"] += OPTIMIZER_READS * role.held().get(OPTIMIZER, 0) / (MEMORY * gpu.memory_rate)
        seconds["communication"] += sum(_reduction(job, role, cluster))
    return seconds


def _exchanges(role: MegatronRole, size: Pass, cluster: GpuCluster, *, passes: int, trains: bool) -> Iterator[float]:
    """Seconds of a micro-batch in which rows, contexts, experts' inputs and stages' outputs are exchanged."""
    d, s, token_bytes = role.model, role.sizes, size.tokens * role.how.c
    rows, layers = token_bytes * d.hidden, d.num_layers / s.pp
    yield layers * 4 * passes * cluster.ring_s(rows, s.tp)
    yield layers * passes * cluster.ring_s(2 * token_bytes * d.kv * s.cp / s.tp, s.cp, s.tp)
    yield passes * cluster.all_to_all_s(d.num_sparse / s.pp * 2 * d.routed * rows / s.tp, s.ep * s.expert_tp)
    if s.pp > 1:
        # a stage that fills a node sends to the next one over the network: nearly all, as to very many ranks
        fills_node = role.dp * s.tp >= cluster.node_size
        yield (1 + trains) * cluster.all_to_all_s(rows / s.tp, 1 << 30 if fills_node else 2)


def _reduction(job: PlanInputs, role: Role, cluster: GpuCluster) -> Iterator[float]:
    """Seconds in which gradients are added up over data-parallel ranks and parameters come back."""
    if isinstance(role, FsdpRole):
        replicas = job.plan.pools.train_ranks // role.ranks
        yield 2 * cluster.ring_s(role.master * role.model.parameters / role.ranks, replicas, role.ranks)
        return
    here, s, width = role.adapters or role.held_here, role.sizes, fp.WIDE + role.how.c
    yield cluster.ring_s(width * here.dense, role.dp, s.tp)
    yield cluster.ring_s(width * here.experts, role.expert_dp, s.expert_tp * s.ep)


def rollout_phase(job: PlanInputs, cluster: GpuCluster, sigma: float, beside: int = 0) -> Phase:
    """A prompt is read once for its answers; answers are decoded together, fewer and fewer of them as they end.

    `beside`: bytes of a GPU that roles hold on it when the engine starts.
    """
    rollout, lengths, d = job.cfg.actor_rollout_ref.rollout, job.lengths, fp.decoder_of(job.machine.actor)
    rows = -(-job.plan.samples * rollout.attention_size // job.plan.pools.rollout_ranks)
    floor, row_s, scheduled_s = DECODE_S.get(rollout.name, DECODE_S["vllm"])
    row_s += scheduled_s / (1 if d.num_sparse else rollout.num_scheduler_steps)
    if rollout.name == "hf":
        floor, row_s = HF_LAYER_S * d.num_layers, 0.0
    read = lengths.mean_prompt * rows / (rollout.n if rollout.enable_prefix_caching else 1)
    flops = MATMUL * cluster.gpu.flops * rollout.tensor_model_parallel_size
    seconds = {"compute": 2 * read * (d.active + d.attended * lengths.mean_prompt / 2) / flops}
    ends = response_quantiles(lengths, sigma)
    most = max(1.0, min(rows, rollout.max_num_seqs, _cache_rows(job, d, cluster, beside)))
    # (decode steps, answers that run, tokens drawn so far of each): first while ended answers are replaced by waiting
    # ones, then from each quantile of the lengths to the next, while those that are left run out
    spans = [((rows / most - 1) * mean(ends), most, lengths.mean_response / 2)]
    for number, (before, end) in enumerate(zip((0.0, *ends), ends, strict=False)):
        spans.append((end - before, most * (1 - number / QUANTILES), (before + end) / 2))
    for steps, running, drawn in spans:
        busy = _decode_s(job, d, cluster, running, lengths.mean_prompt + drawn)
        cause = "tail" if running < TAIL * most else ""
        for name, one in (("memory", busy), ("host", hypot(floor + row_s * running, busy) - busy)):
            seconds[cause or name] = seconds.get(cause or name, 0.0) + steps * one
    return Phase("rollout", seconds)


def _cache_rows(job: PlanInputs, d: fp.Decoder, cluster: GpuCluster, beside: int) -> float:
    """Answers of mean length that the cache of a serving engine has room for."""
    rollout = job.cfg.actor_rollout_ref.rollout
    c = width_of(rollout.dtype, "cuda")
    if rollout_backend(rollout.name).cache_share_of is None:
        return inf
    room = fp.engine_bytes(rollout, cluster.gpu.memory_bytes, beside) - fp.served_bytes(job.machine.actor, rollout, c=c)
    return room / (c * fp.served_cache(d, rollout) * (job.lengths.mean_prompt + job.lengths.mean_response))


def _decode_s(job: PlanInputs, d: fp.Decoder, cluster: GpuCluster, running: float, context: float) -> float:
    """A decode step on the GPU: weights and cache are read once, of experts those that some answer is sent to.

    Stages take turns; each sends rows and residuals on, the last its logits to all.
    """
    rollout, c = job.cfg.actor_rollout_ref.rollout, width_of(job.cfg.actor_rollout_ref.rollout.dtype, "cuda")
    tp, dp = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    stages, head = rollout.pipeline_model_parallel_size, d.vocab * d.hidden
    width, faster = (1, FP8_MATMUL) if rollout.quantization else (c, 1.0)
    unused = (1 - d.routed / d.num_experts) ** (running * dp) if d.num_sparse else 0.0  # share of experts without rows
    experts = d.in_experts * (1 - unused) / dp
    matrices = (d.parameters - d.outer - d.in_experts + experts) / tp
    cached = running * d.cached * context / min(tp, d.cache_heads)
    read = width * matrices + c * (head / tp + cached)
    products = 2 * running * (d.active / faster + head + d.attended * context)
    memory_s = read / (MEMORY * cluster.gpu.memory_rate)
    compute_s = products / (tp * MATMUL * cluster.gpu.flops)
    reduce_s = ALL_REDUCE_S if rollout.replica_size <= cluster.node_size else ALL_REDUCE_FAR_S
    rows = c * running * d.hidden
    sent = cluster.ring_s(2 * stages * rows + c * running * d.vocab, stages, tp)
    if tp > 1:
        sent += 2 * d.num_layers * (reduce_s + 2 * cluster.ring_s(rows, tp))
    if dp > 1:  # experts get the rows of all data-parallel ranks
        sent += 2 * d.num_sparse * (reduce_s + cluster.ring_s(dp * rows, dp, tp))
    return max(memory_s, compute_s) + sent


@cache
def response_quantiles(lengths: Lengths, sigma: float) -> tuple[float, ...]:
    """Lengths of responses, shortest first: lognormal with this mean, cut at the longest; all alike without `sigma`."""
    normal, low, high = NormalDist(), 0.0, 1e3 * lengths.response
    factors = [exp(sigma * normal.inv_cdf((number + 0.5) / QUANTILES)) for number in range(QUANTILES)]
    for _ in range(60):
        middle = (low + high) / 2
        is_short = mean(min(middle * factor, lengths.response) for factor in factors) < lengths.mean_response
        low, high = (middle, high) if is_short else (low, middle)
    return tuple(min(high * factor, lengths.response) for factor in factors)


def _push(job: PlanInputs, cluster: GpuCluster) -> dict[str, float]:
    """Each rollout rank takes its share of the weights; a node of actors first takes what it lacks, once."""
    rollout, pools, node = job.cfg.actor_rollout_ref.rollout, job.plan.pools, job.cfg.trainer.n_gpus_per_node
    d, c = fp.decoder_of(job.machine.actor), width_of(rollout.dtype, "cuda")
    size, taken = c * d.parameters, fp.served_bytes(job.machine.actor, rollout, c=c)
    sent = cluster.all_to_all_s(taken, pools.total_ranks)
    if pools.colocated and job.cfg.trainer.nnodes > 1:
        sent = cluster.all_to_all_s(size / node, pools.total_ranks) + cluster.all_to_all_s(taken, node)
    return {"communication": sent, "memory": taken / CHECKSUM_RATE, "host": PUSH_S}
