"""Starts and stops SGLang's Engine in a process that it shares with other code."""

import asyncio
import atexit
import gc
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from rlsys.rollout.sglang.dp_attention import REPLICA_ARGUMENTS
from rlsys.rollout.sglang.given_images import take_given_images
from rlsys.rollout.sglang.scheduler_hooks import SchedulerSettings, run_scheduler
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, result_within

STOP_WAIT_S = 20.0
_stopped: list[object] = []
"""Stopped engines are kept: garbage-collecting their sockets would wait for processes that have exited."""


class SchedulerProcess(SpawnProcess):
    """The process of SGLang's scheduler, which imports SGLang while its parent does, before there is a task for it."""

    def __init__(self, device: str) -> None:
        from torch_memory_saver import configure_subprocess

        receiver, sender = multiprocessing.Pipe(duplex=False)
        super().__init__(target=_run_task, args=(receiver,), name="sglang-scheduler")
        with configure_subprocess() if device == "cuda" else nullcontext():
            super().start()
        receiver.close()
        self._sender = sender

    def with_task(self, target: Callable[..., object], args: tuple[object, ...]) -> Self:
        """In the place of `multiprocessing.Process(target=target, args=args)`."""
        self._task = target, args
        return self

    def start(self) -> None:
        self._sender.send((dict(os.environ), *self._task))


def _run_task(receiver: Connection) -> None:
    """Import SGLang, then run the task of `SchedulerProcess.start` in the environment of that moment."""
    gc.disable()
    import sglang.srt.managers.scheduler  # noqa: F401

    gc.enable()
    environment, target, args = receiver.recv()
    os.environ.update(environment.items() - os.environ.items())  # setproctitle fails where all of them have moved
    target(*args)


class EngineThread:
    """SGLang's Engine and the thread that owns it: its child processes live as long as this thread does."""

    def __init__(
        self, arguments: Mapping[str, object], settings: SchedulerSettings, *, socket: Path, deadline_s: float
    ) -> None:
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self.engine: Any = None
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._own, args=(dict(arguments), settings), name="sglang", daemon=True)
        self._thread.start()
        end_s = time.monotonic() + deadline_s
        if not self._ready.wait(deadline_s):
            raise DeadlineError("SGLang", "start", deadline_s, "the first start on a GPU compiles kernels for minutes")
        if isinstance(self._failure, TypeError | ConfigError):
            raise ConfigError(f"SGLang rejected actor_rollout_ref.rollout.engine_kwargs.sglang: {self._failure}")
        if self._failure is not None:
            raise RolloutError(f"SGLang did not start: {self._failure}; see its log for the cause") from self._failure
        atexit.register(self.stop)
        while not socket.exists():
            if time.monotonic() > end_s or not multiprocessing.active_children():
                self.stop()
                raise RolloutError("SGLang's scheduler exited before it opened its socket; see its log for the cause")
            time.sleep(0.05)

    def submit(self, work: Coroutine[object, object, object]) -> Future[Any]:
        """Run a coroutine on the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[object, object, object], stage: str, deadline_s: float) -> Any:
        """The coroutine's result; DeadlineError after `deadline_s`."""
        return result_within(self.submit(work), deadline_s, who="SGLang", stage=stage, hint="it may hang in a step")

    def stop(self) -> None:
        """Kill SGLang's processes and stop the thread."""
        atexit.unregister(self.stop)
        engine, self.engine = self.engine, None
        if engine is None:
            return
        from sglang.srt.utils import kill_process_tree

        _stopped.append(engine)
        pids = engine.get_all_child_pids()
        for pid in pids:
            kill_process_tree(pid)
        self.loop.call_soon_threadsafe(self._leave)
        self._thread.join(STOP_WAIT_S)
        for child in multiprocessing.active_children():
            if child.pid in pids:
                child.join(STOP_WAIT_S)

    def _leave(self) -> None:
        """Cancel SGLang's tasks, then stop the loop."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)

    def _own(self, arguments: dict[str, object], settings: SchedulerSettings) -> None:
        try:
            with _restored_process_state():
                self.engine = _start(arguments, settings)
            self.loop = self.engine.loop
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        self.loop.run_forever()


def _start(arguments: dict[str, Any], settings: SchedulerSettings) -> Any:
    ranks, tp_size, copies = arguments.get("nnodes", 1), arguments["tp_size"], arguments.get("dp_size", 1)
    if arguments["device"] == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        if ranks > 1:
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _stage_cores(ranks, tp_size, arguments["node_rank"]))
    if tp_size > copies:
        os.environ["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"  # all take the least of their tokens
    if ranks > 1:
        # Ranks share their GPUs with stages of unlike size, so SGLang must not compare their free memory.
        os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    os.environ["SGLANG_NUMA_BIND_V2"] = "0"  # the scheduler's process binds itself: it is there before SGLang starts it
    if copies > 1:
        settings = replace(settings, replica_arguments=arguments)
        arguments = {name: value for name, value in arguments.items() if name not in REPLICA_ARGUMENTS}
    scheduler = SchedulerProcess(arguments["device"])
    atexit.register(scheduler.kill)  # before multiprocessing waits for it
    try:
        return _engine(arguments, settings, scheduler)
    except BaseException:
        scheduler.kill()
        raise


def _engine(arguments: dict[str, Any], settings: SchedulerSettings, scheduler: SchedulerProcess) -> Any:
    from sglang.srt.entrypoints import engine as theirs

    class RolloutEngine(theirs.Engine):
        """SGLang's Engine with our scheduler entry point and without detokenizer processes."""

        run_scheduler_process_func = staticmethod(partial(run_scheduler, settings=settings))

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: object, **kwargs: object) -> tuple[list[object], list[str]]:
            return [], []

    take_given_images()
    with patch.object(theirs, "mp", SimpleNamespace(**vars(multiprocessing) | {"Process": scheduler.with_task})):
        engine = RolloutEngine(**arguments)
    atexit.unregister(engine.shutdown)  # it kills all children of this process, including the reward pool's
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:  # it would kill this process by a signal; `check_alive` raises instead
        watchdog.stop()
    return engine


def _stage_cores(ranks: int, tp_size: int, rank: int) -> str:
    """The cores of each rank of this rank's stage, in SGLang's syntax: "0-3|4-7"."""
    cores, first = sorted(os.sched_getaffinity(0)), rank // tp_size * tp_size
    each = max(1, len(cores) // ranks)
    starts = range(first * each, (first + tp_size) * each, each)
    parts = [[cores[n % len(cores)] for n in range(start, start + each)] for start in starts]
    return "|".join(str(part[0]) if each == 1 else f"{part[0]}-{part[-1]}" for part in parts)


@contextmanager
def _restored_process_state() -> Iterator[None]:
    """Restore the environment, logging, start method and event loop policy of the process, which SGLang changes."""
    root, environment = logging.getLogger(), dict(os.environ)
    handlers, level = list(root.handlers), root.level
    method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        root.handlers[:], root.level = handlers, level
        multiprocessing.set_start_method(method, force=True)
        asyncio.set_event_loop_policy(policy)
