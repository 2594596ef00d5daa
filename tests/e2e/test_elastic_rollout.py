"""Nodes that join, drain and die under a running asynchronous job."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from transformers import Qwen2Config

from tests.e2e.conftest import Toy, with_model
from tests.timing import scaled_s, wait_until

STAGE_S = 240  # against hangs only: what a start takes beside other tests is mostly imports from a cold disk
CLUSTER = """
import sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
quick = {"health_check_period_ms": 1000}  # a killed node is known to be lost after 5 of them
gpus, nodes = sys.argv[1:], []
def node(**variables):
    shown = {"CUDA_VISIBLE_DEVICES": gpus.pop(0)} if gpus else {}
    return {"num_gpus": len(shown), "env_vars": {**shown, **variables}}
head = {**node(), "num_cpus": 2, "include_dashboard": False, "_system_config": quick}
cluster = Cluster(initialize_head=True, head_node_args=head)
def add():
    nodes.append(cluster.add_node(num_cpus=1, **node(NCCL_HOSTID=f"host-{time.monotonic()}")))
def kill():
    cluster.remove_node(nodes.pop(0), allow_graceful=False)
def drain():
    deadline_ms = int((time.time() + 3600) * 1000)
    print(GcsClient(cluster.address).drain_node(nodes.pop(0).node_id, 2, "a test", deadline_ms), file=sys.stderr)
add()
print(cluster.address, flush=True)
for command in sys.stdin:
    {"add": add, "kill": kill, "drain": drain}[command.strip()]()
    print("done", flush=True)
"""
JOB = (
    "trainer.total_training_steps=100000",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
    "trainer.max_staleness=2",
    "actor_rollout_ref.rollout.min_replicas=1",
    "actor_rollout_ref.rollout.validate_weight=true",
)
LARGE = (
    "trainer.n_gpus_per_node=2",
    "trainer.rollout_workers=3",
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
)
LONG = (
    "trainer.n_gpus_per_node=2",
    "trainer.rollout_workers=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.max_response_length=480",
    "actor_rollout_ref.rollout.ignore_eos=true",
)
STILL = (
    "trainer.rollout_workers=2",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.actor.optim.lr=0",  # answers of any age have the trainer's log-probs
)
ENGINES = [
    pytest.param(name, marks=[mark, pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")])
    for name, mark in (("vllm", pytest.mark.vllm), ("sglang", pytest.mark.sglang))
]


@dataclass
class Cluster:
    """A head with 2 CPUs, where only the trainer fits, and nodes with a CPU each, all of them hosts of their own.

    Ray puts the trainer on the head with GPUs too, since it takes the node that has most left.
    """

    process: subprocess.Popen[str]

    def do(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def workers(self, name: str) -> list[psutil.Process]:
        """The processes of workers with this in their name."""
        workers = list[psutil.Process]()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it may end meanwhile
                workers += [child] if name in " ".join(child.cmdline()) else []
        return workers

    def hurt(self, worker: psutil.Process, *, stop_s: float) -> None:
        """Kill a process, or stop it for some seconds."""
        with suppress(psutil.NoSuchProcess):
            if not stop_s:
                worker.kill()
            else:
                worker.suspend()
                time.sleep(stop_s)
                worker.resume()


@contextmanager
def cluster_of(*gpus: str) -> Iterator[tuple[Cluster, str]]:
    """A cluster of the head and a node, and its address; with `gpus` the head has the first, each node the next."""
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        with subprocess.Popen(
            [sys.executable, "-c", CLUSTER, *gpus],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            yield Cluster(process), process.stdout.readline().strip()
            process.communicate()


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, str]]:
    with cluster_of() as nodes:
        yield nodes


def steps_of(folder: Path) -> list[Mapping[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # the last one may be half written
    return [line for line in map(json.loads, lines) if "rollout/replicas_ready" in line]


@dataclass
class Job:
    """A job on a cluster, and what it has logged."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def steps(self) -> list[Mapping[str, float]]:
        return steps_of(self.folder)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait_for(self, number: int, num_steps: int = 1) -> None:
        """Wait until so many replicas have served for some steps."""

        def serves() -> bool:
            served = [step["rollout/replicas_ready"] for step in self.steps[-num_steps:]]
            return self.process.poll() is not None or served == [number] * num_steps

        assert wait_until(serves, STAGE_S), self.log
        assert self.process.poll() is None, self.log

    def continues(self) -> None:
        """Wait for some more steps."""
        enough = len(self.steps) + 3
        assert wait_until(lambda: len(self.steps) >= enough, STAGE_S), self.log

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(scaled_s(STAGE_S)) == 143, self.log


@contextmanager
def job_on(address: str, folder: Path, arguments: Sequence[str]) -> Iterator[Job]:
    command = [sys.executable, "-m", "trainer.main_ppo", *arguments, f"ray_kwargs.ray_init.address={address}"]
    with (folder / "log").open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield Job(process, folder)
        finally:
            process.kill()


def counted_in(lines: Sequence[Mapping[str, float]]) -> Counter[str]:
    """What was counted in each step, added up."""
    counted = Counter[str]()
    for line in lines:
        counted.update(line)
    return counted


@pytest.mark.timeout(1200)
def test_nodes_join_drain_and_die_under_a_run(cluster: tuple[Cluster, str], tmp_path: Path) -> None:
    nodes, address = cluster
    with job_on(address, tmp_path, [*JOB, *LARGE, f"trainer.default_local_dir={tmp_path}"]) as job:
        job.wait_for(1)
        for changes, number in ((("add", "add"), 3), (("drain", "kill"), 1)):
            for change in changes:
                nodes.do(change)
            job.wait_for(number)
        job.end()
    lines = job.steps
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["rollout/groups_issued"] == 12 * len(lines) + lines[-1]["rollout/groups_open"]
    assert max(line["training/staleness_max"] for line in lines) <= 2
    assert all(line["rollout/dropped"] == 0 for line in lines)
    counted = counted_in(lines)
    assert [counted[f"rollout/{name}"] for name in ("joined", "left", "waited_for_push")] == [2, 2, 0]
    assert counted["rollout/issued"] == counted["rollout/answered"] + lines[-1]["rollout/pending"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_newcomer_continues_the_answers_that_the_trainer_waits_for(
    cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    """The node that generates is killed within the first answers: the newcomer has no peer to copy weights from."""
    nodes, address = cluster
    with job_on(address, tmp_path, [*JOB, *LONG, f"trainer.default_local_dir={tmp_path}"]) as job:
        assert wait_until(lambda: "loading the model of rollout" in job.log, STAGE_S), job.log
        (worker,) = nodes.workers("Colocated_rollout")
        loaded_s = worker.cpu_times().user
        assert wait_until(lambda: worker.cpu_times().user > loaded_s + 1.5, STAGE_S), job.log  # it generates
        nodes.do("kill")
        assert wait_until(lambda: "rollout 0 is lost" in job.log, STAGE_S), job.log
        nodes.do("add")
        job.continues()
        job.end()
    lines, counted = job.steps, counted_in(job.steps)
    assert "no replica serves: the weights are pushed" in job.log
    assert counted["rollout/issued"] == counted["rollout/answered"] + lines[-1]["rollout/pending"]
    assert lines[-1]["rollout/groups_issued"] == 4 * len(lines) + lines[-1]["rollout/groups_open"]
    assert all(line["rollout/dropped"] == 0 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_whose_gcs_is_killed_ends_with_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")  # Ray's default is 60
    with (
        cluster_of() as (nodes, address),
        job_on(address, tmp_path, [*JOB, *LONG, f"trainer.default_local_dir={tmp_path}"]) as job,
    ):
        job.wait_for(1)
        (gcs,), workers = nodes.workers("gcs_server"), nodes.workers("Colocated_")
        assert len(workers) == 3
        gcs.kill()
        assert job.process.wait(scaled_s(60)) == 1, job.log
        command = shlex.join([sys.executable, "-m", "trainer.main_ppo"])
        (line,) = [line for line in job.log.splitlines() if line.startswith(f"rlsys: Ray's GCS at {address} is lost")]
        assert f"start the cluster again; resume with: {command} " in line
        assert not psutil.wait_procs(workers, scaled_s(60))[1], "they ended neither with the job nor with their raylets"


CHANGES = {
    1: ["add", "add add"],
    2: ["add", "kill", "drain", "kill add", "drain add"],
    3: ["kill", "drain kill", "kill kill", "kill add", "drain add"],
}
"""What may happen at once to so many nodes that serve."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_job_outlives_nodes_that_come_and_go_at_random(
    seed: int, cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    (nodes, address), chance, number = cluster, random.Random(seed), 1
    with job_on(address, tmp_path, [*JOB, *LARGE, f"trainer.default_local_dir={tmp_path}"]) as job:
        job.wait_for(number)
        for _ in range(8):
            changes = chance.choice(CHANGES[number]).split()
            for change in changes:
                time.sleep(chance.random())  # at any moment of a push
                nodes.do(change)
            number += 2 * changes.count("add") - len(changes)
            job.continues()
            job.wait_for(number)
        job.end()
    lines = job.steps
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["rollout/dropped"] == 0 for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_job_outlives_rollout_processes_that_die_at_random(
    seed: int, cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    """Also several within a push and its repetitions; one that is stopped for a moment is not lost."""
    (nodes, address), chance = cluster, random.Random(seed)
    nodes.do("add")
    with job_on(address, tmp_path, [*JOB, *LARGE, f"trainer.default_local_dir={tmp_path}"]) as job:
        job.wait_for(2)
        for _ in range(16):
            time.sleep(chance.choice([0.0, 0.2, 1.0, 4.0]))
            if victims := nodes.workers("Colocated_rollout"):
                nodes.hurt(chance.choice(victims), stop_s=chance.choice([0.0, 0.0, 1.0]))
            if chance.random() < 0.5:
                job.continues()
        job.continues()
        job.wait_for(2)
        job.end()
    lines = job.steps
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["rollout/dropped"] == 0 for line in lines)
    assert counted_in(lines)["rollout/left"] > 2


@pytest.fixture
def wide(toy: Toy, tmp_path: Path) -> Toy:
    """The toy with heads of 32, the smallest that vLLM's CPU attention has."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    return with_model(toy, tmp_path / "wide", Qwen2Config, num_attention_heads=4, num_key_value_heads=2, **sizes)


def serves_in_the_place_of_another(job: Job, nodes: Cluster) -> list[Mapping[str, float]]:
    """A node joins the first, which is killed then: the steps, of which the last are answered by the second alone."""
    job.wait_for(1)
    nodes.do("add")
    job.wait_for(2)
    nodes.do("kill")
    job.wait_for(1, num_steps=5)  # more than are answered ahead
    job.end()
    lines = job.steps
    assert all(line["rollout/dropped"] == 0 for line in lines)
    counted = counted_in(lines)
    assert [counted[f"rollout/{name}"] for name in ("joined", "left", "waited_for_push")] == [1, 1, 0]
    return lines


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_copies_the_weights_of_another_and_serves_in_its_place(
    engine: str, wide: Toy, cluster: tuple[Cluster, str], tmp_path: Path
) -> None:
    nodes, address = cluster
    more = (f"reward.custom_reward_function.path={wide.grader}", f"actor_rollout_ref.rollout.name={engine}")
    with job_on(address, tmp_path, wide.overrides(tmp_path, *JOB, *STILL, *more)) as job:
        lines = serves_in_the_place_of_another(job, nodes)
    assert max(line["rollout_corr/log_ppl_abs_diff"] for line in lines) < 1e-3, "replicas have other weights"
