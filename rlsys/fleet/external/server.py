"""An external server as a replica of a fleet: one stream for each request, health, and the weights that it holds."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from rlsys.config.checks.files import model_facts
from rlsys.fleet.external.backends import FULL, RAW, BadResponseError, adapter_of, check, probed_mode, setting_of
from rlsys.fleet.external.capabilities import ALL, SERVERS
from rlsys.fleet.external.http import Call, RefusedError, ServerFault, StaleWeightsFault, ask, events
from rlsys.rollout.base import check_sampling
from rlsys.types import Finish, ModelRequest, ResponseDelta, WeightUpdateMeta
from rlsys.utils.errors import ConfigError, WeightTransferError

if TYPE_CHECKING:
    from rlsys.fleet.external.engine import RemoteEngine

log = logging.getLogger(__name__)
OUT = (ServerFault, RefusedError, ConfigError, WeightTransferError)
"""Why a server is not admitted."""

EVENT_BYTES, EVENT_TOKEN_BYTES = 1 << 20, 256
CONNECT_S, ABORT_WAIT_S, FIRST_BACKOFF_S = 10.0, 0.05, 0.2
HEALTH = Call("/health", method="GET")
TIED_ON_CPU = "vLLM on CPU keeps the old head where embeddings are tied; set rollout.checkpoint_engine.backend=nccl"


class ServerReplica:
    """A Replica; `identity` is the server's own name of the weights that it was given last."""

    def __init__(self, url: str, engine: "RemoteEngine") -> None:
        self.url, self.name, self.engine = url, url, engine
        self.is_admitted, self.cause = False, "not connected yet"
        self.logprobs = self.version = self.identity = ""
        self.capabilities, self.on_cpu, self.normalises = ALL, False, False
        self.num_failures, self._examined_s = 0, 0.0
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._outbox: list[ResponseDelta] = []

    # ---- called by the fleet's threads -------------------------------------------------------------------------

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> list[ResponseDelta]:
        return self.engine.do(self._exchange(new, set(cancel), wait_s), deadline_s, self.url, "exchange")

    def health(self, deadline_s: float) -> Mapping[str, object]:
        self.engine.do(self.examine(), deadline_s, self.url, "health")
        return self.about()

    def restart(self, deadline_s: float) -> None:
        """Wait until the server is back; it is restarted from outside."""
        self.engine.do(self._come_back(), deadline_s, self.url, "start")

    def about(self) -> dict[str, object]:
        """What is known of the server, without asking it."""
        names = ("is_admitted", "identity", "version", "logprobs", "cause")
        return {**{name: getattr(self, name) for name in names}, "running": len(self._streams)}

    # ---- requests ----------------------------------------------------------------------------------------------

    async def _exchange(self, new: Sequence[ModelRequest], cancel: set[str], wait_s: float) -> list[ResponseDelta]:
        if not self.is_admitted:
            raise ServerFault(self.url, "exchange", self.cause)
        if asyncio.get_running_loop().time() - self._examined_s > self.engine.settings.health_s:
            await self.examine()
        for rid in cancel & self._streams.keys():
            self._streams[rid].cancel()
        self._streams |= {request.rid: asyncio.create_task(self._answer(request)) for request in new}
        if self._streams:
            await asyncio.wait(self._streams.values(), timeout=wait_s)
        deltas, self._outbox = self._outbox, []
        return [delta for delta in deltas if delta.rid not in cancel]

    async def _answer(self, request: ModelRequest) -> None:
        """Put what the server streams into the outbox; a failure waits a while, so that it is not repeated at once."""
        try:
            async with aclosing(self._stream(request)) as stream:
                async for delta in stream:
                    self._outbox.append(delta)
            self.num_failures = 0
        except (RefusedError, ValueError) as error:
            if is_lost := bool(self.engine.adapter) and self.engine.adapter in str(error):  # SGLang has started again
                self.is_admitted, self.cause = False, str(error)
            self._outbox.append(ResponseDelta(request.rid, error=str(error), refused=not is_lost))
        except ServerFault as fault:
            log.log(logging.DEBUG if self.num_failures else logging.WARNING, "%s", fault)
            if isinstance(fault, StaleWeightsFault) or (self.engine.adapter and fault.status == 404):
                self.is_admitted, self.cause = False, str(fault)
            wait_s = max(fault.wait_s, FIRST_BACKOFF_S * 2 ** min(self.num_failures, 30))
            self.num_failures += 1
            await asyncio.sleep(min(wait_s, self.engine.settings.max_backoff_s))
            self._outbox.append(ResponseDelta(request.rid, error=str(fault)))
        finally:
            self._streams.pop(request.rid, None)

    async def _stream(self, request: ModelRequest) -> AsyncGenerator[ResponseDelta]:
        """What one generation of the server adds to a request, by event."""
        self._check(request)
        engine, settings, backend = self.engine, self.engine.settings, self.engine.backend
        version, adapter, stamp = engine.get_version(), engine.adapter, self._stamp()
        call = backend.generate(request, settings, adapter=adapter, salt=f"{engine.job}-{version}")
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=settings.servers.timeout_s)
        num, vocab_size, seen = request.gconfig.max_new_tokens, settings.vocab_size, 0
        size = EVENT_BYTES + EVENT_TOKEN_BYTES * (len(request.input_ids) + num)
        stream = events(engine.session, self.url, call, stage="generate", timeout=timeout, max_bytes=size)
        async with aclosing(stream):
            async for event in stream:
                try:
                    delta = backend.read(event, seen)
                    check(delta, room=num - seen, vocab_size=vocab_size)
                    if delta.finish is Finish.STOP and not seen + len(delta.tokens):
                        raise BadResponseError("an answer that stopped without a stop token")
                except BadResponseError as error:
                    raise ServerFault(self.url, "generate", str(error)) from error
                if stamp and (wrong := set(delta.stamps) - {stamp, ""}):
                    what = f"tokens of weights {sorted(wrong)}, wanted '{stamp}' (version {version})"
                    raise StaleWeightsFault(self.url, "generate", what)
                seen += len(delta.tokens)
                finish = Finish.LENGTH if seen == num and delta.finish is not Finish.STOP else delta.finish
                if finish is Finish.ABORT:
                    await asyncio.sleep(ABORT_WAIT_S)
                full = tuple(delta.logprobs)
                sampled = (0.0,) * len(full) if request.gconfig.greedy else full
                yield ResponseDelta(request.rid, tuple(delta.tokens), full, sampled, (version,) * len(full), finish)
                if finish is not None:
                    return
        raise ServerFault(self.url, "generate", "the answer has no finish reason")

    def _check(self, request: ModelRequest) -> None:
        if not request.input_ids or min(request.input_ids) < 0:
            raise ValueError("a prompt is one token id from 0 up, or more")
        check_sampling(request.gconfig)
        if self.logprobs == RAW and request.gconfig.temperature not in (0.0, 1.0):
            why = f"gives log-probabilities before temperature {request.gconfig.temperature:g}"
            raise ValueError(f"{self.url} {why}; start it with --logprobs-mode processed_logprobs")
        if request.images and "images" not in self.capabilities:
            raise ValueError(f"{self.url}: {self.engine.backend.kind} {self.version} takes no processed images")
        if request.images and self.normalises:
            raise ValueError(f"{self.url} would normalise pixels again; start it with --no-mm-device-do-normalize")

    def _stamp(self) -> str:
        """How the server marks tokens of the current weights; empty where it does not mark them reliably."""
        if self.engine.backend.kind == "vllm":
            return self.engine.adapter
        return "" if self.engine.adapter else self.identity

    async def interrupt(self) -> None:
        """End what runs, by the server's pause or else by hanging up; its tokens are kept and it is given back."""
        settings = self.engine.settings
        try:
            await self._ask(self.engine.backend.pause, "pause", settings.health_deadline_s)
            if self._streams:
                await asyncio.wait(self._streams.values(), timeout=settings.stop_grace_s)
        except (ServerFault, RefusedError) as fault:
            log.info("%s", fault)
        for rid, stream in list(self._streams.items()):
            stream.cancel()
            self._outbox.append(ResponseDelta(rid, finish=Finish.ABORT))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities at temperature 1 of every token but the first."""
        engine = self.engine
        call = engine.backend.score(token_ids, model=engine.settings.servers.model or "", adapter=engine.adapter)
        return engine.backend.read_scores(await self._ask(call, "score", engine.settings.request_s))

    # ---- health and weights ------------------------------------------------------------------------------------

    async def examine(self) -> None:
        """Raise unless the server answers and has the weights that it was given; one that was out is admitted."""
        if not self.is_admitted:
            return await self.admit()
        await self._ask(HEALTH, "health", self.engine.settings.health_deadline_s)
        if self.engine.weights is not None and not self.engine.adapter and await self._identify() != self.identity:
            self.is_admitted, self.cause = False, "its weights are not those that were pushed"
            raise WeightTransferError(f"{self.url}: {self.cause}")
        self._examined_s = asyncio.get_running_loop().time()

    async def admit(self) -> None:
        """Let a server that is up serve, after giving it the current weights."""
        limit_s, backend, again = self.engine.settings.health_deadline_s, self.engine.backend, bool(self.logprobs)
        try:
            await self._ask(HEALTH, "health", limit_s)
            if not again:
                self.version = await self._first_answer(backend.version, "version")
                self.capabilities = SERVERS[backend.kind].features(self.version) if self.version else ALL
                if backend.about:
                    about = await self._ask(backend.about, "start", limit_s)
                    self.on_cpu = setting_of(about, "device_config", "device") == "cpu"
                    images = setting_of(about, "model_config", "multimodal_config")
                    self.normalises = not isinstance(images, dict) or bool(images.get("mm_device_do_normalize"))
                self.logprobs = probed_mode(await self._ask(backend.probe, "probe", limit_s)) if backend.probe else FULL
            async with self.engine.updating:
                if self.engine.weights is not None:
                    await self.load(self.engine.weights)
                if again:
                    await self._ask(backend.resume, "resume", limit_s)
                self.identity = await self._identify()
            self.is_admitted, self.cause = True, ""
            self._examined_s = asyncio.get_running_loop().time()
        except Exception as error:
            cause = str(error) if isinstance(error, OUT) else f"{self.url}: {error!r}"
            if self.cause != cause:
                log.warning("waiting for a server: %s", cause)
            self.cause = cause
            raise

    async def _come_back(self) -> None:
        settings, self.is_admitted = self.engine.settings, False
        for stream in [*self._streams.values()]:
            stream.cancel()  # the fleet has placed these requests again
        rests = wait_exponential(multiplier=2 * settings.cooldown_s, max=settings.max_cooldown_s)
        await asyncio.sleep(settings.cooldown_s)
        await AsyncRetrying(retry=retry_if_exception_type(OUT), wait=rests)(self.admit)

    async def attempt(self, act: Awaitable[None]) -> bool:
        """Whether this succeeds; where it fails the server is out until a health check or an update succeeds."""
        try:
            await act
        except (ServerFault, RefusedError) as error:
            self.give_up(str(error))
            return False
        return True

    def give_up(self, cause: str) -> None:
        log.warning("%s", cause)
        self.is_admitted, self.cause = False, cause

    async def take(self, meta: WeightUpdateMeta) -> None:
        """Bring the server to new weights."""
        await self.load(meta)
        self.identity = await self._identify()
        self.is_admitted, self.cause = True, ""

    async def load(self, meta: WeightUpdateMeta) -> None:
        stage = f"update_weights to version {meta.version}"
        if not meta.weights_path:
            if await self._identify() != str(meta.version):
                raise ServerFault(self.url, stage, "it gets its weights with the next push")
            return
        if self.on_cpu and not adapter_of(meta) and model_facts(Path(meta.weights_path)).get("tie_word_embeddings"):
            raise ServerFault(self.url, stage, TIED_ON_CPU)
        source = "adapters" if adapter_of(meta) else "files"
        if source not in self.capabilities:
            kind = f"{self.engine.backend.kind} {self.version}"
            raise ServerFault(self.url, stage, f"{kind}: servers of this version cannot load weights by '{source}'")
        await self.send(stage, *self.engine.backend.update(meta))

    async def send(self, stage: str, *calls: Call) -> None:
        """Send calls in their order; ServerFault or RefusedError where one fails."""
        for call in calls:
            answer = await self._ask(call, stage, self.engine.settings.update_s)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise ServerFault(self.url, stage, str(answer.get("message"))[:300])

    async def num_ranks(self) -> int:
        """The ranks that receive weights over a process group."""
        call, key = self.engine.backend.num_ranks
        num = await self._first_answer((call,), key)
        if not num.isdecimal():
            raise ServerFault(self.url, "join", f"no {key}: see docs/external_servers.md")
        return int(num)

    async def _identify(self) -> str:
        return await self._first_answer(self.engine.backend.identity, "weight_version")

    async def _first_answer(self, calls: Sequence[Call], key: str) -> str:
        """The value under this key in the answer of the first of these routes that the server has."""
        for call in calls:
            answer = await self._ask(call, "health", self.engine.settings.health_deadline_s)
            if isinstance(answer, dict):
                return str(answer.get(key, ""))
        return ""

    async def _ask(self, call: Call, stage: str, deadline_s: float) -> object:
        try:
            return await ask(self.engine.session, self.url, call, stage=stage, deadline_s=deadline_s)
        except ServerFault as fault:
            if call.optional and fault.status in (404, 405):
                return None
            raise
