"""Faults that a test puts into a forked run, by name (tests.e2e.fork_server.Patches)."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from tests.e2e.fork_server import wrap


def torn_metric_line() -> None:
    """The process is killed when half of the first metric line is written."""
    from rlsys.telemetry.jsonl import JsonlWriter, encode_line

    def write(self: Any, record: Mapping[str, Any]) -> None:
        line = encode_line(record)
        self._file.write(line[: len(line) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    JsonlWriter.write = write


def nan_gradient_in_step_2() -> None:
    """One advantage of the second step is not a number."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch, metrics = original(batch, *args, **kwargs)
            if batch.meta_info["global_steps"] == 2:
                batch.tensors["advantages"] = torch.full_like(batch.tensors["advantages"], float("nan"))
            return batch, metrics

        return call

    wrap("trainer.steps:rewards_to_advantages", make)


def unexpected_error_in_step_2() -> None:
    """The controller divides by zero in the second step."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch.meta_info["share"] = 1 / (2 - batch.meta_info["global_steps"])
            return original(batch, *args, **kwargs)

        return call

    wrap("trainer.steps:rewards_to_advantages", make)


def disk_full_at_second_checkpoint() -> None:
    """The file system refuses new folders for checkpoint 2: no space left."""
    _refuse_mkdir(errno.ENOSPC)


def disk_read_only_at_second_checkpoint() -> None:
    """The file system was remounted read-only before checkpoint 2."""
    _refuse_mkdir(errno.EROFS)


def device_fails_for_the_second_checkpoint() -> None:
    """The thread that writes checkpoint 2 gets EIO from fsync."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path) -> None:
            if "global_step_2" in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            original(path)

        return call

    wrap("rlsys.engines.tensor_files:fsync_file", make)


def interrupted_while_the_disk_is_slow() -> None:
    """Ctrl-C in step 2, while the thread that writes checkpoint 1 still waits for the disk."""
    interrupted = threading.Event()

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path) -> None:
            assert interrupted.wait(60)
            time.sleep(0.3)
            original(path)

        return call

    def interrupting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.meta_info["global_steps"] == 2:
                interrupted.set()
                signal.raise_signal(signal.SIGINT)
            return original(batch, *args, **kwargs)

        return call

    signal.signal(signal.SIGINT, signal.default_int_handler)
    wrap("rlsys.engines.tensor_files:fsync_file", slow)
    wrap("trainer.steps:rewards_to_advantages", interrupting)


def disk_full_for_metrics() -> None:
    """The disk is full when the metrics of a step are written."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(writer: Any, *args: Any, **kwargs: Any) -> None:
            original(writer, *args, **kwargs)
            writer._file = FileIO("/dev/full", "ab")

        return call

    wrap("rlsys.telemetry.jsonl:JsonlWriter.__init__", make)


def _refuse_mkdir(number: int) -> None:
    original = os.mkdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if "global_step_2" in Path(path).name:
            raise OSError(number, os.strerror(number), str(path))
        original(path, *args, **kwargs)

    os.mkdir = mkdir
