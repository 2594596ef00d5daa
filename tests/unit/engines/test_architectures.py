"""One training step of many architectures: packed rows and padded ones give what transformers gives in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.config.schema.model import ModelConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from tests.contracts.train_engine import ENGINES, MODELS, Case, all_steps, reference
from tests.ranks import run_ranks

NAMES = (
    "qwen3-window",
    "qwen3-moe",
    "mixtral",
    "deepseek-v3",
    "glm4-moe",
    "gpt-oss",
    "gemma3",
    "gemma4",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
)
PADDED = ("qwen3-next", "qwen3.5", "gemma2")
CASES = [Case(rows=3), Case(max_tokens=15, packed=False)]


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[Case, dict[str, Any]]]:
    return run_ranks(1, _every_step)[0]


def _every_step() -> dict[str, dict[Case, dict[str, Any]]]:
    cases = {**dict.fromkeys(NAMES, CASES), **dict.fromkeys(PADDED, CASES[1:])}
    return {name: all_steps(ENGINES["fsdp"], name, "lm", own) for name, own in cases.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_step_equals_an_unpacked_one(name: str, steps: dict[str, dict[Case, dict[str, Any]]]) -> None:
    outputs, loss, gradients = reference(name, "lm")
    packed, padded = (steps[name][case] for case in CASES)
    for made in (packed, padded):
        for output, expected in outputs.items():
            torch.testing.assert_close(made["outputs"][output].double(), expected, rtol=0, atol=2e-5)
    assert math.isclose(packed["metrics"]["loss"], loss, rel_tol=1e-5, abs_tol=1e-6)
    for key, gradient in packed["gradients"].items():
        torch.testing.assert_close(gradient, padded["gradients"][key], rtol=1e-4, atol=1e-6)
    squares = sum(float(gradient.square().sum()) for gradient in gradients.values())
    assert math.isclose(packed["report"].grad_norm, math.sqrt(squares), rel_tol=1e-4)
    for key, weight in packed["weights"].items():
        torch.testing.assert_close(weight, padded["weights"][key], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", PADDED)
def test_what_packs_do_not_go_with_is_trained_on_padded_rows(
    name: str, steps: dict[str, dict[Case, dict[str, Any]]]
) -> None:
    outputs, loss, gradients = reference(name, "lm")
    made = steps[name][CASES[1]]
    for output, expected in outputs.items():
        torch.testing.assert_close(made["outputs"][output].double(), expected, rtol=0, atol=2e-5)
    assert math.isclose(made["metrics"]["loss"], loss, rel_tol=1e-5, abs_tol=1e-6)
    squares = sum(float(gradient.square().sum()) for gradient in gradients.values())
    assert math.isclose(made["report"].grad_norm, math.sqrt(squares), rel_tol=1e-4)


def _loaded(folder: Path) -> int:
    """The tensors of an engine over the model in a folder."""
    return len(FSDPEngine(ModelConfig(path=str(folder), use_remove_padding=False)).local_tensors())


def test_tensors_that_transformers_never_reads_are_left_unread(tmp_path: Path) -> None:
    """As the multi-token prediction layer of the published Qwen3-Next and Qwen3.5; others are refused."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["qwen3-next"]))
    model.save_pretrained(tmp_path)
    file, saved = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    unread = {"mtp.fc.weight": torch.ones(2, 4), "mtp.layers.0.input_layernorm.weight": torch.ones(2)}
    save_file(saved | unread, file)
    assert run_ranks(1, _loaded, tmp_path) == [len(list(model.parameters()))]
    save_file(saved | {"model.mtp.fc.weight": torch.ones(2, 4)}, file)
    with pytest.raises(AssertionError, match=r"1 tensors are not the model's \(model.mtp.fc.weight\)"):
        run_ranks(1, _loaded, tmp_path)
