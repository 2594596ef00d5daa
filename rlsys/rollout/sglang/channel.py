"""Calls from a rollout worker into SGLang's scheduler process, over a Unix socket that only this user can open.

A message is a line of JSON and raw bytes (`wire`). While a call runs, the called side may ask the caller something;
each thread of the caller has a connection of its own, so that calls do not wait for each other.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlsys.rollout.sglang import wire
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, WeightTransferError

LENGTH = struct.Struct("!Q")
Ask = Callable[..., Any]
"""(method, *args) -> its result on the other side."""
_errors: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, RolloutError, ValueError, WeightTransferError)
}


def allow_errors(*kinds: type[Exception]) -> None:
    """Let these errors, which take one text, be raised again on the other side."""
    _errors.update({kind.__name__: kind for kind in kinds})


class _Line:
    """One connection, used by one thread at a time."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def send(self, kind: str, value: Any) -> None:
        blobs: list[bytes] = []
        body = {"kind": kind, "value": wire.encode(value, blobs), "sizes": []}
        body["sizes"] = [len(blob) for blob in blobs]
        text = json.dumps(body).encode()
        self.link.sendall(LENGTH.pack(len(text)) + text)
        for blob in blobs:
            self.link.sendall(blob)

    def receive(self) -> tuple[str, Any]:
        """The next message; EOFError where the other side is gone."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        body = json.loads(self._read(length))
        blobs = [self._read(size) for size in body["sizes"]]
        return body["kind"], wire.decode(body["value"], blobs)

    def _read(self, length: int) -> bytearray:
        data, filled = bytearray(length), 0
        view = memoryview(data)
        while filled < length:
            got = self.link.recv_into(view[filled:])
            if not got:
                raise EOFError
            filled += got
        return data

    def call(self, methods: Mapping[str, Ask], method: str, args: tuple[Any, ...], kind: str) -> Any:
        """Ask the other side and answer what it asks in between."""
        self.send(kind, [method, args])
        while True:
            answer, value = self.receive()
            if answer == "ask":
                self.answer(methods, *value)
            elif answer == "error":
                raise _error_of(*value)
            else:
                return value

    def answer(self, methods: Mapping[str, Ask], method: str, args: tuple[Any, ...]) -> None:
        """Run a method and send what it returns or raises."""
        try:
            if method not in methods:
                raise ValueError(f"there is no method '{method}'; there are {', '.join(sorted(methods))}")
            result = methods[method](*args)
        except (EOFError, OSError):
            raise
        except Exception as error:
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            self.send("error", [type(error).__name__, f"{error}{notes}"])
        else:
            self.send("result", result)


def _error_of(kind: str, text: str) -> Exception:
    return _errors[kind](text) if kind in _errors else RolloutError(f"{kind}: {text}")


class Caller:
    """The worker's side; `methods` are what the scheduler process may ask of it during a call."""

    def __init__(self, path: Path, who: str, methods: Mapping[str, Ask]) -> None:
        self.path, self.who, self.methods = path, who, methods
        self._lines = threading.local()
        self._watch = self._connect()

    def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result; DeadlineError names who did not answer, RolloutError tells that it died."""
        line = getattr(self._lines, "line", None) or _Line(self._connect())
        self._lines.line = None
        line.link.settimeout(deadline_s)
        try:
            found = line.call(self.methods, method, args, "call")
        except TimeoutError:
            line.link.close()
            raise DeadlineError(self.who, method, deadline_s, "it hangs, or the machine is overloaded") from None
        except (EOFError, BrokenPipeError, ConnectionError):
            line.link.close()
            raise RolloutError(f"{self.who} died while '{method}' ran: its own last words are in the log") from None
        except Exception:
            self._lines.line = line
            raise
        self._lines.line = line
        return found

    def check_alive(self) -> None:
        """RolloutError when the other process is gone."""
        try:
            gone = self._watch.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return
        except OSError:
            gone = True
        if gone:
            raise RolloutError(f"{self.who} died: its own last words are in the log")

    def close(self) -> None:
        self._watch.close()

    def _connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(self.path))
        except OSError as error:
            link.close()
            raise RolloutError(f"{self.who} cannot be reached: {error}") from error
        return link


class Server:
    """The scheduler process's side: answers every connection in a thread of its own."""

    def __init__(self, path: Path, methods: Mapping[str, Ask], *, enter: Callable[[], None]) -> None:
        """Listen below a folder that only this user may enter; each thread calls `enter` first."""
        self.methods, self._enter, self._current = methods, enter, threading.local()
        if path.parent.stat().st_uid != os.getuid() or path.parent.stat().st_mode & 0o077:
            raise RolloutError(f"{path.parent} is open to other users")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="rlsys-channel", daemon=True).start()

    def ask(self, method: str, *args: Any) -> Any:
        """Ask the caller of the call that runs in this thread."""
        return self._current.line.call({}, method, args, "ask")

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), name="rlsys-call", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        line = self._current.line = _Line(link)
        self._enter()
        try:
            while True:
                _, value = line.receive()
                line.answer(self.methods, *value)
        except (EOFError, OSError):
            link.close()
