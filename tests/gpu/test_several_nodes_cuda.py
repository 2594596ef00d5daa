"""A whole job over two nodes of Ray with one GPU each, hosts of their own by NCCL_HOSTID: pushes cross by NCCL."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import GPU_MEMORY, UNCOMPILED, Toy, toy  # noqa: F401
from tests.e2e.test_several_nodes import (
    ENGINES,
    ENGINES_OF_TWO_HOSTS,
    Nodes,
    check_pushes,
    cluster_of,
    serves_on_two_hosts,
)
from trainer.main_ppo import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Nodes]:
    with cluster_of(*os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]) as cluster:
        cluster.grow(2)
        yield cluster


@ENGINES
@ENGINES_OF_TWO_HOSTS
def test_engines_on_gpus_serve_on_two_hosts(
    hosts: Nodes,
    toy: Toy,  # noqa: F811
    tmp_path: Path,
    engine: str,
    tp: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_gpus = ("trainer.device=cuda", *GPU_MEMORY[engine], UNCOMPILED)
    assert main([*serves_on_two_hosts(toy, tmp_path, hosts, engine, tp), *on_gpus]) == 0
    lines = check_pushes(tmp_path)
    with capsys.disabled():
        print(f"{engine} on {tp} of two hosts: bytes that crossed", *(line["weights/network_bytes"] for line in lines))
