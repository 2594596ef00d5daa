"""Whole runs as children forked from one process that has imported everything: about a second each, and killable.

`python -m tests.e2e.fork_server` reads one JSON request a line, `{"argv", "log", "env", "patches", "deadline_s"}`,
forks a child that runs the main job, and answers `{"status", "orphans", "seconds"}`. Orphans of a child become children
of the server, which therefore sees what a run leaves behind.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.timing import scaled_s

PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE_S = 5.0
IMPORTED = (
    *("trainer.main_ppo", "trainer.build", "workers.actor", "workers.critic", "workers.reference", "workers.rollout"),
    *("rlsys.planning.advice", "rlsys.planning.sizes", "rlsys.rollout.hf.engine", "rich.console", "numpy.ma"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2"),
)
"""What most runs import later than at their start."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of the run at the `call`-th call of `target` ("module:Class.function"), before or after its work.

    With `inside` only calls made while that other function runs count.
    """

    target: str
    call: int = 1
    when: str = "before"
    inside: str | None = None


@dataclass(frozen=True)
class Patches:
    """What is done to a run: a kill, functions of tests.e2e.injections by name, a limit on file sizes, signals."""

    kill: Kill | None = None
    inject: tuple[str, ...] = ()
    max_file_bytes: int | None = None
    faults: tuple[Any, ...] = ()
    """tests.e2e.fault_injection.Fault: signals to the workers of a run under Ray."""


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code (negative: the signal), its log, and the processes that outlived it."""

    status: int
    orphans: int
    seconds: float
    log: str = field(repr=False)


class ForkServer:
    """The test's end of the server."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def run(
        self,
        argv: list[str],
        log: Path,
        patches: Patches | None = None,
        *,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 60.0,
    ) -> Ended:
        """Run the main job with these arguments until it succeeds or fails; `env` is added to its environment."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit_s = scaled_s(deadline_s)
        request = {"argv": argv, "log": str(log), "env": {**(env or {})}, "deadline_s": limit_s}
        request["patches"] = asdict(patches or Patches())
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Ended(**answer, log=log.read_text(errors="replace"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(scaled_s(20))


def serve() -> None:
    """Answer requests until the input ends."""
    import torch

    from rlsys.config import load_config

    torch.set_num_threads(1)
    for name in IMPORTED:
        import_module(name)
    load_config()
    gc.freeze()  # children need not copy the pages of what lives as long as they do
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(request)
        status = _wait(child, request["deadline_s"])
        seconds = time.monotonic() - start
        print(json.dumps({"status": status, "orphans": _orphans(), "seconds": seconds}), flush=True)


def _child(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    code = 70
    try:
        apply(request["patches"])
        from trainer.main_ppo import main

        code = main(request["argv"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def apply(patches: dict[str, Any]) -> None:
    """Do to this process what a request asks for."""
    if patches["max_file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (patches["max_file_bytes"],) * 2)
    for name in patches["inject"]:
        getattr(import_module("tests.e2e.injections"), name)()
    if patches["faults"]:
        from tests.e2e.fault_injection import Fault, inject_faults

        inject_faults([Fault(**fault) for fault in patches["faults"]])
    if patches["kill"] is not None:
        arm(Kill(**patches["kill"]))


def arm(kill: Kill) -> None:
    """Make this process kill itself where `kill` says."""
    depth, calls = 0 if kill.inside else 1, 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += depth > 0
            if kill.when == "before" and calls == kill.call:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if kill.when == "after" and calls == kill.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    wrap(kill.target, counted)
    if kill.inside is not None:
        wrap(kill.inside, around)


def wrap(target: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace "module:Class.function" by `make` of it."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, make(getattr(owner, name)))


def _wait(child: int, deadline_s: float) -> int:
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _orphans() -> int:
    """How many processes of the run still live after a grace; they are ended."""
    end_s = time.monotonic() + scaled_s(ORPHAN_GRACE_S)
    while time.monotonic() < end_s:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return 0
        time.sleep(0.01)
    living = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(living)


if __name__ == "__main__":
    serve()
