"""Layouts of a job on the GPUs it has: which fit, and which of them takes the fewest seconds a step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlsys.config import PPOConfig, plan_batches
from rlsys.config.checks.all import check
from rlsys.config.derive import ENGINE, MODE
from rlsys.config.engines import rollout_backend
from rlsys.config.introspect import replaced, shown, value_at
from rlsys.models.megatron.family import find_family
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.planning import footprint as fp
from rlsys.planning.memory import Lengths, Machine, PlanInputs, device_roles, plan_memory
from rlsys.planning.sizes import ACTOR_BUDGET, CRITIC_BUDGET, MODEL, MOST_TOKENS, ROLLOUT, choose_sizes, compiled_roles
from rlsys.planning.step_time import GpuCluster, Phase, plan_step, rollout_phase, step_seconds, training_phases
from rlsys.utils.errors import ConfigError

Settings = dict[str, Any]
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
RECOMPUTED = [f"{model}.enable_gradient_checkpointing" for model in (MODEL, "critic.model")]
ROLES = {ACTOR: "fsdp_config", REF: "fsdp_config", "critic": "fsdp"}
COUNTS = ("trainer.n_gpus_per_node", "trainer.rollout_workers")
SIZES = (1, 2, 4, 8, 16, 32, 64)
HEADS = "num_attention_heads"
NAMES = ("tensor", "pipeline", "context", "expert")
UNEVEN, FIRST, LAST = "override_transformer_config", *(f"num_layers_in_{n}_pipeline_stage" for n in ("first", "last"))
Timed = tuple[float, str, Settings, int]
"""Seconds, a name, its settings, and bytes of what is always held."""
SIMPLER = 1.02
"""What a further size must gain."""
BEST = {f"{ROLLOUT}.gpu_memory_utilization": 0.85, f"{ROLLOUT}.max_num_seqs": 1024}
"""What an engine has at most; layouts are tried in the order of what they could then reach."""
LARGEST = dict.fromkeys((ACTOR_BUDGET, CRITIC_BUDGET), MOST_TOKENS["cuda"]) | dict.fromkeys(RECOMPUTED, False)
"""What a trainer has at most, in the same way."""
MOST_TRIED, SPARE = 200, 4
"""Layouts whose memory is planned, the fastest first, and how many more must fit than are asked for."""


@dataclass(frozen=True)
class Proposal:
    """A layout that fits: a name, the settings that ask for it, seconds of a step and bytes of its largest stage."""

    name: str
    settings: Mapping[str, Any]
    phases: tuple[Phase, ...]
    seconds: float
    peak_bytes: int

    def words(self, cfg: PPOConfig) -> str:
        """The engine, and the settings that are other than those of `cfg`, as on a command line; instead of an
        allocation all of them and its counts."""
        has_mode = bool(cfg.trainer.allocation_mode)
        own = {ENGINE: value_at(cfg, ENGINE)}
        if has_mode:
            own |= {key: value_at(cfg, key) for key in COUNTS} | {MODE: None}
        own |= {key: value for key, value in self.settings.items() if has_mode or value != value_at(cfg, key)}
        return " ".join(f"{key}={shown(value)}" for key, value in own.items())


def propose_layouts(
    cfg: PPOConfig, machine: Machine, cluster: GpuCluster, *, lengths: Lengths, sigma: float = 0.0, most: int = 5
) -> list[Proposal]:
    """At most `most` layouts that fit, the fastest first; token budgets and what is recomputed are chosen for each."""
    serving, training = list[Timed](), list[Timed]()
    for name, settings in _rollout_layouts(cfg, machine):
        job = PlanInputs(replaced(cfg, settings | BEST), machine, lengths)
        held = fp.served_bytes(machine.actor, job.cfg.actor_rollout_ref.rollout, c=2)
        serving.append((rollout_phase(job, cluster, sigma).total, name, settings, held))
    is_off = {key for key, works in compiled_roles(cfg, machine).items() if works and not value_at(cfg, key)}
    for name, settings in _training_layouts(cfg, machine, cluster):
        works = compiled_roles(replaced(cfg, settings), machine)
        settings |= {key: one and key not in is_off for key, one in works.items()}
        job = PlanInputs(replaced(cfg, settings | LARGEST), machine, lengths)
        roles = device_roles(job)
        if (held := sum(sum(one.role.held().values()) for one in roles)) <= machine.room_bytes:
            seconds = sum(phase.total for phase in training_phases(job, roles, cluster))
            training.append((seconds * SIMPLER ** name.count(","), name, settings, held))
    proposals, room = list[Proposal](), machine.room_bytes
    shared = plan_batches(cfg).pools.colocated  # the engine starts beside what trains
    pairs = [(one, other) for one, other in product(training, serving) if not shared or one[3] + other[3] <= room]
    pairs.sort(key=lambda pair: pair[0][0] + pair[1][0])
    for tried, ((trains_s, name, trains, _), (serves_s, copies, serves, _)) in enumerate(pairs):
        fastest = sorted(one.seconds for one in proposals)[: most + SPARE]
        if tried == MOST_TRIED or (len(fastest) == most + SPARE and trains_s + serves_s > fastest[-1]):
            break
        settings = trains | serves
        try:
            chosen, _ = choose_sizes(replaced(cfg, settings), settings, machine)
            changed = replaced(cfg, settings | chosen)
            plan = plan_memory(changed, machine)
        except ConfigError:
            continue
        peak = max(stage.total for stage in (*plan.train, *plan.rollout))
        if peak <= room:
            phases = plan_step(changed, machine, cluster, lengths=lengths, sigma=sigma)
            seconds = step_seconds(changed, phases)
            proposals.append(Proposal(f"{name}; rollout {copies}", settings | chosen, phases, seconds, peak))
    return sorted(proposals, key=lambda one: one.seconds)[:most]


def _rollout_layouts(cfg: PPOConfig, machine: Machine) -> Iterator[tuple[str, Settings]]:
    """Copies of the engine whose weights fit: cut by tensors, into stages, or with several copies of the attention."""
    rollout, ranks = cfg.actor_rollout_ref.rollout, plan_batches(cfg).pools.rollout_ranks
    d, heads = fp.decoder_of(machine.actor), machine.actor[HEADS]
    dims, whole = rollout_backend(rollout.name).dims, rollout.expert_parallel_size > 1
    for tp, dp, pp in product(*(SIZES if dim in dims else (1,) for dim in "tep")):
        sizes = {"tensor_model": tp, "data": dp, "pipeline_model": pp, "expert": tp * dp if whole or dp > 1 else 1}
        settings = {f"{ROLLOUT}.{name}_parallel_size": size for name, size in sizes.items()}
        held = replaced(cfg, settings)
        divides = ranks and not (heads % tp or d.num_experts % sizes["expert"]) and pp <= min(8, d.num_layers)
        if not divides or check(held)[0]:
            continue
        if fp.served_bytes(machine.actor, held.actor_rollout_ref.rollout, c=2) < machine.room_bytes:
            stages = f", PP{pp}" if pp > 1 else ""
            copies = f", DP attention {dp}" if dp > 1 else ""
            yield f"TP{tp}{stages}{copies} x DP{ranks // (tp * dp * pp)}", settings


def _training_layouts(cfg: PPOConfig, machine: Machine, cluster: GpuCluster) -> Iterator[tuple[str, Settings]]:
    """FSDP over all ranks or over those of some nodes, and Megatron's sizes, with and without offloading."""
    plan, layers = plan_batches(cfg), machine.actor["num_hidden_layers"]
    ranks, trained = plan.pools.train_ranks, [role for role in (plan.actor, plan.critic) if role is not None]

    def divides(shared_by: int) -> bool:
        return not ranks % shared_by and not any(role.mini_batch_samples % (ranks // shared_by) for role in trained)

    for share, ulysses in product(sorted({ranks, *(n * cluster.node_size for n in SIZES[:4])}), SIZES[:4]):
        if share <= ranks and not (ranks % share or machine.actor[HEADS] % ulysses) and divides(ulysses):
            settings = {"strategy": "fsdp", "ulysses_sequence_parallel_size": ulysses}
            sharding = {"fsdp_size": share if share < ranks else -1, "tensor_parallel_size": 1}
            copies = f" x {ranks // share}" if share < ranks else ""
            sequences = f", Ulysses {ulysses}" if ulysses > 1 else ""
            yield from _offloaded(cfg, f"FSDP{share}{copies}{sequences}", settings, sharding)
    if (family := find_family(machine.actor)) is None:
        return
    role = {"strategy": "megatron", "ulysses_sequence_parallel_size": 1}
    for tp, pp, cp, ep in product(SIZES[:4], SIZES, SIZES[:4], SIZES):
        sizes, last = (tp, pp, cp, ep), layers - (pp - 1) * -(-layers // pp) if layers % pp else None
        if ranks % (tp * pp * cp) or ranks % (ep * pp):
            continue
        layout = ParallelSizes(tp, pp, cp=cp, ep=ep, etp=1, sequence_parallel=True, last_layers=last)
        try:
            family.check(machine.actor, RankPlace(layout))
        except ConfigError:
            continue
        if divides(tp * pp * cp):
            keys = layout.arguments() | {"sequence_parallel": True, UNEVEN: {FIRST: None, LAST: last}}
            name = ", ".join(f"{key[0].upper()}P{size}" for key, size in zip(NAMES, sizes, strict=True) if size > 1)
            yield from _offloaded(cfg, f"Megatron, {name or 'DP'}", role, keys)


def _offloaded(cfg: PPOConfig, name: str, role: Settings, sharding: Settings) -> Iterator[tuple[str, Settings]]:
    """The layout as settings of the roles that there are; the second time with everything on the host while others
    run. Other entries of `override_transformer_config` are kept."""
    is_megatron = role["strategy"] == "megatron"
    there = {ACTOR: True, REF: cfg.use_reference or bool(cfg.teachers), "critic": cfg.use_critic}
    for away in (False, True):
        settings: Settings = {}
        for key, fsdp in ((key, fsdp) for key, fsdp in ROLES.items() if there[key]):
            trains, section = key != REF, f"{key}.{'megatron' if is_megatron else fsdp}"
            has_part = {"param_offload": True, "optimizer_offload": trains, "grad_offload": trains and is_megatron}
            own = sharding | {part: away for part, is_there in has_part.items() if is_there}
            if is_megatron:
                held = value_at(cfg, f"{section}.{UNEVEN}")
                merged = (held if isinstance(held, dict) else {}) | sharding[UNEVEN]
                own[UNEVEN] = {name: value for name, value in merged.items() if value is not None}
            settings |= {f"{key}.{field}": value for field, value in role.items() if trains or field != "strategy"}
            settings |= {f"{section}.{field}": value for field, value in own.items()}
        yield f"{name}, offloaded" if away else name, settings
