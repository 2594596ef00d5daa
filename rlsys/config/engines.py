"""The rollout engines: one record each, which the schema, the checks, the planner and the trainer read."""

from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal

from rlsys.utils.errors import ConfigError

ENGINE_SETTINGS = (
    *("gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "enable_chunked_prefill", "enable_prefix_caching"),
    *("cuda_graph_max_bs", "cudagraph_capture_sizes", "disable_log_stats", "free_cache_engine"),
)
"""Keys of the rollout section that only some engines read."""


@dataclass(frozen=True)
class RolloutBackend:
    """A rollout engine: actor_rollout_ref.rollout.name and what follows from it.

    `worker`: "module:Class" of its RolloutWorker, or for external servers of the RemoteEngine that is made from
    RemoteSettings. `weights_in`: the worker's process, a child process of it, or a server. `dims`: its parallel sizes
    in an allocation (d data, t tensor, e expert). `settings`: those of ENGINE_SETTINGS that it reads.
    `cache_share_of`: it allocates its cache at start, as a share of the device's memory or of the free memory.
    `drops_weights`: its weights can be dropped while it sleeps.
    """

    name: str
    worker: str | None
    weights_in: Literal["process", "child", "server"] = "process"
    dims: str = "d"
    settings: tuple[str, ...] = ("free_cache_engine",)
    cache_share_of: Literal["device", "free"] | None = None
    batch_invariant: bool = False
    drops_weights: bool = False

    @property
    def is_external(self) -> bool:
        return self.weights_in == "server"


_serving = partial(RolloutBackend, dims="dte", settings=ENGINE_SETTINGS, batch_invariant=True, drops_weights=True)
_external = partial(RolloutBackend, weights_in="server", settings=())
_BACKENDS = {
    backend.name: backend
    for backend in (
        RolloutBackend("hf", "workers.rollout:HFRolloutWorker"),
        _serving("sglang", "workers.rollout:SGLangRolloutWorker", weights_in="child", cache_share_of="free"),
        _serving("vllm", "workers.rollout:VLLMRolloutWorker", cache_share_of="device"),
        _external("sglang_remote", "rlsys.fleet.external.engine:SGLangRemoteEngine"),
        _external("vllm_remote", "rlsys.fleet.external.engine:VLLMRemoteEngine"),
    )
}
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
    return _BACKENDS.get(name) or RolloutBackend(name, None, dims="dte", settings=ENGINE_SETTINGS, batch_invariant=True)


def worker_class(name: str) -> Any:
    """The worker class of an engine, or its class of remote engines; ConfigError if no module has registered it."""
    worker = rollout_backend(name).worker
    if worker is None:
        known = ", ".join(backend.name for backend in rollout_backends())
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name}: unknown rollout engine; choose from {known}, or register it with "
            "register_rollout_backend in the module of actor_rollout_ref.model.external_lib"
        )
    return resolve_name(worker)
