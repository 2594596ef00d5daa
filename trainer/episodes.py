"""Answers to prompts by episodes of a workflow, as configured: turns, tools and environments."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from rlsys.agent.collate import collate_episodes
from rlsys.agent.episode_log import EpisodeLog, read_episodes, write_episodes
from rlsys.agent.presets import Workflow, load_workflow
from rlsys.agent.programs import command_workflow, function_workflow
from rlsys.agent.rounds import Rounds
from rlsys.agent.runner import FAILED, EpisodeResult, EpisodeRunner, EpisodeStart, episode_metrics
from rlsys.agent.session import EpisodeLimits, Grade, Score, SessionSettings
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tool_config import tools_of_yaml
from rlsys.agent.tool_pool import ToolPool
from rlsys.agent.tools import Tool, tools_of_file
from rlsys.config import EvalConfig, PPOConfig
from rlsys.config.pools import generates_ahead
from rlsys.config.schema.agent import AgentConfig, MultiTurnConfig
from rlsys.fleet.fleet import RolloutFleet
from rlsys.protocol import DataProto
from rlsys.rewards.pool.pool import RewardItem, RewardPool
from rlsys.rollout.batch import SEEDS, with_request_seeds
from rlsys.telemetry.metrics import StageTimer
from rlsys.types import SamplingParams
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError
from trainer.async_source import AsyncSource
from trainer.generation import (
    GradedRollout,
    answer_printer,
    fleet_generate,
    meta_of_all_calls,
    training_sampling,
    validation_sampling,
)
from trainer.prompt_groups import PromptGroup, PromptGroups
from trainer.rewards import reward_manager
from trainer.source import Fleet

EPISODES = "open_episodes.jsonl"
AGENTS = {"single_turn_agent": "RLVRWorkflow", "tool_agent": "ToolWorkflow"}
"""verl's names of its agents -> ours."""
HINTS = {
    "context": "the prompts with their tools have more than data.max_prompt_length tokens",
    "length": "raise data.max_response_length, which counts all turns of an episode",
    "no_draw": "the workflow never drew an answer",
    "rejected": "the workflow returned None",
}


@dataclass(frozen=True)
class EpisodeRollout(GradedRollout):
    """A GradedRollout whose answers are episodes; the workflow's rewards take the place of the reward manager's."""

    runner: EpisodeRunner
    cfg: PPOConfig | EvalConfig

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
            futures = self.runner.submit(starts, sampling)
            try:
                results = [future.result(self.deadline_s) for future in futures]
            except TimeoutError as error:
                raise DeadlineError("the episodes", "generate", self.deadline_s) from error
            finally:
                for future in futures:
                    future.cancel()
        self.keep(starts, sampling, step)
        check_episodes(results, self.cfg.actor_rollout_ref.rollout.agent.max_failed_share)
        return self.collate(results, rows), episode_metrics(results)

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
        """Write the logs of training episodes, not those of validation or a baseline, whose sampling differs."""
        cfg = self.cfg
        if not isinstance(cfg, PPOConfig) or sampling != training_sampling(cfg):
            return
        if cfg.trainer.rollout_data_dir is not None:
            path = Path(cfg.trainer.rollout_data_dir) / "episodes" / f"{step}.jsonl"
            write_episodes(path, (start.to_dict() for start in starts), max_mb=cfg.trainer.rollout_data_max_mb)


class EpisodeSource(AsyncSource):
    """An AsyncSource whose answers are episodes; those that are open at a checkpoint continue from their logs."""

    def __init__(self, groups: PromptGroups, fleet: Fleet, rollout: EpisodeRollout, *, deadline_s: float) -> None:
        self._rollout = rollout
        self._starts: dict[PromptGroup, list[EpisodeStart]] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        super().__init__(groups, fleet, deadline_s=deadline_s)

    def save(self, folder: Path) -> dict[str, Any]:
        """Keep finished groups and the logs of open episodes beside a checkpoint."""
        with self._change:
            episodes = [start.to_dict() for starts in self._starts.values() for start in starts]
            write_episodes(folder / EPISODES, episodes)
            return self._groups.save(folder)

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        super().load(state, folder)
        self._saved = read_episodes(folder / EPISODES)

    def _submitted(self, groups: Sequence[PromptGroup]) -> list[dict[int, Future[Any]]]:
        starts = {group: episode_starts(group.rows, self._saved, name=f"{group.number:09d}") for group in groups}
        self._starts |= starts
        return [dict(enumerate(self._rollout.runner.submit(some, self._rollout.sampling))) for some in starts.values()]

    def _settle(self, groups: Sequence[PromptGroup]) -> None:
        with self._change:
            for group in groups:
                starts = self._starts.pop(group, [])
                futures = list(self._running.pop(group, {}).values())
                if not futures or any(future.cancelled() for future in futures):
                    continue
                results: list[EpisodeResult] = [future.result() for future in futures]
                step = group.number // self._groups.window.groups_per_step + 1
                self._rollout.keep(starts, self._rollout.sampling, step)
                if any(result.rows for result in results):
                    group.graded = self._rollout.collate(results, group.rows)
                    self._groups.finish(group)
                else:
                    causes = {result.error or result.end for result in results}
                    self._groups.fail(group, RolloutError(f"no episode has an answer: {', '.join(sorted(causes))}"))
                self._groups.add(episode_metrics(results))


def episode_starts(rows: DataProto, saved: Mapping[str, Any], *, name: str) -> list[EpisodeStart]:
    """An episode for each row, by its `request_seeds`; those that are `saved` continue from their logs.

    A workflow gets the columns of its row, and `prompt` as messages.
    """
    columns = {**rows.non_tensor_batch, "prompt": rows.non_tensor_batch["raw_prompt"]}
    starts = []
    for number, seed in enumerate(rows.tensors[SEEDS].tolist()):
        row, episode = {key: column[number] for key, column in columns.items()}, f"{name}-{number:09d}"
        starts.append(EpisodeStart(row, seed, episode, EpisodeLog(saved.get(episode, {}).get("log", ()))))
    return starts


def check_episodes(results: Sequence[EpisodeResult], max_failed_share: float) -> None:
    """RolloutError if too many episodes failed, or none has an answer to train on; with the first cause."""
    failed = [result for result in results if result.end in FAILED]
    if len(failed) > max_failed_share * len(results):
        share = f"actor_rollout_ref.rollout.agent.max_failed_share={max_failed_share:g}"
        raise RolloutError(f"{len(failed)} of {len(results)} episodes failed ({share}); the first: {failed[0].error}")
    if not any(result.rows for result in results):
        ends = Counter(result.end for result in results)
        hints = "; ".join(HINTS[end] for end in ends if end in HINTS)
        raise RolloutError(f"no episode has an answer: {dict(ends)}. {hints}")


def graded_rollout(
    cfg: PPOConfig | EvalConfig,
    fleet: RolloutFleet,
    tokenizer: PreTrainedTokenizerBase,
    pool: RewardPool,
    stack: ExitStack,
    stage: StageTimer,
) -> GradedRollout:
    """The configured rollout, by episodes where there is a workflow; `stack` closes what it starts."""
    rollout = GradedRollout(
        generate=fleet_generate(fleet),
        manager=reward_manager(cfg, tokenizer, pool),
        sampling=training_sampling(cfg) if isinstance(cfg, PPOConfig) else validation_sampling(cfg),
        num_answers=cfg.actor_rollout_ref.rollout.n if isinstance(cfg, PPOConfig) else 1,
        greedy_baseline=isinstance(cfg, PPOConfig) and cfg.algorithm.adv_estimator == "remax",
        pad_token_id=tokenizer.pad_token_id,
        stage=stage,
        on_answers=answer_printer(cfg.actor_rollout_ref.rollout, tokenizer),
    )
    loaded = load_agents(cfg, tokenizer)
    if loaded is None:
        return rollout
    agent, turns = cfg.actor_rollout_ref.rollout.agent, cfg.actor_rollout_ref.rollout.multi_turn
    tool_pool = ToolPool(
        num_workers=agent.num_workers,
        timeout_s=agent.tool_timeout_s,
        max_chars=turns.max_tool_response_length,
        side=turns.tool_response_truncate_side,
    )
    stack.callback(tool_pool.close)
    is_free = isinstance(cfg, PPOConfig) and generates_ahead(cfg)
    rounds = None if is_free else Rounds(fleet.generate, max_concurrent=agent.max_concurrent)
    settings = SessionSettings(
        fleet.sample if rounds is None else rounds.sample,
        loaded.template,
        rollout.sampling,
        _limits(cfg, agent, turns),
        agent.history,
        turns.format,
        _grade(pool, cfg.data.reward_fn_key),
    )
    runner = EpisodeRunner(
        settings,
        loaded.workflow,
        tool_pool,
        tools=loaded.tools,
        agents=loaded.by_name,
        rounds=rounds,
        max_concurrent=agent.max_concurrent,
        deadline_s=agent.episode_timeout_s,
    )
    stack.callback(runner.close)
    return EpisodeRollout(**vars(rollout), runner=runner, cfg=cfg)


@dataclass(frozen=True)
class LoadedAgents:
    """The configured workflow, those that rows may choose by `agent_name`, the tools, and the proved chat template."""

    workflow: Workflow
    by_name: Mapping[str, Workflow]
    tools: Sequence[Tool]
    template: ChatTemplate


def load_agents(cfg: PPOConfig | EvalConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedAgents | None:
    """The configured workflow, tools and chat template, None where each prompt is answered by one draw. ConfigError."""
    generation = cfg.actor_rollout_ref.rollout
    agent = generation.agent
    if not generation.has_workflow:
        return None
    by_name = {name: load_workflow(workflow) for name, workflow in AGENTS.items()}
    if agent.agent_loop_config_path is not None:
        entries: Any = OmegaConf.to_container(OmegaConf.load(agent.agent_loop_config_path), resolve=True)
        for entry in entries:
            kwargs = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            by_name[entry["name"]] = load_workflow(entry["_target_"], kwargs)
    name = "tool_agent" if generation.multi_turn.enable else agent.default_agent_loop
    if generation.workflow is not None:
        workflow = load_workflow(generation.workflow, agent.workflow_kwargs)
    elif agent.command is not None:
        workflow = command_workflow(agent.command)
    elif agent.path is not None:
        workflow = function_workflow(agent.path)
    elif name in by_name:
        workflow = by_name[name]
    else:
        key = "actor_rollout_ref.rollout.agent.default_agent_loop"
        raise ConfigError(f"{key}={name}: choose from {', '.join(by_name)}, or add it to agent_loop_config_path")
    turns, tools = generation.multi_turn, list[Tool]()
    key = "actor_rollout_ref.rollout.multi_turn"
    if turns.tool_config_path is not None:
        tools += tools_of_yaml(turns.tool_config_path, key=f"{key}.tool_config_path")
    if turns.function_tool_path is not None:
        tools += tools_of_file(turns.function_tool_path, key=f"{key}.function_tool_path")
    uses_tools = tools or any(one.tools or one.environment for one in (workflow, *by_name.values()))
    kwargs = cfg.data.apply_chat_template_kwargs
    template = ChatTemplate(tokenizer, template_kwargs=kwargs, kinds=("tool",) if uses_tools else ())
    return LoadedAgents(workflow, by_name, tools, template)


def _limits(cfg: PPOConfig | EvalConfig, agent: AgentConfig, turns: MultiTurnConfig) -> EpisodeLimits:
    unlimited = 1 << 30
    user_turns = unlimited if turns.max_user_turns is None else turns.max_user_turns + 1
    return EpisodeLimits(
        cfg.data.max_prompt_length,
        cfg.data.max_response_length,
        max_turns=min(turns.max_assistant_turns or unlimited, user_turns),
        max_tokens_per_turn=agent.max_tokens_per_turn or unlimited,
        max_tool_s=agent.max_tool_seconds or float("inf"),
        max_parallel_calls=turns.max_parallel_calls,
    )


def _grade(pool: RewardPool, reward_fn_key: str) -> Grade:
    async def grade(row: Mapping[str, Any], answer: str, extra_info: Mapping[str, Any]) -> Score:
        truth = (row.get("reward_model") or {}).get("ground_truth")
        item = RewardItem(str(row[reward_fn_key]), answer, truth, {**(row.get("extra_info") or {}), **extra_info})
        (result,) = await asyncio.wrap_future(pool.submit([item]))
        return Score(result.score, extra=result.extra)

    return grade
