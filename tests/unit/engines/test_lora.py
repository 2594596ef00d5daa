"""Adapters: what is trained, what is served, the reference without them, and their files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.model_merger.convert import merge
from rlsys.models.lora import LoraSettings, adapter_weights, lora_settings, targeted
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.ranks import run_ranks
from tests.unit.engines.common import random_model, same, small_engine, small_rows, train, whole

SEED = ShardConfig(seed=4)


def lora_engine(lora_rank: int = 3, **options: Any) -> FSDPEngine:
    """An engine with adapters, of the weights that `plain_engine` has."""
    names = ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
    model = {name: options.pop(name) for name in names if name in options}
    return small_engine(random_model(lora_rank=lora_rank, **{"lora_alpha": 6, **model}), shard=SEED, **options)


def plain_engine() -> FSDPEngine:
    return small_engine(shard=SEED)


def log_probs(engine: Any) -> Tensor:
    return engine.forward(small_rows(), ("log_probs",))["log_probs"]


def train_adapters(place: Path) -> dict[str, Any]:
    plain, engine = plain_engine(), lora_engine()
    start, first = whole(plain), log_probs(engine)
    torch.testing.assert_close(first, log_probs(plain))
    assert same(start, whole(engine))
    for _ in range(3):
        assert train(engine).applied
    base = engine._parameters()
    assert all(p.grad is None and not p.requires_grad for p in base.values())
    with engine.adapters_disabled():
        assert torch.equal(log_probs(engine), first)
    assert not torch.allclose(log_probs(engine), first, atol=1e-3)
    merged = whole(engine)
    assert {name for name in merged if not torch.equal(merged[name], start[name])} == {
        name for name in merged if "_proj" in name
    }
    engine.save(place / "export", "export")
    engine.save(place / "adapter", "adapter")
    engine.save(place / "resume", "resume")
    served = small_engine(ModelConfig(path=str(place / "export")))
    torch.testing.assert_close(log_probs(served), log_probs(engine), rtol=1e-5, atol=1e-5)
    layout, local = engine.weight_layout(), engine.local_tensors()
    for shard in layout.shards:
        box = tuple(slice(s, s + n) for s, n in zip(shard.box.start, shard.box.shape, strict=True))
        torch.testing.assert_close(local[shard.local], merged[shard.box.tensor][box], rtol=1e-6, atol=1e-6)
    resumed = lora_engine()
    resumed.load(place / "resume")
    assert same(whole(resumed), merged)
    assert train(resumed) == train(engine)
    assert same(whole(resumed), whole(engine))
    return {"merged": merged, "log_probs": log_probs(served)}


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_are_trained_served_resumed_and_exported(tmp_path: Path, world: int) -> None:
    result = run_ranks(world, train_adapters, tmp_path)[0]
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    saved = dict(base.named_parameters())
    assert all(torch.equal(saved[name], tensor) for name, tensor in result["merged"].items())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        alone = (tmp_path / "adapter/lora_adapter" / name).read_bytes()
        assert alone == (tmp_path / "export/lora_adapter" / name).read_bytes()
    assert not [*(tmp_path / "adapter").glob("*.safetensors*")]
    config = json.loads((tmp_path / "export/lora_adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)


def continue_adapter(place: Path) -> tuple[Tensor, Tensor]:
    first = lora_engine()
    train(first)
    first.save(place / "export", "export")
    again = lora_engine(99, lora_adapter_path=str(place / "export/lora_adapter"))
    assert again.lora is not None
    assert (again.lora.rank, again.lora.alpha) == (3, 6.0)
    return log_probs(first), log_probs(again)


def test_training_continues_from_a_saved_adapter_and_peft_loads_it(tmp_path: Path) -> None:
    for first, again in run_ranks(2, continue_adapter, tmp_path):
        torch.testing.assert_close(first, again)
    torch.testing.assert_close(again, peft_log_probs(tmp_path / "export/lora_adapter"), rtol=1e-5, atol=1e-5)


def peft_log_probs(adapter: Path) -> Tensor:
    """What peft computes with a saved adapter on the weights that `lora_engine` has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED.seed)
        from rlsys.models.hf import read_config

        base = AutoModelForCausalLM.from_config(read_config(random_model()))
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    ids = small_rows().batch["input_ids"]
    return torch.log_softmax(model(ids).logits[:, 2:-1], -1).gather(2, ids[:, 3:, None])[..., 0]


def saved_with(place: Path, **settings: object) -> None:
    """Put settings into the configuration of a saved adapter."""
    file = place / "export/lora_adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def continue_scaled(place: Path) -> tuple[Tensor, Tensor]:
    first = lora_engine()
    train(first)
    first.save(place / "export", "export")
    saved_with(place, use_rslora=True)
    scaled = lora_engine(99, lora_adapter_path=str(place / "export/lora_adapter"))
    for name, value in {"use_dora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 60}}.items():
        saved_with(place, **{name: value})
        with pytest.raises(CheckpointError, match=f"adapters with {name} are not supported: merge it"):
            lora_engine(99, lora_adapter_path=str(place / "export/lora_adapter"))
        saved_with(place, **{name: type(value)()})
    scaled.save(place / "again", "export")
    again = lora_engine(99, lora_adapter_path=str(place / "again/lora_adapter"))
    return log_probs(scaled), log_probs(again)


def test_an_adapter_of_rslora_keeps_its_scale_and_what_has_scales_by_layer_is_refused(tmp_path: Path) -> None:
    ((scaled, again),) = run_ranks(1, continue_scaled, tmp_path)
    torch.testing.assert_close(again, scaled)
    torch.testing.assert_close(scaled, peft_log_probs(tmp_path / "export/lora_adapter"), rtol=1e-5, atol=1e-5)


def save_adapters(place: Path) -> None:
    engine = lora_engine()
    for role in ("actor", "critic"):
        engine.save(place / "global_step_1" / role, "resume")


def test_adapters_that_cannot_be_merged_later_name_the_key_of_their_role(tmp_path: Path) -> None:
    run_ranks(1, save_adapters, tmp_path)
    for role, key in {"actor": "actor_rollout_ref.actor", "critic": "critic"}.items():
        with pytest.raises(CheckpointError, match=rf"train a step more with {key}\.checkpoint\.save_contents=\[model,"):
            merge(tmp_path / "global_step_1" / role, tmp_path / "out")


def train_scalar() -> set[str]:
    engine = lora_engine(head="scalar")
    before = whole(engine)
    train(engine, outputs=("values",))
    train(engine, outputs=("values",))
    return {name for name, tensor in whole(engine).items() if not torch.equal(tensor, before[name])}


def test_a_scalar_head_is_trained_whole_beside_the_adapters() -> None:
    (changed,) = run_ranks(1, train_scalar)
    assert {"score.weight", "score.bias"} < changed
    assert all("_proj" in name for name in changed - {"score.weight", "score.bias"})


def targets(names: Any, without: Any = ()) -> set[str]:
    engine = lora_engine(2, target_modules=names, exclude_modules=without)
    return {name.rsplit(".", 2)[1] for name in engine._adapted}


def test_target_modules_pick_the_layers() -> None:
    assert run_ranks(1, targets, ("q_proj", "v_proj")) == [{"q_proj", "v_proj"}]
    assert len(run_ranks(1, targets, "all-linear")[0]) == 7
    assert run_ranks(1, targets, ("q_proj", "v_proj"), ["v_proj"]) == [{"q_proj"}]
    assert run_ranks(1, targets, "all-linear", ".*(mlp|k_proj|v_proj).*") == [{"q_proj", "o_proj"}]
    layers, settings = ["a.q_proj", "b.q_proj"], LoraSettings(2, exclude_modules=".*b.q_proj")
    assert targeted(layers, settings) == ["a.q_proj"]


def test_the_first_factor_starts_as_asked() -> None:
    name, shape = "x.lora_A.default.weight", (64, 256)
    drawn = {}
    for init in ("kaiming", "xavier", "normal"):
        settings = lora_settings(ModelConfig(lora_rank=64, lora_A_init_method=init), seed=1)
        assert settings is not None
        drawn[init] = adapter_weights(settings, {name: shape})[name].read((0, 0), shape)
    assert drawn["kaiming"].abs().max() <= 1 / 16
    assert drawn["kaiming"].std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.03)
    assert drawn["xavier"].std().item() == pytest.approx((2 / (64 + 256)) ** 0.5, rel=0.03)
    assert drawn["normal"].std().item() == pytest.approx(0.2, rel=0.03)


def wrong_settings(place: Path) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        lora_engine(2, target_modules=("nothing",))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        lora_engine(2, lora_adapter_path=str(place))


def test_wrong_targets_and_paths_are_reported(tmp_path: Path) -> None:
    run_ranks(1, wrong_settings, tmp_path)
