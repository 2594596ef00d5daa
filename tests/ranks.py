"""Run a function on several ranks: processes forked from this one, joined by gloo over a file.

Ranks with GPUs are forked from a clean server process instead, since CUDA does not survive a fork.
"""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.shown_gpus import SHOWN, VISIBLE, show_gpus
from tests.timing import scaled_s

DEADLINE_S = 120.0
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3"))
"""What most tests build: imported once instead of by every rank."""


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """`work(*args)` on every rank of a fresh process group; results in rank order. AssertionError if one fails."""
    deadline_s = scaled_s(DEADLINE_S)
    context: Any = multiprocessing.get_context("forkserver" if "nccl" in backend else "fork")
    if "nccl" in backend:
        _start_server(context)
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            context.Process(
                target=_rank, args=(rank, world_size, Path(place), backend, deadline_s / 2, work, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(deadline_s)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        results = [_read(Path(place) / f"result_{rank}") for rank in range(world_size)]
    assert not hung, f"ranks {hung} did not end within {deadline_s:g} s"
    failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _start_server(context: Any) -> None:
    """Start the server that ranks with GPUs are forked from; its imports see no GPU, so that they leave CUDA alone."""
    context.set_forkserver_preload(["torch", "rlsys.engines.fsdp.engine", *MODELS, "tests.shown_gpus"])
    hidden = {VISIBLE: "", SHOWN: os.environ.get(VISIBLE, "")}
    os.environ.update({**hidden, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    forkserver.ensure_running()
    show_gpus()


def _rank(
    rank: int, world_size: int, place: Path, backend: str, deadline_s: float, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    store = dist.FileStore(str(place / "store"), world_size)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline_s)
        )
        store.set(f"connected {rank}", "")  # a rank whose work ends at once must not leave while others still connect
        store.wait([f"connected {other}" for other in range(world_size)], timedelta(seconds=deadline_s))
        result = (True, work(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    (place / f"result_{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)


def _read(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "died without a word")
