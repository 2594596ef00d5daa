"""Whether the settings of the engine that writes responses say something to it."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.checks.findings import note, wrong
from rlsys.config.pools import is_external
from rlsys.config.schema.rollout import GenerationConfig

SERVING = (
    *("gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "enable_chunked_prefill", "enable_prefix_caching"),
    *("cuda_graph_max_bs", "cudagraph_capture_sizes", "disable_log_stats"),
)
"""What vLLM and SGLang are told when they start."""
KEY = "actor_rollout_ref.rollout"


def check_engine(rollout: GenerationConfig, name: str, ranks: int) -> Iterator[str]:
    """Whether the engine `name` on so many ranks can do what it is asked, and notes on what says nothing to it."""
    yield from _replicas(rollout, name, ranks)
    yield from _aligned(rollout, name)
    yield from _idle(rollout, name)


def _idle(rollout: GenerationConfig, name: str) -> Iterator[str]:
    fields, names, why = type(rollout).model_fields, (), ""
    if name == "hf":
        names, why = SERVING, f"the hf engine has no use for {{}}; vLLM and SGLang have: {KEY}.name=vllm"
    elif is_external(name):
        names, why = (*SERVING, "free_cache_engine"), "servers outside are as they were started, {} say nothing to them"
    if changed := {key: value for key in names if (value := getattr(rollout, key)) != fields[key].default}:
        first, value = next(iter(changed.items()))
        yield note(f"{KEY}.{first}", value, why.format(", ".join(changed)))
    for engine, given in (("vllm", rollout.engine_kwargs.vllm), ("sglang", rollout.engine_kwargs.sglang)):
        if given and name != engine:
            yield note(f"{KEY}.engine_kwargs.{engine}", given, f"they are for {KEY}.name={engine}, and it is {name}")


def _replicas(rollout: GenerationConfig, name: str, ranks: int) -> Iterator[str]:
    """Whether the processes that generate make whole copies of the model."""
    key, size = f"{KEY}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    if size == 1:
        return
    if name == "hf":
        yield wrong(key, size, f"the hf engine serves a model from one process; write {key}=1, or use vllm or sglang")
    elif is_external(name):
        yield note(key, size, "servers outside have the sizes they were started with")
    elif ranks % size:
        why = f"the {ranks} processes that generate do not make whole copies; write a divisor of {ranks}"
        yield wrong(key, size, why)


def _aligned(rollout: GenerationConfig, name: str) -> Iterator[str]:
    """What the aligned mode is where the engine is not ours to set or has no batch-invariant kernels."""
    if not rollout.full_determinism:
        return
    key, why = f"{KEY}.full_determinism", ""
    if is_external(name):
        why = "servers compute as they were started: start them with FULL_DETERMINISM=1 by scripts/run_*.sh"
    elif name == "hf":
        why = "logits are in float32; transformers' kernels may give a token other digits in another batch"
    if why:
        yield note(key, True, why)
