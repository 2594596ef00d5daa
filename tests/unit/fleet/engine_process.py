"""A replica whose engine is in a process of its own, which can be killed and stopped."""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from rlsys.types import ModelRequest, ResponseDelta
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.timing import scaled_s


class EngineProcess:
    """Calls of `make_engine()`'s methods are (method, arguments, named arguments) through a pipe.

    An engine that computes needs `start_method` forkserver: a fork of this process has none of its OpenMP threads, and
    waits for them.
    """

    def __init__(self, name: str, make_engine: Callable[[], Any], *, start_method: str = "fork") -> None:
        self.name, self.make_engine = name, make_engine
        self.context: Any = get_context(start_method)
        self.asked, self.lock = 0, threading.Lock()
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.make_engine), daemon=True)
        process.start()
        self.process = process
        theirs.close()

    def ask(self, deadline_s: float, method: str, *args: Any, **named: Any) -> Any:
        """The answer to this call; answers to earlier ones that came too late are passed over."""
        with self.lock:
            self.asked += 1
            self.pipe.send((self.asked, method, args, named))
            end_s = time.monotonic() + deadline_s
            while self.pipe.poll(max(0.0, end_s - time.monotonic())):
                number, answer = self.pipe.recv()
                if number == self.asked:
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
        raise DeadlineError(self.name, method, deadline_s)

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> list[ResponseDelta]:
        return self.ask(deadline_s, "exchange", list(new), cancel=set(cancel), wait_s=wait_s)

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.ask(deadline_s, "health")

    def restart(self, deadline_s: float) -> None:
        self.close()
        self._start()

    def update(self, version: int, deadline_s: float = 20.0) -> None:
        self.ask(scaled_s(deadline_s), "begin_update")
        self.ask(scaled_s(deadline_s), "finish_update", version)

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def _serve(pipe: Connection, make_engine: Callable[[], Any]) -> None:
    engine = make_engine()
    while True:
        number, method, args, named = pipe.recv()
        try:
            answer = getattr(engine, method)(*args, **named)
        except (RolloutError, WeightTransferError) as error:
            answer = error
        pipe.send((number, answer))
