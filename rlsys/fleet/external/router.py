"""Chooses the server of the next request and keeps failing servers out. No I/O; the clock is passed in."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlsys.fleet.external.capabilities import Capabilities
from rlsys.fleet.external.settings import RemoteSettings

MAX_SESSIONS = 100_000
STEADY = 20
"""Consecutive answers after which a readmitted server's next cool-down is short again."""


@dataclass(eq=False)
class ServerState:
    """The router's state of a server. `identity` is the server's name of its last known good weights."""

    url: str
    admitted: bool = True
    load: int = 0
    served: int = 0
    failures: int = 0
    trips: int = 0
    streak: int = 0
    probe_at_s: float = 0.0
    identity: str = ""
    logprobs: str = ""
    device: str = ""
    version: str = ""
    capabilities: Capabilities = field(default_factory=Capabilities)
    cause: str = ""


class Router:
    """Chooses among admitted servers. `breaker_failures` in a row open a server's breaker; a probe closes it."""

    def __init__(self, settings: RemoteSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers = [ServerState(url) for url in settings.urls]
        self.settings, self.clock = settings, clock
        self._sessions: OrderedDict[str, ServerState] = OrderedDict()
        self._turn = 0

    def choose(self, session: str = "", avoid: Collection[str] = ()) -> ServerState | None:
        """The server for a request: its session's, else by policy; one of `avoid` only if there is no other."""
        admitted = [server for server in self.servers if server.admitted]
        open_ = [server for server in admitted if server.url not in avoid] or admitted
        if not open_:
            return None
        owner = self._sessions.get(session) if session else None
        chosen = owner if owner in open_ else self._by_policy(open_)
        if session:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _by_policy(self, servers: Sequence[ServerState]) -> ServerState:
        start, self._turn = self._turn % len(servers), self._turn + 1
        turned = [*servers[start:], *servers[:start]]
        return turned[0] if self.settings.policy == "round_robin" else min(turned, key=lambda server: server.load)

    def succeeded(self, server: ServerState) -> None:
        server.served += 1
        server.streak += 1
        server.failures = 0
        if server.streak >= STEADY:
            server.trips = 0

    def failed(self, server: ServerState, cause: str) -> bool:
        """Count a failure; returns whether it opened the breaker."""
        server.failures += 1
        server.streak = 0
        return server.admitted and server.failures >= self.settings.breaker_failures and self.trip(server, cause)

    def trip(self, server: ServerState, cause: str) -> bool:
        """Send the server nothing until it is readmitted; a probe is due after a cool-down that grows each time."""
        first, server.admitted, server.cause = server.admitted, False, cause
        rest_s = min(self.settings.cooldown_s * 2 ** min(server.trips, 30), self.settings.max_cooldown_s)
        server.probe_at_s = self.clock() + rest_s
        server.trips += 1
        return first

    def to_probe(self) -> list[ServerState]:
        """Servers that are out and have cooled down."""
        return [server for server in self.servers if not server.admitted and server.probe_at_s <= self.clock()]

    def readmit(self, server: ServerState) -> None:
        """Admit the server again, with its failures reset."""
        server.admitted, server.failures, server.cause = True, 0, ""
