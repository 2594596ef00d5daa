"""A node with a GPU joins a job, copies the weights of the engine of another, and serves when that one is killed."""

import os
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from tests.e2e.conftest import GPU_MEMORY, UNCOMPILED, Toy, toy, with_model  # noqa: F401
from tests.e2e.test_elastic_rollout import ENGINES, JOB, STILL, cluster_of, job_on, serves_in_the_place_of_another

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_on_a_gpu_copies_the_weights_of_another_and_serves_in_its_place(
    engine: str,
    toy: Toy,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = with_model(toy, tmp_path / "model", Qwen2Config, num_key_value_heads=2, **sizes)
    trains, serves = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    arguments = wide.overrides(
        tmp_path,
        *(*JOB, *STILL, UNCOMPILED, "trainer.device=cuda", f"reward.custom_reward_function.path={wide.grader}"),
        *(f"{ROLLOUT}.name={engine}", *GPU_MEMORY[engine]),
    )
    with cluster_of(trains, serves, serves) as (nodes, address), job_on(address, tmp_path, arguments) as job:
        lines = serves_in_the_place_of_another(job, nodes)
    largest = max(line["rollout_corr/log_ppl_abs_diff"] for line in lines)
    assert largest < 0.01, "replicas have other weights"  # bfloat16
    with capsys.disabled():
        print(f"{engine}: log-probs of {len(lines)} steps differ by at most {largest:.2g} on average; joined:")
        print([line for line in job.log.splitlines() if "after its start" in line])
