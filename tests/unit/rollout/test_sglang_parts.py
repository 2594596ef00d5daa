"""The parts of the SGLang adapter that need no SGLang: request ids, sampling and server arguments."""

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from rlsys.config.schema.rollout import EngineKwargsConfig, GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.sampling.hook import SampleSpec
from rlsys.rollout.sampling.sample import BatchSampling, row_keys, sample_tokens
from rlsys.rollout.sglang.arguments import SINGLE_RANK, ReplicaRank, server_arguments
from rlsys.rollout.sglang.engine import SGLangRollout
from rlsys.rollout.sglang.launch import _stage_cores
from rlsys.rollout.sglang.sampler import SchedulerSampler, request_id, spec_of
from rlsys.rollout.versions import VersionTable
from rlsys.types import SamplingParams
from rlsys.utils.errors import ConfigError


def spec(number: int, *, min_new_tokens: int = 0) -> SampleSpec:
    params = SamplingParams(1, 0.8, 0.9, 20, min_new_tokens, seed=7)
    return SampleSpec(number, 3 + number, params, (5, 6) if min_new_tokens else ())


def test_ids_encode_the_spec_and_none_is_a_prefix_of_another() -> None:
    for one in (spec(1), spec(12, min_new_tokens=4)):
        assert spec_of(request_id(one)) == one
    assert not request_id(spec(12)).startswith(request_id(spec(1)).split("|")[0])
    assert spec_of("HEALTH_CHECK_1") is None


def test_samples_are_those_of_the_reference_in_any_row() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    sampler = SchedulerSampler(11, torch.device("cpu"), logged=True)
    rids = [request_id(spec(0)), request_id(spec(1))]
    forced = logits.clone()
    sampler.force(forced, rids, torch.tensor([2, 5]))
    early = torch.tensor([0, 0])
    sampler.force(logits.clone(), rids[::-1], early)
    how = BatchSampling(
        keys=row_keys(11, [7, 7]),
        temperature=torch.tensor([0.8, 0.8]),
        top_p=torch.tensor([0.9, 0.9], dtype=torch.float64),
        top_k=torch.tensor([20, 20]),
        scaled=True,
        any_top_p=True,
        max_top_k=20,
    )
    expected = sample_tokens(logits, torch.tensor([3, 6]), how)
    assert torch.equal(forced.argmax(1), expected.tokens)
    counts, table = sampler.take([0, 1])
    assert counts.tolist() == [1, 1], "samples before the end of the prompt do not count"
    np.testing.assert_array_equal(table[:, 0], expected.tokens.numpy())
    np.testing.assert_allclose(table[:, 1], expected.full_logprobs.numpy())
    assert sampler.take([0])[0].tolist() == [0]
    untouched = logits.clone()
    sampler.force(untouched, ["HEALTH_CHECK", rids[0]], early)
    assert torch.equal(untouched, logits)


@cache
def model_folder(vocab_size: int = 32000) -> str:
    """A config.json of a model with 1 KiB of keys and values per token in float32."""
    folder = tempfile.mkdtemp(prefix="rlsys-sglang-")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    LlamaConfig(**sizes, vocab_size=vocab_size).save_pretrained(folder)
    return folder


def arguments(
    *, device: str = "cuda", replica: ReplicaRank = SINGLE_RANK, path: str | None = None, **settings: Any
) -> dict[str, Any]:
    config = GenerationConfig(**{"dtype": "float32", "seed": 5, "max_num_seqs": 17} | settings)
    context = EngineContext(device, load_format="dummy")
    return server_arguments(path or model_folder(), config, context, max_model_len=100, replica=replica)


def test_every_setting_reaches_sglang_under_its_name() -> None:
    server_args = arguments(max_num_batched_tokens=1234, gpu_memory_utilization=0.37)
    expected = {
        "random_seed": 5,
        "max_running_requests": 18,
        "pp_max_micro_batch_size": 17,
        "chunked_prefill_size": 1234,
        "max_prefill_tokens": 1234,
        "mem_fraction_static": 0.37,
        "disable_cuda_graph": False,
        "disable_radix_cache": False,
        "dtype": "float32",
        "tp_size": 1,
        "enable_memory_saver": True,
        "skip_tokenizer_init": True,
    }
    assert "disable_overlap_schedule" not in server_args, "SGLang schedules a step while it computes the last one"
    assert {name: server_args[name] for name in expected} == expected
    changed = arguments(enforce_eager=True, enable_chunked_prefill=False, enable_prefix_caching=False)
    assert (changed["disable_cuda_graph"], changed["chunked_prefill_size"], changed["disable_radix_cache"]) == (
        True,
        -1,
        True,
    )
    assert (server_args["log_level"], arguments(disable_log_stats=False)["log_level"]) == ("error", "info")
    on_cpu = arguments(device="cpu")
    assert on_cpu["max_total_tokens"] == 2**20
    assert "enable_memory_saver" not in on_cpu
    assert "nccl_port" not in server_args
    assert arguments(replica=ReplicaRank(address="127.0.0.1:9"))["nccl_port"] == 9
    cut = arguments(replica=ReplicaRank(1, 2, "127.0.0.1:9"))
    assert (cut["tp_size"], cut["nnodes"], cut["node_rank"], cut["dist_init_addr"]) == (2, 2, 1, "127.0.0.1:9")
    assert cut["pp_size"] == 1
    stages = arguments(replica=ReplicaRank(3, 4, "127.0.0.1:9"), pipeline_model_parallel_size=2)
    assert [stages[name] for name in ("tp_size", "pp_size", "nnodes", "node_rank")] == [2, 2, 4, 3]


MOST = (78 - 0.08 * 140) / 78


@pytest.mark.parametrize(
    ("utilization", "size", "expected"),
    [
        (0.3, 1, 0.3 * 140 / 78),
        (0.3, 2, 0.3),
        (0.47, 1, 0.47 * 140 / 78),
        (0.48, 1, MOST),
        (0.8, 1, MOST),
        (0.9, 1, 0.9),
    ],
    ids=str,
)
def test_the_cache_beside_a_trainer_is_a_share_of_all_memory(
    utilization: float, size: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU of 140 GiB 78 are free; of these SGLang takes a share, which a larger setting never makes smaller."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (78 << 30, 140 << 30))
    made = arguments(gpu_memory_utilization=utilization, replica=ReplicaRank(0, size, "127.0.0.1:9"))
    assert made["mem_fraction_static"] == pytest.approx(expected)


def test_each_rank_of_a_stage_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [_stage_cores(4, 2, rank) for rank in range(4)] == ["0-1|2-3", "0-1|2-3", "4-5|6-7", "4-5|6-7"]
    assert [_stage_cores(2, 1, rank) for rank in range(2)] == ["0-3", "4-7"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7})
    assert [_stage_cores(4, 2, rank) for rank in (0, 2)] == ["5|7", "5|7"]


def test_samples_of_a_later_stage_are_logged_by_the_first_rank_alone() -> None:
    rids = [request_id(spec(0)), request_id(spec(1))]
    samples = torch.tensor([[0.0, 7, -1, -2, 1], [-1, 8, -1, -2, 1]], dtype=torch.float64)
    for logged in (True, False):
        sampler = SchedulerSampler(11, torch.device("cpu"), logged=logged)
        sampler.add(rids, samples)
        counts, table = sampler.take([0, 1])
        assert counts.tolist() == [logged, 0], "nothing is sampled in the middle of a prompt"
        assert table.tolist() == [[7.0, -1.0, -2.0, 1.0]] * logged


def test_what_sglang_drops_of_a_request_that_it_retracts_is_drawn_again_as_it_was() -> None:
    """The worker may know the token of a step that ran ahead, and other weights would draw another one.

    Tensor-parallel ranks that keep no log draw it again too: SGLang takes the least of their tokens.
    """
    rng = torch.Generator().manual_seed(5)
    sampler, peer = (SchedulerSampler(11, torch.device("cpu"), logged=logged) for logged in (True, False))
    rids = [request_id(SampleSpec(number, 3, SamplingParams(9, seed=number))) for number in (4, 6)]

    def draw(rids: list[str], *indices: int) -> list[int]:
        logits, same = torch.randn(len(rids), 97, generator=rng).repeat(2, 1, 1)
        sampler.force(logits, rids, torch.tensor(indices) + 2)
        peer.force(same, rids, torch.tensor(indices) + 2)
        assert torch.equal(logits.argmax(1), same.argmax(1))
        assert torch.equal(sampler.samples, peer.samples)
        return logits.argmax(1).tolist()

    tokens = [draw(rids, at, at) for at in range(4)]
    before = sampler.take([4], [0])[1]
    for rank in (sampler, peer):
        rank.retract("HEALTH_CHECK_1", 0)
        rank.retract(rids[0], 1)
    draw(rids[1:], 4)
    sampler.half_read = peer.half_read = rids[0]
    draw(rids, 0, 5)
    sampler.half_read = peer.half_read = ""
    again = [draw(rids, at, at + 5)[0] for at in range(1, 6)]
    assert again[:3] == [first for first, _ in tokens[1:]]
    counts, after = sampler.take([4, 6])
    assert (counts.tolist(), after[:4].tolist()) == ([6, 11], before.tolist())
    assert after[4:6, 0].tolist() == again[3:]


def test_copies_of_the_attention_have_as_many_requests_each() -> None:
    place = ReplicaRank(3, 4, "127.0.0.1:9")
    copies = arguments(replica=place, data_parallel_size=4, expert_parallel_size=4)
    expected = {"tp_size": 4, "dp_size": 4, "ep_size": 4, "node_rank": 3, "max_running_requests": 72}
    assert {name: copies[name] for name in expected} == expected
    assert [copies["enable_dp_attention"], copies["enable_dp_lm_head"]] == [True, True]
    cut = arguments(replica=place, data_parallel_size=2, tensor_model_parallel_size=2)
    assert (cut["dp_size"], cut["enable_dp_lm_head"], cut["cuda_graph_max_bs_decode"]) == (2, True, 17)
    odd = arguments(replica=place, data_parallel_size=2, tensor_model_parallel_size=2, path=model_folder(32001))
    assert not odd["enable_dp_lm_head"]
    assert "dp_size" not in arguments(replica=place, tensor_model_parallel_size=4)


def test_a_version_older_than_those_of_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionTable, "installed", lambda table: "0.5.15")
    with pytest.raises(ConfigError, match=r"SGLang in this process 0\.5\.15: older than rlsys drives"):
        SGLangRollout(model_folder(), GenerationConfig(), EngineContext())


def test_batches_up_to_the_largest_are_decoded_by_graphs_unless_configured_otherwise() -> None:
    assert arguments()["cuda_graph_max_bs_decode"] == 17
    assert arguments(max_num_seqs=4096)["cuda_graph_max_bs_decode"] == 512
    chosen = arguments(max_num_seqs=4096, cuda_graph_max_bs=128, cudagraph_capture_sizes=(64, 8))
    assert (chosen["cuda_graph_max_bs_decode"], chosen["cuda_graph_bs_decode"]) == (128, [8, 64])
    assert not any("graph_max" in name for name in arguments(device="cpu"))


def test_the_aligned_mode_is_a_float32_head_and_on_gpus_batch_invariance() -> None:
    names = ("enable_fp32_lm_head", "enable_deterministic_inference")
    aligned, on_cpu = arguments(full_determinism=True), arguments(full_determinism=True, device="cpu")
    assert [aligned.get(name) for name in names] == [True, True]
    assert [on_cpu.get(name) for name in names] == [True, None]
    assert not set(names) & set(arguments())


def test_pushed_weights_may_be_in_blocks_of_fp8(tmp_path: Path) -> None:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    LlamaConfig(**sizes, num_hidden_layers=1).save_pretrained(tmp_path)
    config = GenerationConfig(quantization="fp8")
    context = EngineContext("cuda", load_format="dummy")
    given = server_arguments(tmp_path, config, context, max_model_len=32, replica=SINGLE_RANK)
    settings = json.loads(given["json_model_override_args"])["quantization_config"]
    assert settings["weight_block_size"] == [64, 64]
    assert settings["modules_to_not_convert"] == ["model.layers.0.mlp.gate"]
    assert {given["fp8_gemm_runner_backend"], given["moe_runner_backend"]} == {"triton"}
    for other in (EngineContext("cpu", load_format="dummy"), EngineContext("cuda")):
        with pytest.raises(ConfigError, match="pushed FP8 weights only, on GPUs"):
            server_arguments(tmp_path, config, other, max_model_len=32, replica=SINGLE_RANK)


def test_engine_kwargs_win() -> None:
    kwargs = EngineKwargsConfig(sglang={"random_seed": 9, "attention_backend": "fa3"})
    assert arguments(engine_kwargs=kwargs)["random_seed"] == 9
