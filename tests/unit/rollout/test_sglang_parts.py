"""The parts of the SGLang adapter that need no SGLang: its words, its names, its draws and its channel."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.rollout.sampling.hook import DrawParams
from rlsys.rollout.sampling.sample import Flags, Sampling, row_keys, sample_tokens
from rlsys.rollout.sglang import wire
from rlsys.rollout.sglang.arguments import Replica, server_arguments
from rlsys.rollout.sglang.channel import Caller, Server
from rlsys.rollout.sglang.sampler import Draws, draw_of, request_name
from rlsys.rollout.sglang.version import SGLANG, SGLangAdapter
from rlsys.types import Box
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError, WeightTransferError
from tests.timing import scaled_s, wait_until


@dataclass(frozen=True)
class Stranger:
    text: str


wire.allow(Box)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.builds(Box, st.text(), st.tuples(st.integers()), st.tuples(st.integers()))
    ),
    max_leaves=20,
)


def crossed(value: Any) -> Any:
    blobs: list[bytes] = []
    text = json.dumps(wire.encode(value, blobs))
    return wire.decode(json.loads(text), [bytearray(blob) for blob in blobs])


@given(PLAIN)
def test_values_cross_unchanged(value: Any) -> None:
    assert crossed(value) == value


def test_arrays_and_tensors_cross_bitwise() -> None:
    half = torch.randn(3, 5).bfloat16()
    arrays = [np.arange(4, dtype=np.uint64) + 2**63, np.zeros((0, 4))]
    got_half, got_scalar, got_empty, (first, second) = crossed([half.t(), torch.tensor(2.5), torch.empty(0, 3), arrays])
    assert torch.equal(got_half, half.t())
    assert got_half.dtype is torch.bfloat16
    assert got_scalar.shape == ()
    assert got_empty.shape == (0, 3)
    np.testing.assert_array_equal(first, arrays[0])
    assert (second.shape, second.dtype) == ((0, 4), np.float64)


def test_what_nobody_allowed_does_not_cross() -> None:
    with pytest.raises(TypeError, match="Stranger"):
        wire.encode(Stranger("x"), [])
    with pytest.raises(TypeError, match="set"):
        wire.encode({1, 2}, [])
    with pytest.raises(ValueError, match="Stranger"):
        wire.decode({"$": "Stranger", "fields": {"text": "x"}}, [])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Caller]]:
    os.chmod(tmp_path, 0o700)
    callers: list[Caller] = []

    def start(methods: dict[str, Any], **asked: Any) -> Caller:
        path = tmp_path / "s"
        server = Server(path, methods, enter=lambda: None)
        methods["ask_home"] = lambda *args: server.ask("home", *args)
        callers.append(Caller(path, "the scheduler", asked))
        return callers[0]

    yield start
    for caller in callers:
        caller.close()


def test_calls_return_raise_and_ask_back(serve: Callable[..., Caller]) -> None:
    def refuse() -> None:
        raise WeightTransferError("not whole")

    inner: list[Any] = []

    def home(number: int) -> int:
        inner.append(caller.call("add", number, 1, deadline_s=scaled_s(5)))
        return number

    caller = serve({"add": lambda a, b: a + b, "refuse": refuse}, home=home)
    assert caller.call("add", (1,), (2,), deadline_s=scaled_s(5)) == (1, 2)
    with pytest.raises(WeightTransferError, match="not whole"):
        caller.call("refuse", deadline_s=scaled_s(5))
    with pytest.raises(ValueError, match="no method 'nothing'"):
        caller.call("nothing", deadline_s=scaled_s(5))
    assert caller.call("ask_home", 4, deadline_s=scaled_s(5)) == 4
    assert inner == [5], "a call made while another one runs has a connection of its own"
    caller.check_alive()


def test_a_call_that_hangs_names_who(serve: Callable[..., Caller]) -> None:
    caller = serve({"hang": lambda: time.sleep(scaled_s(2)), "one": lambda: 1})
    with pytest.raises(DeadlineError, match=r"the scheduler did not answer within 0.2 s at stage 'hang'"):
        caller.call("hang", deadline_s=0.2)
    assert caller.call("one", deadline_s=scaled_s(5)) == 1, "the next call has a new connection"


def test_the_death_of_the_other_process_is_an_error(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    child = os.fork()
    if child == 0:
        Server(tmp_path / "s", {"die": lambda: os._exit(1)}, enter=lambda: None)
        time.sleep(30)
        os._exit(0)
    assert wait_until((tmp_path / "s").exists)
    caller = Caller(tmp_path / "s", "the scheduler", {})
    caller.check_alive()
    with pytest.raises(RolloutError, match="the scheduler died while 'die' ran"):
        caller.call("die", deadline_s=scaled_s(5))
    os.waitpid(child, 0)
    with pytest.raises(RolloutError, match="died"):
        caller.check_alive()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(RolloutError, match="open to other users"):
        Server(tmp_path / "s", {}, enter=lambda: None)


def draw(number: int, *, min_new_tokens: int = 0) -> DrawParams:
    return DrawParams(number, 3 + number, 7, 0.8, 0.9, 20, min_new_tokens, (5, 6) if min_new_tokens else ())


def test_names_carry_draws_and_none_begins_another() -> None:
    for one in (draw(1), draw(12, min_new_tokens=4)):
        assert draw_of(request_name(one)) == one
    assert not request_name(draw(12)).startswith(request_name(draw(1)).split("|")[0])
    assert draw_of("HEALTH_CHECK_1") is None


def test_draws_are_those_of_the_reference_wherever_a_row_stands() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    draws = Draws(11, torch.device("cpu"), logged=True)
    names = [request_name(draw(0)), request_name(draw(1))]
    forced = logits.clone()
    draws.force(forced, names, torch.tensor([2, 5]))
    early = torch.tensor([0, 0])
    draws.force(logits.clone(), names[::-1], early)
    how = Sampling(
        keys=row_keys(11, [7, 7]),
        temperature=torch.tensor([0.8, 0.8]),
        top_p=torch.tensor([0.9, 0.9], dtype=torch.float64),
        top_k=torch.tensor([20, 20]),
        flags=Flags(scaled=True, any_top_p=True, max_top_k=20),
    )
    expected = sample_tokens(logits, torch.tensor([3, 6]), how)
    assert torch.equal(forced.argmax(1), expected.tokens)
    counts, table = draws.take([0, 1])
    assert counts.tolist() == [1, 1], "draws before a prompt's end do not count"
    np.testing.assert_array_equal(table[:, 0], expected.tokens.numpy())
    np.testing.assert_allclose(table[:, 1], expected.full_logprobs.numpy())
    assert draws.take([0])[0].tolist() == [0]
    untouched = logits.clone()
    draws.force(untouched, ["HEALTH_CHECK", names[0]], early)
    assert torch.equal(untouched, logits)


def arguments(**more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cuda",
        "seed": 5,
        "max_num_seqs": 17,
        "max_num_batched_tokens": 1234,
        "max_model_len": 100,
        "gpu_memory_utilization": 0.37,
        "max_cache_tokens": 999,
        "enforce_eager": False,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "cuda_graph_max_bs": None,
        "cudagraph_capture_sizes": None,
        "disable_log_stats": True,
        "full_determinism": False,
        "replica": Replica(),
        "adapter": SGLangAdapter(),
        "engine_kwargs": {},
    }
    return server_arguments("folder", **(values | more))


def test_every_setting_reaches_sglang_under_its_name() -> None:
    found = arguments()
    expected = {
        "random_seed": 5,
        "max_running_requests": 17,
        "chunked_prefill_size": 1234,
        "max_prefill_tokens": 1234,
        "mem_fraction_static": 0.37,
        "disable_cuda_graph": False,
        "disable_radix_cache": False,
        "dtype": "float32",
        "tp_size": 1,
        "enable_memory_saver": True,
    }
    assert {name: found[name] for name in expected} == expected
    changed = arguments(enforce_eager=True, enable_chunked_prefill=False, enable_prefix_caching=False)
    assert (changed["disable_cuda_graph"], changed["chunked_prefill_size"], changed["disable_radix_cache"]) == (
        True,
        -1,
        True,
    )
    assert (found["log_level"], arguments(disable_log_stats=False)["log_level"]) == ("error", "info")
    on_cpu = arguments(device="cpu")
    assert on_cpu["max_total_tokens"] == 999
    assert "enable_memory_saver" not in on_cpu
    assert "nccl_port" not in found
    assert arguments(replica=Replica(address="127.0.0.1:9"))["nccl_port"] == 9
    cut = arguments(replica=Replica(1, 2, "127.0.0.1:9"))
    assert (cut["tp_size"], cut["nnodes"], cut["node_rank"], cut["dist_init_addr"]) == (2, 2, 1, "127.0.0.1:9")


def test_batches_up_to_the_largest_are_decoded_by_graphs_unless_said_otherwise() -> None:
    assert arguments()["cuda_graph_max_bs_decode"] == 17
    assert arguments(max_num_seqs=4096)["cuda_graph_max_bs_decode"] == 512
    chosen = arguments(max_num_seqs=4096, cuda_graph_max_bs=128, cudagraph_capture_sizes=(64, 8))
    assert (chosen["cuda_graph_max_bs_decode"], chosen["cuda_graph_bs_decode"]) == (128, [8, 64])
    older = arguments(adapter=SGLANG.adapter("0.5.13"), cudagraph_capture_sizes=(8,))
    assert (older["cuda_graph_max_bs"], older["cuda_graph_bs"]) == (17, [8])
    assert not any("graph_max" in name for name in arguments(device="cpu"))


def test_the_aligned_mode_is_a_float32_head_and_on_gpus_batch_invariance() -> None:
    names = ("enable_fp32_lm_head", "enable_deterministic_inference")
    aligned, on_cpu = arguments(full_determinism=True), arguments(full_determinism=True, device="cpu")
    assert [aligned.get(name) for name in names] == [True, True]
    assert [on_cpu.get(name) for name in names] == [True, None]
    assert not set(names) & set(arguments())


def test_engine_kwargs_win_but_not_over_what_the_adapter_needs() -> None:
    assert arguments(engine_kwargs={"random_seed": 9, "attention_backend": "fa3"})["random_seed"] == 9
    with pytest.raises(ConfigError, match=r"engine_kwargs.sglang may not set dp_size, tp_size"):
        arguments(engine_kwargs={"tp_size": 2, "dp_size": 2})
