"""All external servers of a fleet: their event loop, and the weights that they are to hold."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TypeVar

from rlsys.fleet.external.backends import Backend, adapter_of
from rlsys.fleet.external.http import ServerFault, open_session
from rlsys.fleet.external.server import ServerReplica
from rlsys.fleet.external.settings import KEY, RemoteSettings
from rlsys.types import WeightUpdateMeta
from rlsys.utils.daemon_threads import LoopThread, cancel_others
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError

T = TypeVar("T")
SendWeights = Callable[[Sequence[ServerReplica], int], Awaitable[Sequence[ServerReplica]]]
"""Sends a version to servers; returns those that have received it."""
CLOSE_S = 10.0
POLL_S = 0.5


class ServerPool:
    """The servers; coroutines run on the pool's own loop, through `do` and `start`."""

    def __init__(self, backend: Backend, settings: RemoteSettings, *, version: int) -> None:
        self.backend, self.settings, self.version = backend, settings, version
        self.adapter, self.quarantined = "", False
        self.job = secrets.token_hex(8)  # a server may still know images by the weights of another job
        self.weights: WeightUpdateMeta | None = None
        self._adapters: list[str] = []
        self._thread = LoopThread(f"remote-{backend.kind}")
        self.servers = [ServerReplica(url, self) for url in settings.urls]
        self.session, self.updating = self.do(open_session(settings.token)), asyncio.Lock()

    def start(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        if self._thread.loop.is_closed():
            work.close()
            raise RolloutError("the remote engine is closed")
        return self._thread.start(work)

    def do(self, work: Coroutine[object, None, T], limit_s: float | None = None, who: str = "", stage: str = "") -> T:
        """The coroutine's result; DeadlineError after `limit_s`."""
        waiting = self.start(work)
        try:
            return waiting.result(limit_s)
        except DeadlineError:
            raise
        except TimeoutError as error:
            cause = next((server.cause for server in self.servers if server.url == who), "")
            raise DeadlineError(who, stage, limit_s or 0.0, cause) from error
        finally:
            waiting.cancel()

    async def connect(self) -> None:
        """Wait until a server is up; the others are admitted when they come up."""
        end_s = time.monotonic() + self.settings.start_s
        while not any(server.is_admitted for server in self.servers):
            await asyncio.gather(*(server.admit() for server in self.servers), return_exceptions=True)
            if time.monotonic() > end_s and not any(server.is_admitted for server in self.servers):
                states = "; ".join(server.cause for server in self.servers)
                who = " and ".join(self.settings.urls)
                raise DeadlineError(who, "start", self.settings.start_s, f"start the servers first. {states}")
            await asyncio.sleep(0 if any(server.is_admitted for server in self.servers) else POLL_S)

    async def stop(self) -> None:
        """Interrupt running requests, keeping their tokens."""
        await asyncio.gather(*(server.interrupt() for server in self.servers if server.is_admitted))

    async def resume(self) -> None:
        await asyncio.gather(*(s.attempt(s.send("resume", self.backend.resume)) for s in self.servers if s.is_admitted))

    async def update(self, meta: WeightUpdateMeta, send: SendWeights | None = None) -> None:
        """Bring every server to new weights, which it loads or `send` sends; those that fail are out until they have
        them."""
        adapter = adapter_of(meta)
        async with self.updating:
            if not adapter:
                self.quarantined = True
                await self.stop()
            servers = [server for server in self.servers if server.logprobs]
            reached = await send(servers, meta.version) if send else servers
            await asyncio.gather(*(server.attempt(server.take(meta)) for server in reached))
            if not any(server.is_admitted for server in self.servers):
                causes = "\n  ".join(server.cause for server in self.servers)
                hint = f"\n(they must see {meta.weights_path}: {KEY}.weights_dir)" if meta.weights_path else ""
                raise WeightTransferError(f"no server took version {meta.version}:\n  {causes}{hint}")
            self.weights, self.version, self.adapter = meta, meta.version, adapter
            if not adapter:
                await self.resume()
                self.quarantined = False
            await self._forget_adapters()

    async def _forget_adapters(self) -> None:
        if self.adapter and self.adapter not in self._adapters:
            self._adapters.append(self.adapter)
        while len(self._adapters) > self.settings.keep_adapters:
            call = self.backend.unload_adapter(self._adapters.pop(0))
            unloaded = (server.send("unload", call) for server in self.servers if server.is_admitted)
            await asyncio.gather(*unloaded, return_exceptions=True)

    async def scores(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of every token but the first, by the first server that gives them."""
        error: Exception = RolloutError("no server is up")
        for server in sorted(self.servers, key=lambda server: not server.is_admitted):
            try:
                return await server.score(token_ids)
            except ServerFault as fault:
                error = fault
        raise error

    def close(self) -> None:
        """End all streams and the loop; the servers stay as they are."""
        if not self._thread.loop.is_closed():
            self._thread.close(self._close(), wait_s=CLOSE_S)

    async def _close(self) -> None:
        await cancel_others()
        await self.session.close()
