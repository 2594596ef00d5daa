"""The servers of a remote engine, on its event loop: queue, retries, fail-over, health and weight updates."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlsys.fleet.external.backends import (
    FULL,
    RAW,
    Backend,
    WeightGroupSpec,
    adapter_of,
    device_of,
    over_group,
    probed_mode,
    way_of,
)
from rlsys.fleet.external.capabilities import Capabilities, capabilities_of
from rlsys.fleet.external.http import Call, RefusedError, ServerFault, ask, events, open_session
from rlsys.fleet.external.partial import BadResponseError, Delta, ServedResponse, check
from rlsys.fleet.external.router import Router, ServerState
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.types import ModelRequest, ModelResponse, WeightUpdateMeta
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, WeightTransferError

log = logging.getLogger(__name__)
T = TypeVar("T")

EVENT_BYTES, EVENT_TOKEN_BYTES = 1 << 20, 256
ABORT_WAIT_S = 0.05
FIRST_BACKOFF_S = 0.2
GONE_BY = "the current weights came over a process group and cannot be sent again; update from files once"
TIED_ON_CPU = (
    "vLLM on CPU keeps the old output head when the weights of a model with tied embeddings are reloaded (seen with "
    "0.32.0); push adapters, serve it with SGLang, or use a model with tie_word_embeddings=false"
)
COUNTS = ("requests", "tokens", "retries", "failovers", "bad_answers", "busy", "trips", "readmitted", "aborted")


class ServerPool:
    """Everything here runs on one event loop and is called by RemoteEngine only."""

    def __init__(self, backend: Backend, settings: RemoteSettings, *, version: int) -> None:
        self.backend, self.settings, self.version = backend, settings, version
        self.router = Router(settings)
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.session = open_session(settings.token)
        self.gate, self.change = asyncio.Event(), asyncio.Condition()
        self.gate.set()
        self.quarantined = False
        self.adapter = ""
        self._weights: WeightUpdateMeta | None = None
        self._adapters: list[str] = []
        self._versions: dict[str, int] = {"": version}
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._updating = asyncio.Lock()
        self._segments: dict[asyncio.Task[None], ServerState] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._segments)

    # ---- requests ----------------------------------------------------------------------------------------------

    async def complete(self, request: ModelRequest, *, patient: bool) -> ModelResponse:
        """Complete a request. While stopped, a patient one waits, another one returns its tokens so far."""
        partial, limit_s = ServedResponse(request), self.settings.request_s
        await self.connect()
        try:
            async with asyncio.timeout(limit_s), self._slots:
                while partial.finish is None and (patient or self.gate.is_set()):
                    await self.gate.wait()
                    await self._retry(f"request {request.rid}", lambda avoid: self._attempt(partial, avoid))
        except TimeoutError as error:
            states = ", ".join(f"{s.url} ({'up' if s.admitted else s.cause})" for s in self.router.servers)
            hint = f"request {request.rid} has {len(partial.tokens)} tokens; servers: {states}"
            raise DeadlineError(partial.server or "the request queue", "generate", limit_s, hint) from error
        self.counts["requests"] += 1
        self.counts["aborted"] += partial.finish is None
        return partial.response()

    async def _retry(self, what: str, once: Callable[[Collection[str]], Awaitable[T]]) -> T:
        """Run `once` on one server after another until it succeeds; it gets the servers where it failed."""
        causes: list[str] = []
        failed_on: list[str] = []
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.settings.max_retries + 1),
            wait=self._back_off,
            retry=retry_if_exception_type(ServerFault),
            reraise=True,
        )

        async def attempt() -> T:
            self.counts["retries"] += bool(causes)
            try:
                return await once(failed_on)
            except ServerFault as fault:
                causes.append(str(fault))
                failed_on.append(fault.url)
                raise

        try:
            return await retrying(attempt)
        except ServerFault as error:
            raise RolloutError("\n  ".join([f"{what} failed {len(causes)} times", *causes])) from error

    def _back_off(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.wait_s if isinstance(error, ServerFault) else 0.0
        random_s = wait_random_exponential(multiplier=FIRST_BACKOFF_S, max=self.settings.max_backoff_s)(state)
        return max(asked_s, random_s)

    async def _attempt(self, partial: ServedResponse, avoid: Collection[str]) -> None:
        """One segment from one server; nothing while stopped."""
        session = partial.request.session
        if not session and self.settings.policy == "affinity":
            session = f"prompt {hash(partial.request.input_ids)}"
        server = await self._server(session, avoid)
        if not self.gate.is_set():
            return
        before, partial.server = len(partial.tokens), server.url
        segment = asyncio.create_task(self._segment(partial, server))
        self._segments[segment] = server
        server.load += 1
        try:
            await segment
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        except ServerFault as fault:
            self.counts["failovers"] += len(partial.tokens) > before
            self._note(server, fault)
            raise
        else:
            self.router.succeeded(server)
        finally:
            server.load -= 1
            del self._segments[segment]

    async def _server(self, session: str, avoid: Collection[str]) -> ServerState:
        async with self.change:
            while (server := self.router.choose(session, avoid)) is None:
                await self.change.wait()
        return server

    async def _segment(self, partial: ServedResponse, server: ServerState) -> None:
        """Stream tokens into the partial until this server has no more."""
        settings, request = self.settings, partial.rest()
        version, adapter = self.version, self.adapter
        self._check_mode(server, request)
        call = self.backend.generate(request, model=settings.model, adapter=adapter, send_seed=settings.send_seeds)
        timeout = aiohttp.ClientTimeout(sock_connect=settings.connect_s, sock_read=settings.idle_s)
        size = EVENT_BYTES + EVENT_TOKEN_BYTES * (len(request.input_ids) + request.gconfig.max_new_tokens)
        seen = 0
        stream = events(self.session, server.url, call, stage="generate", timeout=timeout, max_event_bytes=size)
        try:
            async for event in stream:
                try:
                    delta = self.backend.read(event, seen)
                    made_by = [self._version_of(stamp, server, version, adapter) for stamp in delta.stamps]
                    partial.add(delta, made_by)
                except BadResponseError as error:
                    self.counts["bad_answers"] += 1
                    raise ServerFault(server.url, "generate", str(error), kind="bad_answer") from error
                seen += len(delta.tokens)
                self.counts["tokens"] += len(delta.tokens)
                if partial.finish is not None:
                    return
                if delta.finish is not None:
                    await asyncio.sleep(ABORT_WAIT_S)
                    return
        except RefusedError as error:
            raise RefusedError(f"request {request.rid}: {error}") from error
        finally:
            await stream.aclose()
        raise ServerFault(server.url, "generate", "the answer has no finish reason", kind="bad_answer")

    def _check_mode(self, server: ServerState, request: ModelRequest) -> None:
        if server.logprobs == RAW and request.gconfig.temperature not in (0.0, 1.0):
            raise ValueError(
                f"request {request.rid}: {server.url} gives log-probabilities before temperature "
                f"{request.gconfig.temperature:g}; start it with --logprobs-mode processed_logprobs"
            )

    def _version_of(self, stamp: str, server: ServerState, asked: int, adapter: str) -> int:
        """The version that the server says made a token; a fault where that is not what was asked for."""
        if self.backend.kind == "vllm" and not adapter:
            return asked
        version = self._versions.get(stamp) if stamp else asked
        if version != asked:
            what = f"tokens of weights '{stamp}' (version {version}), wanted version {asked}"
            raise ServerFault(server.url, "generate", what, kind="stale")
        return asked

    def _note(self, server: ServerState, fault: ServerFault) -> None:
        """Count a fault: a busy server has not failed, one with wrong weights is taken out at once."""
        log.warning("%s", fault)
        if fault.kind == "busy":
            self.counts["busy"] += 1
        elif fault.kind == "stale" or (self.adapter and fault.status == 404):
            self.counts["trips"] += self.router.trip(server, str(fault))
        else:
            self.counts["trips"] += self.router.failed(server, str(fault))

    # ---- health ------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Wait once until a server is up; the others are admitted when they come up."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        end_s = asyncio.get_running_loop().time() + self.settings.start_s
        for server in self.router.servers:
            server.admitted, server.cause = False, "not connected yet"
        while not any(server.admitted for server in self.router.servers):
            await asyncio.gather(*(self._admit(s) for s in self.router.servers if not s.admitted))
            if asyncio.get_running_loop().time() > end_s:
                self._connecting = None
                states = "; ".join(f"{server.cause}" for server in self.router.servers)
                who = " and ".join(self.settings.urls)
                raise DeadlineError(who, "start", self.settings.start_s, f"start the servers first. {states}")
            if not any(s.admitted for s in self.router.servers):
                await asyncio.sleep(min(1.0, self.settings.health_s))
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Check admitted servers regularly, and those that are out after their cool-down."""
        while True:
            await asyncio.sleep(min(self.settings.health_s, self.settings.cooldown_s))
            if self.gate.is_set() and not self._updating.locked():
                due = self.router.to_probe()
                idle = [s for s in self.router.servers if s.admitted]
                await asyncio.gather(*(self._admit(s) for s in due), *(self._examine(s) for s in idle))

    async def _examine(self, server: ServerState) -> None:
        try:
            await self._ask(server, self.backend.health, "health", self.settings.health_deadline_s)
            if self._weights is not None and await self._identity(server) != server.identity and not self.adapter:
                fault = ServerFault(server.url, "health", "its weights are not those that were pushed", kind="stale")
                self._note(server, fault)
        except ServerFault as fault:
            self._note(server, fault)

    async def _admit(self, server: ServerState) -> None:
        """Admit a server that is out if it is healthy, after giving it the current weights."""
        again = bool(server.logprobs)
        try:
            await self._ask(server, self.backend.health, "health", self.settings.health_deadline_s)
            if not server.logprobs:
                server.version, server.capabilities = await self._abilities(server)
                probe = self.backend.probe
                answer = await self._ask(server, probe, "probe", self.settings.health_deadline_s) if probe else None
                server.logprobs = probed_mode(answer) if probe else FULL
                if self.backend.about:
                    about = await self._ask(server, self.backend.about, "start", self.settings.health_deadline_s)
                    server.device = device_of(about)
            async with self._updating:
                if self._weights is not None and over_group(self._weights):
                    raise ServerFault(server.url, "update_weights", GONE_BY, kind="stale")
                if self._weights is not None:
                    await self._give(server, self._weights)
                if again:
                    await self._ask(server, self.backend.resume, "resume", self.settings.health_deadline_s)
                server.identity = await self._identity(server)
                if self._weights is None:
                    self._versions[server.identity] = self.version
                self.counts["readmitted"] += again
                self.router.readmit(server)
            async with self.change:
                self.change.notify_all()
        except (ServerFault, RefusedError) as error:
            self.router.trip(server, str(error))

    async def _identity(self, server: ServerState) -> str:
        return await self._first_answer(server, self.backend.identity, "weight_version")

    async def _abilities(self, server: ServerState) -> tuple[str, Capabilities]:
        version = await self._first_answer(server, self.backend.version, "version")
        try:
            return version, capabilities_of(self.backend.kind, version)
        except ConfigError as error:
            raise ServerFault(server.url, "start", str(error), kind="status") from error

    async def _first_answer(self, server: ServerState, calls: Sequence[Call], key: str) -> str:
        """The value under this key in the answer of the first of these routes that the server has."""
        for call in calls:
            try:
                answer = await self._ask(server, call, "health", self.settings.health_deadline_s)
            except ServerFault as fault:
                if fault.status != 404:
                    raise
            else:
                return str(answer.get(key, "")) if isinstance(answer, dict) else ""
        return ""

    async def _ask(self, server: ServerState, call: Call, stage: str, deadline_s: float) -> Any:
        try:
            return await ask(self.session, server.url, call, stage=stage, deadline_s=deadline_s)
        except ServerFault as fault:
            if call.optional and fault.status in (404, 405):
                return None
            raise

    # ---- weights -----------------------------------------------------------------------------------------------

    async def stop(self, *, quarantine: bool = False) -> None:
        """Interrupt running requests, keeping their tokens, and start none until `go`."""
        self.gate.clear()
        self.quarantined = self.quarantined or quarantine
        paused = await self._each(
            lambda server: self._ask(server, self.backend.pause, "pause", 30.0), "pause", keep=True
        )
        rest = {task for task, server in self._segments.items() if server in paused}
        if rest:
            await asyncio.wait(rest, timeout=self.settings.stop_grace_s)
        for segment in self._segments:
            segment.cancel()
        if self._segments:
            await asyncio.wait(set(self._segments), timeout=self.settings.stop_grace_s)

    async def go(self) -> None:
        limit_s = self.settings.health_deadline_s
        await self._each(lambda server: self._ask(server, self.backend.resume, "resume", limit_s), "resume")
        self.quarantined = False
        self.gate.set()

    async def update(self, meta: WeightUpdateMeta) -> None:
        """Update every server; those that fail are taken out and get the weights before they serve again."""
        adapter, in_place = adapter_of(meta), bool(meta.metadata.get("in_place"))
        self.backend.update(meta)
        await self.connect()
        async with self._updating:
            stops = not adapter or in_place
            if stops:
                await self.stop(quarantine=True)
            reached = await self._each(lambda server: self._give(server, meta), "update_weights", anyone=True)
            if not reached:
                causes = "\n  ".join(server.cause for server in self.router.servers)
                raise WeightTransferError(f"no server took version {meta.version}:\n  {causes}")
            self._weights, self.version = meta, meta.version
            self.adapter = adapter
            self._versions[self.adapter or str(meta.version)] = meta.version
            for server in reached:
                server.identity = await self._identity(server)
                self.router.readmit(server)
            if stops:
                await self.go()
            await self._forget_adapters()

    async def _give(self, server: ServerState, meta: WeightUpdateMeta) -> None:
        stage = f"update_weights to version {meta.version}"
        if server.device == "cpu" and not adapter_of(meta) and _tied(meta.weights_path):
            raise ServerFault(server.url, stage, TIED_ON_CPU, kind="status")
        if why := server.capabilities.lacking(way_of(meta)):
            raise ServerFault(server.url, stage, f"{self.backend.kind} {server.version}: {why}", kind="status")
        for call in self.backend.update(meta):
            answer = await self._ask(server, call, stage, self.settings.update_s)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise ServerFault(server.url, stage, str(answer.get("message"))[:300], kind="status")

    async def join_group(self, group: WeightGroupSpec) -> None:
        """Have every server join a process group, in the order of their addresses."""
        await self.connect()
        calls = [
            self.backend.join_group(group, 1 + number * group.ranks_per_server)
            for number in range(len(self.router.servers))
        ]
        pairs = zip(self.router.servers, calls, strict=True)
        limit_s = self.settings.update_s
        await asyncio.gather(*(self._ask(server, call, "join_group", limit_s) for server, call in pairs))

    async def _forget_adapters(self) -> None:
        if self.adapter and self.adapter not in self._adapters:
            self._adapters.append(self.adapter)
        while len(self._adapters) > self.settings.keep_adapters:
            old = self._adapters.pop(0)
            call, limit_s = self.backend.unload_adapter(old), self.settings.update_s
            await self._each(lambda server: self._ask(server, call, "unload_adapter", limit_s), "unload", keep=True)  # noqa: B023

    async def _each(
        self, do: Callable[[ServerState], Awaitable[Any]], stage: str, *, keep: bool = False, anyone: bool = False
    ) -> Sequence[ServerState]:
        """Run `do` on all admitted servers at once; returns those where it succeeded and takes the others out unless
        `keep`. If none is admitted, `anyone` tries those that are out."""
        servers = [server for server in self.router.servers if server.admitted]
        servers = self.router.servers if anyone and not servers else servers
        results = await asyncio.gather(*(do(server) for server in servers), return_exceptions=True)
        reached = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, ServerFault | RefusedError):
                log.log(logging.INFO if keep else logging.WARNING, "%s", result)
                if not keep:
                    self.counts["trips"] += self.router.trip(server, str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                reached.append(server)
        return reached

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities at temperature 1 of every token but the first."""
        await self.connect()
        async with self._slots:
            return await self._retry("scoring", lambda avoid: self._score(token_ids, avoid))

    async def _score(self, token_ids: Sequence[int], avoid: Collection[str]) -> list[float]:
        server = await self._server("", avoid)
        call = self.backend.score(token_ids, model=self.settings.model, adapter=self.adapter)
        server.load += 1
        try:
            answer = await self._ask(server, call, "score", self.settings.request_s)
            scores = self.backend.read_scores(answer)
            check(Delta(token_ids[1:], scores), room=len(token_ids))
        except BadResponseError as error:
            self.counts["bad_answers"] += 1
            raise ServerFault(server.url, "score", str(error), kind="bad_answer") from error
        finally:
            server.load -= 1
        return scores

    async def set_version(self, version: int) -> None:
        """Declare that the servers' current weights are this version."""
        self.version = version
        self._versions |= {server.identity: version for server in self.router.servers}

    async def call_all(self, call: Call, stage: str) -> None:
        """Send every admitted server this call; one that fails is an error."""
        for server in self.router.servers:
            if server.admitted:
                await self._ask(server, call, stage, self.settings.update_s)

    async def close(self) -> None:
        """End everything that runs on this loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.session.close()


def _tied(folder: str) -> bool:
    """Whether the model in a folder has tied embeddings, if its config can be read."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("tie_word_embeddings", False))
