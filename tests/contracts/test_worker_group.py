"""What a worker group promises, on every backend: the same calls, the same answers, the same errors."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from rlsys.single_controller.base.decorator import collect_all_to_all, dispatch_one_to_all

from rlsys.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup
from rlsys.single_controller.dispatch import Dispatch, register, register_dispatch_mode, update_dispatch_mode
from rlsys.single_controller.local import LocalWorkerGroup
from rlsys.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from rlsys.utils.errors import ConfigError, WorkerError
from tests.timing import scaled_s
from tests.unit.single_controller.crew import Calculator, MeshCalculator, Rows, Student, Teacher

Make = Callable[..., WorkerGroup]
NUM_RANKS = 2


def _make(backend: str, cls: Any, *args: Any, num_ranks: int = NUM_RANKS, **kwargs: Any) -> WorkerGroup:
    if backend == "local":
        made = cls if isinstance(cls, ClassWithInitArgs) else ClassWithInitArgs(cls, *args, **kwargs)
        return LocalWorkerGroup(ResourcePool([num_ranks]), made, role="calc")
    made = cls if isinstance(cls, RayClassWithInitArgs) else RayClassWithInitArgs(cls, *args, **kwargs)
    pool = RayResourcePool([num_ranks], use_gpu=False, max_colocate_count=1, num_cpus=0.5)
    return RayWorkerGroup(pool, made, role="calc", deadlines={"default": scaled_s(30.0)})


@pytest.fixture(scope="module", params=["local", "ray"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return partial(_make, request.param)


@pytest.fixture(scope="module")
def group(make: Make) -> Iterator[WorkerGroup]:
    with make(Calculator, 7) as group:
        yield group


@pytest.fixture(scope="module")
def mesh(make: Make) -> Iterator[WorkerGroup]:
    with make(MeshCalculator, num_ranks=4) as group:
        yield group


def test_every_rank_knows_its_place(group: WorkerGroup) -> None:
    environments = group.whoami()
    assert [one["RANK"] for one in environments] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in environments} == {"2"}
    assert group.world_size == NUM_RANKS == len(group.workers)


def test_calls_of_a_local_worker_that_is_alone_change_no_variables() -> None:
    with _make("local", Calculator, 7, num_ranks=1) as group:
        assert group.whoami()[0]["RANK"] is None
        assert group.execute_all_sync("plain", 1) == [(0, 8)]


def test_variables_of_a_rank_cannot_be_overridden(ray_cluster: object) -> None:
    env, pool = {"WORLD_SIZE": "100", "MASTER_PORT": "1", "MINE": "2"}, RayResourcePool([1], use_gpu=False)
    with pytest.raises(ValueError, match="worker_env sets MASTER_PORT, WORLD_SIZE"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Calculator, 7), worker_env=env)


def test_a_mode_of_verls_functions_gives_every_rank_the_same(group: WorkerGroup) -> None:
    (values,), named = dispatch_one_to_all(group, 3, x=4)
    assert (values, named) == ([3, 3], {"x": [4, 4]})
    assert collect_all_to_all(group, [1, 2]) == [1, 2]


def test_state_stays_with_the_worker(group: WorkerGroup) -> None:
    before = group.count_calls()
    assert group.count_calls() == [count + 1 for count in before]


@pytest.mark.parametrize(
    ("method", "args", "expected"),
    [
        ("echo", ([5, 6],), [(0, 5), (1, 6)]),
        ("echo", (3,), [(0, 3), (1, 3)]),
        ("echo", (), [(0, None), (1, None)]),
        ("first_only", ([1, 2, 3],), (0, 3)),
        ("rank_zero", (4,), (0, 4)),
        ("per_rank", ([1, 2],), [10, 21]),
        ("waits", (5,), [5, 6]),
    ],
)
def test_modes_without_rows(group: WorkerGroup, method: str, args: tuple[Any, ...], expected: Any) -> None:
    assert getattr(group, method)(*args) == expected


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 7])
def test_rows_are_split_padded_and_joined_in_order(group: WorkerGroup, num_rows: int) -> None:
    doubled = group.double(Rows(range(num_rows)), plus=1)
    assert doubled.values == [2 * value + 1 for value in range(num_rows)]


def test_caller_and_worker_never_write_into_each_others_rows(group: WorkerGroup) -> None:
    rows = Rows([1, 2])
    first = group.execute_rank(0, "scribble", rows)
    assert group.execute_rank(0, "scribble", rows).values == [1, 3]
    assert first.values == [1, 3]
    assert rows.values == [1, 2]


def test_ranks_may_return_different_numbers_of_rows(group: WorkerGroup) -> None:
    assert group.grow(Rows([0, 1, 2, 0])).values == [1, 2, 2]
    assert group.grow(Rows([0, 0])).values == []


def test_a_padded_call_without_rows_to_cut_is_an_error(group: WorkerGroup) -> None:
    assert group.train_without_rows(Rows([1, 2])) == [{"rows": 1}, {"rows": 1}]
    with pytest.raises(WorkerError, match="1 rows were repeated"):
        group.train_without_rows(Rows([1, 2, 3]))


def test_metrics_are_never_made_of_repeated_rows(group: WorkerGroup) -> None:
    metrics = group.metrics(Rows(range(4)))
    assert metrics == [{"rank": 0, "rows": 2}, {"rank": 1, "rows": 2}]
    with pytest.raises(ValueError, match="3 rows cannot be split evenly over 2"):
        group.metrics(Rows(range(3)))


def test_functions_run_on_the_workers(group: WorkerGroup) -> None:
    scaled = group.execute_with_func_generator(
        lambda worker, rows: Rows([value + worker.offset for value in rows.values]), Rows([1, 2, 3])
    )
    assert scaled.values == [8, 9, 10]
    assert group.execute_func_rank_zero(lambda a, b: a + b, 2, b=3) == 5


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("echo", ([1, 2, 3],), "lists of 2"),
        ("per_rank", (3,), "list of 2"),
        ("double", (3,), "without a DataProto"),
        ("execute_with_func_generator", (Rows([1]),), "needs a function"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_is_sent(
    group: WorkerGroup, method: str, args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(group, method)(*args)


def test_batches_of_one_call_must_agree(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="different numbers of rows"):
        group.double(Rows([1, 2]), plus=Rows([1, 2, 3, 4]))


def test_a_direct_rollout_method_is_not_for_the_controller(group: WorkerGroup) -> None:
    with pytest.raises(NotImplementedError):
        group.direct()


def test_single_ranks_and_futures(group: WorkerGroup) -> None:
    assert group.execute_rank(1, "plain", 5) == (1, 12)
    assert group.execute_rank_zero_sync("plain", value=1) == (0, 8)
    assert group.execute_all_sync("plain", [1, 2]) == [(0, 8), (1, 9)]
    assert [future.get() for future in group.execute_all_async("plain")] == [(0, 7), (1, 7)]
    future = group.execute_rank_async(1, "plain", 2)
    assert future.get(deadline_s=scaled_s(5.0)) == (1, 9)
    assert future.done()
    with pytest.raises(ValueError, match=r"0\.\.1"):
        group.execute_rank(2, "plain")


def test_a_call_that_does_not_block_gives_a_future(group: WorkerGroup) -> None:
    future = group.echo_later(3)
    assert future.get() == [(0, 3), (1, 3)]
    assert future.done()


def test_one_error_names_the_worker_and_its_cause(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.fails([1])
    failed = caught.value.failed
    assert (failed.role, failed.rank, failed.stage) == ("calc", 1, "fails")
    assert failed.cause.startswith("ValueError: rank 1 cannot divide")
    assert "in fails" in failed.cause
    assert isinstance(caught.value.__cause__, ValueError)
    assert group.count_calls()


def test_an_unknown_method_is_named(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"no 'ecco'; its workers register: .*echo, echo_later"):
        group.ecco()
    with pytest.raises(WorkerError, match="Calculator has no method 'no_such_thing'"):
        group.execute_rank(0, "no_such_thing")


def test_a_config_error_stays_one_and_says_where(group: WorkerGroup) -> None:
    with pytest.raises(ConfigError, match=r"actor\.lr=-1 must be positive") as caught:
        group.refuses()
    assert "calc rank 0" in caught.value.__notes__[0]


def test_a_constructor_that_fails_is_one_error(make: Make) -> None:
    with pytest.raises(WorkerError) as caught:
        make(Calculator, refuses=1)
    assert (caught.value.failed.rank, caught.value.failed.stage) == (1, "start")
    assert "KeyError: 'no such model'" in str(caught.value)


def test_mesh_dispatch_splits_by_data_parallel_rank(mesh: WorkerGroup) -> None:
    seen = mesh.seen(Rows([1, 2, 3, 4]), factor=10)
    assert seen.values == [3010, 3020, 1030, 1040]
    trained = mesh.train(Rows(range(6)))
    assert trained == [{"rank": 3, "rows": 3}, {"rank": 1, "rows": 3}]


def test_mesh_dispatch_repeats_rows_only_when_allowed(mesh: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="5 rows cannot be split evenly over 2"):
        mesh.train(Rows(range(5)))
    seen = mesh.seen(Rows(range(5), padding_enabled=True))
    assert seen.values == [3000, 3001, 3002, 1003, 1004]


def test_mesh_mistakes_are_named(mesh: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="exactly one rank of each"):
        mesh.on_broken_mesh(Rows([1, 2]))
    with pytest.raises(WorkerError, match="never called _register_dispatch_collect_info"):
        mesh.on_unknown_mesh(Rows([1, 2]))


def test_roles_share_a_process(make: Make) -> None:
    entry = ClassWithInitArgs if make.args[0] == "local" else RayClassWithInitArgs
    both = create_colocated_worker_cls({"student": entry(Student, "Ada"), "teacher": entry(Teacher, name="Emmy")})
    with make(both) as group:
        roles = group.spawn({"student", "teacher"})
        ada, emmy = roles["student"].call_me(), roles["teacher"].call_me()
        assert [name for name, _, _ in ada + emmy] == ["Ada", "Ada", "Emmy", "Emmy"]
        assert [pid for _, _, pid in ada] == [pid for _, _, pid in emmy]
        assert roles["teacher"].grade(Rows([1, 2, 3])).values == [101, 102, 103]
        assert not hasattr(roles["student"], "grade")
        group.fuse({"student"})
        assert group.student.call_me() == ada
        with pytest.raises(ValueError, match="no roles"):
            group.spawn({"janitor"})
        with pytest.raises(WorkerError) as caught:
            roles["teacher"].execute_rank(1, "no_such_thing")
        assert caught.value.failed.role == "teacher"


def stages_of(group: WorkerGroup) -> list[tuple[str, str]]:
    """(worker, stage) of every span noted since the last time, which are those of the memory ledger too."""
    report = group.drain_stages()
    noted = [(record.worker, record.stage) for record in report.memory]
    spans = [event for event in report.events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == [stage for _, stage in noted]
    return sorted(noted)


def test_every_call_of_every_worker_is_noted_once(make: Make) -> None:
    with make(Calculator) as group:
        futures = group.execute_all_async("plain", [1, 2])
        assert stages_of(group) == []
        assert [future.get() for future in (*futures, *futures)] == [(0, 1), (1, 2)] * 2
        assert stages_of(group) == [("calc 0", "plain"), ("calc 1", "plain")]
        group.waits(3)
        group.first_only([1])
        assert stages_of(group) == [("calc 0", "first_only"), ("calc 0", "waits"), ("calc 1", "waits")]
        with pytest.raises(WorkerError):
            group.execute_rank(1, "fails", [1])
        (error,) = [event for event in group.drain_stages().events if event["name"] == "fails"]
        assert error["args"] == {"error": "ValueError"}
        assert stages_of(group) == []


def test_roles_of_one_process_have_a_track_each(make: Make) -> None:
    entry = ClassWithInitArgs if make.args[0] == "local" else RayClassWithInitArgs
    both = create_colocated_worker_cls({"student": entry(Student, "Ada"), "teacher": entry(Teacher, name="Emmy")})
    with make(both) as group:
        roles = group.spawn({"student", "teacher"})
        roles["student"].call_me()
        roles["teacher"].call_me()
        events = group.drain_stages().events
    tracks = {
        event["args"]["name"].split(" @ ")[0]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert tracks.keys() == {"student 0", "student 1", "teacher 0", "teacher 1"}
    assert len(set(tracks.values())) == 4
    assert [event["pid"] for event in events if event["ph"] == "X"] == list(tracks.values())


def test_a_mode_of_ones_own() -> None:
    def hand_out(group: WorkerGroup, value: int) -> tuple[tuple[list[int], ...], dict[str, list[int]]]:
        return ([value + rank for rank in range(group.world_size)],), {}

    mode = register_dispatch_mode("COUNTED", hand_out, lambda group, results: sum(results))
    assert mode is Dispatch.COUNTED
    with pytest.raises(ValueError, match="already exists"):
        register_dispatch_mode("COUNTED", hand_out, lambda group, results: results)

    class Counter(Calculator):
        @register(dispatch_mode=mode)
        def add(self, value: int) -> int:
            return value

    with _make("local", Counter) as group:
        assert group.add(10) == 21
        update_dispatch_mode(mode, hand_out, lambda group, results: max(results))
        assert group.add(10) == 11


def test_a_name_the_group_needs_cannot_be_registered() -> None:
    class Greedy(Calculator):
        @register()
        def close(self) -> None: ...

    with pytest.raises(ValueError, match="has a 'close' of its own"):
        _make("local", Greedy)


def test_the_local_backend_says_that_it_has_no_process_group() -> None:
    class Joins(Calculator):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def meet(self) -> tuple[str, str]:
            return self.get_master_addr_port()

    with _make("local", Joins) as group, pytest.raises(ConfigError, match=r"trainer\.backend=ray"):
        group.meet()
    with _make("local", Joins, num_ranks=1) as group:
        assert group.meet()[0][0] == "127.0.0.1"
