"""The rollout engines: one record each, which the schema, the checks, the planner and the trainer read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlsys.config.schema.rollout import GenerationConfig

QUANTIZATION = "actor_rollout_ref.rollout.quantization"
FLOAT8_BLOCKS = 128, 64
"""Rows and columns of the blocks of weights that can share a scale in FP8, the faster first."""


@dataclass(frozen=True)
class RolloutBackend:
    """A rollout engine: actor_rollout_ref.rollout.name and what follows from it.

    `worker`: "module:Class" of its RolloutWorker, or for external servers of the RemoteEngine that is made from
    RemoteSettings. `weights_in`: the worker's process, a child process of it, or a server. `dims`: its parallel sizes
    in an allocation (d data, t tensor, e expert, p pipeline). `settings`: the keys that it reads of those that only
    some engines read, which are vLLM's.
    `cache_share_of`: it allocates its cache at start, as a share of the device's memory or of the free memory
    (`share_of_free`).
    `drops_weights`: its weights can be dropped while it sleeps.
    """

    name: str
    worker: str | None
    weights_in: Literal["process", "child", "server"] = "process"
    dims: str = "d"
    settings: Sequence[str] = ("free_cache_engine",)
    cache_share_of: Literal["device", "free"] | None = None
    drops_weights: bool = False

    @property
    def is_external(self) -> bool:
        return self.weights_in == "server"


_BACKENDS = {name: RolloutBackend(name, **facts) for name, facts in read_table(__file__, "engines.toml").items()}
VLLM_SETTINGS = _BACKENDS["vllm"].settings
"""Keys of the rollout section that only some engines read."""
IN_JOB_ENGINES = tuple(backend.name for backend in _BACKENDS.values() if not backend.is_external)
"""Those built in that run in processes of the job."""


def register_rollout_backend(backend: RolloutBackend) -> None:
    """Add an engine, e.g. from a module named in actor_rollout_ref.model.external_lib; ValueError for a taken name."""
    if _BACKENDS.setdefault(backend.name, backend) != backend:
        raise ValueError(f"a rollout engine '{backend.name}' is registered already")


def rollout_backends() -> tuple[RolloutBackend, ...]:
    """All registered engines."""
    return tuple(_BACKENDS.values())


def rollout_backend(name: str) -> RolloutBackend:
    """The engine of this name; one that is not registered yet is assumed to support every setting."""
    return _BACKENDS.get(name) or RolloutBackend(name, None, "process", "dtep", VLLM_SETTINGS)


def share_of_free(utilization: float, free: int, whole: int, *, ranks: int) -> float:
    """The share of the free memory of a GPU, of which SGLang takes a share, that is `utilization` of its whole memory.

    They differ beside a trainer. Activations and CUDA graphs need 0.08 of the whole: where so much is not left, it is
    the share that leaves it or, if that is more, `utilization` of what is free, so that a larger `utilization` is never
    a smaller share. `utilization` itself for a rank of a larger replica: the caches of all ranks must be equal, and
    what is free on the other GPUs is not known.
    """
    most = max(free - 0.08 * whole, utilization * free)
    return min(utilization * whole, most) / max(free, 1) if ranks == 1 else utilization


def decoder_sizes(hf_config: Mapping[str, object]) -> dict[str, int]:
    """The whole numbers of a config.json, those of the decoder of a vision-language model among them."""
    text = hf_config.get("text_config")
    both = {**hf_config, **(text if isinstance(text, dict) else {})}
    return {name: value for name, value in both.items() if isinstance(value, int)}


def is_dense(sizes: Mapping[str, int]) -> bool:
    """Whether the sizes of a config.json, where they are known, are of a model without experts."""
    return bool(sizes) and not any("expert" in name for name in sizes)


def float8_block(hf_config: Mapping[str, object], rollout: "GenerationConfig", *, is_pushed: bool = True) -> int:
    """The largest block that divides the widths of all layers as a rank of an engine holds them.

    Inputs of a layer are quantised by blocks too, and blocks may not span the parts of a fused matrix. ConfigError if
    none does, or, where weights are not pushed, not the one that vLLM makes of a checkpoint. Source: vLLM's
    `per_token_group_quant_fp8` and `validate_fp8_block_shape`.
    """
    size, tp = decoder_sizes(hf_config).get, rollout.tensor_model_parallel_size
    hidden, heads, expert = size("hidden_size", 0), size("num_attention_heads", 1), size("moe_intermediate_size", 0)
    shared = size("shared_expert_intermediate_size", 0), size("n_shared_experts", 0) * expert
    mlps = size("intermediate_size", 0), *shared
    widths = [hidden, expert // (1 if rollout.expert_parallel_size > 1 else tp), *(width // tp for width in mlps)]
    if latent := size("kv_lora_rank", 0):
        nope, rope, value = (size(f"{part}_head_dim", 0) for part in ("qk_nope", "qk_rope", "v"))
        widths += [latent, size("q_lora_rank", 0), *(heads // tp * n for n in (nope + rope, nope + value, value))]
    else:
        head = size("head_dim", hidden // heads)
        widths += [heads // tp * head, max(size("num_key_value_heads", heads) // tp, 1) * head]
    blocks = FLOAT8_BLOCKS if is_pushed else FLOAT8_BLOCKS[:1]
    if (block := next((each for each in blocks if not any(width % each for width in widths)), 0)) == 0:
        odd = ", ".join(str(width) for width in sorted(set(widths)) if width % blocks[-1])
        why = f"layers of this model are {odd} wide on a rank, no multiples of {blocks[-1]}, as blocks need"
        why += "" if is_pushed else ", of which vLLM makes them of a checkpoint"
        less = ", or a smaller actor_rollout_ref.rollout.tensor_model_parallel_size" if tp > 1 else ""
        raise ConfigError(f"{QUANTIZATION}={rollout.quantization}: {why}; set {QUANTIZATION}=null{less}")
    return block


def worker_class(name: str) -> Any:
    """The worker class of an engine, or its class of remote engines; ConfigError if no module has registered it."""
    if (worker := rollout_backend(name).worker) is None:
        known = ", ".join(backend.name for backend in rollout_backends())
        how = "register it with register_rollout_backend in the module of actor_rollout_ref.model.external_lib"
        why = f"unknown rollout engine; choose from {known}, or {how}"
        raise ConfigError(f"actor_rollout_ref.rollout.name={name}: {why}")
    return resolve_name(worker)
