"""Our settings in SGLang's words: the keyword arguments of its ServerArgs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.rollout.sglang.version import SGLangAdapter
from rlsys.utils.errors import ConfigError

RESERVED = {
    "base_gpu_id",
    "device",
    "dist_init_addr",
    "dp_size",
    "enable_dp_attention",
    "load_format",
    "model_path",
    "nnodes",
    "node_rank",
    "pp_size",
    "skip_tokenizer_init",
    "speculative_algorithm",
    "tensor_parallel_size",
    "tokenizer_worker_num",
    "tp_size",
}
"""What the adapter decides itself, or cannot do."""
MOST_GRAPHS = 512
SPARE_TOKENS = 8
"""SGLang ends a request some tokens before its context is full."""


@dataclass(frozen=True)
class Replica:
    """This rank's part of a replica: its process groups meet at `address` (host:port), by default where SGLang chooses.

    SGLang draws the port of a replica of one rank from a generator that the job has seeded, so jobs of one host may
    draw the same.
    """

    rank: int = 0
    size: int = 1
    address: str = ""


def server_arguments(
    path: str,
    *,
    load_format: str,
    dtype: str,
    device: str,
    seed: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    gpu_memory_utilization: float,
    max_cache_tokens: int | None,
    enforce_eager: bool,
    enable_chunked_prefill: bool,
    enable_prefix_caching: bool,
    cuda_graph_max_bs: int | None,
    cudagraph_capture_sizes: Sequence[int] | None,
    disable_log_stats: bool,
    full_determinism: bool,
    replica: Replica,
    adapter: SGLangAdapter,
    engine_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments; `engine_kwargs` win, and ConfigError names those of them that are not the user's to set.

    With `full_determinism` logits are not rounded to the model's type, and on GPUs kernels are batch-invariant. SGLang
    itself has graphs for 256 sequences at most on most GPUs: more of them would be decoded kernel by kernel.
    """
    if taken := sorted(RESERVED & set(engine_kwargs)):
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.sglang may not set {', '.join(taken)}")
    on_cpu = {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": max_cache_tokens,
    }
    on_gpu = {
        "mem_fraction_static": gpu_memory_utilization,
        "disable_cuda_graph": enforce_eager,
        f"cuda_graph_max_bs{adapter.decode}": cuda_graph_max_bs or min(max_num_seqs, MOST_GRAPHS),
        "enable_memory_saver": True,
        **({f"cuda_graph_bs{adapter.decode}": sorted(sizes)} if (sizes := cudagraph_capture_sizes) else {}),
    }
    apart = {
        "nnodes": replica.size,
        "node_rank": replica.rank,
        "dist_init_addr": replica.address,
        "disable_custom_all_reduce": True,  # it asks after devices that a worker with one visible GPU cannot see
    }
    alone = {"nccl_port": int(replica.address.rpartition(":")[2])} if replica.address else {}
    return {
        "model_path": path,
        "load_format": load_format,
        "dtype": dtype,
        "device": "cpu" if device == "cpu" else "cuda",
        "random_seed": seed,
        "max_running_requests": max_num_seqs,
        "chunked_prefill_size": max_num_batched_tokens if enable_chunked_prefill else -1,
        "max_prefill_tokens": max_num_batched_tokens,
        "context_length": max_model_len + SPARE_TOKENS,
        "disable_radix_cache": not enable_prefix_caching,
        "tp_size": replica.size,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "sleep_on_idle": True,
        "log_level": "error" if disable_log_stats else "info",
        **(apart if replica.size > 1 else alone),
        **(on_cpu if device == "cpu" else on_gpu),
        **({"enable_fp32_lm_head": True} if full_determinism else {}),
        **({"enable_deterministic_inference": True} if full_determinism and device != "cpu" else {}),
        **engine_kwargs,
    }
