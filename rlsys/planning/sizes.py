"""Sizes that a job chooses itself where they are not set: by the memory plan, for the device that it runs on.

Token budgets of updates and of log-probs, whether activations are recomputed, how many sequences are decoded together
and the share of a GPU that a serving engine takes. What a user or a preset set is never changed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlsys.config import PPOConfig, plan_batches
from rlsys.config.checks.batches import sequence_ranks
from rlsys.config.engines import rollout_backend
from rlsys.config.introspect import nest, shown
from rlsys.config.plan import RolePlan
from rlsys.config.schema.actor import TrainedRoleConfig
from rlsys.config.schema.base import Section
from rlsys.planning import footprint as fp
from rlsys.planning.memory import Machine, MemoryPlan, plan_memory, width_of
from rlsys.utils.errors import ConfigError

GIB = 1 << 30
MOST_TOKENS = {"cuda": 65536, "cpu": 4096}
"""Tokens of a micro-batch beyond which a device gets no faster."""
ENOUGH_TOKENS = 8192
"""Tokens that keep a GPU busy: activations are recomputed only if fewer fit."""
FEWEST_SEQS, MOST_SEQS = {"cuda": 256, "cpu": 1}, {"cuda": 1024, "cpu": 384}
ENGINE_EXTRA, LEAST_SHARE = 4 * GIB, 0.3
_POLICY, _TOKENS = "actor_rollout_ref", "max_token_len_per_gpu"
ROLLOUT, MODEL = f"{_POLICY}.rollout", f"{_POLICY}.model"
SEQS, SHARE = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.gpu_memory_utilization"
ACTOR_BUDGET, CRITIC_BUDGET = f"{_POLICY}.actor.ppo_{_TOKENS}", f"critic.ppo_{_TOKENS}"
Chosen = Iterator[tuple[str, Any, str]]
"""Keys with their values and what the plan says beside them."""


@dataclass(frozen=True)
class _Job:
    """A configuration whose open keys get values one after the other."""

    cfg: PPOConfig
    given: Collection[str]
    machine: Machine

    def with_value(self, key: str, value: Any) -> "_Job":
        return replace(self, cfg=replaced(self.cfg, {key: value}))

    def needs(self, *stages: str) -> dict[str, int]:
        """Bytes by owner of the largest of these stages; nothing where they are not known."""
        plan = plan_memory(self.cfg, self.machine) if self.machine.actor else MemoryPlan(())
        there = [stage.bytes for stage in (*plan.train, *plan.rollout) if stage.name in stages]
        return max(there, key=lambda owners: sum(owners.values()), default={})

    def fits(self, *stages: str) -> bool:
        return sum(self.needs(*stages).values()) <= self.machine.room_bytes

    def largest(self, key: str, stage: str, least: int) -> int | None:
        """The largest budget with which a stage fits, in steps of a quarter; None if not even `least` does."""
        size = max(least, MOST_TOKENS[self.machine.device])
        while not self.with_value(key, size).fits(stage):
            if size == least:
                return None
            size = max(least, size * 3 // 4 // 256 * 256)
        return size


def choose_sizes(cfg: PPOConfig, given: Collection[str], machine: Machine) -> tuple[dict[str, Any], str]:
    """Values of keys that are not `given`, and what the plan says of them.

    None for a GPU whose memory, or a model whose sizes, are not known. ConfigError with the arithmetic if an update
    does not fit at all.
    """
    try:
        plan_memory(cfg, machine)
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError):
        machine = replace(machine, actor={})
    if machine.device == "cuda" and not (machine.actor and machine.device_bytes):
        return {}, ""
    job, values, words = _Job(cfg, given, machine), dict[str, Any](), list[str]()
    for part in (_sequences, _share, *_passes(cfg)):
        for key, value, why in part(job):
            job, values[key] = job.with_value(key, value), value
            words.append(f"{key.removeprefix(_POLICY + '.')}={shown(value)}{why}")
    room = f" ({machine.room_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB to plan with)" if words else ""
    return values, f"{', '.join(words)}{room}"


def replaced(section: Any, settings: dict[str, Any]) -> Any:
    """A section with other values of some keys, given with their dots."""
    return _replaced(section, nest(settings))


def _replaced(section: Any, tree: Mapping[str, Any]) -> Any:
    update = {
        name: _replaced(old, value) if isinstance(old := getattr(section, name), Section) else value
        for name, value in tree.items()
    }
    return section.model_copy(update=update)


def _sequences(job: _Job) -> Chosen:
    """All rows of a replica together, within limits."""
    rollout, ranks = job.cfg.actor_rollout_ref.rollout, plan_batches(job.cfg).pools.rollout_ranks
    if SEQS in job.given or not ranks or job.cfg.trainer.reproducible:
        return
    device, rows = job.machine.device, job.cfg.data.gen_batch_size * rollout.n * rollout.tensor_model_parallel_size
    number = min(MOST_SEQS[device], max(FEWEST_SEQS[device], -(-rows // ranks)))
    while number > 1 and not rollout_backend(rollout.name).cache_share_of and not _fits_rollout(job, SEQS, number):
        number //= 2
    yield SEQS, number, ""


def _share(job: _Job) -> Chosen:
    """The cache of all sequences at full length, if it fits beside what trains; all that is free where nothing does."""
    cfg, machine = job.cfg, job.machine
    rollout = cfg.actor_rollout_ref.rollout
    if SHARE in job.given or machine.device != "cuda" or not rollout_backend(rollout.name).cache_share_of:
        return
    d, c, rows = fp.decoder_of(machine.actor), width_of(rollout.dtype, "cuda"), rollout.max_num_seqs
    columns = cfg.data.max_prompt_length + cfg.data.max_response_length
    tp = rollout.tensor_model_parallel_size
    split = d.parameters // tp + rows * columns * d.cached // min(tp, d.cache_heads)
    needed = c * split + fp.drawing_bytes(d, rows, c=c) + ENGINE_EXTRA
    wanted = max(LEAST_SHARE, needed / machine.device_bytes) if plan_batches(cfg).pools.colocated else 1.0
    percent = min(90, 5 * round(20 * wanted + 0.49))
    while percent > 5 and not _fits_rollout(job, SHARE, percent / 100):
        percent -= 5
    if percent / 100 * machine.device_bytes < c * d.parameters // rollout.tensor_model_parallel_size:
        raise _refusal(f"{rollout.name} beside what trains", job.with_value(SHARE, 0.01).needs("start"), machine, SHARE)
    yield SHARE, percent / 100, f" (all sequences need {needed / GIB:.1f} GiB)"


def _fits_rollout(job: _Job, key: str, value: float) -> bool:
    return job.with_value(key, value).fits("start", "rollout")


def _passes(cfg: PPOConfig) -> Iterator[Callable[[_Job], Chosen]]:
    """The choices of token budgets, of updates first."""
    policy, critic, grader, plan = cfg.actor_rollout_ref, cfg.critic, cfg.reward.reward_model, plan_batches(cfg)
    longest, scored = cfg.data.max_prompt_length + cfg.data.max_response_length, f"log_prob_{_TOKENS}"
    least = -(-longest // sequence_ranks(policy.actor))
    yield partial(_update, of=policy.actor, plan=plan.actor, model=MODEL, key=ACTOR_BUDGET, least=least)
    passes = [(f"{ROLLOUT}.{scored}", policy.rollout.log_prob_use_dynamic_bsz, ACTOR_BUDGET, "old_log_prob", least)]
    if cfg.use_reference:
        passes.append((f"{_POLICY}.ref.{scored}", policy.ref.log_prob_use_dynamic_bsz, ACTOR_BUDGET, "ref", least))
    if plan.critic is not None:
        least = -(-longest // sequence_ranks(critic))
        yield partial(_update, of=critic, plan=plan.critic, model="critic.model", key=CRITIC_BUDGET, least=least)
        passes.append((f"critic.forward_{_TOKENS}", critic.use_dynamic_bsz, CRITIC_BUDGET, "values", least))
    if grader.enable:
        key = f"reward.reward_model.forward_{_TOKENS}"
        passes.append((key, grader.use_dynamic_bsz, key, "reward_model", longest))
    for key, is_dynamic, follows, stage, least in passes:
        if is_dynamic:
            yield partial(_score, key=key, follows=follows, stage=stage, least=least)


def _score(job: _Job, *, key: str, follows: str, stage: str, least: int) -> Chosen:
    if not {key, follows} & set(job.given):
        yield key, job.largest(key, stage, least) or least, ""


def _update(job: _Job, *, of: TrainedRoleConfig, plan: RolePlan, model: str, key: str, least: int) -> Chosen:
    """Activations are kept if enough tokens, or a rank's whole share, then fit; else they are recomputed."""
    if key in job.given or not of.use_dynamic_bsz:
        return
    recompute, stage = f"{model}.enable_gradient_checkpointing", f"update_{key.split('.')[-2]}"
    enough = min(plan.rank_samples * least, max(ENOUGH_TOKENS, least))
    if recompute not in job.given and job.machine.device == "cuda":
        kept = job.with_value(recompute, False)
        keeps = (kept.largest(key, stage, least) or 0) >= enough
        job = kept if keeps else job.with_value(recompute, True)
        yield recompute, not keeps, ""
    size = job.largest(key, stage, least)
    needs = job.with_value(key, size or least).needs(stage)
    total = sum(needs.values())
    if total > job.machine.device_bytes:
        raise _refusal(f"{stage} with one sequence at a time", needs, job.machine, key)
    yield key, size or least, f" ({total / GIB:.1f} GiB)" if needs else ""


def _refusal(what: str, needs: Mapping[str, int], machine: Machine, key: str) -> ConfigError:
    parts = " + ".join(f"{owner} {one / GIB:.1f}" for owner, one in needs.items() if one)
    room = f"tensors have {machine.room_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f}"
    return ConfigError(
        f"{what} does not fit: it needs {sum(needs.values()) / GIB:.1f} GiB ({parts}), and {room}; "
        f"docs/oom.md says what needs less, or set {key} to try it"
    )
