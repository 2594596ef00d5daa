"""Death, hang and exception of workers under real Ray: one error, in seconds, naming who and why; nothing is left."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from rlsys.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import ConfigError, DeadlineError, WorkerError
from tests.timing import scaled_s, wait_until
from tests.unit.single_controller.crew import Calculator, Gloo, Sleeper

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _pool(num_ranks: int, **kwargs: Any) -> RayResourcePool:
    return RayResourcePool([num_ranks], use_gpu=False, num_cpus=0.5, **kwargs)


def _group(
    cls: type, *args: Any, num_ranks: int = 2, pool: RayResourcePool | None = None, **kwargs: Any
) -> RayWorkerGroup:
    options = {name: kwargs.pop(name) for name in ("deadlines", "role", "worker_env") if name in kwargs}
    made = RayClassWithInitArgs(cls, *args, **kwargs)
    return RayWorkerGroup(pool or _pool(num_ranks), made, **{"role": "sleeper", "deadlines": scaled_s(30.0), **options})


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _all_gone(pids: list[int]) -> bool:
    return wait_until(lambda: not any(_runs(pid) for pid in pids), 5.0)


@pytest.fixture(scope="module")
def bedroom() -> Iterator[RayWorkerGroup]:
    with _group(Sleeper, deadlines={"sleep": scaled_s(2.0), "default": scaled_s(40.0)}) as group:
        yield group


@pytest.fixture
def sleepers(bedroom: RayWorkerGroup) -> Iterator[RayWorkerGroup]:
    """Two ranks, idle and alive; those a test leaves in another state are replaced behind it."""
    yield bedroom
    for rank in range(bedroom.world_size):
        try:
            bedroom.execute_rank(rank, "pid", deadline_s=scaled_s(0.5))
        except (WorkerError, DeadlineError):
            bedroom.restart_rank(rank)


def test_failures_in_a_collective_are_reported_by_cause_not_by_broken_connections() -> None:
    def spoil() -> None:
        raise ZeroDivisionError("the reward was empty")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with _group(Gloo, role="trainer", deadlines=scaled_s(60.0)) as group:
        assert group.total(-1) == [1.0, 1.0]
        start_s = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            group.total(1, spoil)
        assert time.monotonic() - start_s < scaled_s(20)
        assert (caught.value.failed.role, caught.value.failed.rank) == ("trainer", 1)
        assert "ZeroDivisionError: the reward was empty" in caught.value.failed.cause
        start_s = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            group.total(1, die)
        assert time.monotonic() - start_s < scaled_s(20)
        assert caught.value.failed.rank == 1
        assert "the worker process died" in caught.value.failed.cause


def test_a_killed_worker_is_reported_with_its_last_words(sleepers: RayWorkerGroup) -> None:
    start_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        sleepers.die(1)
    assert time.monotonic() - start_s < scaled_s(20)
    failed = caught.value.failed
    assert (failed.role, failed.rank, failed.stage) == ("sleeper", 1, "die")
    assert failed.host
    assert "rank 1 says farewell" in failed.log_tail
    with pytest.raises(WorkerError):
        sleepers.pid()


def test_a_death_of_a_rank_that_has_nothing_to_do_is_seen(sleepers: RayWorkerGroup) -> None:
    assert sleepers.first_sleeps(1.5) == 0
    os.kill(sleepers.pid()[1], signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        sleepers.first_sleeps(1000.0)
    assert time.monotonic() - start_s < scaled_s(20)
    assert caught.value.failed.rank == 1


def test_a_hang_is_a_deadline_error_that_says_where_the_code_stands(sleepers: RayWorkerGroup) -> None:
    start_s = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        sleepers.sleep([0.0, 1000.0])
    limit_s = caught.value.deadline_s
    assert 2 <= limit_s <= time.monotonic() - start_s < limit_s + scaled_s(20)
    assert caught.value.stage == "sleep"
    assert caught.value.who.startswith("sleeper rank 1 on ")
    assert "in sleep" in str(caught.value)
    assert "crew.py" in str(caught.value)


def test_a_stopped_process_is_named_as_such_and_killed_on_close(sleepers: RayWorkerGroup) -> None:
    pids = sleepers.pid()
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"rank 0: pid \d+ is stopped by a signal"):
        sleepers.sleep([0.0, 0.0])
    start_s = time.monotonic()
    sleepers.restart_rank(0)
    assert time.monotonic() - start_s < scaled_s(30)
    assert _all_gone(pids[:1])
    assert sleepers.sleep([0.0, 0.0]) == [0, 1]


def test_an_exception_comes_with_the_last_lines_of_its_worker(sleepers: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        sleepers.fails([0, 1])
    assert "cannot divide" in caught.value.failed.cause
    assert "into the abyss" in caught.value.failed.log_tail
    assert f"rank {caught.value.failed.rank} has password=[redacted]" in caught.value.failed.log_tail


@pytest.mark.parametrize(("cause", "text"), [("dies_at_birth", "died"), ("hangs", "did not answer within 3 s")])
def test_a_group_that_cannot_be_built_leaves_nothing(cause: str, text: str) -> None:
    pool = _pool(2)
    arguments = {"dies_at_birth": 1} if cause == "dies_at_birth" else {"sleeps_at_birth_s": 60.0}
    start_s = scaled_s(20.0) if cause == "dies_at_birth" else 3.0
    with pytest.raises((WorkerError, DeadlineError), match=text):
        _group(Sleeper, pool=pool, deadlines=start_s, **arguments)
    assert not _placement_groups_of(pool)


def test_close_ends_workers_their_children_and_the_reservation() -> None:
    pool = _pool(1)
    group = _group(Sleeper, pool=pool)
    pids = group.pid() + group.breed()
    assert _placement_groups_of(pool) == 1
    group.close()
    group.close()
    assert _all_gone(pids)
    assert not _placement_groups_of(pool)


def test_children_of_a_killed_worker_end_too() -> None:
    with _group(Sleeper, num_ranks=1) as group:
        (pid,), children = group.pid(), group.breed()
        os.kill(pid, signal.SIGKILL)
        assert _all_gone(children)


def test_a_start_whose_process_is_killed_from_another_thread_fails_at_once(sleepers: RayWorkerGroup) -> None:
    restart = in_daemon_thread(partial(sleepers.restart_rank, 0, scaled_s(200)), name="restart")
    while not wait([restart], 0.1).done:
        sleepers.backend.kill(0)  # pyrefly: ignore
    with pytest.raises(WorkerError, match="stage 'start'"):
        restart.result()


def test_a_dead_rank_is_replaced_in_its_place(sleepers: RayWorkerGroup) -> None:
    first, second = sleepers.pid()
    future = sleepers.execute_rank_async(1, "sleep", [0.0, 1000.0])
    healthy = sleepers.execute_rank_async(0, "sleep", [0.1, 0.0])
    os.kill(second, signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        future.get()
    assert (caught.value.failed.rank, caught.value.failed.stage) == (1, "sleep")
    assert healthy.get() == 0
    sleepers.restart_rank(1)
    again = sleepers.pid()
    assert again[0] == first
    assert again[1] != second
    assert sleepers.execute_rank(1, "sleep", [0.0, 0.0]) == 1


def test_a_later_answer_can_still_be_had_after_its_deadline(sleepers: RayWorkerGroup, tmp_path: Path) -> None:
    future = sleepers.waits_for_file(str(tmp_path / "now"))
    with pytest.raises(DeadlineError):
        future.get(deadline_s=0.3)
    (tmp_path / "now").touch()
    assert future.get(deadline_s=scaled_s(10.0)) == [0, 1]


def _placement_groups_of(pool: RayResourcePool) -> int:
    table = ray.util.placement_group_table().values()
    return sum(one["name"].startswith(pool.name_prefix) and one["state"] != "REMOVED" for one in table)


def test_a_pool_larger_than_the_cluster_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"has 8 CPUs and 2 GPUs on 1 node.*needs 64 CPUs"):
        _group(Sleeper, pool=RayResourcePool([64], use_gpu=False))
    with pytest.raises(ConfigError, match=r"needs 4 CPUs and 4 GPUs.*trainer\.device=cpu"):
        _group(Sleeper, pool=RayResourcePool([4]))


def test_a_pool_that_others_hold_is_logged_and_an_error_after_the_start_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "rlsys")
    holder = RayResourcePool([1], use_gpu=False, num_cpus=1.0)
    holder.get_placement_groups()
    try:
        with pytest.raises(
            DeadlineError,
            match=r"needed are 1 of pool '.*': 1 x 1 on one node, 8 CPUs and 0 GPUs for each process; free are \d CPUs",
        ):
            _group(Sleeper, pool=RayResourcePool([1], use_gpu=False, num_cpus=8.0), deadlines={"start": 1.0})
        assert "waiting for a place on the cluster at" in caplog.text
    finally:
        holder.acquire(True, 1.0)
        holder.release()


def test_a_reservation_that_is_given_back_too_slowly_starts_no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's functions start a cluster where there is none, as after a shutdown that did not wait for them."""
    started, release, removed = Event(), Event(), list[object]()

    def remove(group: object) -> None:
        started.set()
        release.wait(scaled_s(30.0))
        removed.append(group)

    pool = RayResourcePool([1, 1], use_gpu=False, num_cpus=0.5)
    placed = pool.get_placement_groups()
    monkeypatch.setattr("rlsys.single_controller.ray.pool.REMOVE_S", 0.1)
    monkeypatch.setattr("rlsys.single_controller.ray.pool.remove_placement_group", remove)
    pool.acquire(True, scaled_s(10.0))
    pool.release()
    assert started.wait(scaled_s(10.0))
    with monkeypatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: False)
        release.set()
        assert wait_until(lambda: not [t for t in enumerate_threads() if t.name == "remove groups"], scaled_s(10.0))
    assert removed == placed[:1]
    for group in placed:
        remove_placement_group(group)


def test_a_reservation_that_cannot_be_given_back_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(group: object) -> None:
        raise RuntimeError("no such group")

    pool = RayResourcePool([1], use_gpu=False, num_cpus=0.5, name_prefix="mine")
    pool.acquire(True, scaled_s(10.0))
    placed = pool.get_placement_groups()
    monkeypatch.setattr("rlsys.single_controller.ray.pool.remove_placement_group", refuse)
    pool.release()
    assert "the reservation of mine was not given back: RuntimeError('no such group')" in caplog.text
    for group in placed:
        remove_placement_group(group)


def test_groups_share_a_pool_up_to_its_count() -> None:
    pool = _pool(1, max_colocate_count=2)
    with _group(Sleeper, pool=pool) as first, _group(Calculator, pool=pool) as second:
        assert first.pid() != [one["pid"] for one in second.whoami()]
        with pytest.raises(ConfigError, match="max_colocate_count"):
            _group(Sleeper, pool=pool)
    assert not _placement_groups_of(pool)
