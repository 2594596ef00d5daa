"""The reward pool when its processes cannot be started, and when it is closed while something waits for it."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s


def fail_starts(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> list[str]:
    """Have the first starts of processes fail; returns the list in which starts are noted."""
    start, starts = asyncio.create_subprocess_exec, list[str]()

    async def start_or_fail(*command: str, **options: Any) -> asyncio.subprocess.Process:
        starts.append(command[0])
        if len(starts) <= num_failures:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*command, **options)

    monkeypatch.setattr("asyncio.create_subprocess_exec", start_or_fail)
    return starts


def test_a_process_that_could_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = fail_starts(monkeypatch, 1)
    with RewardPool(num_workers=1) as pool:
        (result,) = pool.score([RewardItem("text/number", "1", "1")], deadline_s=scaled_s(5))
    assert (result.status, result.score, len(starts)) == ("ok", 1.0, 2)


def test_processes_that_can_never_be_started_are_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_starts(monkeypatch, 99)
    with (
        RewardPool(num_workers=1) as pool,
        pytest.raises(ConfigError, match=r"cannot be started \(3 times\): .*temporarily unavailable"),
    ):
        pool.score([RewardItem("text/number", "1", "1")], deadline_s=scaled_s(5))


def test_what_waits_for_a_pool_that_closes_is_an_error(tmp_path: Path) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text(
        "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info): time.sleep(99)"
    )
    pool = RewardPool(Grader(str(grader)), num_workers=1, timeout_s=90)
    pool.start()
    results = pool.submit([RewardItem("any", "1", "1")] * 3)
    pool.close()
    assert [result.status for result in results.result(scaled_s(2))] == ["error"] * 3
