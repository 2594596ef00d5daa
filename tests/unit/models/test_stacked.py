"""Experts that transformers stacks in memory, found again under the names it saves them by."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.rollout.hf.engine import HFRollout
from tests.contracts.train_engine import MODELS


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3", "llama-untied"])
def test_the_rollout_holds_what_a_checkpoint_names(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    engine = HFRollout(model)
    layout, local = engine.weight_layout(), engine.local_tensors()
    assert layout.full_shapes == {key: tuple(tensor.shape) for key, tensor in saved.items()}
    for shard in layout.shards:
        at = tuple(slice(s, s + n) for s, n in zip(shard.local_start, shard.box.shape, strict=True))
        assert torch.equal(local[shard.local][at], saved[shard.box.tensor])
    engine.begin_update()
    engine.load([(key, tensor + 1) for key, tensor in saved.items()])
    engine.finish_update(1)
    model.save_pretrained(tmp_path / "after")
    after = load_file(tmp_path / "after" / "model.safetensors")
    assert all(torch.equal(after[key], tensor + 1) for key, tensor in saved.items())
