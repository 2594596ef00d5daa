"""OpenAI's and Anthropic's APIs over HTTP, so that any program that speaks them is an agent that can be trained.

An episode has its own base URL and a random key. What a conversation repeats of the episode's earlier draws keeps its
tokens; a rewritten or compacted history becomes a branch. Requests are answered on loopback only.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from types import ModuleType

from aiohttp import web
from aiohttp.typedefs import Handler

from rlsys.agent import anthropic_messages, responses_api
from rlsys.agent.session import Answer, EpisodeEnd, Session
from rlsys.agent.template import with_arguments
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import is_reward, refuse_penalties
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError

MAX_BODY_BYTES = 64 << 20
MAX_CHOICES = 16
FREE = ("temperature", "top_p", "top_k")
"""What requests outside of episodes sample by."""


@dataclass(eq=False)
class OpenEpisode:
    """An episode that a program talks to: where, with which key, and the reward that it posted, if any."""

    session: Session
    base_url: str
    key: str
    reward: float | None = None
    last: Answer | None = None
    answers: dict[str, asyncio.Task[list[Answer]]] = field(default_factory=dict)


class Endpoint:
    """The HTTP server of all open episodes; belongs to one event loop.

    With `make_session` requests outside of episodes are answered too, without a key, each by a session of its own.
    """

    def __init__(self, make_session: Callable[[], Session] | None = None) -> None:
        self._make_session = make_session
        self._episodes: dict[str, OpenEpisode] = {}
        self._runner: web.AppRunner | None = None
        self._lock = asyncio.Lock()

    async def open(self, session: Session) -> OpenEpisode:
        """Give an episode its URL; the server starts with the first one."""
        address = await self.start()
        name = secrets.token_urlsafe(9)
        episode = OpenEpisode(session, f"http://{address}/e/{name}/v1", secrets.token_urlsafe(24))
        self._episodes[name] = episode
        return episode

    async def end(self, episode: OpenEpisode) -> None:
        """Answer no more requests of an episode and give up its draws; raises what an engine that failed raised."""
        self._episodes = {name: other for name, other in self._episodes.items() if other is not episode}
        for draw in episode.answers.values():
            draw.cancel()
        for drawn in await asyncio.gather(*episode.answers.values(), return_exceptions=True):
            if isinstance(drawn, (RolloutError, WeightTransferError, DeadlineError)):
                raise drawn

    async def close(self) -> None:
        """Stop the server."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def start(self) -> str:
        """Start the server unless it runs; its HOST:PORT."""
        async with self._lock:
            if self._runner is None:
                app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._checked])
                for path in ("/e/{episode}/v1/chat/completions", "/v1/chat/completions"):
                    app.router.add_post(path, self._complete)
                app.router.add_post("/e/{episode}/v1/responses", partial(self._translate, responses_api))
                app.router.add_post("/e/{episode}/v1/messages", partial(self._translate, anthropic_messages))
                app.router.add_get("/e/{episode}/v1/models", self._models)
                app.router.add_post("/e/{episode}/v1/reward", self._reward)
                self._runner = web.AppRunner(app, access_log=None)
                await self._runner.setup()
                await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The answer of a handler to a program that may ask; errors in OpenAI's form."""
        if (name := request.match_info.get("episode", "")) or self._make_session is None:
            episode = self._episodes.get(name)
        else:
            episode = OpenEpisode(self._make_session(), "", "")
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if episode is None:
            return _error(404, "not_found", "there is no open episode at this URL; it may have ended")
        is_key = not episode.key or hmac.compare_digest(given.encode("utf-8", "replace"), episode.key.encode())
        if not is_key or "Origin" in request.headers:
            episode.session.counts["refused_requests"] += 1
            if is_key:
                return _error(403, "forbidden", "requests of web pages are not answered")
            return _error(401, "invalid_api_key", "wrong key; use the OPENAI_API_KEY that the program was given")
        request["episode"] = episode
        try:
            return await handler(request)
        except ConnectionError as error:  # the program has hung up, and gets no answer
            return _error(400, "disconnected", str(error))
        except EpisodeEnd as ended:
            return _error(400, "episode_end", str(ended))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            episode.session.counts["bad_requests"] += 1
            return _error(400, "invalid_request_error", f"{type(error).__name__}: {error}")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "rlsys"}]})

    async def _reward(self, request: web.Request) -> web.Response:
        if not is_reward(reward := float((await request.json())["reward"])):
            raise ValueError(f"the reward is {reward}: post a number that is finite in float32")
        request["episode"].reward = reward
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        completion = await self._completion(request, body)
        if body.get("stream"):
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return await _stream(request, _chunks(completion, with_usage), last=b"data: [DONE]\n\n")
        return web.json_response(completion)

    async def _translate(self, api: ModuleType, request: web.Request) -> web.StreamResponse:
        """Answer a request of another API by a chat completion."""
        body = await request.json()
        response = api.response(await self._completion(request, api.chat_request(body)), body)
        return await _stream(request, api.events(response)) if body.get("stream") else web.json_response(response)

    async def _completion(self, request: web.Request, body: JsonObject) -> JsonObject:
        episode = request["episode"]
        answers = await self._drawn(episode, body, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
        episode.last = answers[0]
        parent = answers[0].span.parent
        num_drawn = sum(len(answer.span.ids) for answer in answers)
        usage = {"prompt_tokens": parent.num_tokens if parent else 0, "completion_tokens": num_drawn}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(body.get("model") or "policy"),
            "choices": [_choice(number, answer) for number, answer in enumerate(answers)],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }

    async def _drawn(self, episode: OpenEpisode, body: JsonObject, *, is_retry: bool) -> list[Answer]:
        """The answers to a request; a client's repetition of one gets the same answers."""
        key = blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
        if not (is_retry and key in episode.answers):
            episode.answers[key] = asyncio.create_task(_draw(episode.session, body, () if episode.key else FREE))
        else:
            episode.session.counts["retries"] += 1
        return await asyncio.shield(episode.answers[key])


async def _draw(session: Session, body: JsonObject, sampled: Sequence[str]) -> list[Answer]:
    """Draw the answers that a request asks for. Of `sampled` it has its own, the rest of the sampling is the job's."""
    messages, num_choices = body["messages"], int(body.get("n") or 1)
    most = [int(body[name]) for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if not (isinstance(messages, list) and messages and 0 < num_choices <= MAX_CHOICES and min(most, default=1) > 0):
        raise ValueError(f"messages must be a list that is not empty, n from 1 to {MAX_CHOICES}, max_tokens at least 1")
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    limit: dict[str, object] = {"max_new_tokens": most[0]} if most else {}
    refuse_penalties(body)
    if body.get("logit_bias") or (body.get("response_format") or {"type": "text"}).get("type") != "text":
        raise ValueError("logit_bias, or a response_format other than text: answers are drawn from the model as it is")
    limit |= {name: body[name] for name in sampled if body.get(name) is not None}
    return [await session.draw(messages, tools=tools or [], **limit) for _ in range(num_choices)]


def _choice(number: int, answer: Answer) -> dict[str, object]:
    message = with_arguments(answer.message, json.dumps)
    reason = "tool_calls" if "tool_calls" in message else "length" if answer.span.finish == "length" else "stop"
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return {"index": number, "message": message, "finish_reason": reason, "logprobs": None}


def _chunks(completion: JsonObject, with_usage: bool) -> Iterator[JsonObject]:
    """The events of a streamed completion: each choice as one chunk and its end, then the usage if it is asked for,
    since its event has no choice."""
    head = {**completion, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{**call, "index": at} for at, call in enumerate(delta["tool_calls"])]
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            yield {**head, "choices": [{"index": choice["index"], "delta": part, "finish_reason": reason}]}
    if with_usage:
        yield {**head, "choices": [], "usage": usage}


async def _stream(request: web.Request, events: Iterable[JsonObject], last: bytes = b"") -> web.StreamResponse:
    """Server-sent events, with the type of those that have one as their name."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    await response.write(last)
    return response


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)
