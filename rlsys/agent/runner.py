"""Runs the episodes of a job: a bounded number at once, each with a deadline, and every end counted by its reason.

Draws may be in rounds: when every open episode waits for the model, all their requests are completed in one batch. What
is drawn then follows from seeds, tokens and tool results alone, not from the time that a tool takes: the same run gives
the same tokens. In an epoch a conversation only takes part while it is below the limit of its episode in drawn tokens.
"""

import asyncio
import copy
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum, inf
from typing import SupportsFloat

from rlsys.agent.episode_log import EpisodeEnd, EpisodeLog
from rlsys.agent.presets import Workflow
from rlsys.agent.session import Row, Score, Session, SessionSettings
from rlsys.agent.tool_pool import EpisodeTools, ToolPool
from rlsys.agent.tools import Tool
from rlsys.agent.trace import TraceRow
from rlsys.data.chat import Messages
from rlsys.rewards.pool.worker import describe
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import ModelRequest, ModelResponse, SamplingParams, is_reward
from rlsys.utils.daemon_threads import LoopThread, cancel_others
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, WeightTransferError

Generate = Callable[[Sequence[ModelRequest]], Sequence[ModelResponse]]

log = logging.getLogger(__name__)
CLOSE_S = 20.0
FAILED = ("error", "deadline")


@dataclass(frozen=True)
class EpisodeStart:
    """What an episode starts from; names are unique among the episodes that run, their order is that of the rows.

    `log` has the draws and tool results of an earlier attempt, if there was one, and gets those that are made now.
    """

    row: Row
    seed: int
    name: str = ""
    log: EpisodeLog = field(default_factory=EpisodeLog)

    def to_dict(self) -> dict[str, object]:
        """The episode so far, as plain data."""
        return {"name": self.name, "seed": self.seed, "row": self.row, "log": self.log.rows()}


@dataclass(frozen=True)
class EpisodeResult:
    """How an episode ended and its training rows, none where it failed or was rejected.

    `end` is stop, ungraded where its grader gave the last answer no score, a budget (turns, length, context, tool),
    rejected, deadline or error; `counts` what happened in it; `error` why it failed or has no score.
    """

    rows: Sequence[TraceRow]
    reward: float
    end: str
    num_turns: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    tool_s: float = 0.0
    extra: JsonObject = field(default_factory=dict)
    messages: Messages = ()
    error: str = ""


class Rounds:
    """`sample` for episodes that run at most `max_concurrent` at once; belongs to one event loop.

    `generate` blocks and runs in a thread. `add` says how many more episodes there are, of which the last `num_spare`
    are cancelled, `end` that one has ended, whose other requests are given up. With `limits` an epoch begins: a
    conversation of these episodes, by name, only draws while fewer of its tokens were drawn, whatever those that are
    parallel to it have.
    """

    def __init__(self, generate: Generate, *, max_concurrent: int) -> None:
        self._generate, self._max_concurrent = generate, max_concurrent
        self._num_left = self._num_spare = 0
        self._waiting: dict[asyncio.Future[ModelResponse], ModelRequest] = {}
        self._running: asyncio.Task[None] | None = None
        self._limits: dict[str, float] = {}
        self._epoch: asyncio.Future[None] | None = None

    def add(self, num_episodes: int, limits: Mapping[str, float] | None = None, num_spare: int = 0) -> None:
        self._num_left, self._num_spare = self._num_left + num_episodes, num_spare
        self._limits = self._limits if limits is None else dict(limits)

    def end(self, session: str) -> None:
        self._num_left -= 1
        for response in [response for response, request in self._waiting.items() if request.session == session]:
            response.cancel()
        self._start()

    async def end_epoch(self) -> None:
        """Until all episodes have ended or wait at their limits."""
        self._epoch = asyncio.get_running_loop().create_future()
        self._start()
        await self._epoch

    async def sample(self, request: ModelRequest) -> ModelResponse:
        """Complete a prompt with the next round; the order of sessions is that of the batch."""
        response: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        self._waiting[response] = request
        asyncio.get_running_loop().call_soon(self._start)  # after all requests that the episode sends now
        try:
            return await response
        except asyncio.CancelledError:  # wait for the round: the engines still run it
            if self._running is not None:
                await asyncio.wait([self._running])
            raise

    def _start(self) -> None:
        num_open = min(self._num_left, self._max_concurrent)
        if self._running is not None or len(self._waiting) < num_open:
            return  # as most calls of a round
        self._waiting = {response: request for response, request in self._waiting.items() if not response.done()}
        if len({request.session for request in self._waiting.values()}) < num_open:
            return
        if 0 < self._num_left <= self._num_spare:
            for response in self._waiting:
                response.cancel("over_sampled")
            return
        round_ = {future: r for future, r in self._waiting.items() if r.num_drawn < self._limits.get(r.session, inf)}
        if round_:
            self._running = asyncio.get_running_loop().create_task(self._run(round_))
        elif self._epoch is not None and not self._epoch.done():
            # until the next epoch nothing draws: weights are pushed meanwhile
            self._limits = dict.fromkeys(self._limits, 0.0)
            self._epoch.set_result(None)

    async def _run(self, round_: Mapping[asyncio.Future[ModelResponse], ModelRequest]) -> None:
        draws = sorted(round_.items(), key=lambda draw: (draw[1].session, draw[1].input_ids, draw[1].gconfig.seed))
        self._waiting = {response: asked for response, asked in self._waiting.items() if response not in round_}
        requests = [replace(asked, rid=f"{n}", session="") for n, (_, asked) in enumerate(draws)]
        try:
            for (future, _), response in zip(draws, await asyncio.to_thread(self._generate, requests), strict=True):
                if not future.done():
                    future.set_result(response)
        except BaseException as error:
            for future in (future for future in round_ if not future.done()):
                future.set_exception(error)
        finally:
            self._running = None
            asyncio.get_running_loop().call_soon(self._start)  # after the requests of those that have answers now


class EpisodeRunner:
    """Runs episodes on an event loop in a thread of its own; `submit` may be called from any thread.

    Rows choose one of `agents` by their `agent_name`; `rounds` are the ones that `settings.sample` draws in, if any.
    What a workflow raises ends its episode only; an engine that fails (RolloutError, DeadlineError) fails the future.
    """

    def __init__(
        self,
        settings: SessionSettings,
        workflow: Workflow,
        pool: ToolPool,
        *,
        tools: Sequence[Tool] = (),
        agents: Mapping[str, Workflow] | None = None,
        rounds: Rounds | None = None,
        max_concurrent: int = 256,
        deadline_s: float | None = 600.0,
    ) -> None:
        self.settings, self.workflow, self.pool = settings, workflow, pool
        self._tools, self._agents, self._rounds = tuple(tools), dict(agents or {}), rounds
        self._slots, self.deadline_s = asyncio.Semaphore(max_concurrent), deadline_s
        self._thread, self._warned = LoopThread("episodes"), deque[str](maxlen=16)

    def submit(
        self,
        starts: Sequence[EpisodeStart],
        sampling: SamplingParams,
        limits: Mapping[str, float] | None = None,
        *,
        num_spare: int = 0,
    ) -> list[Future[EpisodeResult]]:
        """Start episodes, each once there is room for it; cancelling a future ends its episode.

        With `limits` an epoch begins, in which conversations of these episodes draw, in whole turns, while fewer of
        their tokens were drawn.
        In rounds, the last `num_spare` that are still open are cancelled.
        """
        if self._rounds is not None:
            self._thread.loop.call_soon_threadsafe(self._rounds.add, len(starts), limits, num_spare)
        futures = [self._thread.start(self._run(start, sampling)) for start in starts]
        for start, future in zip(starts, futures):
            future.add_done_callback(partial(self._ended, start.name))
        return futures

    def end_epoch(self) -> Future[None]:
        """Done when all open episodes have ended or wait for the limits of another epoch."""
        assert self._rounds is not None
        return self._thread.start(self._rounds.end_epoch())

    def _ended(self, name: str, _: Future[EpisodeResult]) -> None:
        if self._rounds is not None and not self._thread.loop.is_closed():
            self._thread.loop.call_soon_threadsafe(self._rounds.end, name)

    def close(self) -> None:
        """End all episodes and the thread."""
        self._thread.close(self._close(), wait_s=CLOSE_S)

    async def _close(self) -> None:
        await cancel_others()
        for workflow in (self.workflow, *self._agents.values()):
            if workflow.close is not None:
                await workflow.close()

    async def _run(self, start: EpisodeStart, sampling: SamplingParams) -> EpisodeResult:
        async with self._slots:
            result = await self.attempt(start, sampling)
            if start.log.differs:
                start.log.restart()
                result = await self.attempt(start, sampling)
                result = replace(result, counts={**result.counts, "log_mismatches": 1})
            return result

    async def attempt(self, start: EpisodeStart, sampling: SamplingParams) -> EpisodeResult:
        """Run an episode by its log and beyond; `start.log.differs` says whether it was another episode's log."""
        row = copy.deepcopy(start.row)
        agent = row.get("agent_name")
        if agent and agent not in self._agents:
            raise ConfigError(f"agent_name={agent}: choose from {', '.join(self._agents)}, or name it in your agents")
        workflow = self._agents[agent] if agent else self.workflow
        session = Session(replace(self.settings, sampling=sampling), seed=start.seed, row=row, name=start.name)
        session.log = start.log
        offered = [*self._tools, *workflow.tools]
        tools = session.tools = EpisodeTools(
            self.pool, offered, environment=workflow.environment, tools_kwargs=row.get("tools_kwargs"), log=start.log
        )
        start_s = time.monotonic()
        try:
            result = await self._outcome(workflow, row, session)
            total = fsum(session.tool_rewards)  # the same bits in whatever order parallel calls end
            extra = {**result.extra, "tool_reward": total} if total else result.extra
            result = replace(result, seconds=time.monotonic() - start_s, num_turns=session.trace.num_turns, extra=extra)
            return replace(result, counts=session.counts, tool_s=session.tool_s, messages=session.messages)
        finally:
            session.is_over = True
            with suppress(Exception):
                await tools.close()

    async def _outcome(self, workflow: Workflow, row: Mapping[str, object], session: Session) -> EpisodeResult:
        """What the workflow returned, or why it did not; raises what is no failure of this episode."""
        limit = asyncio.timeout(self.deadline_s)
        try:
            async with limit:
                outcome = await workflow.run(row, session)
            rows, score = _scored(outcome, session)
            session.log.differs |= session.log.has_unread
            returned = "ungraded" if session.lost_score else "stop"
            end = "rejected" if outcome is None else session.end or (returned if rows else "no_draw")
            return EpisodeResult(rows, score.reward, end, extra=dict(score.extra), error=session.lost_score)
        except (RolloutError, WeightTransferError, DeadlineError, ConfigError):
            raise
        except EpisodeEnd as ended:
            return EpisodeResult(session.trace.rows(), 0.0, ended.reason)
        except (Exception, SystemExit, asyncio.CancelledError) as failure:  # an exit would end the event loop
            if failure.args == ("over_sampled",) or asyncio.current_task().cancelling():  # pyrefly: ignore
                raise
            end, error = "error", describe(failure)
            if limit.expired():
                end, error = "deadline", f"no result within {self.deadline_s:g} s"
            if error not in self._warned:  # a thousand episodes of a broken agent are one warning
                self._warned.append(error)
                log.warning("episode %s failed: %s", session.name, error)
            return EpisodeResult([], 0.0, end, error=error)


def _scored(outcome: object, session: Session) -> tuple[list[TraceRow], Score]:
    """The training rows and the score of what a workflow returned. TypeError or ValueError if it is none of Outcome."""
    if outcome is None:
        return [], Score(0.0)
    if isinstance(outcome, list) and all(isinstance(row, TraceRow) for row in outcome):
        rows, score = outcome, Score(sum(sum(row.rewards) for row in outcome) / max(1, len(outcome)))
    elif isinstance(outcome, Score | SupportsFloat):
        score = outcome if isinstance(outcome, Score) else Score(float(outcome))
        rows = session.trace.rows(score.reward, score.turn_rewards)
    else:
        raise TypeError(f"the workflow returned {outcome!r:.100}: return a number, a Score, or None to reject the row")
    total = score.reward if score.turn_rewards is None else sum(score.turn_rewards)
    for reward in (total, *(part for row in rows for part in row.rewards)):
        if not is_reward(reward):
            raise ValueError(f"the workflow returned the reward {reward}, which is not finite in float32")
    return rows, replace(score, reward=total)


def episode_metrics(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Counts of ends and of what happened, and means by episode, under agent/."""
    ends, counts = Counter(result.end for result in results), Counter[str]()
    for result in results:
        counts.update(result.counts)
    n = max(1, len(results))
    return {
        **{f"agent/end/{reason}": float(count) for reason, count in sorted(ends.items())},
        **{f"agent/{name}": float(count) for name, count in sorted(counts.items()) if name != "ids"},
        "agent/rows": float(sum(len(result.rows) for result in results)),
        "agent/num_turns/mean": sum(result.num_turns for result in results) / n,
        "agent/episode_seconds/mean": sum(result.seconds for result in results) / n,
        "agent/tool_seconds/mean": sum(result.tool_s for result in results) / n,
    }
