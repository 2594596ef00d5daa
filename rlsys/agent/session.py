"""One episode as a workflow sees it: draw answers, add messages, call tools. Prompts are made only here."""

import asyncio
import json
import math
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

from rlsys.agent.episode_log import EpisodeEnd, EpisodeLog
from rlsys.agent.message_images import image_part, plain_content, with_placeholders
from rlsys.agent.template import ChatTemplate, Tools, call_id, tool_call, with_arguments
from rlsys.agent.tool_calls import ToolCall, parse_tool_calls
from rlsys.agent.tool_pool import EpisodeTools, result_text
from rlsys.agent.trace import Span, Trace
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.data.chat import Message, Messages
from rlsys.rewards.pool.pool import RewardResult, failed
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams

Row = Mapping[str, Any]
"""The columns of a prompt's row by name."""
Sample = Callable[[ModelRequest], Awaitable[ModelResponse]]
"""Completes a prompt, as `RolloutFleet.sample`."""
Grade = Callable[[Row, str, Mapping[str, object]], Awaitable["Score"]]
"""(row, answer, extra_info) -> score by the job's reward function."""


@dataclass(frozen=True)
class Score:
    """The reward of an episode, or one for each turn (their sum is the episode's); `extra` goes to the metrics."""

    reward: float
    turn_rewards: Sequence[float] | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionSettings:
    """What all episodes of a job share: the engine, the template, sampling, budgets and how answers are read.

    A prompt and what follows it are what one row may hold.
    """

    sample: Sample
    template: ChatTemplate
    sampling: SamplingParams
    max_prompt_tokens: int
    max_response_tokens: int
    agent: AgentConfig = field(default_factory=AgentConfig)
    turns: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    grade: Grade | None = None


@dataclass(frozen=True)
class Answer:
    """What the model drew: `text` as it wrote it, without its end token, and `message` with the tool calls read."""

    text: str
    message: Message
    tool_calls: Sequence[ToolCall]
    span: Span


class Session:
    """An episode under way; `trace` has its tokens, `messages` the conversation, `counts` what happened in it.

    `lost_score` is why the last answer that was graded got no score, empty where it got one. Once it `is_over`, a
    task that its workflow left running is cancelled at its next draw.

    Draws are functions of `seed` and the tokens before them, so the same calls give the same episode. What `log` has
    of them is not drawn again.
    """

    def __init__(self, settings: SessionSettings, *, seed: int = 0, row: Row | None = None, name: str = "") -> None:
        self.settings, self.seed, self.row, self.name = settings, seed, row or {}, name
        self.log = EpisodeLog()
        self.trace = Trace()
        self.messages: list[Message] = []
        self.tools: EpisodeTools | None = None
        self.counts: Counter[str] = Counter()
        self.tool_s, self.tool_rewards = 0.0, list[float]()
        self.end, self.lost_score, self.is_over = "", "", False
        self._drawn: dict[str, Span] = {}
        self._given: dict[tuple[int, str], Span] = {}
        self._num_draws: Counter[int] = Counter()

    def add(self, *messages: str | Message) -> None:
        """Append messages to the conversation; a text is a user message. ValueError for parts but texts and images."""
        self.messages += [{"role": "user", "content": m} if isinstance(m, str) else plain_message(m) for m in messages]

    async def draw(self, messages: Messages | None = None, *, tools: Tools | None = None, **sampling: object) -> Answer:
        """The model's next turn, appended to `messages`; a conversation given here takes their place.

        The longest part of the conversation that was drawn before keeps its tokens, whatever its template would write;
        the rest is appended to it, or starts a new branch. `sampling` changes SamplingParams (temperature, ...) of this
        draw. EpisodeEnd when a budget is used up; ValueError for messages that the template rejects.
        """
        if messages is not None:
            self.messages = [plain_message(message) for message in messages]
        conversation = list(self.messages)
        tools = tools if tools is not None else self.tools.schemas if self.tools else None
        parent, key = self._context(conversation, tools)
        answer = self._answer(self.trace.draw(parent, await self._sample(parent, sampling)))
        self._drawn[message_key(answer.message, key)] = answer.span
        if conversation == self.messages:
            self.messages.append(answer.message)
        return answer

    async def call(self, tool: str | ToolCall, **arguments: object) -> str:
        """What a tool returns, as text for the model; errors and timeouts are texts too, and are counted."""
        return result_text(await self._call(ToolCall(tool, arguments) if isinstance(tool, str) else tool))

    async def _call(self, call: ToolCall) -> RewardResult:
        if self.tool_s >= (self.settings.agent.max_tool_seconds or math.inf):
            raise self._ended("tool")
        if self.tools is None or call.error:
            result = failed("error", 0.0, call.error or "there are no tools")
        else:
            result = await self.tools.call(call.name, call.arguments)
        self.counts.update({"tool_calls": 1, f"tool_{result.status}": 1})
        self.tool_s += result.seconds
        self.tool_rewards.append(result.score)
        return result

    async def call_tools(self, answer: Answer) -> None:
        """Run an answer's tool calls, at most `max_parallel_calls` together, and add their results in order."""
        limit = asyncio.Semaphore(self.settings.turns.max_parallel_calls)

        async def result(number: int, call: ToolCall) -> Message:
            async with limit:
                result = await self._call(call)
            content: object = result_text(result)
            if images := result.extra.get("images"):
                content = [*map(image_part, images), {"type": "text", "text": content}]
            sent = answer.message["tool_calls"][number]
            return {"role": "tool", "name": call.name or "unknown", "tool_call_id": sent["id"], "content": content}

        made = [asyncio.ensure_future(result(n, call)) for n, call in enumerate(answer.tool_calls)]
        await asyncio.gather(*made, return_exceptions=True)  # none runs on where another ends the episode
        self.add(*(task.result() for task in made))

    async def grade(self, answer: str | Answer | None, **extra_info: object) -> Score:
        """The score of an answer by the job's reward function and the row's ground truth; 0 where there is none."""
        if answer is None:
            return Score(0.0)
        assert self.settings.grade is not None, "the job has no reward function"
        text = answer.text if isinstance(answer, Answer) else answer
        score = await self.settings.grade(self.row, text, {"num_turns": self.trace.num_turns, **extra_info})
        self.lost_score = str(score.extra.get("reward_error", ""))
        self.counts["ungraded"] += self.lost_score != ""
        return score

    async def draw_ids(self, ids: Sequence[int], **sampling: object) -> ModelResponse:
        """The completion of token ids, for workflows that make their own; they may continue what was drawn before."""
        drawn = [span for span in self.trace.spans if span.is_drawn and tuple(ids[: span.num_tokens]) == span.context]
        parent = max(drawn, key=lambda span: span.num_tokens, default=None)
        rest = tuple(ids[parent.num_tokens :] if parent else ids)
        given = next((s for s in self.trace.spans if s.parent is parent and s.ids == rest and not s.is_drawn), None)
        given = given or self.trace.give(rest, parent)
        response = await self._sample(given, sampling)
        self.trace.draw(given, response)
        return response

    def _ended(self, reason: str) -> EpisodeEnd:
        self.end = reason
        return EpisodeEnd(reason)

    # ---- tokens ------------------------------------------------------------------------------------------------

    def _context(self, conversation: Messages, tools: Tools | None) -> tuple[Span, str]:
        """The span after which the answer to a conversation is drawn, and the conversation's key."""
        key = json.dumps(tools, sort_keys=True) if tools else ""
        last, rest = None, conversation
        for number, message in enumerate(conversation):
            key = message_key(message, key)
            if (span := self._drawn.get(key)) is not None:
                last, rest = span, conversation[number + 1 :]
        rendered = self.settings.agent.history == "as_rendered"
        branch = None if last is None or rendered else last
        if (cached := self._given.get((id(branch), key))) is not None:
            return cached, key
        limit = self.settings.max_prompt_tokens + self.settings.max_response_tokens
        if len(json.dumps(with_placeholders(rest), ensure_ascii=False, default=str)) > 64 * limit:
            raise self._ended("length" if last else "context")  # others wait while a text is made tokens, 2 s a MB
        if branch is not None and rest:
            ids, images = self.settings.template.encode(branch, rest, tools)
            if images and self.settings.template.has_drawn_placeholders(branch):
                raise self._ended("image_token")
            span = self.trace.give(ids, branch, images)
        else:
            ids, images = self.settings.template.encode(None, conversation, tools)
            before = last.context if last is not None and rendered and not images else ()
            prefix = last if before and ids[: len(before)] == before else None
            self.counts["branches"] += bool(self.trace.spans) and prefix is None
            span = self.trace.give(ids[len(before) :] if prefix else ids, prefix, images)
        self._given[(id(branch), key)] = span
        return span, key

    async def _sample(self, parent: Span, changes: Mapping[str, Any]) -> ModelResponse:
        settings = self.settings
        if self.is_over:
            raise asyncio.CancelledError
        if parent.next_turn >= settings.turns.max_turns:
            raise self._ended("turns")
        num_prompt = next((s.parent.num_tokens for s in parent.path if s.is_drawn and s.parent), parent.num_tokens)
        if num_prompt > settings.max_prompt_tokens:
            raise self._ended("context")
        room = settings.max_response_tokens - (parent.num_tokens - num_prompt)
        if room < 1:
            raise self._ended("length")
        ids, sampling = parent.context, replace(settings.sampling, **changes)
        most = min(sampling.max_new_tokens, settings.agent.max_tokens_per_turn or room, room)
        seed = _seed(self.seed, self._num_draws[id(parent)], ids)
        self._num_draws[id(parent)] += 1
        params = replace(sampling, max_new_tokens=most, seed=seed)
        request = {"num_prompt_tokens": len(ids), **asdict(params)}
        drawn = sum(len(span.ids) for span in parent.path if span.is_drawn)
        asked = ModelRequest(ids, params, session=self.name, images=parent.all_images, num_drawn=drawn)
        return await self.log.result(request, partial(settings.sample, asked), partial(_response, ids))

    def _answer(self, span: Span) -> Answer:
        tokenizer = self.settings.template.tokenizer
        ends = {tokenizer.eos_token_id, *self.settings.sampling.stop_token_ids}
        ids = span.ids[:-1] if span.ids[-1:] and span.ids[-1] in ends else span.ids
        text = str(tokenizer.decode(list(ids), skip_special_tokens=False))
        content, calls = parse_tool_calls(text, self.settings.turns.format)
        message: dict[str, object] = {"role": "assistant", "content": content}
        if calls:
            first = self.counts["ids"]
            self.counts["ids"] += len(calls)
            message["tool_calls"] = [
                tool_call(call_id(first + n), call.name or "unknown", call.arguments) for n, call in enumerate(calls)
            ]
        return Answer(text, message, calls, span)


def plain_message(message: Message) -> dict[str, object]:
    """A message with arguments of calls as objects, and as content text or, with images, text and image_url parts.

    ValueError for other parts.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.setdefault("content", "")
    if isinstance(content, list):
        plain["content"] = plain_content(content)
    if plain["role"] == "developer":
        plain["role"] = "system"
    return with_arguments(plain, lambda given: json.loads(given or "{}") if isinstance(given, str) else given)


def message_key(message: Message, before: str) -> str:
    """Identifies a conversation up to this message, by role, text and tool calls; `before` is that of those before."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    content = message["content"].strip() if isinstance(message["content"], str) else message["content"]
    text = json.dumps([before, message["role"], content, calls], sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _response(ids: tuple[int, ...], *, rid: str, stop_reason: str, **tokens: Sequence[Any]) -> ModelResponse:
    """What an engine drew after `ids`, from a log's plain data."""
    full, sampled = (tuple(map(float, tokens[name])) for name in ("output_logprobs", "sampled_logprobs"))
    drawn, versions = tuple(tokens["output_tokens"]), tuple(tokens["output_versions"])
    return ModelResponse(rid, ids, drawn, full, sampled, versions, Finish(stop_reason))


def _seed(episode: int, number: int, ids: Sequence[int]) -> int:
    """The seed of a draw, from its episode, the tokens before it and how often it was drawn before."""
    digest = blake2b(f"{episode}/{number}/".encode() + array("i", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
