"""Whether the settings of the rollout engine suit it."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.checks.findings import note, unknown_name, wrong
from rlsys.config.engines import ENGINE_SETTINGS, rollout_backend, rollout_backends
from rlsys.config.pools import is_external
from rlsys.config.schema.rollout import GenerationConfig

KEY = "actor_rollout_ref.rollout"


def check_engine(rollout: GenerationConfig, name: str, ranks: int) -> Iterator[str]:
    """Whether the engine `name` on `ranks` processes supports its settings, and notes on settings that it ignores."""
    yield from _replicas(rollout, name, ranks)
    yield from _aligned(rollout, name)
    yield from _idle(rollout, name)


def check_engine_name(name: str, external_lib: str | None, *, has_servers: bool) -> Iterator[str]:
    """Whether the engine is registered; a module named in `external_lib` may register more."""
    known = [backend.name for backend in rollout_backends() if has_servers or not backend.is_external]
    if name not in known and not external_lib:
        yield unknown_name(f"{KEY}.name", name, known, what="rollout engine")


def _idle(rollout: GenerationConfig, name: str) -> Iterator[str]:
    fields, backend = type(rollout).model_fields, rollout_backend(name)
    names = [key for key in ENGINE_SETTINGS if key not in backend.settings]
    why = f"{{}} only apply to {KEY}.name=vllm and sglang; ignored for {name}"
    if backend.is_external:
        why = "{} cannot be changed on external servers; set them when starting the server"
    if changed := {key: value for key in names if (value := getattr(rollout, key)) != fields[key].default}:
        first, value = next(iter(changed.items()))
        yield note(f"{KEY}.{first}", value, why.format(", ".join(changed)))
    for engine, given in (("vllm", rollout.engine_kwargs.vllm), ("sglang", rollout.engine_kwargs.sglang)):
        if given and name != engine:
            yield note(
                f"{KEY}.engine_kwargs.{engine}", given, f"they only apply to {KEY}.name={engine}; ignored for {name}"
            )


def _replicas(rollout: GenerationConfig, name: str, ranks: int) -> Iterator[str]:
    """Whether the rollout processes hold whole copies of the model."""
    key, size = f"{KEY}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    if size == 1:
        return
    if not is_external(name) and "t" not in rollout_backend(name).dims:
        yield wrong(key, size, f"the {name} engine runs a model in one process; set {key}=1, or use vllm or sglang")
    elif is_external(name):
        yield note(key, size, "external servers keep the parallel sizes they were started with")
    elif ranks % size:
        why = f"the {ranks} rollout processes cannot hold whole copies of the model; set a divisor of {ranks}"
        yield wrong(key, size, why)


def _aligned(rollout: GenerationConfig, name: str) -> Iterator[str]:
    """What the aligned mode means for external servers, and for hf, which has no batch-invariant kernels."""
    if not rollout.full_determinism:
        return
    key, why = f"{KEY}.full_determinism", ""
    if is_external(name):
        why = "it cannot be changed on external servers; start them with FULL_DETERMINISM=1 scripts/run_*.sh"
    elif not rollout_backend(name).batch_invariant:
        why = "logits are in float32, but transformers' kernels may give a token other digits in another batch"
    if why:
        yield note(key, True, why)
