"""Episodes that were killed continue from their logs: the same tokens, and no recorded call is made twice."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.agent.episode_log import EpisodeLog, read_episodes, write_episodes
from rlsys.agent.presets import load_workflow
from rlsys.agent.runner import EpisodeRunner, EpisodeStart, episode_metrics
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tools import tool_of
from rlsys.types import SamplingParams
from tests.timing import scaled_s, wait_until
from tests.unit.agent import user_tools
from tests.unit.agent.engine import RandomEngine, settings_for, tool_pool
from tests.unit.agent.templates import HERMES, tokenizer_with

TOKENIZER = tokenizer_with(HERMES)
TEMPLATE = ChatTemplate(TOKENIZER, kinds=("user", "tool"))
PROMPT = [{"role": "user", "content": "go"}]


WORKFLOW = load_workflow(user_tools.Counter)
"""Brings the environment; its run is replaced by `agent` below."""


async def agent(row, session):
    """Parallel tool calls, an environment with a state, a second conversation, and randomness by seed."""
    dice = random.Random(row["number"])
    await session.tools.environment.call("create", {"goal": 3})
    session.add(*row["prompt"])
    text = ""
    for turn in range(dice.randint(1, 4)):
        answer = await session.draw()
        names = [f"{row['number']}/{turn}/{n}/{answer.span.ids[0]}" for n in range(dice.randint(1, 3))]
        calls = [session.call("log_call", path=row["calls"], line=name) for name in names]
        text = await session.call("step", by=turn + 1)
        session.add("; ".join([*await asyncio.gather(*calls), text]))
    await session.draw([{"role": "user", "content": f"sum up {text}"}])
    return float(text.split()[1])


class StoppingEngine(RandomEngine):
    """Draws `num_draws` times and then answers no more."""

    def __init__(self, num_draws: float = math.inf) -> None:
        super().__init__(TOKENIZER)
        self.num_draws, self.num_left_waiting = num_draws, 0

    def is_stuck(self) -> bool:
        return self.num_left_waiting >= 8

    async def sample(self, request):
        if len(self.draws) >= self.num_draws:
            self.num_left_waiting += 1
            await asyncio.Event().wait()
        return await super().sample(request)


def run(starts, engine, *, workflow=agent, until=None):
    """The results of episodes in new tool processes; with `until` they are killed once it holds."""
    pool = tool_pool(num_workers=2, timeout_s=scaled_s(10.0))
    tools = [*WORKFLOW.tools, tool_of(user_tools.log_call)]
    settings = settings_for(engine, TEMPLATE)
    runner = EpisodeRunner(settings, replace(WORKFLOW, run=workflow, tools=tools), pool, max_concurrent=8)
    try:
        futures = runner.submit(starts, SamplingParams(64))
        if until is None:
            return [future.result(scaled_s(60.0)) for future in futures]
        assert wait_until(until, 30.0)
        return []
    finally:
        runner.close()
        pool.close()


def starts_of(calls: Path, saved=None, num_episodes=50) -> list[EpisodeStart]:
    empty = {"log": ()}
    return [
        EpisodeStart({"prompt": PROMPT, "number": n, "calls": str(calls)}, n, f"{n:02d}", EpisodeLog(log))
        for n in range(num_episodes)
        for log in [(saved or {}).get(f"{n:02d}", empty)["log"]]
    ]


def saved_by(starts, file: Path):
    write_episodes(file, [start.to_dict() for start in starts])
    return read_episodes(file)


def test_killed_episodes_finish_with_the_same_tokens_and_repeat_no_recorded_call(tmp_path: Path) -> None:
    quiet = run(starts_of(tmp_path / "quiet"), StoppingEngine())
    saved, calls, num_draws = {}, tmp_path / "calls", []
    for number in range(3):
        engine, starts = StoppingEngine(40), starts_of(calls, saved)
        run(starts, engine, until=engine.is_stuck)
        saved = saved_by(starts, tmp_path / f"{number}.jsonl")
        num_draws.append(len(engine.draws))
    engine = StoppingEngine()
    resumed = run(starts_of(calls, saved), engine)
    assert [result.rows for result in resumed] == [result.rows for result in quiet]
    assert [result.messages for result in resumed] == [result.messages for result in quiet]
    assert [result.reward for result in resumed] == [result.reward for result in quiet]
    assert num_draws == [40, 40, 40]
    assert len(engine.draws) == sum(result.num_turns for result in quiet) - 120
    assert not any("log_mismatches" in result.counts for result in resumed)
    made = Counter(calls.read_text().splitlines())
    entries = [entry for episode in saved.values() for entry in episode["log"] if entry["result"] is not None]
    recorded = [e["request"]["arguments"]["line"] for e in entries if e["request"].get("tool") == "log_call"]
    assert len(recorded) > 50
    assert {made[line] for line in recorded} == {1}


def test_a_finished_log_needs_neither_engine_nor_tools(tmp_path: Path) -> None:
    starts = starts_of(tmp_path / "calls", num_episodes=3)
    quiet = run(starts, StoppingEngine())
    made = (tmp_path / "calls").read_text()
    again = run(starts_of(tmp_path / "calls", saved_by(starts, tmp_path / "log"), 3), StoppingEngine(0))
    assert [result.rows for result in again] == [result.rows for result in quiet]
    assert (tmp_path / "calls").read_text() == made


async def asks_something_else(row, session):
    await session.draw([{"role": "user", "content": "other"}])
    return 1.0


async def ends_early(row, session):
    return 1.0


@pytest.mark.parametrize("workflow", [asks_something_else, ends_early])
def test_an_episode_that_differs_from_its_log_starts_again_and_is_counted(tmp_path: Path, workflow) -> None:
    starts = starts_of(tmp_path / "calls", num_episodes=2)
    run(starts, StoppingEngine())
    others = starts_of(tmp_path / "calls", saved_by(starts, tmp_path / "log"), 2)
    engine = StoppingEngine()
    results = run(others, engine, workflow=workflow)
    assert len(engine.draws) == sum(result.num_turns for result in results)
    fresh = run(starts_of(tmp_path / "calls", num_episodes=2), StoppingEngine(), workflow=workflow)
    assert [result.rows for result in results] == [result.rows for result in fresh]
    assert episode_metrics(results)["agent/log_mismatches"] == 2
    assert [len(start.log.rows()) for start in others] == [result.num_turns for result in fresh]


def test_log_probs_that_are_not_finite_survive_the_file(tmp_path: Path) -> None:
    class Infinite(RandomEngine):
        async def sample(self, request):
            response = await super().sample(request)
            return replace(response, sampled_logprobs=(-math.inf,) * len(response.output_tokens))

    starts = starts_of(tmp_path / "calls", num_episodes=1)
    [first] = run(starts, Infinite(TOKENIZER), workflow=asks_something_else)
    again = starts_of(tmp_path / "calls", saved_by(starts, tmp_path / "log"), 1)
    [second] = run(again, StoppingEngine(0), workflow=asks_something_else)
    assert first.rows == second.rows
    assert first.rows[0].sampled_log_probs[0] == -math.inf
