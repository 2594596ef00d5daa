"""Whole jobs on a cluster of several Ray nodes, all on this machine, each a host of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.conftest import Toy
from tests.e2e.fork_server import ForkServer

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
print(cluster.address, flush=True)
for host in sys.stdin:
    cluster.add_node(**node, env_vars={"NCCL_HOSTID": host.strip()})
    cluster.wait_for_nodes()
    print("joined", flush=True)
"""
JOB = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
    "actor_rollout_ref.rollout.validate_weight=true",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
)


@dataclass
class Nodes:
    """A cluster of nodes with one CPU each."""

    process: subprocess.Popen[str]
    number: int = 0
    address: str = ""

    def read(self) -> str:
        assert self.process.stdout is not None
        self.number += 1
        return self.process.stdout.readline().strip()

    def grow(self, number: int) -> None:
        assert self.process.stdin is not None
        while self.number < number:
            self.process.stdin.write(f"host-{self.number}\n")
            self.process.stdin.flush()
            assert self.read() == "joined"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # not where a later ray.init() looks for a cluster
        environment = {**os.environ, "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", CLUSTER]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            cluster = Nodes(process)
            cluster.address = cluster.read()
            yield cluster
            process.communicate()


SPLIT = "trainer.nnodes=2 trainer.rollout_workers="


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        pytest.param(2, "trainer.nnodes=2", id="colocated on 2"),
        pytest.param(3, "trainer.nnodes=3", id="colocated on 3", marks=pytest.mark.slow),
        pytest.param(3, f"{SPLIT}1", id="split on 3", marks=pytest.mark.slow),
        pytest.param(3, f"{SPLIT}1 trainer.max_staleness=2", id="asynchronous on 3"),
        pytest.param(4, f"{SPLIT}2 trainer.max_staleness=2", id="asynchronous on 4", marks=pytest.mark.slow),
        pytest.param(4, f"{SPLIT}2", id="split on 4", marks=pytest.mark.slow),
        pytest.param(4, "trainer.nnodes=4", id="colocated on 4", marks=pytest.mark.slow),
    ],
)
def test_a_job_on_several_nodes(
    nodes: Nodes, server: ForkServer, toy: Toy, tmp_path: Path, number: int, settings: str
) -> None:
    nodes.grow(number)
    more = [*JOB, *settings.split(), f"ray_kwargs.ray_init.address={nodes.address}"]
    ended = server.run(toy.overrides(tmp_path / "out", *more), tmp_path / "log", deadline_s=200)
    assert ended.status == 0, ended.log
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "critic/score/mean" in line] == [1, 2]
    crossed = {line["weights/network_bytes"] for line in lines if "weights/network_bytes" in line}
    assert len(crossed) == 1
    # beside the actor each host lacks what FSDP keeps on the others; apart from it the trainer sends to each engine
    assert (crossed == {0.0}) == ("rollout_workers" in settings)
