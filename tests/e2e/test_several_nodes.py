"""Whole jobs on a cluster of several Ray nodes, all on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.timing import scaled_s

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
for _ in range(int(sys.argv[1]) - 1):
    cluster.add_node(**node)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
"""
JOB = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=12",
    "actor_rollout_ref.rollout.validate_weight=true",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster of three nodes with 2 CPUs each."""
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # not where a later ray.init() looks for a cluster
        environment = {**os.environ, "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", CLUSTER, "3"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
            process.communicate()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param("trainer.rollout_workers=4 trainer.max_staleness=2", id="asynchronous"),
        pytest.param("trainer.rollout_workers=4", id="split", marks=pytest.mark.slow),
        pytest.param("trainer.nnodes=3", id="colocated", marks=pytest.mark.slow),
    ],
)
def test_a_job_on_three_nodes(address: str, settings: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.main_ppo", *JOB, *settings.split()]
    done = subprocess.run(
        [*command, f"trainer.default_local_dir={tmp_path}", f"ray_kwargs.ray_init.address={address}"],
        capture_output=True,
        text=True,
        timeout=scaled_s(200),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "critic/score/mean" in line] == [1, 2]
