"""The parts of the SGLang adapter that need no SGLang: request names, draws and server arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlsys.rollout.sampling.hook import DrawParams
from rlsys.rollout.sampling.sample import Flags, Sampling, row_keys, sample_tokens
from rlsys.rollout.sglang.arguments import Replica, server_arguments
from rlsys.rollout.sglang.sampler import Draws, draw_of, request_name
from rlsys.rollout.sglang.version import SGLANG, SGLangAdapter
from rlsys.utils.errors import ConfigError


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
