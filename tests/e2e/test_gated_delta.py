"""Models with gated delta layers in live engines of vLLM, which follow large updates of either training engine."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from transformers import Qwen3_5TextConfig, Qwen3NextConfig

from rlsys.rollout.versions import VLLM
from tests.e2e.conftest import GDN, GPU_MEMORY, UNCOMPILED, Toy, follow_large_updates, with_model
from tests.fla_stand_in import HAS_PACKED_DELTA

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
ROLLOUT = "actor_rollout_ref.rollout"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5"])
def delta(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The toy with three gated delta layers and one with attention, with experts or dense."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3-next":
        return with_model(toy, folder, Qwen3NextConfig, **SIZES, **EXPERTS)
    return with_model(toy, folder, Qwen3_5TextConfig, **SIZES)


def check(delta: Toy, tmp_path: Path, *more: str) -> None:
    """After each push of a large update vLLM's log-probs are the trainer's."""
    served = ("name=vllm", "dtype=bfloat16", "validate_weight=true", "parity.rows=32")
    lines = follow_large_updates(delta, tmp_path, *(f"{ROLLOUT}.{setting}" for setting in served), *more)
    assert max(line["parity/mean_abs"] for line in lines) < 0.02


@pytest.mark.vllm
def test_vllm_follows_large_updates(delta: Toy, tmp_path: Path) -> None:
    on_cpus = (
        "trainer.device=cpu",
        f"{ROLLOUT}.enforce_eager=true",
        "actor_rollout_ref.model.use_remove_padding=false",
    )
    check(delta, tmp_path, *on_cpus)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_vllm_on_a_gpu_follows_large_updates(strategy: str, delta: Toy, tmp_path: Path) -> None:
    if strategy == "megatron" and not (HAS_PACKED_DELTA and find_spec("fla")):
        pytest.skip("needs megatron-core>=0.19 and flash-linear-attention")
    if delta.model.name.startswith("qwen3.5") and VLLM.installed() in SpecifierSet("<0.27"):
        pytest.skip("vLLM 0.26 has no text model of Qwen3.5")
    assert torch.cuda.is_available()
    packed = "true" if strategy == "megatron" else "false"
    check(
        delta,
        tmp_path,
        *(f"actor_rollout_ref.actor.strategy={strategy}", f"actor_rollout_ref.model.use_remove_padding={packed}"),
        *(*GPU_MEMORY["vllm"], GDN, UNCOMPILED),
    )
