"""The log of an episode: its draws and tool results, by which its workflow runs again without making them again."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import TypeVar

from rlsys.telemetry.jsonl import JsonObject, encode_line, plain_json, read_jsonl
from rlsys.utils.grouping import group_by

R = TypeVar("R")


class EpisodeEnd(Exception):
    """A budget is used up; `reason` is turns, length, context or tool. A workflow may catch it and return a score.

    The reason `log` means that the episode runs again and asks for something else than its log has.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the episode has ended: {reason}")
        self.reason = reason


class EpisodeLog:
    """The requests of an episode in their order, each with its result once there is one.

    A request equal to one in `rows` gets the result that is there. The first other one is made, if all results that
    the log starts with were read, else it `differs`: EpisodeEnd. With `is_closed` no request is made: it `has_ended`.
    """

    def __init__(self, rows: Sequence[JsonObject] = (), *, is_closed: bool = False) -> None:
        self._is_closed = is_closed
        self.restart(rows)

    def restart(self, rows: Sequence[JsonObject] = ()) -> None:
        """Begin again, with other rows."""
        self.differs = self.has_ended = self._is_live = False
        self._rows = [dict(row) for row in rows]
        self._unread = group_by(self._rows, lambda row: _key(row["request"]))

    @property
    def has_unread(self) -> bool:
        """Whether there are results that the workflow has not asked for."""
        return any(row["result"] is not None for rows in self._unread.values() for row in rows)

    async def result(self, request: JsonObject, make: Callable[[], Awaitable[R]], read: Callable[..., R]) -> R:
        """The recorded result of a request, from its fields by `read`, or the one that is made now."""
        recorded = self._unread.get(_key(request))
        row = recorded.pop(0) if recorded else None
        if row is not None and row["result"] is not None:
            return read(**row["result"])
        self.differs |= row is None and self.has_unread and not self._is_live
        self.has_ended = self._is_closed
        if self.differs or self.has_ended:
            raise EpisodeEnd("log")
        self._is_live = True
        if row is None:
            row = {"request": request, "result": None}
            self._rows.append(row)
        result = await make()
        row["result"] = {name: value for name, value in vars(result).items() if name != "input_tokens"}
        return result

    def rows(self) -> list[JsonObject]:
        """Requests and results as plain data; may be called from any thread."""
        return [dict(row) for row in tuple(self._rows)]


def write_episodes(path: Path, episodes: Iterable[Mapping[str, object]], *, max_mb: float | None = None) -> None:
    """Append episodes to a file of JSON lines of name, seed, row and log, while it has room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as out:
        for episode in episodes:
            if max_mb is None or out.seek(0, SEEK_END) < max_mb * 1e6:
                out.write(encode_line(episode))


def read_episodes(path: Path) -> dict[str, JsonObject]:
    """The episodes of a file by name, the last of equal names; none if there is no file."""
    return {episode["name"]: episode for episode in read_jsonl(path) if "log" in episode} if path.exists() else {}


def _key(request: JsonObject) -> str:
    return json.dumps(plain_json(request), sort_keys=True)
