"""Micro-batches that agree over ranks, groups of ranks, and small exchanges between them."""

import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.mesh import gather_json, make_ranks, max_over_ranks, together
from rlsys.engines.micro_batches import MicroBatches, split_rows
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.ranks import run_ranks
from tests.timing import scaled_s


@given(
    lengths=st.lists(st.integers(0, 20), max_size=24),
    rows=st.integers(1, 5),
    budget=st.integers(40, 90),
    others=st.integers(0, 20),
)
def test_every_row_is_in_one_micro_batch(lengths: list[int], rows: int, budget: int, others: int) -> None:
    for size in (MicroBatches(rows=rows), MicroBatches(max_tokens=budget), MicroBatches()):
        parts = split_rows(lengths, size, agree=lambda own: max(own, others))
        assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
        assert len(parts) >= others
        for part in parts:
            assert size.max_tokens is None or sum(lengths[row] for row in part) <= size.max_tokens
            assert size.rows is None or len(part) <= size.rows


def test_a_token_budget_counts_for_each_rank_that_shares_the_rows() -> None:
    assert len(split_rows([10] * 4, MicroBatches(max_tokens=20), agree=int)) == 2
    assert len(split_rows([10] * 4, MicroBatches(max_tokens=20), agree=int, num_sharing=2)) == 1


@pytest.mark.parametrize("size", [{"rows": 0}, {"max_tokens": 0}, {"rows": 1, "max_tokens": 1}])
def test_a_micro_batch_has_one_size(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="either rows or max_tokens"):
        MicroBatches(**size)


def too_long() -> str:
    lengths = [[50], [], [3, 4]][dist.get_rank()]
    with pytest.raises(ValueError, match="exceed") as caught:
        split_rows(lengths, MicroBatches(max_tokens=20), agree=max_over_ranks)
    return str(caught.value)


def test_a_row_over_the_budget_is_refused_on_every_rank() -> None:
    first, *others = run_ranks(3, too_long)
    assert "row 0 of 50 tokens" in first
    assert all("another rank" in other for other in others)


def places(fsdp_size: int, sp_size: int) -> dict[str, Any]:
    ranks = make_ranks("cpu", fsdp_size=fsdp_size, sp_size=sp_size)
    groups = {"dp": ranks.loss_group, "sp": ranks.sp_group, "shard": ranks.mesh.get_group("shard")}
    members = {name: dist.get_process_group_ranks(group) if group else None for name, group in groups.items()}
    return {"dp_rank": ranks.dp_rank, "dp_size": ranks.dp_size, **members}


def test_neighbours_share_sequences_and_shards() -> None:
    ranks = run_ranks(4, places, 2, 2)
    assert [place["dp_rank"] for place in ranks] == [0, 0, 1, 1]
    assert [place["dp"] for place in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [place["sp"] for place in ranks] == [place["shard"] for place in ranks] == [[0, 1]] * 2 + [[2, 3]] * 2


def wrong_sizes() -> list[str]:
    messages = []
    for sizes in ({"fsdp_size": 2}, {"sp_size": 2}):
        with pytest.raises(ConfigError) as caught:
            make_ranks("cpu", **sizes)
        messages.append(str(caught.value))
    return messages


def test_sizes_that_do_not_divide_are_refused() -> None:
    for shard, sequence in run_ranks(3, wrong_sizes):
        assert "fsdp_size=2 does not divide the 3 ranks" in shard
        assert "ulysses_sequence_parallel_size=2 x tensor_parallel_size=1 must divide 3 ranks" in sequence


def exchange() -> tuple[Any, int, str]:
    rank = dist.get_rank()

    def work() -> int:
        if rank == 1:
            raise OSError("the disk is full")
        return rank

    with pytest.raises(CheckpointError) as caught:
        together(work)
    return gather_json({"rank": rank, "text": "é" * rank}), max_over_ranks(rank * 10), str(caught.value)


def test_ranks_exchange_values_and_fail_together() -> None:
    for values, largest, message in run_ranks(3, exchange):
        assert values == [{"rank": rank, "text": "é" * rank} for rank in range(3)]
        assert largest == 20
        assert message == "rank 1: the disk is full"


STORE = """
import os, psutil, torch.distributed as dist
from rlsys.engines.mesh import ensure_process_group
from rlsys.single_controller.worker import free_port
port = free_port()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
ensure_process_group("cpu")
dist.barrier()
listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
print(*(address.ip for address in listening if address.port == port))
"""


def test_the_store_of_ranks_on_one_node_listens_on_loopback_only() -> None:
    done = subprocess.run([sys.executable, "-c", STORE], capture_output=True, text=True, timeout=scaled_s(60))
    assert done.stdout == "127.0.0.1\n", done.stderr
