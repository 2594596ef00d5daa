"""What a job chooses itself where it is not set: by the memory plan, for the device that it runs on.

The rollout engine, whether layers are compiled, token budgets of updates and of log-probs, whether activations are
recomputed, how many sequences are decoded together and the share of a GPU that a serving engine takes. What a user or a
preset set is never changed.
"""

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rlsys.config import PPOConfig, plan_batches
from rlsys.config.checks.all import check
from rlsys.config.checks.batches import sequence_ranks
from rlsys.config.derive import COMPILE, ENGINE, MODE, RANKS, UNSET_RANKS
from rlsys.config.engines import rollout_backend
from rlsys.config.introspect import replaced, shown
from rlsys.config.plan import RolePlan
from rlsys.config.schema.actor import TrainedRoleConfig
from rlsys.config.schema.types import MicroBatches
from rlsys.planning import footprint as fp
from rlsys.planning.memory import CACHE, Machine, MemoryPlan, plan_memory, width_of
from rlsys.planning.roles import Bytes
from rlsys.types import LARGEST_IMAGE
from rlsys.utils.errors import ConfigError
from rlsys.utils.gpus import OTHER_GPUS

GIB = 1 << 30
MOST_TOKENS = {"cuda": 65536, "cpu": 4096}
"""Tokens of a micro-batch beyond which a device gets no faster."""
ENOUGH_TOKENS = 8192
"""Tokens that keep a GPU busy: activations are recomputed only if fewer fit."""
FEWEST_SEQS, MOST_SEQS = {"cuda": 256, "cpu": 1}, {"cuda": 1024, "cpu": 384}
ENGINE_EXTRA, LEAST_PERCENT = 4 * GIB, 30
_POLICY, _TOKENS = "actor_rollout_ref", "max_token_len_per_gpu"
ROLLOUT, MODEL = f"{_POLICY}.rollout", f"{_POLICY}.model"
SEQS, SHARE = f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.gpu_memory_utilization"
ACTOR_BUDGET, CRITIC_BUDGET = f"{_POLICY}.actor.ppo_{_TOKENS}", f"critic.ppo_{_TOKENS}"
COMPILED = f"{_POLICY}.actor.fsdp_config.{COMPILE}", f"critic.fsdp.{COMPILE}"


def compiled_roles(cfg: PPOConfig, machine: Machine) -> dict[str, bool]:
    """Whether a job compiles the layers of a role on FSDP, by key: where that is known to work, packs of text in half
    precision, on whole layers without experts or adapters. The reference follows the actor, and is then the actor's
    model."""
    policy = cfg.actor_rollout_ref
    actor, alone = policy.actor, policy.reference_model is policy.model and not cfg.teachers
    works = dict[str, bool]()
    policies = [(COMPILED[0], actor, actor.fsdp_config, policy.model, machine.actor)] if alone else []
    values = [(COMPILED[1], cfg.critic, cfg.critic.fsdp, cfg.critic.model, machine.critic or machine.actor)]
    roles = [*policies, *values] if cfg.use_critic else policies
    may_compile = machine.device == "cuda" and not cfg.trainer.reproducible
    for key, role, shard, model, facts in roles if may_compile else ():
        d, ranks = fp.decoder_of(facts), shard.tensor_parallel_size * role.ulysses_sequence_parallel_size
        odd = ranks > 1 or shard.offload_policy or not model.use_remove_padding or model.has_adapters
        odd = odd or d.encoder.pixels or d.num_sparse or shard.full_determinism or shard.dtype == "float32"
        if role.strategy == "fsdp":
            works[key] = not odd
    return works


class _Sizes:
    """Values that are chosen one after the other, each for the configuration with those before."""

    def __init__(self, cfg: PPOConfig, given: Collection[str], machine: Machine) -> None:
        self.cfg, self.given, self.machine = cfg, given, machine
        self.values: dict[str, Any] = {}
        self.words: list[str] = []

    def choose(self, key: str, value: object, why: str = "") -> None:
        self.cfg, self.values[key] = replaced(self.cfg, {key: value}), value
        self.words.append(f"{key.removeprefix(_POLICY + '.')}={shown(value)}{why}")

    def needs(self, settings: dict[str, object], *stages: str) -> Bytes:
        """Bytes by owner of the largest of these stages with further settings; nothing where they are not known."""
        plan = plan_memory(replaced(self.cfg, settings), self.machine) if self.machine.actor else MemoryPlan(())
        there = [stage.bytes for stage in (*plan.train, *plan.rollout) if stage.name in stages]
        return max(there, key=lambda owners: sum(owners.values()), default={})

    def fits(self, settings: dict[str, Any], *stages: str, room: int = 0) -> bool:
        return sum(self.needs(settings, *stages).values()) <= max(room, self.machine.room_bytes)

    def cache_bytes(self, percent: int) -> int:
        """Of an engine that takes this share."""
        return self.needs({SHARE: percent / 100}, "rollout").get(CACHE, 0)

    def largest(self, key: str, stage: str, least: int, settings: dict[str, bool] | None = None, room: int = 0) -> int:
        """The largest budget with which a stage fits, in steps of a quarter; 0 if not even `least` does."""
        size = max(least, MOST_TOKENS[self.machine.device])
        while not self.fits({**(settings or {}), key: size}, stage, room=room):
            if size == least:
                return 0
            size = max(least, size * 3 // 4 // 256 * 256)
        return size

    def choose_engine(self, engines: Iterable[str]) -> None:
        """The first that works with all other settings."""
        fit = (name for name in engines if not check(replaced(self.cfg, {ENGINE: name}))[0])
        if ENGINE not in self.given and (name := next(fit, "")):
            self.choose(ENGINE, name)

    def choose_sequences(self) -> None:
        """All rows of a replica together, within limits."""
        rollout, ranks = self.cfg.actor_rollout_ref.rollout, plan_batches(self.cfg).pools.rollout_ranks
        if SEQS in self.given or not ranks or self.cfg.trainer.reproducible:
            return
        device, answers = self.machine.device, rollout.n * rollout.attention_size
        number = min(MOST_SEQS[device], max(FEWEST_SEQS[device], -(-self.cfg.data.gen_batch_size * answers // ranks)))
        has_share = rollout_backend(rollout.name).cache_share_of
        while number > 1 and not has_share and not self.fits({SEQS: number}, "start", "rollout"):
            number //= 2
        self.choose(SEQS, number)

    def check_sequences(self) -> None:
        """Refuse an engine whose cache has no share of the device where the chosen sequences do not fit."""
        name, needs = self.cfg.actor_rollout_ref.rollout.name, self.needs({}, "start", "rollout")
        is_ours = SEQS not in self.given and self.machine.device == "cuda"
        if is_ours and not rollout_backend(name).cache_share_of and sum(needs.values()) > self.machine.device_bytes:
            raise self.refusal(f"{name} beside what trains", needs, SEQS)

    def choose_share(self) -> None:
        """The cache of all sequences at full length, if it fits beside what trains; all that is free where nothing
        does."""
        machine, rollout = self.machine, self.cfg.actor_rollout_ref.rollout
        if SHARE in self.given or machine.device != "cuda" or not rollout_backend(rollout.name).cache_share_of:
            return
        d, c, rows = fp.decoder_of(machine.actor), width_of(rollout.dtype, "cuda"), rollout.max_num_seqs
        columns = self.cfg.data.max_prompt_length + self.cfg.data.max_response_length
        weights = fp.served_bytes(machine.actor, rollout, c=c)
        cache = rows * columns * fp.served_cache(d, rollout)
        encoding = fp.image_bytes(d, min(LARGEST_IMAGE, rollout.max_model_len or columns), c=c, trained=False)
        needed = weights + c * cache + fp.drawing_bytes(d, rows, c=c) + sum(encoding) + ENGINE_EXTRA
        most = 90 - 5 * bisect(range(90, 5, -5), False, key=lambda x: self.fits({SHARE: x / 100}, "start", "rollout"))
        enough = (one for one in range(LEAST_PERCENT, most, 5) if self.cache_bytes(one) >= needed - weights)
        percent = next(enough, most) if plan_batches(self.cfg).pools.colocated else most
        if not self.cache_bytes(percent):
            is_too_large = weights > machine.room_bytes
            keys = f"a larger {ROLLOUT}.tensor_model_parallel_size, or {SHARE}" if is_too_large else SHARE
            raise self.refusal(f"{rollout.name} beside what trains", self.needs({SHARE: 0.01}, "start"), keys)
        self.choose(SHARE, percent / 100, f" (all sequences need {needed / GIB:.1f} GiB)")

    def choose_update(self, of: TrainedRoleConfig, plan: RolePlan, model: str, key: str, least: int) -> None:
        """Activations are kept if what is set, enough tokens, or a rank's whole share then fits; else recomputed."""
        recompute, stage = f"{model}.enable_gradient_checkpointing", f"update_{key.split('.')[-2]}"
        is_set = key in self.given or not of.use_dynamic_bsz
        enough = min(plan.rank_samples * least, max(ENOUGH_TOKENS, least))
        if recompute not in self.given and self.machine.device == "cuda":
            kept = {recompute: False}
            fits = self.fits(kept, stage) if is_set else self.largest(key, stage, least, kept) >= enough
            self.choose(recompute, not fits)
        if is_set:
            return
        size = self.largest(key, stage, least, room=sum(self.needs({key: least}, stage).values()))
        needs = self.needs({key: size}, stage)
        if (total := sum(needs.values())) > self.machine.device_bytes:
            raise self.refusal(f"{stage} with one sequence at a time", needs, key)
        self.choose(key, size, f" ({total / GIB:.1f} GiB)" if needs else "")

    def choose_scoring(self, key: str, size: MicroBatches, follows: str, stage: str, least: int) -> None:
        if size.max_tokens is not None and not {key, follows} & set(self.given):
            self.choose(key, self.largest(key, stage, least) or least)

    def refusal(self, what: str, needs: Mapping[str, int], key: str) -> ConfigError:
        """An error with the arithmetic; `key` is what may be set to try it nevertheless."""
        machine, is_unset = self.machine, {MODE, RANKS}.isdisjoint(self.given)
        parts = " + ".join(f"{owner} {one / GIB:.1f}" for owner, one in needs.items() if one)
        room = f"tensors have {machine.room_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f}"
        room += f", a process's share of this machine's memory ({OTHER_GPUS})" if machine.device == "cpu" else ""
        how = f"docs/oom.md says what needs less, or set {key} to try it"
        how += f"; {UNSET_RANKS}" if machine.device == "cuda" and is_unset else ""
        needed = sum(needs.values()) / GIB
        return ConfigError(f"{what} does not fit: it needs {needed:.1f} GiB ({parts}), and {room}; {how}")


def choose_sizes(
    cfg: PPOConfig, given: Collection[str], machine: Machine, *, engines: Iterable[str] = ()
) -> tuple[dict[str, object], str]:
    """Values of keys that are not `given`, and what the plan says of them.

    `engines` are those that can be had on a GPU, best first; for a GPU whose memory, or a model whose sizes, are not
    known that is all. ConfigError with the arithmetic if an update does not fit at all.
    """
    try:
        plan_memory(cfg, machine)
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError):
        machine = replace(machine, actor={})
    sizes = _Sizes(cfg, given, machine)
    sizes.choose_engine(engines if machine.device == "cuda" else ())
    if machine.device == "cuda" and not (machine.actor and machine.device_bytes):
        return sizes.values, ", ".join(sizes.words)
    policy, critic, plan = cfg.actor_rollout_ref, cfg.critic, plan_batches(cfg)
    longest, scored = cfg.data.max_prompt_length + cfg.data.max_response_length, f"log_prob_{_TOKENS}"
    least, of_critic = -(-longest // sequence_ranks(policy.actor)), -(-longest // sequence_ranks(critic))
    for key in (key for key, works in compiled_roles(cfg, machine).items() if works and key not in given):
        sizes.choose(key, True)
    sizes.choose_sequences()
    sizes.choose_share()
    sizes.choose_update(policy.actor, plan.actor, MODEL, ACTOR_BUDGET, least)
    if plan.critic is not None:
        sizes.choose_update(critic, plan.critic, "critic.model", CRITIC_BUDGET, of_critic)
        sizes.choose_scoring(f"critic.forward_{_TOKENS}", critic.scoring, CRITIC_BUDGET, "values", of_critic)
    sizes.choose_scoring(f"{ROLLOUT}.{scored}", policy.rollout.scoring, ACTOR_BUDGET, "old_log_prob", least)
    if cfg.use_reference:
        sizes.choose_scoring(f"{_POLICY}.ref.{scored}", policy.ref.scoring, ACTOR_BUDGET, "ref", least)
    if cfg.reward.reward_model.enable:
        key = f"reward.reward_model.forward_{_TOKENS}"
        sizes.choose_scoring(key, cfg.reward.reward_model.scoring, key, "reward_model", longest)
    sizes.check_sequences()
    room = f" ({machine.room_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB to plan with)"
    return sizes.values, f"{', '.join(sizes.words)}{room if sizes.words else ''}"
