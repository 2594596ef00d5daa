"""The rollout config as keyword arguments of SGLang's ServerArgs."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlsys.config.engines import QUANTIZATION, share_of_free
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.models.hf import dtype_name
from rlsys.models.quantized import block_settings
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf_files import is_quantised, text_config
from rlsys.utils.errors import ConfigError

MAX_GRAPH_SEQS = 512
SPARE_TOKENS = 8
"""SGLang ends a request a few tokens before its context is full."""
HEAD_ROWS = 64
"""SGLang pads the rows of a head that is cut to a multiple of this, and of a copy's own head keeps the padding."""


@dataclass(frozen=True)
class ReplicaRank:
    """This rank of a replica of `size` ranks; its process groups meet at `address` (host:port).

    Without an address SGLang chooses a port from a generator seeded by the job, so two jobs on a host may collide.
    """

    rank: int = 0
    size: int = 1
    address: str = ""


SINGLE_RANK = ReplicaRank()


def server_arguments(
    path: str | Path, config: GenerationConfig, context: EngineContext, *, max_model_len: int, replica: ReplicaRank
) -> dict[str, Any]:
    """The arguments; `config.engine_kwargs.sglang` overrides the others.

    With `full_determinism` logits are not rounded to the model's type, and on GPUs kernels are batch-invariant. CUDA
    graphs are captured for up to `max_num_seqs` sequences; SGLang's own limit is 256 on most GPUs.
    """
    engine_kwargs, on_cpu = config.engine_kwargs.sglang, context.device == "cpu"
    dtype = dtype_name(config.dtype, context.device)
    gpu_arguments = {
        "mem_fraction_static": _static_share(config.gpu_memory_utilization, replica),
        "disable_cuda_graph": config.enforce_eager,
        "cuda_graph_max_bs_decode": config.cuda_graph_max_bs or min(config.max_num_seqs, MAX_GRAPH_SEQS),
        "enable_memory_saver": True,
        **({"cuda_graph_bs_decode": sorted(sizes)} if (sizes := config.cudagraph_capture_sizes) else {}),
    }
    parallel_arguments = {
        "nnodes": replica.size,
        "node_rank": replica.rank,
        "dist_init_addr": replica.address,
        "disable_custom_all_reduce": True,  # it queries devices that a worker with one visible GPU cannot see
    }
    single_arguments = {"nccl_port": int(replica.address.rpartition(":")[2])} if replica.address else {}
    return {
        "model_path": str(path),
        "load_format": context.load_format,
        "dtype": dtype,
        "device": "cpu" if on_cpu else "cuda",
        "random_seed": config.seed,
        "max_running_requests": config.max_replica_seqs + config.data_parallel_size,  # one slot for a prompt in pieces
        "pp_max_micro_batch_size": max(config.max_num_seqs // config.pipeline_model_parallel_size, 1),
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "context_length": max_model_len + SPARE_TOKENS,
        "disable_radix_cache": not config.enable_prefix_caching,
        "tp_size": replica.size // config.pipeline_model_parallel_size,
        "pp_size": config.pipeline_model_parallel_size,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "sleep_on_idle": True,
        "log_level": "error" if config.disable_log_stats else "info",
        "enable_weights_cpu_backup": context.offload_on_sleep and not on_cpu,
        **({"ep_size": config.expert_parallel_size} if config.expert_parallel_size > 1 else {}),
        **(_attention_arguments(path, config) if config.data_parallel_size > 1 else {}),
        **(parallel_arguments if replica.size > 1 else single_arguments),
        **(_cpu_arguments(path, dtype, config.kv_cache_gib) if on_cpu else gpu_arguments),
        **({"enable_fp32_lm_head": True} if config.full_determinism else {}),
        **({"enable_deterministic_inference": True} if config.full_determinism and not on_cpu else {}),
        **({"enable_return_routed_experts": True} if config.enable_rollout_routing_replay else {}),
        **_weight_arguments(path, config, context),
        **engine_kwargs,
    }


def _static_share(utilization: float, replica: ReplicaRank) -> float:
    """SGLang's share of what is free beside a trainer in this process."""
    if not torch.cuda.is_initialized():
        return utilization
    free, whole = torch.cuda.mem_get_info()
    return share_of_free(utilization, free, whole, ranks=replica.size)


def _attention_arguments(path: str | Path, config: GenerationConfig) -> dict[str, object]:
    """Copies of the attention, each with a head of its own where SGLang can put the head's parts together again."""
    own_head = config.tensor_model_parallel_size == 1 or text_config(path).vocab_size % HEAD_ROWS == 0
    return {"dp_size": config.data_parallel_size, "enable_dp_attention": True, "enable_dp_lm_head": own_head}


def _weight_arguments(path: str | Path, config: GenerationConfig, context: EngineContext) -> dict[str, object]:
    """How pushed weights are held, with kernels that take blocks of FP8 as they are loaded.

    DeepGEMM would round their scales on some GPUs, and takes blocks of 128 only. With FP8 a switch of this process and
    its children is set, too: SGLang's loader then takes the bfloat16 that the layout is learned from.
    """
    is_pushed = context.load_format == "dummy"
    if config.quantization and (context.device == "cpu" or not is_pushed):
        raise ConfigError(f"{QUANTIZATION}: SGLang serves pushed FP8 weights only, on GPUs; set {QUANTIZATION}=null")
    if config.quantization:
        os.environ["SGLANG_QUANT_ALLOW_DOWNCASTING"] = "1"
        override = json.dumps({"quantization_config": block_settings(text_config(path).to_dict(), config)})
        kernels = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}
        return {**kernels, "json_model_override_args": override}
    return {"json_model_override_args": '{"quantization_config": null}'} if is_pushed and is_quantised(path) else {}


def _cpu_arguments(path: str | Path, dtype: str, cache_gib: float) -> dict[str, Any]:
    """The arguments of a CPU, whose cache holds as many tokens' keys and values as fit into `cache_gib`."""
    text = text_config(path)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head
    token_bytes = 2 * text.num_hidden_layers * width * getattr(torch, dtype).itemsize
    return {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": int(cache_gib * 2**30) // token_bytes,
    }
