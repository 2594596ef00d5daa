"""How a job ends: exit codes and messages."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest

from rlsys.utils.errors import ConfigError, DataError
from trainer.job import exit_on_sigterm, report_errors


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("write x=1"), 2, "ConfigError: write x=1"),
        (DataError("row 3"), 1, "DataError: row 3"),
        (OSError(28, "No space left on device", "/out/file"), 1, "No space left on device: '/out/file'"),
        (KeyboardInterrupt(), 130, "interrupted (Ctrl-C)"),
    ],
)
def test_expected_errors_are_one_line_and_an_exit_code(error: BaseException, code: int, printed: str) -> None:
    out = io.StringIO()
    with report_errors(out) as outcome:
        raise error
    assert outcome.exit_code == code
    assert printed in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_sigterm_ends_a_job_in_order_and_leaves_the_handler_as_it_was() -> None:
    out, before, ended = io.StringIO(), signal.getsignal(signal.SIGTERM), []
    with report_errors(out) as outcome, exit_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            ended.append("cleaned up")
    assert (outcome.exit_code, out.getvalue(), ended) == (143, "rlsys: stopped by SIGTERM\n", ["cleaned up"])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("error", [SystemExit(3), ZeroDivisionError()])
def test_unexpected_errors_are_re_raised(error: BaseException) -> None:
    with pytest.raises(type(error)), report_errors(io.StringIO()):
        raise error
