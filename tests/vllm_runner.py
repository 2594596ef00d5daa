"""vLLM's model runner 2 on a CPU: its kernels in Triton's interpreter, steps started ahead as on a GPU."""

from types import SimpleNamespace
from typing import Any

SWITCHES = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
"""The environment in which it works, to be set before anything imports vLLM or Triton."""


def interpret_kernels() -> None:
    """Have vLLM take Triton, which it does where there is a backend for the device, and start steps ahead."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def run_ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(run_ahead)  # type: ignore[method-assign]
