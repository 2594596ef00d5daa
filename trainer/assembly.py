"""What a trainer holds beside its worker groups, put together from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rlsys.algorithms import filter_groups
from rlsys.config import PPOConfig
from rlsys.config.plan import BatchPlan
from rlsys.config.schema.algorithm import FilterGroupsConfig
from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import FSDPConfig
from rlsys.fleet.group import group_fleet
from rlsys.interfaces import ExperienceSource
from rlsys.protocol import DataProto
from rlsys.telemetry.metrics import StageTimer
from rlsys.types import TransferReport
from trainer.advantages import advantage_settings, kl_controller
from trainer.evaluate import Evaluator, validation
from trainer.generation import Answers, training_sampling
from trainer.groups import WorkerGroups
from trainer.parity import LOST, REFUSED, ParityProbe, probe_prompts
from trainer.prompts import training_prompts
from trainer.reporting import Reporter
from trainer.residency import Holder, Moves, Residency
from trainer.rewards import reward_manager, reward_pool
from trainer.rollouts import (
    Transfer,
    connect_weights,
    external_rollout,
    generate_by,
    gives_up_weights,
    printer,
    push_by,
)
from trainer.source import GroupFilter, RolloutSource
from trainer.steps import Steps


class Parts(Protocol):
    """A trainer as far as its runtime is made from it."""

    @property
    def cfg(self) -> PPOConfig: ...
    @property
    def plan(self) -> BatchPlan: ...
    @property
    def groups(self) -> WorkerGroups: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def train_dataset(self) -> Any: ...
    @property
    def val_dataset(self) -> Any: ...
    @property
    def train_sampler(self) -> Any: ...
    @property
    def reporter(self) -> Reporter: ...
    @property
    def stage(self) -> StageTimer: ...
    @property
    def device_name(self) -> str: ...
    def dump_validation(self, batch: DataProto, step: int) -> None: ...


@dataclass(frozen=True)
class Runtime:
    """Where batches come from, the verbs of a step, how weights are pushed, how answers and weights are checked."""

    source: ExperienceSource
    steps: Steps
    push: Callable[[int], TransferReport]
    evaluator: Evaluator | None
    parity: ParityProbe
    close: Callable[[], None]

    @property
    def residency(self) -> Residency:
        return self.steps.residency


def assemble(trainer: Parts) -> Runtime:
    """Connect weights, rollouts, rewards and data of a trainer whose groups run."""
    cfg, plan, groups = trainer.cfg, trainer.plan, trainer.groups
    rollout, pad = cfg.actor_rollout_ref.rollout, trainer.tokenizer.pad_token_id
    with ExitStack() as stack:
        pool = stack.enter_context(reward_pool(cfg.reward))
        if plan.pools.external:
            fleet, transfer = external_rollout(cfg, groups.actor)
            stack.callback(transfer.close)
        else:
            transfer = connect_weights(groups, cfg, colocated=plan.pools.colocated)  # what it holds goes with workers
            fleet = group_fleet(
                groups.rollout,
                rollout,
                cfg.trainer.deadlines,
                restore=transfer.restore,
                num_rows=cfg.data.gen_batch_size * rollout.n,
                restartable=not plan.pools.colocated,
                max_staleness=cfg.trainer.max_staleness,
            )
        stack.callback(fleet.close)
        answers = Answers(
            generate=generate_by(fleet, printer(rollout, trainer.tokenizer)),
            manager=reward_manager(cfg, trainer.tokenizer, pool),
            sampling=training_sampling(cfg),
            num_answers=rollout.n,
            greedy_baseline=cfg.algorithm.adv_estimator == "remax",
            pad_token_id=pad,
            stage=trainer.stage,
        )
        source = RolloutSource(
            prompts=trainer.train_sampler or training_prompts(cfg.data, trainer.train_dataset, pad_token_id=pad),
            make=answers.make,
            prompts_per_step=cfg.data.train_batch_size,
            num_samples=rollout.n,
            group_filter=_group_filter(cfg.algorithm.filter_groups),
            max_staleness=cfg.trainer.max_staleness,
            deadline_s=cfg.trainer.deadlines.generate_s + cfg.trainer.deadlines.reward_s,
        )
        stack.callback(source.close)
        moves = residency_moves(cfg, groups, trainer.device_name, plan.pools.colocated)
        push = push_by(transfer, fleet, validate=rollout.validate_weight)
        refill = partial(_push_again, transfer, push) if Holder.ROLLOUT in moves and gives_up_weights(cfg) else None
        residency = Residency(moves, trainer.stage, refill)
        steps = Steps(cfg, plan, groups, residency, trainer.reporter, advantage_settings(cfg), kl_controller(cfg))
        evaluator = None
        if trainer.val_dataset is not None:
            evaluator = validation(cfg, trainer.val_dataset, answers, trainer.dump_validation, seed=cfg.data.seed)
        parity = ParityProbe(
            rollout.parity,
            prompts=probe_prompts(
                trainer.train_dataset,
                rollout.parity,
                answers.sampling,
                prompt_length=cfg.data.max_prompt_length,
                pad_token_id=pad,
            ),
            generate=answers.generate,
            rollout=fleet if plan.pools.external else groups.rollout,
            actor=groups.actor,
            residency=residency,
            refusals=REFUSED if plan.pools.external else () if plan.pools.colocated else LOST,
        )
        return Runtime(source, steps, push, evaluator, parity, stack.pop_all().close)


def _push_again(transfer: Transfer, push: Callable[[int], TransferReport]) -> None:
    """Bring back the weights that were served, where there were any."""
    if transfer.version is not None:
        push(transfer.version)


def residency_moves(cfg: PPOConfig, groups: WorkerGroups, device: str, colocated: bool) -> dict[Holder, Moves]:
    """What each role does when it gets and gives back memory, as offloading is configured."""
    moves: dict[Holder, Moves] = {}
    policy = cfg.actor_rollout_ref
    actor = policy.actor.megatron if policy.actor.strategy == "megatron" else policy.actor.fsdp_config
    critic = cfg.critic.megatron if cfg.critic.strategy == "megatron" else cfg.critic.fsdp
    ref = policy.ref.megatron if policy.actor.strategy == "megatron" else policy.ref.fsdp_config
    wanted = (
        (Holder.ACTOR, groups.actor, _offloaded(actor)),
        (Holder.CRITIC, groups.critic, _offloaded(critic)),
        (Holder.REFERENCE, groups.ref, ("params",) * ref.param_offload),
    )
    for holder, group, parts in wanted:
        if group is not None and parts:
            moves[holder] = Moves(partial(group.move, parts, device), partial(group.move, parts, "cpu"))
    sync_in: list[Callable[[], None]] = []
    sync_out: list[Callable[[], None]] = []
    if actor.param_offload:
        sync_in.append(partial(groups.actor.move, ("params",), device))
        sync_out.append(partial(groups.actor.move, ("params",), "cpu"))
    if colocated and device.startswith("cuda") and policy.rollout.free_cache_engine:
        sleep, wake = groups.rollout.sleep, groups.rollout.wake
        moves[Holder.ROLLOUT] = Moves(partial(wake, ("weights", "kv_cache")), partial(sleep, ("weights", "kv_cache")))
        sync_in.append(partial(wake, ("weights",)))
    if sync_in:
        moves[Holder.SYNC] = Moves(_all(sync_in), _all(sync_out))
    return moves


def _offloaded(role: FSDPConfig | MegatronConfig) -> tuple[str, ...]:
    """The parts of a trained role that leave the device while another role runs."""
    grads = isinstance(role, MegatronConfig) and role.grad_offload
    return ("params",) * role.param_offload + ("grads",) * grads + ("optimizer",) * role.optimizer_offload


def _all(calls: list[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _group_filter(settings: FilterGroupsConfig) -> GroupFilter | None:
    if not settings.enable:
        return None
    return GroupFilter(partial(filter_groups, metric=settings.metric or "seq_reward"), settings.max_num_gen_batches)
