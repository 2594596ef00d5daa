"""SGLang in two pipeline stages on two GPUs."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.conftest import GPU_MEMORY, UNCOMPILED, Toy, toy, with_model  # noqa: F401
from trainer.main_ppo import main

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_SGLANG, reason="needs SGLang")]


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_run_serves_in_two_stages(enforce_eager: bool, on_update: str, toy: Toy, tmp_path: Path) -> None:  # noqa: F811
    """One of the stages has a layer more; their memory is released for the trainer at every step."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = with_model(toy, tmp_path / "model", Qwen2Config, num_hidden_layers=5, tie_word_embeddings=True, **sizes)
    rollout = "actor_rollout_ref.rollout"
    argv = model.overrides(
        tmp_path / "out",
        *(f"{rollout}.name=sglang", f"{rollout}.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2"),
        *([UNCOMPILED] if enforce_eager else []),
        *(f"{rollout}.enforce_eager={enforce_eager}", *GPU_MEMORY["sglang"]),
        f"{rollout}.on_update={on_update}",
        *(f"{rollout}.validate_weight=true", f"{rollout}.parity.freq=1", f"{rollout}.parity.policy=stop"),
        f"reward.custom_reward_function.path={model.grader}",
    )
    assert main(argv) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["weights/version"] for line in lines if "weights/version" in line][-1] == lines[-1]["step"]
