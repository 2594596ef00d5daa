"""Kernel time by range from a trace of torch.profiler, with numbers worked out by hand."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function

from scripts.bench.kernels import GROUPS, by_range, group_of, main, profile_call, read_trace


def event(category: str, name: str, start: int, stop: int, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "args": args}


RANGES = [
    event("user_annotation", "exchange", 0, 10),
    event("user_annotation", "exchange", 20, 40),
    event("user_annotation", "update_actor", 50, 90),
    event("user_annotation", "FSDP::pre_forward", 55, 60),
    event("user_annotation", "stop_profile", 95, 99, finished=False),
]
KERNELS = [
    event("kernel", "ampere_bf16_gemm", 5, 15, correlation=1, stream=7),
    event("kernel", "flash_fwd_kernel", 12, 22, correlation=2, stream=8),
    event("kernel", "nvjet_tst", 45, 60, correlation=3, stream=7),
    event("kernel", "silu", 46, 47, correlation=4, stream=8),
    event("kernel", "ncclDevKernel_AllGather", 55, 75, correlation=5, stream=9),
    event("gpu_memcpy", "Memcpy DtoH", 70, 72, correlation=6, stream=7),
    event("kernel", "multi_tensor_apply_kernel<FusedAdam>", 80, 85, stream=7),
]
LAUNCHES = {1: 2, 2: 4, 3: 38, 4: 44, 5: 51, 6: 52}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    launches = [event("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=n) for n, at in LAUNCHES.items()]
    waits = event("cuda_runtime", "cudaStreamSynchronize", 76, 80)
    events = [{"ph": "M", "name": "process_name", "ts": 0}, *KERNELS, *launches, waits, *RANGES]
    written = tmp_path / "trace.json.gz"
    content = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
    written.write_bytes(gzip.compress(content.encode()))
    return written


def test_kernels_count_where_they_were_launched_and_idle_time_is_that_without_any(path: Path) -> None:
    trace = read_trace(path)
    assert trace.num_waits == 1
    times = by_range(trace)
    assert list(times) == ["exchange", "update_actor", "outside"]
    generation, update, outside = times.values()
    # from 0 to 40, with 5 to 22 busy on two streams
    assert (generation.wall_s, generation.num_kernels) == (pytest.approx(40e-6), 3)
    assert generation.by_name["nvjet_tst"] == pytest.approx(15e-6)
    assert generation.by_group == pytest.approx({"matrix product": 25e-6, "attention": 10e-6})
    assert generation.idle_share == pytest.approx(23 / 40)
    # from 50 to 90, with 50 to 75 and 80 to 85 busy, of that 60 to 70 and 72 to 75 with NCCL alone
    assert update.by_group == pytest.approx({"nccl": 20e-6, "copy": 2e-6, "optimizer": 5e-6})
    assert update.kernel_s == pytest.approx(27e-6)
    assert update.idle_share == pytest.approx(10 / 40)
    assert update.nccl_share == pytest.approx(13 / 40)
    assert (outside.wall_s, outside.kernel_s) == (0, pytest.approx(1e-6))


def test_the_innermost_of_the_chosen_ranges_has_the_time(tmp_path: Path) -> None:
    nested = [("step", 0, 100), ("gen", 10, 40), ("exchange", 15, 20), ("update_actor", 40, 80)]
    events = [event("user_annotation", *one) for one in nested] + [
        event("kernel", "k", at, at + 5) for at in (5, 16, 90)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    times = by_range(read_trace(path), {"step": "rest", "gen": "gen", "update_actor": "update"})
    assert {name: time.wall_s for name, time in times.items()} == pytest.approx(
        {"rest": 30e-6, "gen": 30e-6, "update": 40e-6}
    )
    assert {name: time.num_kernels for name, time in times.items()} == {"rest": 2, "gen": 1, "update": 0}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix product"),
        ("void flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "nccl"),
        ("triton_poi_fused__flash_attention_forward_mul_0", "triton"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "elementwise, norm"),
        ("Memset (Device)", "copy"),
        ("void vllm::advance_step", "other"),
    ],
)
def test_kernels_are_grouped_by_their_names(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in (*GROUPS, "other")


def test_a_trace_of_this_torch_is_read(tmp_path: Path) -> None:
    with profile() as profiler, record_function("update_actor"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    ((name, time),) = by_range(read_trace(tmp_path / "trace.json.gz", ("cpu_op",))).items()
    assert (name, time.runs["aten::mm"]) == ("update_actor", 1)
    assert 0 < time.by_name["aten::mm"] <= time.wall_s
    called, num_waits = profile_call(lambda: torch.ones(8, 8) @ torch.ones(8, 8), cuda=False)
    assert (called.runs["aten::mm"], num_waits) == (1, 0)
    assert 0 <= called.idle_share < 1


def test_a_trace_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kernels.py", "missing.json.gz"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "missing.json.gz: file not found" in capsys.readouterr().err
