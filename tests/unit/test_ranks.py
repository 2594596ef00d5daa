"""Cases that share ranks: each has its own answer, or says how it failed."""

import os

import pytest
import torch.distributed as dist

from tests.ranks import run_cases


def process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    dist.barrier()


def test_cases_share_ranks_until_one_fails_and_the_others_run_in_new_ones() -> None:
    answers = run_cases(2, {"a": process, "b": process, "wrong": fails_on_one, "c": process, "d": process})
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*rank 1:.*in fails_on_one.*ValueError: of rank 1"):
        answers["wrong"]
    assert [rank for rank, _ in answers["a"]] == [0, 1]
    assert answers["a"] == answers["b"]
    assert answers["c"] == answers["d"]
    assert {pid for _, pid in answers["a"]}.isdisjoint(pid for _, pid in answers["c"])
