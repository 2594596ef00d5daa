"""Latent attention in live engines: what they derive from weights follows each push, or the parity probe stops."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.types import ModelRequest, ModelResponse, SamplingParams
from tests.e2e.conftest import GPU_MEMORY, Toy, follow_large_updates, with_model
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = "actor_rollout_ref.actor.strategy=megatron"


@pytest.fixture(scope="module")
def latent(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """DeepSeek-V3 with the sizes of heads that vLLM's kernels have, and the settings of the published config.json.

    In bfloat16 its log-probs are 0.004 from float32's on average, also where experts are chosen as in float32; from an
    initializer_range of 0.2 they would be 0.02. What attention derived from older weights puts them 0.4 apart.
    """
    folder = tmp_path_factory.mktemp("latent")
    made = with_model(
        toy,
        folder,
        DeepseekV3Config,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_nextn_predict_layers=0,
        initializer_range=0.1,
    )
    config = json.loads((folder / "config.json").read_text())
    published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    (folder / "config.json").write_text(json.dumps(config | published))
    return made


def apart(model: Any, answers: list[ModelResponse]) -> float:
    """The largest difference of the answers' log-probs to the model's."""
    differences = []
    for answer in answers:
        with torch.no_grad():
            logits = model(torch.tensor([answer.input_tokens + answer.output_tokens])).logits[0]
        expected = logits[len(answer.input_tokens) - 1 : -1].float().log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(answer.output_tokens)[:, None])[:, 0]
        differences.append((chosen - torch.tensor(answer.output_logprobs)).abs().max().item())
    return max(differences)


def derived_in_place(path: Path) -> dict[str, Any]:
    """kv_b_proj rewritten in place where vLLM keeps copies of it, as it does of a quantized one."""
    from rlsys.rollout.vllm.engine import VLLMRollout

    requests = [ModelRequest((5, 6, 7 + i), SamplingParams(8, ignore_eos=True), rid=str(i)) for i in range(4)]
    model: Any = AutoModelForCausalLM.from_pretrained(path).float().eval()
    config = GenerationConfig(seed=3, enforce_eager=True, max_num_seqs=8, max_model_len=64)
    engine = VLLMRollout(path, config, EngineContext())
    result: dict[str, Any] = {"loaded": apart(model, engine.generate(requests))}
    layers = [layer for layer in engine._model().modules() if hasattr(layer, "W_UK_T")]
    for layer, ours in zip(layers, model.model.layers, strict=True):
        for name in ("W_UK_T", "W_UV"):
            setattr(layer, name, torch.nn.Parameter(getattr(layer, name).clone(), requires_grad=False))
        changed = torch.randn_like(ours.self_attn.kv_b_proj.weight) * 0.2
        ours.self_attn.kv_b_proj.weight.data = changed
        layer.kv_b_proj.weight.copy_(changed)
    places = [(layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) for layer in layers]
    engine.engine.reset_prefix_cache()
    result["stale"] = apart(model, engine.generate(requests))
    engine._rpc("rlsys_derive")
    engine.engine.reset_prefix_cache()
    result["derived"] = apart(model, engine.generate(requests))
    result["in_place"] = [(layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) for layer in layers] == places
    engine.close()
    return result


@pytest.mark.vllm
def test_what_is_derived_from_weights_is_derived_again_in_place(latent: Toy) -> None:
    (result,) = run_ranks(1, derived_in_place, latent.model)
    assert result["loaded"] < 1e-4
    assert result["stale"] > 0.05
    assert result["derived"] < 1e-4
    assert result["in_place"]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_latent_attention_is_trained_and_served(latent: Toy, tmp_path: Path) -> None:
    more = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.parity.max_limit=1e-3")
    lines = follow_large_updates(latent, tmp_path, MEGATRON, *more, "trainer.device=cpu")
    assert all(line["parity/max_abs"] < 1e-4 for line in lines)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_weights_pushed_in_place_on_a_gpu_are_served(
    engine: str, latent: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = f"{ROLLOUT}.engine_kwargs.{engine}.attention_backend={'TRITON_MLA' if engine == 'vllm' else 'triton'}"
    more = (f"{ROLLOUT}.name={engine}", f"+{kwargs}", *GPU_MEMORY[engine])
    limits = (f"{ROLLOUT}.parity.mean_limit=0.05", f"{ROLLOUT}.parity.rows=32", f"{ROLLOUT}.validate_weight=true")
    lines = follow_large_updates(latent, tmp_path, MEGATRON, *more, *limits)
    with capsys.disabled():
        print(f"{engine}: parity/mean_abs", *(round(line["parity/mean_abs"], 5) for line in lines))
