"""Workflows: what an episode does with a row, as `async def run(row, session) -> float | Score | None`.

A workflow is such a function, a class with such a method, an environment class (TRL's convention), or an AReaL class
with `arun_episode(engine, data)`. None rejects the episode: it is counted and not trained on.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlsys.agent.message_images import image_urls
from rlsys.agent.session import Answer, EpisodeEnd, Row, Score, Session, SessionSettings
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tool_pool import checked, result_text
from rlsys.agent.tool_process import CREATE
from rlsys.agent.tools import Tool, load_target, target_of, tool_of, tools_of_class
from rlsys.agent.trace import TraceRow
from rlsys.protocol import ImageInputs
from rlsys.protocol.rows import pad_rows
from rlsys.rewards.math import compute_score_anywhere
from rlsys.types import ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import ConfigError, raised_as

Outcome = float | Score | Sequence[TraceRow] | None
MAX_TOKENS = 1 << 30


@dataclass(frozen=True)
class Workflow:
    """How episodes run, the tools that they bring, the environment class whose methods are tools, and how to end.

    With `is_one_draw` an episode is an answer to the row's prompt, graded by the job: a batch needs no episodes for it.
    Unless it `may_score`, all its answers are graded by the job.
    """

    run: Callable[[Row, Session], Awaitable[Outcome]]
    tools: Sequence[Tool] = ()
    environment: str | None = None
    close: Callable[[], Awaitable[None]] | None = None
    is_one_draw: bool = False
    may_score: bool = True


@dataclass(eq=False)
class RLVRWorkflow:
    """One answer to each prompt, graded by the job's reward function.

    The fields are for `arun_episode`, which needs no job: AReaL's `reward_fn(prompt, completion, prompt_ids,
    completion_ids, **data)`, a tokenizer, and the VisionProcessor of a vision-language model.
    """

    reward_fn: Callable[..., float] | None = None
    tokenizer: Any = None
    processor: Any = None
    n_generations: int = 1
    temperature: float = 1.0
    max_tokens: int = 1024

    async def run(self, row: Row, session: Session) -> Score:
        session.add(*row["prompt"])
        return await session.grade(await session.draw())

    async def arun_episode(self, engine: Any, data: Row) -> dict[str, Tensor]:
        """AReaL's tensors (n, T) of `n_generations` answers to `data["messages"]`, and `rewards` (n,).

        `engine` has the method `sample` of a fleet. ValueError without `reward_fn` and `tokenizer`.
        """
        if self.reward_fn is None or self.tokenizer is None:
            raise ValueError("arun_episode needs reward_fn and tokenizer; a job has its own and calls run")
        seeds = range(self.n_generations)
        rows = await asyncio.gather(*(self._generate_responses(engine, data, seed) for seed in seeds))
        return self._format_output([row for of_one in rows for row in of_one])

    async def _generate_responses(self, engine: Any, data: Row, seed: int) -> list[TraceRow]:
        async def grade(row: Row, answer: str, extra_info: Row) -> Score:
            return Score(self._compute_rewards(session.trace.rows()[-1], answer, data))

        sampling = SamplingParams(self.max_tokens, temperature=self.temperature)
        settings = SessionSettings(engine.sample, self._template, sampling, MAX_TOKENS, self.max_tokens, grade=grade)
        session = Session(settings, seed=seed, row=data)
        return session.trace.rows((await self.run({"prompt": data["messages"], **data}, session)).reward)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, processor=self.processor)

    def _compute_rewards(self, drawn: TraceRow, answer: str, data: Row) -> float:
        assert self.reward_fn is not None
        prompt = self.tokenizer.decode(list(drawn.prompt_ids))
        return float(self.reward_fn(prompt, answer, drawn.prompt_ids, drawn.response_ids, **data))

    @staticmethod
    def _format_output(rows: Sequence[TraceRow]) -> dict[str, Tensor]:
        def columns(given: float, name: str) -> Tensor:
            return pad_rows([(given,) * len(row.prompt_ids) + getattr(row, name) for row in rows], value=given)

        ids = [row.prompt_ids + row.response_ids for row in rows]
        return {
            "input_ids": pad_rows(ids, value=0),
            "attention_mask": pad_rows([(1,) * len(row_ids) for row_ids in ids], value=0),
            "loss_mask": columns(0, "mask"),
            "logprobs": columns(0.0, "log_probs"),
            "versions": columns(-1, "versions"),
            "rewards": torch.tensor([sum(row.rewards) for row in rows]),
        }


class VisionRLVRWorkflow(RLVRWorkflow):
    """RLVRWorkflow for prompts with images; ValueError for a row without one."""

    async def run(self, row: Row, session: Session) -> Score:
        if not image_urls(row["prompt"]):
            raise ValueError("the prompt has no image: use RLVRWorkflow for rows of text")
        return await super().run(row, session)

    @property
    def image_token(self) -> str:
        """The text that stands for an image in a prompt."""
        return self.processor.image_token

    def _process_images(self, data: Row) -> tuple[ImageInputs, ...]:
        return self._template.encode(None, data["messages"])[1]

    def _format_vision_prompt(self, data: Row) -> str:
        return self.tokenizer.decode(list(self._template.encode(None, data["messages"])[0]))


@dataclass(eq=False)
class MultiTurnWorkflow:
    """Answers until one is right, at most `max_turns`; each further turn multiplies the reward by `turn_discount`."""

    max_turns: int = 3
    turn_discount: float = 0.9
    feedback: str = "Your answer is wrong. Please check it and try again."

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


@dataclass(eq=False)
class ToolWorkflow(RLVRWorkflow):
    """The model calls tools until it answers without a call; that answer is graded."""

    tools: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self.tools = [tool_of(tool) for tool in self.tools]

    async def run(self, row: Row, session: Session) -> Score:
        session.add(*row["prompt"])
        return await session.grade(await converse(session))


class MathVerifier:
    """Compares answers as mathematics."""

    @staticmethod
    def verify(solution: str, answer: object) -> bool:
        """Whether the last box of a solution, without one its last expression, equals the answer."""
        return bool(compute_score_anywhere(solution, answer)["acc"])


@dataclass(eq=False)
class MathRLVRWorkflow(ToolWorkflow):
    """Mathematics with a verifier and, with `use_tool` in a job, Python in the sandbox as a tool."""

    use_tool: bool = True
    math_verifier = MathVerifier

    def __post_init__(self) -> None:
        self.tools = [tool_of("rlsys.agent.builtin_tools:python")] if self.use_tool else []
        self.reward_fn = self.reward_fn or self._compute_math_reward

    def _verify_math_solution(self, completion: str, answer: object) -> bool:
        return self.math_verifier.verify(completion, answer)

    def _compute_math_reward(self, prompt: str, completion: str, *ids: object, answer: object, **_: object) -> float:
        return float(self._verify_math_solution(completion, answer))


async def run_environment(row: Row, session: Session) -> Outcome:
    """Episodes of an environment: `reset(**row)` may add to the prompt, methods are tools, `get_reward()` scores.

    Without `get_reward` the last answer is graded by the job's reward function.
    """
    environment = session.tools.environment if session.tools else None
    assert environment is not None
    opened = checked(await environment.call(CREATE, row), "reset")
    *before, last = row["prompt"]
    content, text = last["content"], opened.extra["text"]
    more = text if isinstance(content, str) else [{"type": "text", "text": text}]
    session.add(*before, {**last, "content": content + more})
    answer = await converse(session)
    scored = await environment.call("get_reward")
    if (value := scored.extra.get("value")) is not None:
        return float(value)
    if text := result_text(scored):
        raise RuntimeError(f"get_reward returned no number: {text}")
    return await session.grade(answer)


async def converse(session: Session) -> Answer | None:
    """Draw and call tools until an answer has no calls or a budget is used up; the last answer."""
    answer = None
    with suppress(EpisodeEnd):
        answer = await session.draw()
        while answer.tool_calls:
            await session.call_tools(answer)
            answer = await session.draw()
    return answer


PRESETS = ("RLVRWorkflow", "VisionRLVRWorkflow", "MultiTurnWorkflow", "ToolWorkflow", "MathRLVRWorkflow")


def load_workflow(
    spec: str | object, kwargs: Mapping[str, object] | None = None, *, of_areal: Mapping[str, object] | None = None
) -> Workflow:
    """A workflow by name: one of this module, module.Class, module:function or file.py:name. ConfigError.

    `of_areal` are arguments that AReaL's scripts pass to their classes, for those that take them.
    """
    key = "actor_rollout_ref.rollout.workflow"
    if isinstance(spec, str):
        if not {".", ":"} & {*spec} and spec not in PRESETS:
            raise ConfigError(f"{key}={spec}: choose from {', '.join(PRESETS)}, or set module:name or file.py:name")
        spec = globals()[spec] if spec in PRESETS else load_target(spec, key=key)
    if inspect.isclass(spec) and not hasattr(spec, "run") and not hasattr(spec, "arun_episode"):
        if not hasattr(spec, "reset"):
            raise ConfigError(f"{key}: {spec.__name__} has none of run, arun_episode and reset")
        if kwargs:
            raise ConfigError(f"{key}: {spec.__name__} is made without arguments, so set no agent.workflow_kwargs")
        return Workflow(run_environment, tools_of_class(spec), target_of(spec), may_score=hasattr(spec, "get_reward"))
    if inspect.isclass(spec):
        takes = inspect.signature(spec).parameters if hasattr(spec, "arun_episode") else ()
        given = {name: value for name, value in (of_areal or {}).items() if name in takes}
        with raised_as(ConfigError, f"{key}: {spec.__name__} cannot be made with agent.workflow_kwargs"):
            spec = spec(**{**given, **(kwargs or {})})
    if getattr(type(spec), "arun_episode", None) not in (None, RLVRWorkflow.arun_episode):
        return Workflow(partial(run_areal_episode, spec, (of_areal or {}).get("gconfig")))
    unused = {field.name for field in fields(RLVRWorkflow)} & (kwargs or {}).keys()
    if isinstance(spec, RLVRWorkflow) and unused:
        raise ConfigError(f"{key}: {min(unused)} is for arun_episode; a job has settings for it")
    if kwargs and inspect.isfunction(spec):
        raise ConfigError(f"{key}: {spec.__name__} is no class, which agent.workflow_kwargs are for")
    call = spec.run if hasattr(spec, "run") else spec
    with raised_as(ConfigError, f"{key}: {spec!r} must be an async function run(row, session)", TypeError):
        if not inspect.iscoroutinefunction(call):
            raise TypeError("it is not async")
        inspect.signature(call).bind(None, None)
    is_one_draw, may_score = type(spec) is RLVRWorkflow, not type(spec).__module__.startswith("rlsys.")
    tools, close = getattr(spec, "tools", ()), getattr(spec, "close", None)
    return Workflow(call, tools, close=close, is_one_draw=is_one_draw, may_score=may_score)


async def run_areal_episode(workflow: Any, gconfig: object, row: Row, session: Session) -> list[TraceRow] | None:
    """The rows of one `arun_episode`; None where it rejects the row. Its `data` also has `messages` and `answer`.

    Of the tensors `input_ids` (n, T), `rewards` (n,) and `attention_mask` are used; masks, log-probs and versions are
    those of the draws. ValueError for a row that the engine did not draw like this.
    """

    async def agenerate(req: ModelRequest) -> ModelResponse:
        """Complete a request; its sampling parameters take the place of the job's, but for the seed and for those
        that are still the job's `gconfig`."""
        own = {name: getattr(req.gconfig, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
        changed = {name: value for name, value in own.items() if gconfig is None or value != getattr(gconfig, name)}
        return await session.draw_ids(req.input_ids, **changed)

    data = {"messages": row["prompt"], "answer": (row.get("reward_model") or {}).get("ground_truth"), **row}
    if (tensors := await workflow.arun_episode(SimpleNamespace(agenerate=agenerate), data)) is None:
        return None
    ids, rewards = tensors["input_ids"], tensors["rewards"].flatten().tolist()
    masks = tensors["attention_mask"].bool() if "attention_mask" in tensors else ids >= 0
    by_ids = {drawn.prompt_ids + drawn.response_ids: drawn for drawn in session.trace.rows()}
    rows = []
    for number, (tokens, mask, reward) in enumerate(zip(ids, masks, rewards, strict=True)):
        if (drawn := by_ids.get(tuple(tokens[mask].tolist()))) is None:
            raise ValueError(f"row {number} of arun_episode has other tokens than a prompt and what was drawn for it")
        rows.append(replace(drawn, rewards=(*drawn.rewards[:-1], reward), weight=1.0 / len(ids)))
    return rows
