"""Whole jobs on a cluster of several Ray nodes, all on this machine, each a host of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from transformers import Qwen2Config

from tests.e2e.conftest import Toy, with_model
from tests.e2e.fork_server import ForkServer

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
gpus = sys.argv[1:]
def node(number, **variables):
    shown = {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {}
    return {"num_cpus": 1, "num_gpus": len(shown), "env_vars": {**shown, **variables}}
cluster = Cluster(initialize_head=True, head_node_args={**node(0), "include_dashboard": False})
print(cluster.address, flush=True)
for number, host in enumerate(sys.stdin, start=1):
    cluster.add_node(**node(number, NCCL_HOSTID=host.strip()))
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


@contextmanager
def cluster_of(*gpus: str) -> Iterator[Nodes]:
    """A cluster that begins with one node; with `gpus` each node has one of them."""
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # not where a later ray.init() looks for a cluster
        environment = {**os.environ, "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", CLUSTER, *gpus]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            cluster = Nodes(process)
            cluster.address = cluster.read()
            yield cluster
            process.communicate()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster_of() as cluster:
        yield cluster


SPLIT = "trainer.nnodes=2 trainer.rollout_workers="


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        pytest.param(2, "trainer.nnodes=2", id="colocated on 2"),
        pytest.param(3, "trainer.nnodes=3", id="colocated on 3", marks=pytest.mark.slow),
        pytest.param(3, f"{SPLIT}1", id="split on 3", marks=pytest.mark.slow),
        pytest.param(3, f"{SPLIT}1 trainer.max_staleness=2", id="asynchronous on 3"),
        pytest.param(4, f"{SPLIT}2 trainer.max_staleness=2", id="asynchronous on 4", marks=pytest.mark.slow),
        pytest.param(4, f"{SPLIT}2", id="split on 4"),
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


def serves_on_two_hosts(toy: Toy, folder: Path, nodes: Nodes, engine: str, tp: int) -> list[str]:
    """Two ranks of FSDP, each on a host of its own, beside an engine on each or one on both, stopped by parity."""
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = with_model(toy, folder / "model", Qwen2Config, num_key_value_heads=2, **sizes)
    rollout = "actor_rollout_ref.rollout"
    return wide.overrides(
        folder / "out",
        *(*JOB, "trainer.nnodes=2", f"ray_kwargs.ray_init.address={nodes.address}", f"{rollout}.name={engine}"),
        *(f"{rollout}.enforce_eager=true", f"{rollout}.tensor_model_parallel_size={tp}"),
        *(f"{rollout}.checkpoint_engine.backend=ipc", f"{rollout}.parity.freq=1", f"{rollout}.parity.policy=stop"),
        f"reward.custom_reward_function.path={wide.grader}",
    )


def check_pushes(folder: Path) -> list[dict[str, float]]:
    """The lines of the two steps, whose pushes crossed between hosts."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights/version"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 and line["weights/network_bytes"] > 0 for line in lines)
    return lines


ENGINES = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=(getattr(pytest.mark, name), pytest.mark.skipif(find_spec(name) is None, reason=name)))
        for name in ("vllm", "sglang")
    ],
)
ENGINES_OF_TWO_HOSTS = pytest.mark.parametrize("tp", [1, 2], ids=["an engine on each", "an engine on both"])


@ENGINES
@ENGINES_OF_TWO_HOSTS
def test_engines_serve_on_two_hosts(
    nodes: Nodes, server: ForkServer, toy: Toy, tmp_path: Path, engine: str, tp: int
) -> None:
    nodes.grow(2)
    ended = server.run(serves_on_two_hosts(toy, tmp_path, nodes, engine, tp), tmp_path / "log", deadline_s=200)
    assert ended.status == 0, ended.log
    assert all(line["parity/max_abs"] < 1e-4 for line in check_pushes(tmp_path))
