"""Configurations, structure without memory, and weights from files."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlsys.config.schema.model import ModelConfig
from rlsys.models.flops import ModelFlops, measured_flops
from rlsys.models.hf import (
    build,
    check_names,
    open_model_dir,
    open_weights,
    read_config,
    read_whole,
    saved_config,
    saved_generation,
)
from rlsys.rollout.hf.engine import load_causal_lm
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.contracts.train_engine import MODELS

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_config(ModelConfig(override_config=QWEN)))
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return tmp_path / "model"


def test_a_model_without_a_path_needs_its_whole_configuration() -> None:
    with pytest.raises(ValueError, match="a model needs a path, or override_config with model_type"):
        read_config(ModelConfig(override_config={"hidden_size": 16}))


def test_overrides_are_applied_and_unknown_ones_refused(directory: Path) -> None:
    config = read_config(ModelConfig(path=str(directory), override_config={"rms_norm_eps": 0.5}))
    assert config.rms_norm_eps == 0.5
    with pytest.raises(ConfigError, match=r"override_config\.rms_norm: qwen2 has no such setting"):
        read_config(ModelConfig(path=str(directory), override_config={"rms_norm": 0.5}))


def test_a_configuration_is_of_transformers_class_where_an_engine_put_its_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfAnEngine(Qwen2Config):
        pass

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "qwen2", OfAnEngine)  # what AutoConfig.register does
    assert type(read_config(ModelConfig(path=str(directory)))) is Qwen2Config
    assert type(saved_config(directory)) is Qwen2Config


def test_kimi_k2_is_read_as_the_deepseek_v3_that_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(read_config(ModelConfig(override_config=MODELS["deepseek-v3"]))).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "model_type": "kimi_k2"}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    config = read_config(ModelConfig(path=str(tmp_path)))
    assert not caplog.records, "transformers warns of a model of another type"
    again = load_causal_lm(tmp_path, load_format="auto", dtype="float32", device="cpu").eval()
    ids = torch.arange(1, 9)[None]
    assert (config.model_type, type(again)) == ("deepseek_v3", type(model))
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_structure_has_no_memory_but_true_buffers() -> None:
    config = read_config(ModelConfig(override_config=QWEN))
    model = build(config, head="lm", packed=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name])


@pytest.mark.parametrize(("model_type", "vision"), [("gemma3", "siglip_vision_model"), ("mistral3", "pixtral")])
def test_text_trains_models_whose_images_are_not_read(model_type: str, vision: str) -> None:
    text = {**QWEN, "model_type": {"gemma3": "gemma3_text", "mistral3": "mistral"}[model_type]}
    tower = {"model_type": vision, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
    tower |= {"num_attention_heads": 2, "patch_size": 14}
    settings = {"model_type": model_type, "text_config": text, "vision_config": tower}
    config = read_config(ModelConfig(override_config=settings))
    model = build(config, head="lm", packed=True)
    expected = dict(AutoModelForImageTextToText.from_config(config).named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(expected)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name])


@pytest.mark.parametrize(
    ("setting", "packed", "message"),
    [
        ({"attention_dropout": 0.1}, True, "attention_dropout"),
        ({"model_type": "cohere"}, False, "logit_scale"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, True, "conv layers"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(setting: dict[str, Any], packed: bool, message: str) -> None:
    config = read_config(ModelConfig(override_config={**QWEN, **setting}))
    with pytest.raises(ConfigError, match=message):
        build(config, head="lm", packed=packed)


def test_weights_are_read_box_by_box(directory: Path) -> None:
    assert len(list(directory.glob("*.safetensors"))) > 1
    weights = open_model_dir(directory)
    whole = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    assert set(weights) == set(whole)
    for name, tensor in whole.items():
        rows = tensor.shape[0] // 2
        start, shape = (rows, *(0 for _ in tensor.shape[1:])), (tensor.shape[0] - rows, *tensor.shape[1:])
        assert weights[name].shape == tuple(tensor.shape)
        assert torch.equal(weights[name].read(start, shape), tensor[rows:])


def test_random_weights_depend_on_the_seed_alone() -> None:
    config = read_config(ModelConfig(override_config=QWEN))
    model = ModelConfig(override_config=QWEN)
    first, again, other = (open_weights(model, config, head="lm", seed=seed) for seed in (1, 1, 2))
    name, box = "model.layers.1.mlp.up_proj.weight", ((0, 0), (24, 16))
    assert torch.equal(first[name].read(*box), again[name].read(*box))
    assert not torch.equal(first[name].read(*box), other[name].read(*box))


def test_a_scalar_head_that_is_not_in_the_files_is_drawn_from_the_seed(directory: Path) -> None:
    source = ModelConfig(path=str(directory))
    weights = [open_weights(source, read_config(source), head="scalar", seed=5) for _ in range(2)]
    assert torch.equal(*(w["score.weight"].read((0, 0), (1, 16)) for w in weights))
    assert weights[0]["score.bias"].read((0,), (1,)) == 0


class Runs:
    """What a pickle would execute."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def test_pickled_weights_are_read_as_tensors(directory: Path) -> None:
    tensors = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    names = sorted(tensors)
    torch.save({name: tensors[name] for name in names[::2]}, directory / "pytorch_model-00001-of-00002.bin")
    torch.save({name: tensors[name] for name in names[1::2]}, directory / "pytorch_model-00002-of-00002.bin")
    weights = open_model_dir(directory)
    assert set(weights) == set(names)
    for name, tensor in tensors.items():
        assert torch.equal(read_whole(weights[name]), tensor)
        assert weights[name].dtype == "F32"


def open_whole(directory: Path) -> None:
    source = ModelConfig(path=str(directory))
    build(read_config(source), head="lm", packed=False)
    open_weights(source, read_config(source), head="lm")


def damage_truncate(path: Path) -> None:
    file = min(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])


def damage_remove(path: Path) -> None:
    min(path.glob("*.safetensors")).unlink()


def damage_pickle(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": torch.zeros(1), "run": Runs()}, path / "pytorch_model.bin")


def damage_all(path: Path) -> None:
    for file in path.glob("*.safetensors"):
        file.unlink()


def damage_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def damage_type(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))


def damage_quantised(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


def damage_setting(name: str, value: Any) -> Any:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, name: value}))

    return damage


def damage_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("[1]")


def damage_gone(path: Path) -> None:
    (path / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "cannot be read"),
        (damage_remove, "tensors of its index are missing"),
        (damage_pickle, "cannot be read as tensors, so it is not read at all"),
        (damage_all, "no weights in .*: neither safetensors files nor pytorch_model.bin"),
        (damage_config, r"cannot read .*config.json"),
        (damage_type, "no-such-model"),
        (damage_quantised, "is quantised"),
        (damage_gone, "no config.json"),
        (damage_index, "is not an index of safetensors files: it has no weight_map"),
        (damage_setting("dtype", "float7"), "cannot read .*config.json: .*float7"),
        (damage_setting("dtype", 5), "dtype=5 is not a type"),
        (damage_setting("rms_norm_eps", "small"), "cannot read .*config.json: .*rms_norm_eps"),
        (damage_setting("hidden_act", "nosuch"), "transformers cannot build this .* model, config.json: .*nosuch"),
    ],
)
def test_a_bad_model_directory_is_reported_by_name(directory: Path, damage: Any, message: str) -> None:
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_whole(directory)
    assert len(str(raised.value).splitlines()) == 1


def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert saved_generation(tmp_path) is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        saved_generation(tmp_path)


def test_weights_of_another_model_are_reported_by_tensor(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(2, 3), "c": torch.zeros(1), "x.rotary_emb.inv_freq": torch.zeros(1)},
        tmp_path / "m.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=r"missing \(b\).*not the model's \(c\).*a is \(2, 3\), the model's \(3, 2\)"
    ):
        check_names({"a": (3, 2), "b": (1,)}, open_model_dir(tmp_path))
    check_names({"a": (2, 3)}, open_model_dir(tmp_path), aliases=["c"])


def test_flops_count_every_matrix_product_of_a_transformer() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = read_config(ModelConfig(override_config=QWEN))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    length = 24
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long))
    causal_saving = 2 * 4 * (length**2 - length * (length + 1) // 2) * 4 * 4
    flops = ModelFlops(config)
    rope = counter.get_total_flops() - causal_saving - flops.forward([length])
    assert 0 <= rope < 0.001 * counter.get_total_flops()
    assert flops.forward([3, 4]) == flops.forward([3]) + flops.forward([4])
    assert flops.forward([5]) - flops.forward([5], num_head_tokens=2) == 2 * 3 * 16 * 40


def flops_of(**config: Any) -> ModelFlops:
    return ModelFlops(read_config(ModelConfig(override_config=config)))


def test_flops_of_experts_count_those_a_token_is_sent_to() -> None:
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "model_type": "qwen3_moe"}
    layers = QWEN["num_hidden_layers"]
    dense = layers * (2 * 16 * 16 + 2 * 16 * 8)
    assert flops_of(**{**QWEN, **shape, "head_dim": 4}).blocks == dense + layers * (2 * 3 * 16 * 10 + 16 * 8)
    mixed = flops_of(**{**QWEN, **shape, "head_dim": 4, "mlp_only_layers": [0]})
    assert mixed.blocks == dense + (layers - 1) * (2 * 3 * 16 * 10 + 16 * 8) + 3 * 16 * QWEN["intermediate_size"]


def test_flops_of_deepseek_v3_count_latent_attention_shared_experts_and_the_dense_layer() -> None:
    flops = flops_of(
        model_type="deepseek_v3",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=10,
        kv_lora_rank=6,
        qk_nope_head_dim=5,
        qk_rope_head_dim=2,
        v_head_dim=3,
    )
    queries = 32 * 10 + 10 * 4 * (5 + 2)
    keys_and_values = 32 * (6 + 2) + 6 * 4 * (5 + 3)
    attention = queries + keys_and_values + 4 * 3 * 32
    sparse = 32 * 8 + 2 * (3 * 32 * 12) + 3 * 32 * (2 * 12)
    assert flops.blocks == 3 * attention + 3 * 32 * 48 + 2 * sparse
    pairs = 3 * 4 // 2
    assert flops.forward([3]) == 2 * (3 * flops.blocks + pairs * 3 * 4 * (5 + 2 + 3) + 3 * 32 * 50)


def test_flops_of_an_mlp_without_gate_are_those_of_two_matrices() -> None:
    flops = flops_of(
        model_type="gpt_neox",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    assert flops.blocks == 2 * (4 * 32 * 32 + 2 * 32 * 48)


def test_a_device_without_a_data_sheet_is_measured() -> None:
    assert 1e8 < measured_flops(torch.device("cpu"), repeats=1) < 1e13
