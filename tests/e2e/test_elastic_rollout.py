"""Nodes that join, drain and die under a running asynchronous job."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.timing import scaled_s, wait_until

CLUSTER = """
import sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1)]
print(cluster.address, flush=True)
for command in sys.stdin:
    if command == "add\\n":
        nodes.append(cluster.add_node(num_cpus=1))
    elif command == "kill\\n":
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    else:
        deadline_ms = int((time.time() + 3600) * 1000)
        print(GcsClient(cluster.address).drain_node(nodes.pop(0).node_id, 2, "a test", deadline_ms), file=sys.stderr)
    print("done", flush=True)
"""
JOB = (
    "trainer.total_training_steps=100000",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "trainer.rollout_workers=2",
    "trainer.max_staleness=2",
    "actor_rollout_ref.rollout.min_replicas=1",
    "actor_rollout_ref.rollout.validate_weight=true",
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
)


@dataclass
class Cluster:
    """A head with 2 CPUs, where only the trainer fits, and nodes with a CPU each."""

    process: subprocess.Popen[str]

    def do(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, str]]:
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        with subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            yield Cluster(process), process.stdout.readline().strip()
            process.communicate()


def steps_of(folder: Path) -> list[Mapping[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if "rollout/replicas_ready" in line]


@pytest.mark.slow
def test_nodes_join_drain_and_die_under_a_run(cluster: tuple[Cluster, str], tmp_path: Path) -> None:
    nodes, address = cluster
    command = [sys.executable, "-m", "trainer.main_ppo", *JOB, f"ray_kwargs.ray_init.address={address}"]
    log = tmp_path / "log"
    with (
        log.open("w") as out,
        subprocess.Popen([*command, f"trainer.default_local_dir={tmp_path}"], stdout=out, stderr=out) as job,
    ):

        def serves(number: int) -> bool:
            steps = steps_of(tmp_path)[-1:]
            return job.poll() is not None or [step["rollout/replicas_ready"] for step in steps] == [number]

        try:
            assert wait_until(lambda: serves(1), 60), log.read_text()
            for change, number in (("add", 2), ("drain", 1), ("add", 2), ("kill", 1)):
                nodes.do(change)
                assert wait_until(lambda number=number: serves(number), 60), log.read_text()
                assert job.poll() is None, log.read_text()
            job.send_signal(signal.SIGTERM)
            assert job.wait(scaled_s(60)) == 143
        finally:
            job.kill()
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["rollout/groups_issued"] == 12 * len(lines) + lines[-1]["rollout/groups_open"]
    assert max(line["training/staleness_max"] for line in lines) <= 2
    assert all(line["rollout/dropped"] == 0 for line in lines)
    names = ("issued", "answered", "pending", "joined", "left")  # what was counted in each step
    issued, answered, pending, joined, left = (sum(line[f"rollout/{name}"] for line in lines) for name in names)
    assert (joined, left) == (2, 2)
    assert issued == answered + pending
