"""The whole on CPU: the start model, Megatron on two ranks, a live engine apart, pushes compared, rewards rise."""

import json
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import pytest

from trainer.main_ppo import main

ROLLOUT = "actor_rollout_ref.rollout"
ENGINES = [
    pytest.param("hf", marks=pytest.mark.slow),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]),
    pytest.param(
        "sglang", marks=[pytest.mark.sglang, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]
    ),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
def test_rewards_rise_with_megatron_and_every_engine(engine: str, tmp_path: Path) -> None:
    argv = [
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        *("trainer.n_gpus_per_node=2", "trainer.rollout_workers=1", "ray_kwargs.ray_init.num_cpus=4"),
        *(
            f"{ROLLOUT}.name={engine}",
            f"{ROLLOUT}.validate_weight=true",
            f"{ROLLOUT}.validate_save_dir={tmp_path}/sums",
        ),
        *(f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu", "trainer.test_freq=-1"),
        *([f"{ROLLOUT}.enforce_eager=true"] if engine == "vllm" else []),
    ]
    assert main(argv) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert len(scores) == 25
    assert mean(scores[-5:]) > mean(scores[:5]) + 0.05
    assert max(line.get("training/rollout_probs_diff_max", 0.0) for line in lines) < 1e-5
    for version in range(26):
        assert json.loads((tmp_path / "sums" / f"weights_v{version}.json").read_text())["equal"]
