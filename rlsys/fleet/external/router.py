"""Which server takes the next request, and which ones take none for now. No input or output; the clock is passed in."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlsys.fleet.external.capabilities import Capabilities
from rlsys.fleet.external.settings import Policy

MAX_SESSIONS = 100_000
STEADY = 20
"""Answers in a row after which a server that was out counts as steady, so that its next cool-down is short again."""


@dataclass(eq=False)
class Server:
    """A server as the router sees it. `identity` is what it said of its weights when they were known to be right."""

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

    def __init__(
        self,
        urls: Sequence[str],
        *,
        policy: Policy = "least_loaded",
        breaker_failures: int = 3,
        cooldown_s: float = 2.0,
        max_cooldown_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = [Server(url) for url in urls]
        self.policy, self.breaker_failures = policy, breaker_failures
        self.cooldown_s, self.max_cooldown_s, self.clock = cooldown_s, max_cooldown_s, clock
        self._sessions: OrderedDict[str, Server] = OrderedDict()
        self._turn = 0

    def choose(self, session: str = "", avoid: Collection[str] = ()) -> Server | None:
        """The server for a request: its session's, else by policy; one to avoid only where there is no other."""
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

    def _by_policy(self, servers: Sequence[Server]) -> Server:
        start, self._turn = self._turn % len(servers), self._turn + 1
        turned = [*servers[start:], *servers[:start]]
        return turned[0] if self.policy == "round_robin" else min(turned, key=lambda server: server.load)

    def succeeded(self, server: Server) -> None:
        server.served += 1
        server.streak += 1
        server.failures = 0
        if server.streak >= STEADY:
            server.trips = 0

    def failed(self, server: Server, cause: str) -> bool:
        """Note a failure; returns whether it opened the breaker."""
        server.failures += 1
        server.streak = 0
        return server.admitted and server.failures >= self.breaker_failures and self.trip(server, cause)

    def trip(self, server: Server, cause: str) -> bool:
        """Send the server nothing until it is readmitted; a probe is due after a cool-down that grows each time."""
        first, server.admitted, server.cause = server.admitted, False, cause
        rest_s = min(self.cooldown_s * 2 ** min(server.trips, 30), self.max_cooldown_s)
        server.probe_at_s = self.clock() + rest_s
        server.trips += 1
        return first

    def to_probe(self) -> list[Server]:
        """Servers that are out and have cooled down."""
        return [server for server in self.servers if not server.admitted and server.probe_at_s <= self.clock()]

    def readmit(self, server: Server) -> None:
        """Serve from it again; its next failure finds the breaker as sensitive as ever."""
        server.admitted, server.failures, server.cause = True, 0, ""
