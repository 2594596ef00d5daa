"""What a trainer holds beside its worker groups, put together from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlsys.algorithms import KLController, filter_groups
from rlsys.config import EvalConfig, PPOConfig
from rlsys.config.plan import total_steps
from rlsys.config.schema_algorithm import FilterGroupsConfig, RewardConfig
from rlsys.config.schema_data import DataConfig
from rlsys.config.schema_megatron import MegatronConfig
from rlsys.config.schema_model import FSDPConfig
from rlsys.data.collate import collate_prompts
from rlsys.data.cursor import Cursor
from rlsys.data.dataset import PromptDataset
from rlsys.protocol import DataProto
from rlsys.rewards.manager import OverlongBuffer, RewardManager, build_reward_manager, load_reward_manager
from rlsys.rewards.pool import RewardPool
from rlsys.rewards.records import Grader
from rlsys.rollout.fleet import FleetDeadlines, RolloutFleet
from rlsys.types import SamplingParams, TransferReport
from rlsys.utils.errors import ConfigError
from rlsys.weights.sharding_manager import FSDPHFShardingManager, ShardingManager
from trainer.answers import VALIDATION_SEED, Answers, Generate
from trainer.estimate import AdvantageSettings, advantage_settings, kl_controller
from trainer.evaluate import Dump, Evaluator
from trainer.groups import WorkerGroups, deadlines_of, start_groups
from trainer.residency import Holder, Moves, Residency
from trainer.source import GroupFilter, RolloutSource

if TYPE_CHECKING:
    from trainer.ppo import RayPPOTrainer


@dataclass(frozen=True)
class Runtime:
    """The parts that a step uses."""

    source: RolloutSource
    residency: Residency
    evaluator: Evaluator | None
    advantages: AdvantageSettings
    kl_ctrl: KLController
    push: Callable[[int], TransferReport]
    total_steps: int
    closers: tuple[Callable[[], None], ...]

    def close(self) -> None:
        for close in self.closers:
            close()


@dataclass(frozen=True)
class CollatedPrompts:
    """A cursor over a dataset that hands out padded batches."""

    cursor: Cursor
    dataset: PromptDataset
    max_prompt_tokens: int
    pad_token_id: int

    def next(self) -> DataProto:
        step = self.cursor.next()
        rows = [self.dataset[index] for index in step.rows]
        return collate_prompts(
            rows, prompt_length=self.max_prompt_tokens, pad_token_id=self.pad_token_id, epoch=step.epoch
        )

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor.load_state_dict(state)


def launch(trainer: RayPPOTrainer) -> WorkerGroups:
    """Start the worker groups of a trainer's plan."""
    cfg = trainer.cfg
    return start_groups(
        trainer.role_worker_mapping,
        trainer.resource_pool_manager,
        group_cls=trainer.ray_worker_group_cls,
        deadlines=deadlines_of(cfg.trainer.deadlines),
    )


def assemble(trainer: RayPPOTrainer) -> Runtime:
    """Connect weights, rollouts, rewards and data of a trainer whose groups run."""
    cfg, groups = trainer.cfg, trainer.groups
    pool = reward_pool(cfg.reward)
    manager = reward_manager(cfg, trainer.tokenizer, pool)
    transfer = connect_weights(groups, cfg, colocated=trainer.plan.pools.colocated)
    fleet = rollout_fleet(
        groups.rollout,
        cfg,
        transfer=transfer,
        rows=cfg.data.gen_batch_size * cfg.actor_rollout_ref.rollout.n,
        restartable=not trainer.plan.pools.colocated,
        max_staleness=cfg.trainer.max_staleness,
    )
    pad = trainer.tokenizer.pad_token_id
    answers = Answers(
        generate=generate_by(fleet),
        manager=manager,
        sampling=training_sampling(cfg),
        num_answers=cfg.actor_rollout_ref.rollout.n,
        greedy_baseline=cfg.algorithm.adv_estimator == "remax",
        pad_token_id=pad,
        stage=trainer.stage,
    )
    prompts = trainer.train_sampler or training_prompts(cfg.data, trainer.train_dataset, pad_token_id=pad)
    source = RolloutSource(
        prompts=prompts,
        make=answers.make,
        prompts_per_step=cfg.data.train_batch_size,
        num_samples=cfg.actor_rollout_ref.rollout.n,
        group_filter=_group_filter(cfg.algorithm.filter_groups),
        max_staleness=cfg.trainer.max_staleness,
        deadline_s=cfg.trainer.deadlines.generate_s + cfg.trainer.deadlines.reward_s,
    )
    return Runtime(
        source=source,
        residency=Residency(residency_moves(cfg, groups, trainer.device_name, trainer.plan.pools.colocated)),
        evaluator=validation(cfg, trainer.val_dataset, answers, trainer.dump_validation, seed=cfg.data.seed)
        if trainer.val_dataset is not None
        else None,
        advantages=advantage_settings(cfg),
        kl_ctrl=kl_controller(cfg),
        push=push_by(transfer, fleet),
        total_steps=steps_of(cfg, trainer.train_dataset),
        closers=(source.close, fleet.close, transfer.close, pool.close),
    )


def steps_of(cfg: PPOConfig, dataset: Any) -> int:
    """Steps of the whole run."""
    run = cfg.trainer
    return total_steps(len(dataset), cfg.data.gen_batch_size, run.total_epochs, run.total_training_steps)


def training_prompts(data: DataConfig, dataset: PromptDataset, *, pad_token_id: int) -> CollatedPrompts:
    cursor = Cursor(
        len(dataset),
        batch_size=data.gen_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        dataset=dataset.fingerprint,
        batch_size_key="data.gen_batch_size",
    )
    return CollatedPrompts(cursor, dataset, data.max_prompt_length, pad_token_id)


def training_sampling(cfg: PPOConfig) -> SamplingParams:
    rollout = cfg.actor_rollout_ref.rollout
    return SamplingParams(
        max_new_tokens=cfg.data.max_response_length,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
    )


def validation_sampling(cfg: PPOConfig | EvalConfig) -> SamplingParams:
    rollout = cfg.actor_rollout_ref.rollout
    val = rollout.val_kwargs
    return SamplingParams(
        max_new_tokens=cfg.data.max_response_length,
        temperature=val.temperature if val.do_sample else 0.0,
        top_p=val.top_p,
        top_k=val.top_k,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed + VALIDATION_SEED,
    )


def reward_pool(reward: RewardConfig) -> RewardPool:
    custom = reward.custom_reward_function
    built_in = {"memory_limit_mb": reward.sandbox_fusion.memory_limit_mb}
    kwargs = built_in if custom.path is None else custom.reward_kwargs
    grader = Grader(path=custom.path, name=custom.name, kwargs=kwargs)
    return RewardPool(grader, num_workers=reward.num_workers, timeout_s=reward.timeout_s)


def reward_manager(cfg: PPOConfig | EvalConfig, tokenizer: Any, pool: RewardPool) -> RewardManager:
    """The configured manager: registered by name, or a class from a file."""
    chosen, kwargs = cfg.reward.reward_manager, cfg.reward.reward_kwargs
    overlong = kwargs.overlong_buffer_cfg
    buffer = None
    if overlong.enable:
        buffer = OverlongBuffer(
            max_response_tokens=kwargs.max_resp_len or cfg.data.max_response_length,
            num_tokens=overlong.len,
            penalty_factor=overlong.penalty_factor,
            log=overlong.log,
        )
    if chosen.source == "importlib":
        assert chosen.module.path is not None, "checked with the configuration"
        return load_reward_manager(
            chosen.module.path,
            chosen.module.name,
            tokenizer=tokenizer,
            pool=pool,
            reward_fn_key=cfg.data.reward_fn_key,
            config=cfg,
        )
    return build_reward_manager(
        chosen.name,
        tokenizer=tokenizer,
        pool=pool,
        reward_fn_key=cfg.data.reward_fn_key,
        overlong_buffer=buffer,
        deadline_s=cfg.trainer.deadlines.reward_s,
    )


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
    if colocated and device.startswith("cuda"):
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


@dataclass(frozen=True)
class GroupReplica:
    """One rank of the rollout group as the fleet sees it."""

    group: Any
    rank: int

    @property
    def name(self) -> str:
        return f"rollout {self.rank}"

    def generate(self, work: Any, deadline_s: float) -> Any:
        return self.group.execute_rank(
            self.rank, "generate_sequences", work, deadline_s=deadline_s, stage="generate_sequences"
        )

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.group.execute_rank(self.rank, "health", deadline_s=deadline_s)

    def restart(self, deadline_s: float) -> None:
        self.group.restart_rank(self.rank, deadline_s)
        self.group.execute_rank(self.rank, "init_model", deadline_s=deadline_s)


def rollout_fleet(
    group: Any,
    cfg: PPOConfig | EvalConfig,
    *,
    rows: int,
    restartable: bool,
    transfer: ShardingManager | None = None,
    max_staleness: int = 0,
) -> RolloutFleet:
    """The ranks of a rollout group as replicas, for calls of about `rows` rows.

    One that dies is restarted, unless the actor lived in its process too.
    """
    share = -(-rows // group.world_size)
    return RolloutFleet(
        [GroupReplica(group, rank) for rank in range(group.world_size)],
        chunk_rows=min(share, cfg.actor_rollout_ref.rollout.max_num_seqs),
        deadlines=FleetDeadlines(generate_s=cfg.trainer.deadlines.generate_s, restart_s=cfg.trainer.deadlines.start_s),
        on_restart=None if transfer is None else lambda replica: _restore(transfer, replica),
        max_restarts=3 if restartable else 0,
        max_staleness=max_staleness,
    )


def _restore(transfer: ShardingManager, replica: Any) -> None:
    transfer.restore(replica.rank)


def push_by(transfer: ShardingManager, fleet: RolloutFleet) -> Callable[[int], TransferReport]:
    """Push weights, and from then on refuse answers of older ones."""

    def push(version: int) -> TransferReport:
        fleet.settle()
        if fleet.max_restarts and transfer.version is not None:
            fleet.check_health()
        report = transfer.push(version)
        fleet.weights_pushed(version)
        return report

    return push


def generate_by(fleet: RolloutFleet) -> Generate:
    """Rows in, completed rows out, with the counts of what this call took."""

    def generate(rows: DataProto) -> tuple[DataProto, dict[str, float]]:
        before = {**fleet.metrics(), "rollout/replicas_ready": 0.0}
        prompts = rows.select(batch_keys=["prompts", "attention_mask"], non_tensor_batch_keys=[])
        done = fleet.generate_sequences(prompts)
        columns = {**rows.non_tensor_batch, **done.non_tensor_batch}
        counts = {name: count - before[name] for name, count in fleet.metrics().items()}
        return DataProto(done.batch, columns, dict(rows.meta_info)), counts

    return generate


def connect_weights(groups: WorkerGroups, cfg: PPOConfig, *, colocated: bool) -> ShardingManager:
    """The manager that reshards the actor's weights into the rollout, connected."""
    backend = cfg.actor_rollout_ref.rollout.checkpoint_engine.backend
    local = colocated and backend != "shm"
    if not colocated and backend in ("local", "gather"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend} needs actor and rollout in one process; "
            "write auto or shm where the rollout has processes of its own"
        )
    manager = FSDPHFShardingManager(
        groups.actor,
        groups.actor if local else groups.rollout,
        executor="local" if local else "shm",
        deadline_s=cfg.trainer.deadlines.weights_s,
    )
    manager.connect()
    return manager


def validation(
    cfg: PPOConfig | EvalConfig, dataset: PromptDataset, answers: Answers, dump: Dump, *, seed: int
) -> Evaluator:
    """Validation by a fleet and graders, with the sampling of val_kwargs."""
    asking = replace(
        answers,
        sampling=validation_sampling(cfg),
        num_answers=cfg.actor_rollout_ref.rollout.val_kwargs.n,
        greedy_baseline=False,
    )
    size = cfg.data.val_batch_size or len(dataset)

    def batches() -> list[DataProto]:
        return [
            collate_prompts(
                [dataset[i] for i in range(start, min(start + size, len(dataset)))],
                prompt_length=cfg.data.max_prompt_length,
                pad_token_id=answers.pad_token_id,
            )
            for start in range(0, len(dataset), size)
        ]

    def answer(prompts: DataProto, step: int, call: int) -> DataProto:
        return asking.make(prompts, step=step, call=call)[0]

    return Evaluator(batches=batches, answer=answer, dump=dump, seed=seed)
