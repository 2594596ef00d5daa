"""Calls into another process of this user over a Unix socket.

While a call runs, the called side may call back into the caller. Each thread of the client has its own connection, so
that calls do not wait for each other.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from rlsys.ipc.codec import decode, encode
from rlsys.ipc.framing import receive, send
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, WeightTransferError

MAX_MESSAGE_BYTES = 1 << 40
Method = Callable[..., Any]
_errors: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, RolloutError, ValueError, WeightTransferError)
}


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


def allow_errors(*kinds: type[Exception]) -> None:
    """Let these errors, whose constructors take one text, be raised again in the calling process."""
    _errors.update({kind.__name__: kind for kind in kinds})


class _Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def receive(self) -> MethodCall | MethodResult | MethodError:
        """The next message; EOFError where the other side has closed."""
        body, *buffers = receive(self.link, max_bytes=MAX_MESSAGE_BYTES)
        return decode(body, buffers, MethodCall | MethodResult | MethodError)

    def send(self, message: MethodCall | MethodResult | MethodError) -> None:
        """Send a message; TypeError before any byte of it if a value cannot be sent."""
        body, buffers = encode(message)
        send(self.link, [body, *buffers])

    def call(self, method: str, args: Sequence[Any], methods: Mapping[str, Method], error: type[Exception]) -> Any:
        """Run a method on the other side, and answer its calls to `methods` in the meantime."""
        self.send(MethodCall(method, list(args)))
        while True:
            match self.receive():
                case MethodCall() as callback:
                    self.answer(callback, methods)
                case MethodResult(value):
                    return value
                case MethodError(name, text):
                    raise _errors[name](text) if name in _errors else error(f"{name}: {text}")

    def answer(self, call: MethodCall, methods: Mapping[str, Method]) -> None:
        """Run a method and send its result or exception."""
        try:
            if call.method not in methods:
                raise ValueError(f"no method '{call.method}'; choose from {', '.join(sorted(methods))}")
            answer: MethodResult | MethodError = MethodResult(methods[call.method](*call.args))
        except (EOFError, OSError):
            raise
        except Exception as error:
            answer = _raised(error)
        try:
            self.send(answer)
        except TypeError as error:
            self.send(_raised(error))


def _raised(error: Exception) -> MethodError:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return MethodError(type(error).__name__, f"{error}{notes}")


class RpcClient:
    """Calls methods of the process that listens at `path`, named `peer` in errors.

    The peer may call `callbacks` while a call of ours runs. An `error` is raised where it cannot be reached or has
    exited, and for those of its exceptions that `allow_errors` did not name.
    """

    def __init__(
        self, path: Path, peer: str, callbacks: Mapping[str, Method], *, error: type[Exception] = RuntimeError
    ) -> None:
        self.path, self.peer, self.callbacks, self._error = path, peer, callbacks, error
        self._local = threading.local()
        self._watched = self._connect()

    def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result. DeadlineError where the peer does not answer in time."""
        connection = getattr(self._local, "connection", None) or _Connection(self._connect())
        self._local.connection = None  # a call from within a callback needs another one
        connection.link.settimeout(deadline_s)
        try:
            result = connection.call(method, args, self.callbacks, self._error)
        except TimeoutError:
            connection.link.close()
            raise DeadlineError(self.peer, method, deadline_s, "it hangs or the machine is overloaded") from None
        except (EOFError, ConnectionError):
            connection.link.close()
            raise self._error(f"{self.peer} exited during '{method}'; see its log for the cause") from None
        except Exception:
            self._local.connection = connection
            raise
        self._local.connection = connection
        return result

    def check_alive(self) -> None:
        """Raise the `error` if the peer has exited."""
        try:
            exited = self._watched.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return
        except OSError:
            exited = True
        if exited:
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

    def __init__(self, path: Path, methods: Mapping[str, Method], *, on_thread_start: Callable[[], None]) -> None:
        """Listen at `path`; PermissionError unless only this user may enter its folder."""
        self.methods, self._on_thread_start, self._local = methods, on_thread_start, threading.local()
        folder = path.parent.stat()
        if folder.st_uid != os.getuid() or folder.st_mode & 0o077:
            raise PermissionError(f"{path.parent} is open to other users")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="rlsys-rpc", daemon=True).start()

    def call_back(self, method: str, *args: Any) -> Any:
        """Run a callback of the client whose call this thread answers."""
        return self._local.connection.call(method, args, {}, RuntimeError)

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), name="rlsys-rpc-call", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        connection = self._local.connection = _Connection(link)
        self._on_thread_start()
        try:
            while True:
                message = connection.receive()
                if isinstance(message, MethodCall):
                    connection.answer(message, self.methods)
        except (EOFError, OSError):
            link.close()
