"""Registration, the errors of calls as they cross processes, deadlines, and what stays light to import."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.single_controller.calls import Failure, deadline_for
from rlsys.single_controller.dispatch import MAGIC_ATTR, Dispatch, Execute, register, registered_methods
from rlsys.single_controller.host import failure_of
from rlsys.utils.errors import DeadlineError, FailedWorker, WorkerError
from tests.timing import scaled_s
from tests.unit.single_controller.crew import Calculator

ROOT = Path(__file__).resolve().parents[3]


def test_registration_is_readable_on_the_method() -> None:
    registration = getattr(Calculator.rank_zero, MAGIC_ATTR)
    assert registration["dispatch_mode"] == Dispatch.RANK_ZERO
    assert registration["execute_mode"] is Execute.ALL
    assert registration["blocking"] is True
    assert "plain" not in registered_methods(Calculator)
    assert pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL)) == Dispatch.ONE_TO_ALL


@pytest.mark.parametrize("mode", ["ONE_TO_ALL", {"dispatch_fn": print}, 3])
def test_a_wrong_mode_is_refused_at_the_decorator(mode: object) -> None:
    with pytest.raises(ValueError, match="dispatch"):
        register(dispatch_mode=mode)  # type: ignore[arg-type]


def test_a_wrong_execute_mode_is_refused_at_the_decorator() -> None:
    with pytest.raises(ValueError, match="execute_mode"):
        register(execute_mode="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="materialize_futures=False"):
        register(materialize_futures=False)


def test_deadlines_by_stage() -> None:
    assert deadline_for(5, "x") == 5.0
    assert deadline_for({"x": 3.0, "default": 9.0}, "x") == 3.0
    assert deadline_for({"x": 3.0, "default": 9.0}, "y") == 9.0


@pytest.mark.parametrize(
    ("text", "secondary"),
    [
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer", True),
        ("DistBackendError: NCCL error in: ...", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("ValueError: cannot divide", False),
        ("OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_the_loss_of_a_peer_is_distinguished_from_a_cause(text: str, secondary: bool) -> None:
    assert Failure(text).is_secondary is secondary


def test_the_causes_of_an_exception_are_reported_too() -> None:
    def grade() -> None:
        try:
            {}["answer"]
        except KeyError as error:
            raise RuntimeError("the reward failed") from error

    with pytest.raises(RuntimeError) as caught:
        grade()
    failure = failure_of(caught.value)
    assert failure.cause == "RuntimeError: the reward failed"
    assert "caused by KeyError: 'answer'" in failure.trace
    assert "in grade" in failure.trace


def test_an_exception_that_cannot_travel_is_reported_as_text() -> None:
    class Stubborn(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} {b}")

    assert failure_of(Stubborn(1, 2)).exception is None
    assert isinstance(failure_of(ValueError("x")).exception, ValueError)


@pytest.mark.parametrize(
    "error",
    [DeadlineError("actor", "update", 3.0, "look"), WorkerError(FailedWorker("actor", 1, "host", "update", "x"))],
)
def test_errors_cross_processes_whole(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_worker_process_does_not_import_torch_for_this() -> None:
    code = "import sys, rlsys.single_controller.base.decorator, rlsys.single_controller.host; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(60), check=True
    )
    assert not {"torch", "numpy", "ray", "tensordict"} & set(done.stdout.split())
