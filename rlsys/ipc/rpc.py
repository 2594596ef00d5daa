"""Calls into another process of this user over a Unix socket.

While a call runs, the called side may call back into the caller. Each thread of the client has its own connection, so
that calls do not wait for each other.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from msgspec import Struct

from rlsys.ipc.codec import decode, encode
from rlsys.ipc.framing import receive, send
from rlsys.ipc.process_group import PeerLostError
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, WeightTransferError

MAX_MESSAGE_BYTES = 1 << 40
Method = Callable[..., Any]
Methods = Mapping[str, Method]
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, PeerLostError, RolloutError, ValueError, WeightTransferError)
}
"""Errors that are raised again in the calling process; their constructors take one text."""


class MethodCall(Struct, tag="call"):
    """Run `method`, in either direction."""

    method: str
    args: list[Any]


class MethodResult(Struct, tag="result"):
    """The result of the call."""

    value: Any


class MethodError(Struct, tag="error"):
    """The call failed with an exception of this name."""

    error: str
    text: str


def _receive(link: socket.socket) -> MethodCall | MethodResult | MethodError:
    """The next message; EOFError where the other side has closed."""
    body, *buffers = receive(link, max_bytes=MAX_MESSAGE_BYTES)
    return decode(body, buffers, MethodCall | MethodResult | MethodError)


def _send(link: socket.socket, message: MethodCall | MethodResult | MethodError) -> None:
    """Send a message; TypeError before any byte of it if a value cannot be sent."""
    body, buffers = encode(message)
    send(link, [body, *buffers])


def _call(link: socket.socket, method: str, args: Sequence[Any], methods: Methods, error: type[Exception]) -> Any:
    """Run a method on the other side, and answer its calls to `methods` in the meantime."""
    _send(link, MethodCall(method, list(args)))
    while True:
        match _receive(link):
            case MethodCall() as callback:
                _answer(link, callback, methods)
            case MethodResult(value):
                return value
            case MethodError(name, text):
                raise ERRORS[name](text) if name in ERRORS else error(f"{name}: {text}")


def _answer(link: socket.socket, call: MethodCall, methods: Methods) -> None:
    """Run a method and send its result or exception."""
    try:
        if call.method not in methods:
            raise ValueError(f"no method '{call.method}'; choose from {', '.join(sorted(methods))}")
        answer: MethodResult | MethodError = MethodResult(methods[call.method](*call.args))
    except Exception as error:
        answer = _raised(error)
    try:
        _send(link, answer)
    except TypeError as error:
        _send(link, _raised(error))


def _raised(error: Exception) -> MethodError:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return MethodError(type(error).__name__, f"{error}{notes}")


class RpcClient:
    """Calls methods of the process that listens at `path`, named `peer` in errors.

    The peer may call `callbacks` while a call of ours runs. An `error` is raised where it cannot be reached or has
    exited, and for its exceptions that are not of one of our kinds.
    """

    def __init__(self, path: Path, peer: str, callbacks: Methods, *, error: type[Exception] = RuntimeError) -> None:
        self.path, self.peer, self.callbacks, self._error = path, peer, callbacks, error
        self._local = threading.local()
        self._watched = self._connect()

    def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result. DeadlineError where the peer does not answer in time."""
        link = getattr(self._local, "link", None) or self._connect()
        self._local.link = None  # a call from within a callback needs another one
        link.settimeout(deadline_s)
        try:
            result = _call(link, method, args, self.callbacks, self._error)
        except TimeoutError:
            link.close()
            raise DeadlineError(self.peer, method, deadline_s, "it hangs or the machine is overloaded") from None
        except (EOFError, ConnectionError):
            link.close()
            raise self._error(f"{self.peer} exited during '{method}'; see its log for the cause") from None
        except Exception:
            self._local.link = link
            raise
        self._local.link = link
        return result

    def check_alive(self) -> None:
        """Raise the `error` if the peer has exited."""
        if wait([self._watched], timeout=0):  # nothing is sent over it, so there is only its end to read
            raise self._error(f"{self.peer} exited; see its log for the cause")

    def close(self) -> None:
        """Close the connection by which `check_alive` watches the peer."""
        self._watched.close()

    def _connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(self.path))
        except OSError as error:
            link.close()
            raise self._error(f"cannot connect to {self.peer}: {error}") from error
        return link


class RpcServer:
    """Answers every connection in its own thread; each thread calls `on_thread_start` first."""

    def __init__(self, path: Path, methods: Methods, *, on_thread_start: Callable[[], None]) -> None:
        """Listen at `path`; PermissionError unless only this user may enter its folder."""
        self.methods, self._on_thread_start, self._local = methods, on_thread_start, threading.local()
        folder = path.parent.stat()
        if folder.st_uid != os.getuid() or folder.st_mode & 0o077:
            raise PermissionError(f"{path.parent} is open to other users")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="rlsys-rpc", daemon=True).start()

    def call_back(self, method: str, *args: object) -> object:
        """Run a callback of the client whose call this thread answers."""
        return _call(self._local.link, method, args, {}, RuntimeError)

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), name="rlsys-rpc-call", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        self._local.link = link
        self._on_thread_start()
        try:
            while True:
                message = _receive(link)
                if isinstance(message, MethodCall):
                    _answer(link, message, self.methods)
        except (EOFError, OSError):
            link.close()
