"""What only Ray has: futures between groups, detached groups, sub-pools, colocation in a bundle, the cluster itself."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlsys.protocol import DataProto, DataProtoFuture
from rlsys.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    connect,
    merge_resource_pool,
    split_resource_pool,
)
from rlsys.single_controller.ray.cluster import runtime_env
from rlsys.utils.errors import ConfigError, DeadlineError, WorkerError
from tests.timing import scaled_s, wait_until
from tests.unit.single_controller.crew import Calculator
from tests.unit.single_controller.data_crew import DataWorker, Joiner

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("ray_cluster")


def _pool(process_on_nodes: list[int], **kwargs: Any) -> RayResourcePool:
    return RayResourcePool(process_on_nodes, use_gpu=False, num_cpus=0.5, **kwargs)


def _rows(num_rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(num_rows * 3).reshape(num_rows, 3)},
        non_tensors={"uid": [f"row{i}" for i in range(num_rows)]},
        meta_info={"step": 4},
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """A group of one rank and one of two."""
    one = RayWorkerGroup(_pool([1]), RayClassWithInitArgs(DataWorker), role="one", deadlines=scaled_s(60.0))
    two = RayWorkerGroup(_pool([2]), RayClassWithInitArgs(DataWorker), role="two", deadlines=scaled_s(60.0))
    with one, two:
        yield one, two


@pytest.mark.parametrize("num_rows", [4, 5])
def test_futures_go_from_group_to_group(pair: tuple[RayWorkerGroup, RayWorkerGroup], num_rows: int) -> None:
    one, two = pair
    data = _rows(num_rows)
    first = two.add_later(data, 1)
    assert isinstance(first, DataProtoFuture)
    second = one.add_later(first, 10)
    third = two.add_later(second, amount=100)
    result = third.get(30.0)
    assert torch.equal(result.batch["x"], data.batch["x"] + 111)
    assert list(result.non_tensor_batch["uid"]) == [f"row{i}" for i in range(num_rows)]
    assert torch.equal(first.get().batch["x"], data.batch["x"] + 1)


def test_parts_of_uneven_length_are_redistributed(pair: tuple[RayWorkerGroup, RayWorkerGroup]) -> None:
    _, two = pair
    kept = two.keep_later(_rows(8), [3, 1])
    counted = two.count(kept)
    assert counted == [{"uids": ["row0", "row1"]}, {"uids": ["row2", "row4"]}]


def test_a_future_chunked_by_hand_still_works(pair: tuple[RayWorkerGroup, RayWorkerGroup]) -> None:
    one, two = pair
    halves = two.add_later(_rows(4), 1).chunk(2)
    assert one.add(halves[1], 0).batch["x"].tolist() == [[7, 8, 9], [10, 11, 12]]


def test_a_failure_upstream_is_reported_under_its_own_name(pair: tuple[RayWorkerGroup, RayWorkerGroup]) -> None:
    one, two = pair
    broken = two.break_later(_rows(2))
    with pytest.raises(WorkerError) as caught:
        one.add(broken, 1)
    assert (caught.value.failed.role, caught.value.failed.stage) == ("two", "break_later")
    assert "spilled" in caught.value.failed.cause


class Counted:
    """Counts how often this process serialises it."""

    times = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        Counted.times += 1
        return dict, ()


def test_what_all_ranks_get_is_serialised_once(pair: tuple[RayWorkerGroup, RayWorkerGroup]) -> None:
    _, two = pair
    assert two.kind_of(Counted()) == ["dict", "dict"]
    assert Counted.times == 1


def test_a_late_future_names_its_group_and_stage(pair: tuple[RayWorkerGroup, RayWorkerGroup]) -> None:
    _, two = pair
    with pytest.raises(DeadlineError) as caught:
        two.nap_later(_rows(2), 2.0).get(0.5)
    assert caught.value.who.startswith("two rank")
    assert caught.value.stage == "nap_later"


def test_a_detached_group_is_found_again() -> None:
    pool = _pool([1], detached=True)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Calculator, 5), name_prefix="kept", detached=True)
    try:
        again = RayWorkerGroup.from_detached(
            worker_names=group.worker_names,
            ray_cls_with_init=RayClassWithInitArgs(Calculator),
            deadlines=scaled_s(20.0),
        )
        assert again.execute_rank(0, "plain", 1) == (0, 6)
        assert again.whoami() == group.whoami()
    finally:
        group.close()


def test_sub_pools_and_merged_pools_place_their_ranks() -> None:
    pool = _pool([3])
    small, large = split_resource_pool(pool, [1, 2])
    with (
        RayWorkerGroup(large, RayClassWithInitArgs(ray.remote(Calculator)), deadlines=scaled_s(30.0)) as group,
        RayWorkerGroup(
            merge_resource_pool(small, _pool([1])), RayClassWithInitArgs(Calculator), deadlines=scaled_s(30.0)
        ) as mixed,
    ):
        places = [(one["RANK"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in group.whoami()]
        assert places == [("0", "0", "2"), ("1", "1", "2")]
        assert [one["LOCAL_RANK"] for one in mixed.whoami()] == ["0", "1"]
        assert ray.get(group.workers[1].plain.remote(3)) == (1, 3)


def test_groups_on_one_gpu_pool_see_the_same_devices() -> None:
    def devices(_: None = None) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    pool = RayResourcePool([2], use_gpu=True, max_colocate_count=3, num_cpus=0.5)
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(Calculator), deadlines=scaled_s(30.0)) as actor,
        RayWorkerGroup(pool, RayClassWithInitArgs(Calculator), deadlines=scaled_s(30.0)) as critic,
    ):
        seen = [group.execute_all_sync("execute_func_rank_zero", devices) for group in (actor, critic)]
        assert sorted(seen[0]) == ["0", "1"]
        assert seen[0] == seen[1]
        places = [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in actor.whoami()]
        assert places == [("0", "2"), ("0", "2")]


def test_a_manager_checks_the_whole_plan() -> None:
    manager = ResourcePoolManager({"train": [6], "serve": [6]}, {"actor": "train", "rollout": "serve"}, use_gpu=False)
    with pytest.raises(ConfigError, match=r"8 CPUs.*needs 12 CPUs"):
        manager.create_resource_pool()


@pytest.mark.parametrize(
    ("least", "says"),
    [
        ({"rollout": 9}, r"needs 10 CPUs .*; 9 of actor_rollout_ref\.rollout\.min_replicas: 9 x 1 on one node"),
        ({}, r"needs 17 CPUs .*; 16 of trainer\.rollout_workers: 16 x 1 on one node"),
    ],
)
def test_a_cluster_too_small_for_the_first_replicas_names_their_key(least: dict[str, int], says: str) -> None:
    pools = {"train": [1], "rollout": [1] * 16}
    manager = ResourcePoolManager(pools, {"actor": "train", "rollout": "rollout"}, use_gpu=False, min_nodes=least)
    with pytest.raises(ConfigError, match=says):
        manager.create_resource_pool()


def test_connect_takes_the_cluster_that_is_there(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    again = connect({"num_cpus": 1}, timeline_json_file=str(timeline))
    again.close()
    assert ray.is_initialized()
    assert isinstance(json.loads(timeline.read_text()), list)
    assert not again.connected_here
    assert again.address.startswith("127.0.0.1:")


def test_workers_get_the_path_of_the_checkout_unless_the_driver_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"env_vars": {"A": "1"}}
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(ROOT)
    assert (runtime_env({}), runtime_env(given)) == ({}, given)
    uploaded = {"working_dir": str(tmp_path)}
    assert runtime_env(uploaded) == {**uploaded, "env_vars": {"PYTHONPATH": str(ROOT)}}
    monkeypatch.chdir(tmp_path)
    assert runtime_env(given) == {"env_vars": {"A": "1", "PYTHONPATH": str(ROOT)}}
    assert given == {"env_vars": {"A": "1"}}
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert runtime_env({}) == {"env_vars": {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}}
    own = {"env_vars": {"PYTHONPATH": "/theirs"}}
    assert runtime_env(own) == own


NODE_DIES = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
other = cluster.add_node(num_cpus=1)
from rlsys.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, connect
connect({"address": cluster.address})
from rlsys.utils.errors import WorkerError
from tests.unit.single_controller.crew import Sleeper
pool = RayResourcePool([1, 1], use_gpu=False, max_colocate_count=1)
group = RayWorkerGroup(pool, RayClassWithInitArgs(Sleeper), role="actor", deadlines=100.0)
calls = group.execute_all_async("sleep", [[100, 100], [100, 100]])
cluster.remove_node(other, allow_graceful=False)
try:
    calls[0].get()
except WorkerError as error:
    print("failed:", error.failed.role, error.failed.cause.splitlines()[0], flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
def test_a_node_that_died_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NODE_DIES], capture_output=True, text=True, timeout=scaled_s(120), check=False
    )
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert failed.startswith("failed: actor the node ")
    assert "died or left the Ray cluster" in failed
    assert "Ray: Raylet is terminated" in done.stderr
    assert "state-dump" not in done.stdout + done.stderr


UNEQUAL_NODES = """
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
from rlsys.config.schema.trainer import DeadlinesConfig
from rlsys.single_controller.dispatch import register
from rlsys.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager, connect
from rlsys.single_controller.worker import Worker
from trainer.groups import start_groups
class Model(Worker):
    @register()
    def init_model(self) -> None:
        pass
connect({"address": cluster.address})
manager = ResourcePoolManager({"train": [2], "grade": [4]}, {"actor": "train", "rm": "grade"}, 1, use_gpu=False)
roles = {role: RayClassWithInitArgs(Model) for role in ("actor", "rm")}
deadlines = DeadlinesConfig(start_s=float(sys.argv[1]))
groups = start_groups(roles, manager, group_cls=RayWorkerGroup, deadlines=deadlines)
print({role: group.world_size for role, group in groups.items()}, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_largest_pool_gets_the_largest_node_whatever_its_place_among_the_roles() -> None:
    command = [sys.executable, "-c", UNEQUAL_NODES, f"{scaled_s(30.0)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled_s(120))
    assert done.stdout.strip() == "{'rm': 4, 'actor': 2}", done.stderr


NO_ROOM = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
from trainer.main_ppo import main
main(["--dry-run", "trainer.rollout_workers=1", f"ray_kwargs.ray_init.address={cluster.address}"])
"""


def test_a_head_without_cpus_has_no_room() -> None:
    done = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, timeout=scaled_s(60))
    assert "no node has room for 1 process(es) of pool 'train'" in done.stderr


REFUSED = """
import socket, sys
from rlsys.single_controller.ray import cluster
from rlsys.utils.errors import ConfigError
silent = socket.create_server(("127.0.0.1", 0))
closed = socket.create_server(("127.0.0.1", 0))
ports = [one.getsockname()[1] for one in (closed, silent)]
closed.close()
for options in (
    {"address": f"127.0.0.1:{ports[0]}"},
    {"address": f"127.0.0.1:{ports[1]}"},
    {"address": "nowhere"},
    {"address": "ray://127.0.0.1:10001"},
    {"address": "http://127.0.0.1:8265"},
    {"runtime_env": {"workingdir": "."}},
    {"runtime_env": {"working_dir": "/no/such/folder"}},
):
    try:
        cluster.connect(options, deadline_s=float(sys.argv[1]))
    except ConfigError as error:
        print(str(error).replace(str(ports[0]), "0").replace(str(ports[1]), "1"))
"""


def test_a_cluster_that_does_not_answer_and_wrong_arguments_are_refused_in_one_line() -> None:
    limit_s = f"{scaled_s(2.0):g}"
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, limit_s], capture_output=True, text=True, timeout=scaled_s(15)
    )
    unreachable, silent, nonsense, client, jobs, unknown, missing = done.stdout.splitlines()
    assert unreachable.startswith("no Ray cluster listens at 127.0.0.1:0 (")
    assert "unset it to start a cluster here" in unreachable
    waited = f"what is at 127.0.0.1:1 did not answer as a Ray cluster within {limit_s} s at stage 'connect'"
    assert silent.startswith(f"{waited} (trainer.deadlines.start_s)")
    assert nonsense.startswith("the Ray address 'nowhere' is not host:port")
    assert client.startswith("ray://127.0.0.1:10001: jobs do not run through Ray's clients")
    assert jobs.startswith(
        "http://127.0.0.1:8265: jobs do not run through Ray's clients; use `ray job submit`, or host:"
    )
    assert unknown.startswith("ray_kwargs.ray_init.runtime_env has no field workingdir; Ray's are ")
    assert "/no/such/folder is not a valid path" in missing


OTHER_VERSION = """
from ray._private import utils
from ray.cluster_utils import Cluster
from rlsys.single_controller.ray import connect
from rlsys.utils.errors import ConfigError
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
utils.compute_version_info = lambda: ("0.1", "3.4")
try:
    connect({"address": cluster.address})
except ConfigError as error:
    print(error, flush=True)
"""


def test_a_cluster_of_another_version_is_refused_with_both_versions() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_VERSION], capture_output=True, text=True, timeout=scaled_s(60))
    (line,) = done.stdout.splitlines()
    assert "Version mismatch: The cluster was started with: Ray: " in line
    assert line.endswith(" was started with: Ray: 0.1 Python: 3.4")


def test_threads_and_variables_are_set_before_the_worker_is_built() -> None:
    group = RayWorkerGroup(
        _pool([1]),
        RayClassWithInitArgs(Calculator),
        worker_env={"CUDA_VISIBLE_DEVICES": "3", "RLSYS_TEST": "here", "OMP_NUM_THREADS": "3"},
        deadlines=scaled_s(30.0),
    )
    with group:
        environment = group.execute_func_rank_zero(
            lambda names: {n: os.environ.get(n) for n in names}, ["OMP_NUM_THREADS", "RLSYS_TEST", "LOCAL_RANK"]
        )
    assert environment == {"OMP_NUM_THREADS": "3", "RLSYS_TEST": "here", "LOCAL_RANK": "0"}


@pytest.mark.slow
def test_a_rendezvous_port_that_is_taken_ends_all_ranks_and_is_named() -> None:
    group = RayWorkerGroup(_pool([2]), RayClassWithInitArgs(Joiner), role="actor", deadlines=scaled_s(60.0))
    with group:
        start_s = time.monotonic()
        with pytest.raises(WorkerError) as raised:
            group.join_where_the_port_is_taken()
    first = str(raised.value).splitlines()[0]
    assert time.monotonic() - start_s < scaled_s(30.0)
    assert "actor rank 0" in first
    assert "'join_where_the_port_is_taken'" in first
    assert "Address already in use (while attempting to bind on address ('127.0.0.1', " in first


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import json, os, signal, sys
        from rlsys.single_controller.ray import *
        from tests.unit.single_controller.crew import Sleeper
        connect({"num_cpus": 2}, timeline_json_file=sys.argv[2])
        group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Sleeper))
        pids = group.pid() + group.breed()
        open(sys.argv[1], "w").write(json.dumps(pids))
        os.kill(pids[1], signal.SIGSTOP)
        group.sleep([100, 100])
        """
    )
    pid_file = tmp_path / "pids.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = subprocess.Popen(
        [sys.executable, "-c", script, pid_file, tmp_path / "timeline.json"],
        cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), 60)
        pids = [int(pid) for pid in pid_file.read_text().strip("[]").split(",")]
        family = _descendants(driver.pid)
        assert set(pids) <= set(family)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {os.getpriority(os.PRIO_PROCESS, 0)}
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(_runs(pid) for pid in family))
    assert not [pid for pid in family if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [one for child in children for one in [child, *_descendants(child)]]


@pytest.mark.parametrize(
    ("path", "name", "home"),
    [
        ("base", "WorkerGroup", "worker_group"),
        ("base.decorator", "register", "dispatch"),
        ("ray.base", "RayWorkerGroup", "ray.group"),
    ],
)
def test_the_import_paths_of_verl_give_the_same_objects(path: str, name: str, home: str) -> None:
    room = "rlsys.single_controller"
    assert getattr(import_module(f"{room}.{path}"), name) is getattr(import_module(f"{room}.{home}"), name)
