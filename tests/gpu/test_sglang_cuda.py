"""SGLang in two pipeline stages on two GPUs."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import Toy, toy, two_stages  # noqa: F401
from trainer.main_ppo import main

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_SGLANG, reason="needs SGLang")]


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_run_serves_in_two_stages(enforce_eager: bool, on_update: str, toy: Toy, tmp_path: Path) -> None:  # noqa: F811
    """Their memory is released for the trainer at every step."""
    argv = two_stages(toy, tmp_path, "sglang", enforce_eager=enforce_eager)
    argv.append(f"actor_rollout_ref.rollout.on_update={on_update}")
    assert main(argv) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights/version"] for line in lines if "weights/version" in line][-1] == lines[-1]["step"]
