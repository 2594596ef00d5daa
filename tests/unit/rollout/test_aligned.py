"""The aligned mode: what reaches vLLM's arguments and this process, and logits that are not rounded."""

import os
import sys
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.engines.rng import repeat_bitwise
from rlsys.models.logprobs import wide_product
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.versions import VersionTable
from rlsys.rollout.vllm.determinism import SWITCH, aligned_arguments, restored_torch
from rlsys.types import ModelRequest, SamplingParams
from rlsys.utils.errors import ConfigError

HEAD = {"hf_overrides": {"head_dtype": "float32"}}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionTable, "installed", lambda table: "0.26.0")
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def on_gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))


def test_on_a_cpu_the_head_alone_changes() -> None:
    assert aligned_arguments({}, device="cpu") == HEAD
    assert os.environ[SWITCH] == "0"


def test_on_a_gpu_kernels_are_batch_invariant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 9)
    assert aligned_arguments({}, device="cuda") == HEAD
    assert os.environ[SWITCH] == "1"


def test_overrides_of_the_user_stay() -> None:
    given = {"hf_overrides": {"head_dtype": "model", "rope_theta": 1.0}}
    assert aligned_arguments(given, device="cpu") == given


def test_what_it_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 8)
    with pytest.raises(ConfigError, match=r"full_determinism: .*older than Hopper.*full_determinism=false"):
        aligned_arguments({}, device="cuda")
    on_gpu(monkeypatch, 9)
    monkeypatch.setitem(sys.modules, "vllm", torch)
    with pytest.raises(ConfigError, match="start this process with VLLM_BATCH_INVARIANT=1"):
        aligned_arguments({}, device="cuda")


def test_torch_keeps_its_product_with_gradients() -> None:
    product = torch.bmm
    with restored_torch():
        torch.bmm = None  # type: ignore[assignment]
    assert torch.bmm is product


def test_training_takes_kernels_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    try:
        repeat_bitwise()
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


def test_wide_products_are_not_rounded() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 64).bfloat16(), torch.randn(64, 7).bfloat16()
    torch.testing.assert_close(wide_product(a, b), (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def logprobs(**more: Any) -> torch.Tensor:
    """Of 24 tokens of a small bfloat16 model whose logits are large."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, initializer_range=0.5)).bfloat16()
    engine = HFRollout(model, GenerationConfig(**more))
    asked = ModelRequest((3, 4, 5), SamplingParams(max_new_tokens=24, ignore_eos=True, seed=1))
    (answer,) = engine.generate([asked])
    ids = torch.tensor([[*asked.input_ids, *answer.output_tokens]])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, 2:-1]
        exact = (hidden.double() @ model.lm_head.weight.double().t()).log_softmax(-1)
    return torch.tensor(answer.output_logprobs) - exact.gather(1, ids[0, 3:, None])[:, 0]


def test_the_hf_engine_gives_logits_in_float32() -> None:
    assert logprobs(full_determinism=True).abs().mean() < 0.5 * logprobs().abs().mean()
