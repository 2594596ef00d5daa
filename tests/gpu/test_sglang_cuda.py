"""SGLang in two pipeline stages on two GPUs, and with a small cache on one."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlsys.rollout.base import EngineContext
from tests.contracts.rollout_engine import EOS, VOCABULARY
from tests.e2e.conftest import Toy, toy, two_stages  # noqa: F401
from tests.sglang_cache import check_retracted
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("wait_s", "updates"), [(0.05, 0), (60.0, 0), (0.02, 100)])
def test_tokens_of_requests_that_sglang_retracts_are_those_that_it_returns(
    wait_s: float, updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if updates:
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # one in three steps, right after updates too
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = Qwen3Config(vocab_size=VOCABULARY, num_hidden_layers=2, head_dim=64, eos_token_id=EOS, **sizes)
    Qwen3ForCausalLM(shape).bfloat16().save_pretrained(tmp_path)
    check_retracted(tmp_path, EngineContext("cuda"), wait_s=wait_s, updates=updates)
