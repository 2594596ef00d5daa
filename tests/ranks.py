"""Run a function on several ranks: processes forked from this one, joined by gloo over a file.

Ranks with GPUs are forked from a clean server process instead, since CUDA does not survive a fork.
"""

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.shown_gpus import SHOWN, VISIBLE, show_gpus
from tests.timing import scaled_s

DEADLINE_S = 120.0
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3"))
"""What most tests build: imported once instead of by every rank."""


class Answers(dict[Any, list[Any] | str]):
    """What ranks returned for each case, in rank order; AssertionError for one that failed."""

    def __getitem__(self, name: Any) -> list[Any]:
        answer = super().__getitem__(name)
        assert not isinstance(answer, str), answer
        return answer


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """`work(*args)` on every rank of a fresh process group; results in rank order. AssertionError if one fails."""
    return run_cases(world_size, {"": partial(work, *args)}, backend=backend)[""]


def run_cases(
    world_size: int, cases: Mapping[Any, Callable[[], Any]], *, backend: str = "gloo", deadline_s: float = DEADLINE_S
) -> Answers:
    """Every case on every rank of a process group, one after the other.

    Ranks of which one failed are not used again: fresh ones run the cases that come after. Each case has `deadline_s`.
    """
    answers = Answers()
    while left := [name for name in cases if name not in answers]:
        answers.update(
            zip(left, _run_until_one_fails(world_size, [cases[name] for name in left], backend, scaled_s(deadline_s)))
        )
    return answers


def params_beside(request: Any) -> list[Mapping[str, Any]]:
    """The parameters of all tests of the function of this one that the session runs: their cases can share ranks."""
    tests = [one for one in request.session.items if getattr(one, "function", None) is request.function]
    return [test.callspec.params for test in tests]


def _run_until_one_fails(
    world_size: int, works: Sequence[Callable[[], Any]], backend: str, deadline_s: float
) -> list[list[Any] | str]:
    """Results of each work in rank order, up to the first that failed on a rank; of that one how it failed."""
    context: Any = multiprocessing.get_context("forkserver" if "nccl" in backend else "fork")
    if "nccl" in backend:
        _start_server(context)
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            context.Process(
                target=_rank, args=(rank, world_size, Path(place), backend, deadline_s / 2, works), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, Path(place), world_size * deadline_s)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        answers: list[list[Any] | str] = []
        for number in range(len(works)):
            results = [_read(Path(place) / f"{number}_of_{rank}") for rank in range(world_size)]
            failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
            if failed:
                late = [f"ranks {hung} did not end within {deadline_s:g} s"] if hung else []
                return [*answers, "\n".join([*late, *failed])]
            answers.append([value for _, value in results])
        return answers


def _wait(ranks: Sequence[Any], place: Path, deadline_s: float) -> None:
    """Until all ranks have ended, or none of them has answered anything for `deadline_s`."""
    end_s, answered = time.monotonic() + deadline_s, 0
    while (running := [p.sentinel for p in ranks if p.is_alive()]) and time.monotonic() < end_s:
        wait(running, 1.0)
        if (count := len(list(place.glob("*_of_*")))) > answered:
            end_s, answered = time.monotonic() + deadline_s, count


def _start_server(context: Any) -> None:
    """Start the server that ranks with GPUs are forked from; its imports see no GPU, so that they leave CUDA alone."""
    context.set_forkserver_preload(["torch", "rlsys.engines.fsdp.engine", *MODELS, "tests.shown_gpus"])
    hidden = {VISIBLE: "", SHOWN: os.environ.get(VISIBLE, "")}
    os.environ.update({**hidden, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    forkserver.ensure_running()
    show_gpus()


def _rank(
    rank: int,
    world_size: int,
    place: Path,
    backend: str,
    deadline_s: float,
    works: Sequence[Callable[[], Any]],
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    store = dist.FileStore(str(place / "store"), world_size)
    for number, work in enumerate(works):
        try:
            if number == 0:
                _connect(rank, world_size, store, backend, timedelta(seconds=deadline_s))
            result = (True, work())
        except BaseException:
            result = (False, traceback.format_exc())
        written = place / f"result of {rank}"
        written.write_bytes(pickle.dumps(result))
        written.rename(place / f"{number}_of_{rank}")
        if not result[0]:
            break
        del result
        if number + 1 < len(works):
            _free()
    os._exit(0)


def _connect(rank: int, world_size: int, store: dist.Store, backend: str, limit: timedelta) -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    store.set(f"connected {rank}", "")  # a rank whose work ends at once must not leave while others still connect
    store.wait([f"connected {other}" for other in range(world_size)], limit)


def _free() -> None:
    """Engines of the last case are gone before the next one measures or takes memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _read(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "died without a word")
