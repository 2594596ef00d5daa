"""What a trainer holds beside its worker groups, put together from the configuration."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.agent.endpoint import Endpoint
from rlsys.agent.session import Session, SessionSettings
from rlsys.agent.template import ChatTemplate
from rlsys.algorithms.kl import KLController
from rlsys.algorithms.stages import filter_groups
from rlsys.config import PPOConfig, plan_batches
from rlsys.config.pools import generates_ahead
from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import FSDPConfig
from rlsys.data.collate import collate_answers
from rlsys.data.dataset import PromptDataset
from rlsys.fleet.elastic import ElasticFleet
from rlsys.fleet.fleet import RolloutFleet
from rlsys.fleet.group import group_fleet
from rlsys.interfaces import ExperienceSource
from rlsys.types import SamplingParams
from rlsys.utils.daemon_threads import LoopThread
from trainer.async_source import AsyncSource
from trainer.episodes import EpisodeRollout, OpenEpisodes, graded_rollout
from trainer.epochs import EpochSource, check_repeatable
from trainer.evaluation import OnValidation, Validation
from trainer.generation import GradedRollout
from trainer.groups import EngineGroup, Role, RolloutGroup, WorkerGroups
from trainer.local_files import load_tokenizer
from trainer.overlap import OverlapMeter
from trainer.parity import ParityProbe
from trainer.prompt_groups import OpenAnswers, PromptGroups
from trainer.prompts import num_steps, training_prompts
from trainer.reporting import Reporter
from trainer.residency import SYNC, Moves, Residency, Resident
from trainer.source import GroupFilter, Prompts, RolloutSource
from trainer.staleness_advice import StalenessAdvisor
from trainer.staleness_window import StalenessWindow
from trainer.steps import Steps
from trainer.weight_push import WeightPush, connect_servers, connect_weights, drops_weights_on_sleep

JUDGE_START_S = 30.0


@dataclass(frozen=True)
class Inputs:
    """What a trainer was given beside its configuration; `sampler` takes the place of the configured cursor."""

    tokenizer: Tokenizer
    train_dataset: PromptDataset
    val_dataset: PromptDataset | None
    sampler: Prompts | Sampler[int] | None
    device: str


@dataclass(frozen=True)
class TrainerParts:
    """The source of batches, the calls of a step, weight pushes, validation, and checks of the running job."""

    source: ExperienceSource
    steps: Steps
    weights: WeightPush
    validation: Validation | None
    parity: ParityProbe
    advisor: StalenessAdvisor | None
    close: Callable[[], None]


def assemble(
    cfg: PPOConfig, groups: WorkerGroups, inputs: Inputs, *, reporter: Reporter, on_validation: OnValidation
) -> TrainerParts:
    """Connect weights, rollouts, rewards and data to running groups."""
    rollout, plan = cfg.actor_rollout_ref.rollout, plan_batches(cfg)
    pools = plan.pools
    moves = residency_moves(cfg, groups, inputs.device, colocated=pools.colocated)
    residency = Residency(moves, reporter.stage)
    residency.offload_all()
    residency.enter(SYNC)  # to connect weights where they will be pushed
    with ExitStack() as stack:
        judge = serve_judge(cfg, groups.judge, stack) if groups.judge is not None else ""
        if pools.external:
            fleet, transfer = connect_servers(cfg, groups.actor)
            score = fleet.compute_log_prob
        else:
            assert groups.rollout is not None
            transfer = connect_weights(groups, cfg, colocated=pools.colocated)  # the workers hold its resources
            num_rows = cfg.data.gen_batch_size * rollout.n
            if cfg.trainer.reproducible:  # batches have one size for any number of replicas
                num_rows = pools.rollout_ranks // rollout.replica_size * rollout.max_replica_seqs
            deadlines = cfg.trainer.deadlines
            fleet = group_fleet(
                groups.rollout, rollout, deadlines, manager=transfer, num_rows=num_rows, restartable=not pools.colocated
            )
            score = (fleet if isinstance(fleet, ElasticFleet) else groups.rollout).compute_log_prob
        stack.callback(fleet.close)
        reporter.count("gen", lambda: (fleet.counts["answered"], fleet.counts["issued"]))
        graded = graded_rollout(cfg, fleet, inputs.tokenizer, stack, reporter.stage, judge)
        if isinstance(graded, EpisodeRollout):
            graded = replace(graded, best_effort=reporter.best_effort)
        source = training_source(cfg, inputs, graded, fleet)
        stack.callback(source.close)
        weights = WeightPush(transfer, fleet, rollout.validate_weight)
        residency.refill = weights.push_again if Role.Rollout in moves and drops_weights_on_sleep(cfg) else None
        reward_model, reward_rows = cfg.reward.reward_model, None
        if reward_model.input_tokenizer is not None:
            reward_rows = partial(collate_answers, tokenizer=inputs.tokenizer, own=load_tokenizer(reward_model.model))
        val_rows = inputs.val_dataset
        longest = cfg.data.max_prompt_length
        return TrainerParts(
            source=source,
            steps=Steps(cfg, plan, groups, residency, reporter, KLController(cfg.algorithm.kl_ctrl), reward_rows),
            weights=weights,
            validation=None if val_rows is None else Validation(cfg, val_rows, graded, on_validation, cfg.data.seed),
            parity=ParityProbe(rollout.parity, inputs.train_dataset, graded, longest, score, groups.actor, residency),
            advisor=None if pools.colocated else StalenessAdvisor(cfg, fleet),
            close=stack.pop_all().close,
        )


def training_source(cfg: PPOConfig, inputs: Inputs, graded: GradedRollout, fleet: RolloutFleet) -> ExperienceSource:
    """Where training batches come from, as trainer.max_staleness and trainer.reproducible ask."""
    run, per_step = cfg.trainer, cfg.data.train_batch_size
    prompts = inputs.sampler
    if prompts is None or isinstance(prompts, Sampler):
        pad, restarts = graded.pad_token_id, run.resume_changed
        prompts = training_prompts(cfg.data, inputs.train_dataset, prompts, pad_token_id=pad, restarts=restarts)
    filters, group_filter = cfg.algorithm.filter_groups, None
    if filters.enable:
        keep = partial(filter_groups, metric=filters.metric or "seq_reward")
        group_filter = GroupFilter(keep, filters.max_num_gen_batches)
    if not generates_ahead(cfg):
        return RolloutSource(prompts, graded, per_step, group_filter, counted=OverlapMeter(fleet).new_counts)
    steps = num_steps(cfg, inputs.train_dataset)
    window = StalenessWindow(
        groups_per_step=per_step, max_staleness=run.max_staleness, lookahead=run.lookahead, num_steps=steps
    )
    groups = PromptGroups(window, prompts, graded, group_filter=group_filter, failures=run)
    answers = OpenAnswers(groups, fleet)
    deadline_s = run.deadlines.generate_s + run.deadlines.reward_s
    if isinstance(graded, EpisodeRollout):
        answers = OpenEpisodes(groups, fleet, graded)
        deadline_s = graded.deadline_s
    if run.reproducible:
        probe = partial(check_repeatable, fleet, len(inputs.tokenizer))
        return EpochSource(answers, max_tokens=cfg.data.max_response_length, deadline_s=deadline_s, probe=probe)
    return AsyncSource(answers, deadline_s=deadline_s)


def residency_moves(cfg: PPOConfig, groups: WorkerGroups, device: str, *, colocated: bool) -> dict[Resident, Moves]:
    """What each role does when it enters and leaves the device, as offloading is configured."""
    policy = cfg.actor_rollout_ref

    def offloads(group: EngineGroup, parts: Sequence[str]) -> Moves:
        return Moves([partial(group.move, parts, device)], [partial(group.move, parts, "cpu")])

    moved = ((role, getattr(groups, role), parts) for role, parts in offloaded_parts(cfg).items() if parts)
    moves: dict[Resident, Moves] = {role: offloads(group, parts) for role, group, parts in moved if group is not None}
    sync = offloads(groups.actor, ("params",)) if policy.actor.shard.param_offload else Moves()
    if colocated and device.startswith("cuda") and policy.rollout.free_cache_engine:
        assert groups.rollout is not None
        engines = [groups.rollout]
        if groups.judge is not None and not cfg.reward.reward_model.enable_resource_pool:
            engines.append(groups.judge)
        everything = ("weights", "kv_cache")
        wakes = [partial(engine.wake, everything) for engine in engines]
        moves[Role.Rollout] = Moves(wakes, [partial(engine.sleep, everything) for engine in engines])
        sync = Moves([*sync.enter, partial(groups.rollout.wake, ("weights",))], sync.leave)
    if sync.enter:
        moves[SYNC] = sync
    return moves


def offloaded_parts(cfg: PPOConfig) -> dict[Role, tuple[str, ...]]:
    """The parts of a role that leave the device while another one starts or runs."""

    def parts_of(role: FSDPConfig | MegatronConfig) -> tuple[str, ...]:
        moves_grads = isinstance(role, MegatronConfig) and role.grad_offload
        leaves = {"params": role.param_offload, "grads": moves_grads, "optimizer": role.optimizer_offload}
        return tuple(part for part, does_leave in leaves.items() if does_leave)

    policy = cfg.actor_rollout_ref
    frozen = ("params",) if policy.ref_shard.param_offload else ()
    trained = {Role.Actor: parts_of(policy.actor.shard), Role.Critic: parts_of(cfg.critic.shard)}
    return {**trained, Role.RefPolicy: frozen, Role.Teacher: frozen}


def serve_judge(cfg: PPOConfig, group: RolloutGroup, stack: ExitStack) -> str:
    """HOST:PORT on loopback of a chat completions server over a generative reward model's engines; `stack` ends it."""
    rollout = cfg.reward.reward_model.rollout
    restartable = cfg.reward.reward_model.enable_resource_pool
    num_rows = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    fleet = group_fleet(group, rollout.generation, cfg.trainer.deadlines, num_rows=num_rows, restartable=restartable)
    stack.callback(fleet.close)
    template = ChatTemplate(load_tokenizer(cfg.reward.reward_model.model))
    sampling = SamplingParams(max_new_tokens=rollout.response_length)
    settings = SessionSettings(fleet.sample, template, sampling, rollout.prompt_length, rollout.response_length)
    thread, endpoint = LoopThread("judge"), Endpoint(partial(Session, settings))
    stack.callback(lambda: thread.close(endpoint.close(), wait_s=JUDGE_START_S))
    return thread.start(endpoint.start()).result(JUDGE_START_S)
