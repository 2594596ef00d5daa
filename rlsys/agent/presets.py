"""Workflows: what an episode does with a row, as `async def run(row, session) -> float | Score | None`.

A workflow is such a function, a class with such a method, an environment class (TRL's convention), or an AReaL class
with `arun_episode(engine, data)`. None rejects the episode: it is counted and not trained on.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from rlsys.agent.message_images import image_urls
from rlsys.agent.session import Answer, EpisodeEnd, Score, Session
from rlsys.agent.tool_process import CREATE
from rlsys.agent.tools import Tool, load_target, target_of, tool_of, tools_of_class
from rlsys.agent.trace import TraceRow
from rlsys.types import ModelRequest, ModelResponse
from rlsys.utils.errors import ConfigError

Row = Mapping[str, Any]
Outcome = float | Score | Sequence[TraceRow] | None
Run = Callable[[Row, Session], Awaitable[Outcome]]


@dataclass(frozen=True)
class Workflow:
    """How episodes run, the tools that they bring, the environment class whose methods are tools, and how to end."""

    run: Run
    tools: Sequence[Tool] = ()
    environment: str | None = None
    close: Callable[[], Awaitable[None]] | None = None


class RLVRWorkflow:
    """One answer to each prompt, graded by the job's reward function."""

    async def run(self, row: Row, session: Session) -> Score:
        session.add(*row["prompt"])
        return await session.grade(await session.draw())


class VisionRLVRWorkflow(RLVRWorkflow):
    """RLVRWorkflow for prompts with images; ValueError for a row without one."""

    async def run(self, row: Row, session: Session) -> Score:
        if not image_urls(row["prompt"]):
            raise ValueError("the prompt has no image: use RLVRWorkflow for rows of text")
        return await super().run(row, session)


class MultiTurnWorkflow:
    """Answers until one is right, at most `max_turns`; each further turn multiplies the reward by `turn_discount`."""

    def __init__(
        self,
        max_turns: int = 3,
        turn_discount: float = 0.9,
        feedback: str = "Your answer is wrong. Please check it and try again.",
    ) -> None:
        self.max_turns, self.turn_discount, self.feedback = max_turns, turn_discount, feedback

    async def run(self, row: Row, session: Session) -> Score:
        session.add(*row["prompt"])
        discount, score = 1.0, Score(0.0)
        with suppress(EpisodeEnd):
            for _ in range(self.max_turns):
                score = await session.grade(await session.draw())
                if score.reward > 0:
                    break
                discount *= self.turn_discount
                session.add(self.feedback)
        return replace(score, reward=score.reward * discount)


class ToolWorkflow:
    """The model calls tools until it answers without a call; that answer is graded."""

    def __init__(self, tools: Sequence[str | Callable[..., Any]] = ()) -> None:
        self.tools = [tool_of(tool) for tool in tools]

    async def run(self, row: Row, session: Session) -> Score:
        session.add(*row["prompt"])
        answer = await converse(session)
        return Score(0.0) if answer is None else await session.grade(answer)


class MathRLVRWorkflow(ToolWorkflow):
    """Mathematics with a verifier and, with `use_tool`, Python in the sandbox as a tool."""

    def __init__(self, use_tool: bool = True) -> None:
        super().__init__(["rlsys.agent.builtin_tools:python"] if use_tool else [])


async def run_environment(row: Row, session: Session) -> Outcome:
    """Episodes of an environment: `reset(**row)` may add to the prompt, methods are tools, `get_reward()` scores.

    Without `get_reward` the last answer is graded by the job's reward function.
    """
    environment = session.tools.environment if session.tools else None
    assert environment is not None
    opened = await environment.call(CREATE, row)
    if opened.status != "ok":
        raise RuntimeError(f"reset failed: {opened.message}")
    *before, last = row["prompt"]
    content, text = last["content"], opened.extra["text"]
    more = text if isinstance(content, str) else [{"type": "text", "text": text}]
    session.add(*before, {**last, "content": content + more})
    answer = await converse(session)
    reward = (await environment.call("get_reward")).extra.get("value")
    if reward is not None:
        return float(reward)
    return Score(0.0) if answer is None else await session.grade(answer)


async def converse(session: Session) -> Answer | None:
    """Draw and call tools until an answer has no calls or a budget is used up; the last answer."""
    answer = None
    with suppress(EpisodeEnd):
        answer = await session.draw()
        while answer.tool_calls:
            await session.call_tools(answer)
            answer = await session.draw()
    return answer


def load_workflow(
    spec: str | Any, kwargs: Mapping[str, Any] | None = None, *, of_areal: Mapping[str, Any] | None = None
) -> Workflow:
    """A workflow by name: one of this module, module.Class, module:function or file.py:name. ConfigError.

    `of_areal` are arguments that AReaL's scripts pass to their classes, for those that take them.
    """
    key = "actor_rollout_ref.rollout.workflow"
    if isinstance(spec, str):
        spec = globals().get(spec) or load_target(spec, key=key)
    if inspect.isclass(spec) and not hasattr(spec, "run") and not hasattr(spec, "arun_episode"):
        if not hasattr(spec, "reset"):
            raise ConfigError(f"{key}: {spec.__name__} has none of run, arun_episode and reset")
        return Workflow(run_environment, tools_of_class(spec), target_of(spec))
    if inspect.isclass(spec):
        takes = inspect.signature(spec).parameters if hasattr(spec, "arun_episode") else ()
        given = {name: value for name, value in (of_areal or {}).items() if name in takes}
        try:
            spec = spec(**{**given, **(kwargs or {})})
        except TypeError as error:
            raise ConfigError(f"{key}: {error}; set actor_rollout_ref.rollout.agent.workflow_kwargs") from error
    if hasattr(spec, "arun_episode"):
        return Workflow(partial(run_areal_episode, spec, (of_areal or {}).get("gconfig")))
    call = spec.run if hasattr(spec, "run") else spec
    if not inspect.iscoroutinefunction(call):
        raise ConfigError(f"{key}: {spec!r} must be an async function run(row, session)")
    return Workflow(call, getattr(spec, "tools", ()), close=getattr(spec, "close", None))


async def run_areal_episode(
    workflow: Any, gconfig: Any, row: Mapping[str, Any], session: Session
) -> list[TraceRow] | None:
    """The rows of one `arun_episode`; None where it rejects the row. Its `data` also has `messages` and `answer`.

    Of the tensors `input_ids` (n, T), `rewards` (n,) and `attention_mask` are used; masks, log-probs and versions are
    those of the draws. ValueError for a row that the engine did not draw like this.
    """

    async def agenerate(req: ModelRequest) -> ModelResponse:
        """Complete a request; its sampling parameters take the place of the job's, but for the seed and for those
        that are still the job's `gconfig`."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k")
        own = {name: getattr(req.gconfig, name) for name in names}
        changed = {name: value for name, value in own.items() if gconfig is None or value != getattr(gconfig, name)}
        return await session.draw_ids(req.input_ids, **changed)

    truth = (row.get("reward_model") or {}).get("ground_truth")
    tensors = await workflow.arun_episode(
        SimpleNamespace(agenerate=agenerate), {"messages": row["prompt"], "answer": truth, **row}
    )
    if tensors is None:
        return None
    ids, rewards = tensors["input_ids"], tensors["rewards"].flatten().tolist()
    masks = tensors["attention_mask"].bool() if "attention_mask" in tensors else ids >= 0
    by_ids = {drawn.prompt_ids + drawn.response_ids: drawn for drawn in session.trace.rows()}
    rows = []
    for number, (tokens, mask, reward) in enumerate(zip(ids, masks, rewards, strict=True)):
        drawn = by_ids.get(tuple(tokens[mask].tolist()))
        if drawn is None:
            raise ValueError(
                f"row {number} of arun_episode has other tokens than a prompt and what was drawn behind it"
            )
        rows.append(replace(drawn, rewards=(*drawn.rewards[:-1], reward)))
    return rows
