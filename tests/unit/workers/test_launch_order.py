"""Which workers have kernels start in the order of their launch: those of Megatron that split what they multiply."""

import os
from typing import Any

import pytest

from rlsys.config.schema.actor import ActorConfig, ActorRolloutRefConfig, CriticConfig
from rlsys.config.schema.algorithm import AlgorithmConfig
from rlsys.config.schema.megatron import MegatronConfig
from workers.build import EngineRun
from workers.critic import CriticWorker
from workers.megatron import MegatronPPOWorker

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
RUN = EngineRun("cuda", 600.0)


def environment(worker: str, role: dict[str, Any], given: str | None) -> str | None:
    """The variable once the worker has been made."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(NAME, given or "")
        if given is None:
            patched.delenv(NAME)
        if worker == "critic":
            CriticWorker(CriticConfig(**role), RUN)
        else:
            MegatronPPOWorker(ActorRolloutRefConfig(actor=ActorConfig(**role)), AlgorithmConfig(), RUN)
        return os.environ.get(NAME)


@pytest.mark.parametrize("worker", ["actor", "critic"])
@pytest.mark.parametrize(
    ("strategy", "sizes", "given", "expected"),
    [
        ("megatron", {"tensor_model_parallel_size": 2}, None, "1"),
        ("megatron", {"context_parallel_size": 2}, None, "1"),
        ("megatron", {"tensor_model_parallel_size": 2}, "8", "8"),
        ("megatron", {"pipeline_model_parallel_size": 2}, None, None),
        ("fsdp", {"tensor_model_parallel_size": 2}, None, None),
    ],
)
def test_kernels_start_in_order_where_matrices_or_sequences_are_split(
    worker: str, strategy: str, sizes: dict[str, int], given: str | None, expected: str | None
) -> None:
    role = {"strategy": strategy, "megatron": MegatronConfig(**sizes)}
    assert environment(worker, role, given) == expected
