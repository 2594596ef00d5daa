"""Answers to prompts by episodes of a workflow, as configured: turns, tools and environments."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.agent.collate import collate_episodes
from rlsys.agent.episode_log import EpisodeLog, read_episodes, write_episodes
from rlsys.agent.interactions import InteractionWorkflow
from rlsys.agent.message_images import image_part, png_url
from rlsys.agent.presets import Workflow, load_workflow
from rlsys.agent.programs import command_workflow, function_workflow
from rlsys.agent.runner import FAILED, EpisodeResult, EpisodeRunner, EpisodeStart, Rounds, episode_metrics
from rlsys.agent.session import Row, Score, SessionSettings
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tool_config import read_entries, tools_of_yaml
from rlsys.agent.tool_pool import ToolPool
from rlsys.agent.tools import Tool, tools_of_file
from rlsys.config import EvalConfig, GradedJob, PPOConfig
from rlsys.config.introspect import replaced
from rlsys.config.pools import generates_ahead
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.data.chat import Message, answer_ends, with_parts
from rlsys.data.dataset import PromptDataset, RowStream
from rlsys.fleet.fleet import POLL_S, RolloutFleet
from rlsys.interfaces import State
from rlsys.protocol import IMAGES, DataProto
from rlsys.rewards.manager import build_reward_manager, check_share
from rlsys.rewards.pool.pool import RewardItem, RewardPool
from rlsys.rollout.batch import SEEDS, with_request_seeds
from rlsys.telemetry.jsonl import JsonObject
from rlsys.telemetry.metrics import StageTimer
from rlsys.telemetry.trackers import BestEffort
from rlsys.types import GenerationHyperparameters, SamplingParams
from rlsys.utils.errors import ConfigError, DataError, DeadlineError, RolloutError
from trainer.generation import GradedRollout, fleet_generate, meta_of_all_calls, training_sampling, validation_sampling
from trainer.prompt_groups import EPISODES, OpenAnswers, PromptGroup, PromptGroups, UnansweredError
from trainer.prompts import load_processor
from trainer.rewards import reward_pool

ConfigT = TypeVar("ConfigT", PPOConfig, EvalConfig)
AGENTS = {"single_turn_agent": "RLVRWorkflow", "tool_agent": "ToolWorkflow"}
"""verl's names of its agents -> ours."""
ONE_DRAW = {"workflow": None, "agent.default_agent_loop": "single_turn_agent", "agent.agent_loop_config_path": None}
"""Settings of a rollout that answers each prompt by one draw."""
BLOCKED = (
    "a workflow that blocks, as by time.sleep, or never ends holds all of them up; else raise agent.episode_timeout_s"
)
HINTS = {
    "context": "the prompts with their tools have more than data.max_prompt_length tokens",
    "length": "raise data.max_response_length, which counts all turns of an episode",
    "no_draw": "the workflow never drew an answer",
    "rejected": "the workflow returned None",
}


class AgentEntry(TypedDict):
    """An entry of agent_loop_config_path, without the arguments of its workflow."""

    name: str
    _target_: str


@dataclass(frozen=True)
class EpisodeRollout(GradedRollout):
    """A GradedRollout whose answers are episodes; the workflow's rewards take the place of the reward manager's."""

    runner: EpisodeRunner
    cfg: GradedJob
    meanwhile: Callable[[], object] = lambda: None
    """Called while episodes are waited for, in the thread that waits."""
    best_effort: BestEffort = field(default_factory=BestEffort)

    @property
    def deadline_s(self) -> float:
        """Seconds for the episodes of a call."""
        return self.cfg.trainer.deadlines.generate_s + self.cfg.actor_rollout_ref.rollout.agent.episode_timeout_s

    def _answer(
        self, rows: DataProto, sampling: SamplingParams, *, step: int, call: int
    ) -> tuple[DataProto, dict[str, float]]:
        rows = with_request_seeds(self._sampled(rows, sampling, step=step, call=call))
        with self.stage("gen"):
            starts = episode_starts(rows, {}, name=f"{call:03d}")
            cfg, num = self._run_of(sampling), len(starts)  # all are waited for but in training
            num_spare = num - int(num * (1 - cfg.actor_rollout_ref.rollout.over_sample_rate)) if cfg else 0
            futures = self.runner.submit(starts, sampling, num_spare=num_spare)
            try:
                results = [self._result(future) for future in futures]
            finally:
                for future in futures:
                    future.cancel()
        self.keep(starts, sampling, step)
        check_episodes(results, self.cfg)
        return self.collate(results, rows), episode_metrics(results)

    def _run_of(self, sampling: SamplingParams) -> PPOConfig | None:
        """The configuration of training episodes; None for validation or a baseline, whose sampling differs."""
        cfg, ends = self.cfg, sampling.stop_token_ids
        return cfg if isinstance(cfg, PPOConfig) and sampling == training_sampling(cfg, ends) else None

    def _result(self, future: Future[EpisodeResult]) -> EpisodeResult:
        end_s = time.monotonic() + self.deadline_s
        while not wait([future], POLL_S).done:
            self.meanwhile()
            if time.monotonic() > end_s:
                raise DeadlineError("the episodes", "generate", self.deadline_s, BLOCKED)
        return EpisodeResult((), 0.0, "over_sampled") if future.cancelled() else future.result()

    def collate(self, results: Sequence[EpisodeResult], rows: DataProto) -> DataProto:
        """The episodes of rows as a graded batch; its meta_info has no seed, which differs between calls."""
        return collate_episodes(
            results,
            DataProto(rows.batch, rows.non_tensor_batch, meta_of_all_calls(rows.meta_info)),
            pad_token_id=self.pad_token_id,
            prompt_length=self.cfg.data.max_prompt_length,
            response_length=self.cfg.data.max_response_length,
        )

    def keep(self, starts: Sequence[EpisodeStart], sampling: SamplingParams, step: int) -> None:
        """Write the logs of training episodes; a disk error does not stop the run."""
        if (cfg := self._run_of(sampling)) is not None and cfg.trainer.rollout_data_dir is not None:
            path = Path(cfg.trainer.rollout_data_dir) / "episodes" / f"{step}.jsonl"
            episodes, most = (start.to_dict() for start in starts), cfg.trainer.rollout_data_max_mb
            self.best_effort("rollouts", partial(write_episodes, path, episodes, max_mb=most))


class OpenEpisodes(OpenAnswers):
    """Answers that are episodes: those that a checkpoint has continue from their logs.

    In an epoch they draw in rounds, each turn as a whole.
    """

    by_episodes, hint = True, BLOCKED

    def __init__(self, groups: PromptGroups, fleet: RolloutFleet, rollout: EpisodeRollout) -> None:
        super().__init__(groups, fleet)
        self._rollout = rollout
        self._starts: dict[PromptGroup, list[EpisodeStart]] = {}
        self._saved: dict[str, JsonObject] = {}
        self._unchecked: list[EpisodeResult] = []

    def submit(self, groups: Sequence[PromptGroup], limits: Mapping[PromptGroup, float] | None = None) -> None:
        self._starts |= {group: episode_starts(group.rows, self._saved, name=f"{group.number:09d}") for group in groups}
        by_name = None
        if limits is not None:
            by_name = {start.name: limits.get(group, 0) for group, starts in self._starts.items() for start in starts}
        new = [start for group in groups for start in self._starts[group]]
        futures = iter(self._rollout.runner.submit(new, self._rollout.sampling, by_name))
        self.running |= {group: {row: next(futures) for row in range(len(group.rows))} for group in groups}

    def advance(self, limits: Mapping[PromptGroup, float]) -> list[PromptGroup]:
        self.submit([group for group in limits if group.graded is None and group not in self.running], limits)
        self._rollout.runner.end_epoch().result()
        ended = [group for group in limits if self.has_ended(group)]
        for future in (future for group in ended for future in self.running[group].values()):
            future.result()  # an engine that fails ends the run: one without its prompts is not the same
        return ended

    def grade(self, groups: Sequence[PromptGroup]) -> list[Mapping[str, float]]:
        metrics = list[Mapping[str, float]]()
        for group in groups:
            futures = self.running.get(group, {}).values()
            if not futures or any(future.cancelled() for future in futures):
                continue
            errors = [future.exception() for future in futures]
            group.failure = next((error for error in errors if isinstance(error, RolloutError)), None)
            if group.failure is not None:
                continue
            results: list[EpisodeResult] = [future.result() for future in futures]
            step = group.number // self.groups.window.groups_per_step + 1
            self._rollout.keep(self._starts[group], self._rollout.sampling, step)
            if any(result.rows for result in results):
                group.graded = self._rollout.collate(results, group.rows)
                self._unchecked += results
                if len(self._unchecked) >= self.groups.window.groups_per_step * len(results):
                    check_episodes(self._unchecked, self._rollout.cfg)
                    self._unchecked = []
            else:
                kind = RolloutError if any(result.end in FAILED for result in results) else UnansweredError
                causes = {result.error or result.end for result in results}
                group.failure = kind(f"no episode has an answer: {', '.join(sorted(causes))}")
            metrics.append(episode_metrics(results))
        return metrics

    def finish(self, groups: Sequence[PromptGroup], metrics: Sequence[Mapping[str, float]]) -> None:
        super().finish(groups, metrics)
        for group in groups:
            self._starts.pop(group, None)

    def save(self, folder: Path) -> dict[str, object]:
        """Keep finished groups and the logs of open episodes beside a checkpoint."""
        write_episodes(folder / EPISODES, [start.to_dict() for starts in self._starts.values() for start in starts])
        return self.groups.save(folder)

    def load(self, state: State, folder: Path) -> None:
        super().load(state, folder)
        self._saved = read_episodes(folder / EPISODES)


def episode_starts(rows: DataProto, saved: Mapping[str, JsonObject], *, name: str) -> list[EpisodeStart]:
    """An episode for each row, by its `request_seeds`; those that are `saved` continue from their logs.

    A workflow gets the columns of its row, and `prompt` as messages with its images.
    """
    columns, starts = rows.non_tensor_batch, list[EpisodeStart]()
    for number, seed in enumerate(rows.tensors[SEEDS].tolist()):
        row, episode = {key: column[number] for key, column in columns.items()}, f"{name}-{number:09d}"
        row["prompt"] = prompt_of_row(row)
        for of_engine in (IMAGES, "finish_reason"):  # the rows of a checkpoint have the latter
            row.pop(of_engine, None)
        starts.append(EpisodeStart(row, seed, episode, EpisodeLog(saved.get(episode, {}).get("log", ()))))
    return starts


def prompt_of_row(row: Row) -> list[Message]:
    """The messages of a row of a batch, in which the images stand at their `<image>`."""
    pictures = [image_part(png_url(data.tobytes())) for images in row.get(IMAGES) or () for data in images.pictures]
    parts, messages = iter(pictures), row["raw_prompt"]
    return [with_parts(message, lambda _: next(parts)) for message in messages] if pictures else list(messages)


def check_episodes(results: Sequence[EpisodeResult], cfg: GradedJob) -> None:
    """RolloutError if too many episodes failed or none has an answer to train on, RewardError if too many answers could
    not be graded. Both name the first cause.
    """
    failed = [result for result in results if result.end in FAILED]
    if len(failed) > (most := cfg.actor_rollout_ref.rollout.agent.max_failed_share) * len(results):
        share = f"actor_rollout_ref.rollout.agent.max_failed_share={most:g}"
        raise RolloutError(f"{len(failed)} of {len(results)} episodes failed ({share}); the first: {failed[0].error}")
    if not any(result.rows for result in results):
        ends = Counter(result.end for result in results)
        hints = "; ".join(HINTS[end] for end in ends if end in HINTS)
        raise RolloutError(f"no episode has an answer: {dict(ends)}. {hints}")
    if lost := [result for result in results if result.error and result.end not in FAILED]:
        first = f"{len(lost)} of {len(results)} episodes have no score. First: {lost[0].error}"
        check_share(len(lost), len(results), first, cfg.reward.max_failed)


def graded_rollout(
    cfg: GradedJob, fleet: RolloutFleet, tokenizer: Tokenizer, stack: ExitStack, stage: StageTimer, judge: str = ""
) -> GradedRollout:
    """The configured rollout, by episodes where there is a workflow; `stack` closes what it starts. `judge` as in
    `reward_pool`."""
    ends, pool = answer_ends(tokenizer), stack.enter_context(reward_pool(cfg.reward, judge=judge))
    rollout = GradedRollout(
        generate=partial(fleet_generate, fleet),
        manager=build_reward_manager(cfg, tokenizer, pool),
        sampling=training_sampling(cfg, ends) if isinstance(cfg, PPOConfig) else validation_sampling(cfg, ends),
        num_answers=cfg.actor_rollout_ref.rollout.n if isinstance(cfg, PPOConfig) else 1,
        greedy_baseline=isinstance(cfg, PPOConfig) and cfg.algorithm.adv_estimator == "remax",
        pad_token_id=tokenizer.pad_token_id,
        stage=stage,
        print_by=tokenizer if cfg.actor_rollout_ref.rollout.print_outputs else None,
    )
    loaded = load_agents(cfg, tokenizer)
    if loaded is None or loaded.template is None:
        return rollout
    agent, turns = cfg.actor_rollout_ref.rollout.agent, cfg.actor_rollout_ref.rollout.multi_turn
    tool_pool = ToolPool(agent, turns)
    stack.callback(tool_pool.close)
    is_async = isinstance(cfg, PPOConfig) and generates_ahead(cfg)
    is_repeatable = isinstance(cfg, PPOConfig) and is_async and cfg.trainer.reproducible
    slots = sys.maxsize if is_repeatable else agent.max_concurrent  # episodes wait in theirs for the next epoch
    rounds = None if is_async and not is_repeatable else Rounds(fleet.generate, max_concurrent=slots)
    sample = fleet.sample if rounds is None else rounds.sample
    grade = partial(_grade, pool, cfg.data.reward_fn_key)
    lengths = cfg.data.max_prompt_length, cfg.data.max_response_length
    settings = SessionSettings(sample, loaded.template, rollout.sampling, *lengths, agent, turns, grade)
    runner = EpisodeRunner(
        settings,
        loaded.workflow,
        tool_pool,
        tools=loaded.tools,
        agents=loaded.by_name,
        rounds=rounds,
        max_concurrent=slots,
        deadline_s=None if is_repeatable else agent.episode_timeout_s,
    )
    stack.callback(runner.close)
    return EpisodeRollout(**vars(rollout), runner=runner, cfg=cfg, meanwhile=fleet.push_if_stranded)


@dataclass(frozen=True)
class LoadedAgents:
    """The configured workflow, those that rows may choose by `agent_name`, the tools, and the proved chat template, if
    there is a tokenizer.
    """

    workflow: Workflow
    by_name: Mapping[str, Workflow]
    tools: Sequence[Tool]
    template: ChatTemplate | None


def load_agents(cfg: GradedJob, tokenizer: Tokenizer | None = None) -> LoadedAgents | None:
    """The configured workflow, tools and chat template, None where each prompt is answered by one draw. ConfigError,
    also for a class that cannot be imported.
    """
    generation, key = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.multi_turn"
    agent, turns = generation.agent, generation.multi_turn
    if not generation.has_workflow:
        return None
    by_name = {name: load_workflow(workflow) for name, workflow in AGENTS.items()}
    if (path := turns.interaction_config_path) is not None:
        by_name["tool_agent"] = load_workflow(InteractionWorkflow(path, key=f"{key}.interaction_config_path"))
    if (path := agent.agent_loop_config_path) is not None:
        for entry in read_entries(path, list[AgentEntry], key="actor_rollout_ref.rollout.agent.agent_loop_config_path"):
            kwargs = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            by_name[entry["name"]] = load_workflow(entry["_target_"], kwargs)
    is_plain = agent.default_agent_loop == "single_turn_agent"
    name = "tool_agent" if is_plain and turns.enable else agent.default_agent_loop
    if generation.workflow is not None:
        sampling = training_sampling(cfg) if isinstance(cfg, PPOConfig) else validation_sampling(cfg)
        gconfig = GenerationHyperparameters(**vars(sampling), greedy=sampling.greedy)
        of_areal = {"gconfig": gconfig, "tokenizer": tokenizer}
        workflow = load_workflow(generation.workflow, agent.workflow_kwargs, of_areal=of_areal)
    elif agent.command is not None:
        workflow = command_workflow(agent.command)
    elif agent.path is not None:
        workflow = function_workflow(agent.path)
    elif name in by_name:
        workflow = by_name[name]
    else:
        key = "actor_rollout_ref.rollout.agent.default_agent_loop"
        raise ConfigError(f"{key}={name}: choose from {', '.join(by_name)}, or add it to agent_loop_config_path")
    tools = list[Tool]()
    if turns.tool_config_path is not None:
        tools += tools_of_yaml(turns.tool_config_path, key=f"{key}.tool_config_path")
    if turns.function_tool_path is not None:
        tools += tools_of_file(turns.function_tool_path, key=f"{key}.function_tool_path")
    for candidate in (workflow, *by_name.values()):
        names = Counter(tool.name for tool in (*tools, *candidate.tools))
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"tools: {', '.join(repeated)} is defined by more than one tool; rename one")
    uses_tools = tools or any(candidate.tools or candidate.environment for candidate in (workflow, *by_name.values()))
    kinds, kwargs = ("tool",) if uses_tools else (), cfg.data.apply_chat_template_kwargs
    if tokenizer is None:
        return LoadedAgents(workflow, by_name, tools, None)
    template = ChatTemplate(tokenizer, template_kwargs=kwargs, kinds=kinds, processor=load_processor(cfg, tokenizer))
    return LoadedAgents(workflow, by_name, tools, template)


def without_episodes(cfg: ConfigT, agents: LoadedAgents | None, *datasets: PromptDataset | None) -> ConfigT:
    """The configuration without a workflow where RLVRWorkflow would answer each row: a batch of draws does the same.

    Other settings of episodes, and rows that are read later, keep it. DataError for a row that names an unknown agent.
    """
    if agents is None:
        return cfg
    workflows = [agents.workflow]
    for row in (row for dataset in datasets if dataset is not None for row in dataset):
        if name := row.fields.get("agent_name"):
            if name not in agents.by_name:
                fix = f"choose from {', '.join(agents.by_name)}, or add it to rollout.agent.agent_loop_config_path"
                raise DataError(f"row {row.index}: agent_name={name}: {fix}")
            workflows.append(agents.by_name[name])
    one_draw = replaced(cfg.actor_rollout_ref.rollout, ONE_DRAW)
    has_own = one_draw.agent != AgentConfig() or one_draw.multi_turn != MultiTurnConfig()
    if isinstance(cfg, PPOConfig):
        has_own |= cfg.actor_rollout_ref.rollout.over_sample_rate > 0 or cfg.algorithm.adv_unit == "turn"
    is_read = not any(isinstance(dataset, RowStream) for dataset in datasets)
    if has_own or not is_read or not all(workflow.is_one_draw for workflow in workflows):
        return cfg
    return replaced(cfg, {f"actor_rollout_ref.rollout.{key}": value for key, value in ONE_DRAW.items()})


async def _grade(pool: RewardPool, reward_fn_key: str, row: Row, answer: str, extra: Mapping[str, object]) -> Score:
    truth = (row.get("reward_model") or {}).get("ground_truth")
    item = RewardItem(str(row[reward_fn_key]), answer, truth, {**(row.get("extra_info") or {}), **extra})
    (result,) = await asyncio.wrap_future(pool.submit([item]))
    lost = {} if result.status == "ok" else {"reward_error": result.message}
    return Score(result.score, extra={**result.extra, **lost})
