"""Nodes that join, drain and die under a running asynchronous job."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.timing import scaled_s, wait_until

STAGE_S = 240  # against hangs only: what a start takes beside other tests is mostly imports from a cold disk
CLUSTER = """
import sys, time
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
quick = {"health_check_period_ms": 1000}  # a killed node is known to be lost after 5 of them
head = {"num_cpus": 2, "include_dashboard": False, "_system_config": quick}
cluster, nodes = Cluster(initialize_head=True, head_node_args=head), []
def add():
    host = {"NCCL_HOSTID": f"host-{time.monotonic()}"}
    nodes.append(cluster.add_node(num_cpus=1, env_vars=host))
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
    "trainer.n_gpus_per_node=2",
    "trainer.rollout_workers=3",
    "trainer.max_staleness=2",
    "actor_rollout_ref.rollout.min_replicas=1",
    "actor_rollout_ref.rollout.validate_weight=true",
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
)


@dataclass
class Cluster:
    """A head with 2 CPUs, where only the trainer fits, and nodes with a CPU each, all of them hosts of their own."""

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
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # the last one may be half written
    return [line for line in map(json.loads, lines) if "rollout/replicas_ready" in line]


@pytest.mark.timeout(1200)
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
            assert wait_until(lambda: serves(1), STAGE_S), log.read_text()
            for changes, number in ((("add", "add"), 3), (("drain", "kill"), 1)):
                for change in changes:
                    nodes.do(change)
                assert wait_until(lambda number=number: serves(number), STAGE_S), log.read_text()
                assert job.poll() is None, log.read_text()
            job.send_signal(signal.SIGTERM)
            assert job.wait(scaled_s(STAGE_S)) == 143, log.read_text()
        finally:
            job.kill()
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["rollout/groups_issued"] == 12 * len(lines) + lines[-1]["rollout/groups_open"]
    assert max(line["training/staleness_max"] for line in lines) <= 2
    assert all(line["rollout/dropped"] == 0 for line in lines)
    counted = Counter[str]()
    for line in lines:  # what was counted in each step
        counted.update(line)
    assert [counted[f"rollout/{name}"] for name in ("joined", "left", "waited_for_push")] == [2, 2, 0]
    assert counted["rollout/issued"] == counted["rollout/answered"] + counted["rollout/pending"]
