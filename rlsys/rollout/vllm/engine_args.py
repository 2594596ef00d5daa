"""The rollout config as keyword arguments of vLLM's EngineArgs."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rlsys.config.engines import QUANTIZATION
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.config.vocabulary import EXPERTS
from rlsys.models.hf import dtype_name, saved_config
from rlsys.models.quantized import block_settings
from rlsys.models.vision import has_images
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf_files import is_quantised
from rlsys.rollout.versions import VLLM
from rlsys.rollout.vllm.determinism import aligned_arguments
from rlsys.types import HFConfig
from rlsys.utils.errors import ConfigError

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
ASKED_RUNNER = os.environ.get(RUNNER)
"""Which of vLLM's model runners the environment asks for: "1" is runner 2, "0" runner 1."""
PROCESSOR = "rlsys.rollout.vllm.sampler:SamplingProcessor"
SAME_NAMES = (
    *("seed", "max_num_seqs", "enforce_eager", "enable_chunked_prefill", "enable_prefix_caching"),
    *("data_parallel_size", "disable_log_stats"),
)
"""Settings that have their names in vLLM, too."""
CPU_LATENT_ATTENTION = {
    "attention_config": {"backend": "CPU_MLA"},  # the one for AMX has no float32
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},  # its kernel rotates the wrong part of latent queries
}


def engine_arguments(path: str | Path, config: GenerationConfig, context: EngineContext) -> dict[str, Any]:
    """The arguments; `config.engine_kwargs.vllm` overrides the others.

    Raises ConfigError for a setting that the installed version does not support. With `full_determinism` this process's
    switch for batch-invariant kernels is set too.
    """
    features, on_cpu = VLLM.installed_features(), context.device == "cpu"
    hf_config = saved_config(path)
    text = hf_config.get_text_config()
    is_pushed = context.load_format == "dummy"
    runs_ahead = "ahead" in features and not on_cpu and config.pipeline_model_parallel_size == 1
    returns_routes = config.enable_rollout_routing_replay and "routes_of_runner_2" in features
    if config.quantization and on_cpu:
        why = "vLLM keeps FP8 weights in another form on CPUs"
        raise ConfigError(f"{QUANTIZATION}={config.quantization}: {why}; set {QUANTIZATION}=null")
    if on_cpu and returns_routes and ASKED_RUNNER != "1":
        raise ConfigError("on CPUs vLLM returns no routes of experts: set router_replay.mode=R2, or rollout.name=hf")
    if on_cpu and is_pushed and text.model_type == "gpt_oss":
        raise ConfigError("on CPUs vLLM loads the experts of gpt_oss once only: set rollout.name=hf, or use GPUs")
    arguments = {
        "model": str(path),
        "load_format": context.load_format,
        "dtype": dtype_name(config.dtype, context.device),
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "max_model_len": config.max_model_len or text.max_position_embeddings,
        **{name: getattr(config, name) for name in SAME_NAMES},
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "distributed_executor_backend": "external_launcher" if config.replica_size > 1 else "uni",
        "disable_custom_all_reduce": True,  # it queries devices that a worker with one visible GPU cannot see
        "async_scheduling": runs_ahead,
        **runner_arguments(hf_config, config, runs_ahead=runs_ahead, returns_routes=returns_routes),
        **({} if on_cpu else {"gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": True}),
        "max_cudagraph_capture_size": config.cuda_graph_max_bs,
        "cudagraph_capture_sizes": config.cudagraph_capture_sizes and sorted(config.cudagraph_capture_sizes),
        **({"enable_return_routed_experts": True} if config.enable_rollout_routing_replay else {}),
        # not None: vLLM's gpt-oss reads the method
        **({"hf_overrides": {"quantization_config": {"quant_method": ""}}} if is_pushed and is_quantised(path) else {}),
        **(float8_arguments(text.to_dict(), config, is_pushed=is_pushed) if config.quantization else {}),
        **(CPU_LATENT_ATTENTION if on_cpu and getattr(text, "kv_lora_rank", None) else {}),
        **config.engine_kwargs.vllm,
    }
    return arguments | aligned_arguments(arguments, device=context.device) if config.full_determinism else arguments


def runner_arguments(
    hf_config: PretrainedConfig, config: GenerationConfig, *, runs_ahead: bool, returns_routes: bool = False
) -> dict[str, object]:
    """What has vLLM's model runner take our tokens; this process's switch for the runner is set too.

    Runner 2, in which Python does not iterate over the rows, serves dense models of text where it was seen to run, and
    none with states beside the KV cache, as in vLLM, and others where it alone returns routes of experts; it takes no
    logits processors.
    """
    text = hf_config.get_text_config()
    names = (*text.to_dict(), *(getattr(text, "layer_types", None) or ()))
    has_states = any(name.startswith(("linear_", "mamba", "ssm_", "conv_")) for name in names)
    has_parts = has_images(hf_config) or has_states or any(getattr(text, name, None) for name in EXPERTS)
    is_special = config.full_determinism or config.data_parallel_size > 1
    os.environ[RUNNER] = ASKED_RUNNER or str(int(returns_routes or (runs_ahead and not (has_parts or is_special))))
    return {} if os.environ[RUNNER] == "1" else {"logits_processors": [PROCESSOR]}


def float8_arguments(text: HFConfig, config: GenerationConfig, *, is_pushed: bool) -> dict[str, object]:
    """Blocks of FP8 everywhere but in routers, pushed or made by vLLM, and kernels that take them as they are loaded.

    This process's switches for these kernels are set too.
    """
    os.environ |= float8_switches()
    settings = block_settings(text, config, is_pushed=is_pushed)
    made = {"quantization": "fp8_per_block", "quantization_config": {"ignore": settings["modules_to_not_convert"]}}
    return {"moe_backend": "triton", **({"hf_overrides": {"quantization_config": settings}} if is_pushed else made)}


def float8_switches() -> dict[str, str]:
    """vLLM's environment variables for kernels that take blocks of FP8 and their scales as they are loaded.

    DeepGEMM leaves scales as they are on Hopper only, and only as vLLM brings it: SGLang's package of that name, which
    vLLM takes first where both are installed, was seen to change one.
    """
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return {
        "VLLM_USE_DEEP_GEMM": str(int(is_hopper and find_spec("deep_gemm") is None)),
        "VLLM_USE_DEEP_GEMM_E8M0": "0",  # or scales are rounded to powers of two
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",  # less accurate, by vLLM's own comments
    }
