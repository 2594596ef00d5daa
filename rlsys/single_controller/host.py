"""The worker's side of a call: build the worker, fetch the arguments, run the method, answer with a header."""

import asyncio
import copy
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsys.single_controller.calls import CallSpec, Failure, Header
from rlsys.single_controller.rows import is_rows
from rlsys.single_controller.worker import Worker
from rlsys.single_controller.worker_group import ClassWithInitArgs
from rlsys.telemetry.recorder import StageRecorder


class WorkerHost:
    """Holds one worker in a process of its own; the controller runs its methods through `call`."""

    def __init__(self) -> None:
        self.worker: Any = None
        self._recorders: dict[str, StageRecorder] = {}
        self._runner = asyncio.Runner()
        """Runs async methods, all on one event loop."""

    def set_environment(self, values: Mapping[str, str]) -> None:
        """Set variables before anything that reads them is imported.

        A rank that sees exactly one CUDA device finds it at index 0, whatever its position on the host. A group of
        weights that has lost a peer asks all groups of the process for a dump, and torch ends the process minutes
        after one.
        """
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.update(values)
        if (devices := os.environ.get("CUDA_VISIBLE_DEVICES")) and "," not in devices:
            os.environ["LOCAL_RANK"] = "0"

    def build(self, cls_with_init: ClassWithInitArgs) -> tuple[Header, None]:
        """Build the worker from its class and arguments."""
        header, self.worker = answer(lambda: cls_with_init.cls(*cls_with_init.args, **cls_with_init.kwargs))
        return header, None

    def call(self, spec: CallSpec, *values: object) -> tuple[Header, object]:
        """Run one method of the worker as a stage; failures are reported in the header, never raised."""
        if spec.method.startswith("_"):
            return answer(lambda: self._run(spec, values))
        worker = f"{spec.role} {os.environ.get('RANK', 0)}"
        recorder = self._recorders.setdefault(worker, StageRecorder(worker))

        def run() -> object:
            with recorder.stage(spec.method):
                return self._run(spec, values)

        header, value = answer(run)
        return replace(header, report=recorder.drain()), value

    def close(self) -> None:
        """Have the worker give back what it holds, and forget it."""
        if isinstance(self.worker, Worker):
            self.worker.close()
        self.worker = None

    def _run(self, spec: CallSpec, values: Sequence[object]) -> object:
        if self.worker is None:
            raise RuntimeError("the worker was never built, or its group was closed")
        worker = self.worker if spec.target is None else self.worker.workers[spec.target]
        if (method := getattr(worker, spec.method, None)) is None:
            raise AttributeError(f"{type(worker).__name__} has no method '{spec.method}'")
        num_positional = len(values) - len(spec.names)
        result = method(*values[:num_positional], **dict(zip(spec.names, values[num_positional:], strict=True)))
        if inspect.iscoroutine(result):
            result = self._runner.run(result)
        return without_padding(result, spec.num_padding, spec.method)


def without_padding(result: object, num_padding: int, method: str) -> object:
    """Cut the repeated rows off; ValueError if the result has none, because then they have counted twice."""
    if num_padding == 0:
        return result
    if not is_rows(result) or len(result) < num_padding:
        why = f"but the result of '{method}' has no rows to cut off again"
        how = "pass a batch whose rows divide by the number of data-parallel ranks"
        raise ValueError(f"{num_padding} rows were repeated to split the batch evenly, {why}; {how}")
    return result[: len(result) - num_padding]


def answer(run: Callable[[], object]) -> tuple[Header, object]:
    """Run a function; its header says whether it succeeded."""
    try:
        return Header(), run()
    except Exception as error:
        return Header(failure_of(error)), None


def failure_of(error: BaseException) -> Failure:
    """An exception in a form that another process can read."""
    cause = f"{type(error).__name__}: {error}"
    return Failure(cause, _trace(error)[-4000:], exception=error if _is_picklable(error) else None)


def _trace(error: BaseException) -> str:
    """Where it was raised, without the frames of this file, and the same of the exceptions behind it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    text = "".join(traceback.format_list(frames)).rstrip()
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if behind is None else f"{text}\ncaused by {type(behind).__name__}: {behind}\n{_trace(behind)}"


def _is_picklable(error: BaseException) -> bool:
    """Whether an exception can be sent and built again on the other side."""
    try:
        pickle.dumps(error)
        copy.copy(error)
    except Exception:
        return False
    return True
