"""A model that its training engine cannot take is refused before any worker starts."""

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.models.megatron import family
from rlsys.models.megatron.family import PACKED_DELTA, decoder_family
from rlsys.utils.errors import ConfigError
from tests.contracts.train_engine import HEADS, MODELS, SHAPE
from workers.build import check_model


@pytest.mark.parametrize(
    ("model", "sizes", "says"),
    [
        (
            "qwen2-tied",
            {"tensor_model_parallel_size": 3},
            "4 attention heads are not divisible by tensor_model_parallel_size=3: set a divisor",
        ),
        ("qwen2-tied", {"pipeline_model_parallel_size": 4}, "2 layers cannot be split .*: each needs a layer$"),
        (
            "qwen3-moe",
            {"expert_model_parallel_size": 3},
            "4 experts are not divisible by expert_model_parallel_size=3: set a divisor",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(model: str, sizes: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    with pytest.raises(ConfigError, match=says) as error:
        check_model("critic.megatron", ModelConfig(path=str(tmp_path)), MegatronConfig(full_determinism=False, **sizes))
    assert str(error.value).startswith("critic.megatron: ")


def test_types_are_those_of_the_key_for_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"]))

    def check(dtype: Any, device: str, **overrides: object) -> None:
        sizes = MegatronConfig(full_determinism=False, dtype=dtype, override_transformer_config=overrides)
        check_model("critic.megatron", ModelConfig(path=str(tmp_path)), sizes, device=device)

    for dtype, device, name, value in (
        ("float32", "auto", "params_dtype", "bfloat16"),
        ("auto", "cpu", "bf16", True),
        ("auto", "cuda", "pipeline_dtype", "float32"),
    ):
        with pytest.raises(ConfigError, match=f"does not take {name}: remove it; .* dtype .* keys of their own"):
            check(dtype, device, **{name: value})
    check("bfloat16", "auto", params_dtype="bfloat16", pipeline_dtype="bfloat16", bf16=True)
    check("auto", "auto", params_dtype="bfloat16", bf16=True)


def test_what_can_be_cut_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-moe"]))
    sizes = MegatronConfig(full_determinism=False, tensor_model_parallel_size=2, expert_model_parallel_size=4)
    check_model("critic.megatron", ModelConfig(path=str(tmp_path)), sizes)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3_next", "num_experts": 4}, "packed rows do not go with linear_attention layers"),
        ({"model_type": "falcon"}, "falcon cannot take packed rows: set use_remove_padding=false"),
        ({"model_type": "nemotron"}, "nemotron cannot take packed rows: set use_remove_padding=false"),
        ({"model_type": "gemma2"}, "gemma2 cannot take packed rows: set use_remove_padding=false"),
        ({"model_type": "cohere"}, "cohere changes its logits"),
        (
            {"model_type": "falcon_h1", "lm_head_multiplier": 0.04},
            r"falcon_h1 changes its logits \(lm_head_multiplier\)",
        ),
        ({"model_type": "recurrent_gemma"}, r"recurrent_gemma changes its logits \(logits_soft_cap\)"),
        ({"model_type": "xlstm"}, r"xlstm changes its logits \(output_logit_soft_cap\)"),
        ({"model_type": "phimoe"}, "phimoe adds noise to its router: set override_config.router_jitter_noise=0"),
    ],
)
def test_what_fsdp_would_compute_otherwise_is_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, **SHAPE, **HEADS}))
    with pytest.raises(ConfigError, match=f"^critic.fsdp: .*{says}"):
        check_model("critic.fsdp", ModelConfig(path=str(tmp_path)), ShardConfig())


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (MODELS["llama-6-heads-3-kv"], {}, "it does not divide num_key_value_heads=3; set 1"),
        (
            MODELS["llama-biases"] | {"intermediate_size": 49},
            {},
            r"the shape \(49, 32\) of model.layers.0.mlp.gate_proj",
        ),
        (MODELS["llama-untied"] | {"vocab_size": 97}, {}, r"the shape \(97, 32\) of model.embed_tokens.weight"),
        (MODELS["qwen3-moe"], {}, r"how to split model.layers.0.mlp.experts.gate_up_proj \(packed_colwise\)"),
        (MODELS["gpt-oss"], {}, "plan of gpt_oss does not say how to split it"),
        (MODELS["qwen2-tied"], {"lora_rank": 2}, "low-rank adapters and image encoders are not split"),
    ],
)
def test_what_fsdp_cannot_split_is_refused(
    config: dict[str, Any], settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"^critic.fsdp: tensor_parallel_size=2: .*{says}"):
        check_model("critic.fsdp", ModelConfig(path=str(tmp_path), **settings), ShardConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("model", ["qwen3-next", "qwen3.5"])
def test_gated_delta_layers_need_other_packages(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    megatron, lacking = ModuleSpec("megatron", None, is_package=True), "flash-linear-attention"
    installed: dict[str, ModuleSpec | None] = {"megatron": megatron}
    folder = tmp_path / "megatron" / PACKED_DELTA
    megatron.submodule_search_locations = [str(tmp_path / "megatron")]
    monkeypatch.setattr(family, "find_spec", installed.get)
    triton: list[SimpleNamespace] = []
    monkeypatch.setattr(family, "distributions", lambda name: {"triton": triton}[name])

    def check(**sizes: int) -> None:
        check_model("critic.megatron", ModelConfig(path=str(tmp_path)), MegatronConfig(full_determinism=False, **sizes))

    with pytest.raises(ConfigError, match=f"^critic.megatron: .*: pip install 'megatron-core>=0.19' {lacking} on"):
        check()
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f": pip install {lacking} on Python 3.12, or set strategy=fsdp and"):
        check()
    installed["fla"] = ModuleSpec("fla", None)
    check()
    triton[:] = [SimpleNamespace(version="3.7.1")]
    check()
    triton[:] = [SimpleNamespace(version="3.6.0")]
    with pytest.raises(ConfigError, match=": pip install tilelang on"):
        check()
    installed["tilelang"] = ModuleSpec("tilelang", None)
    check(tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match="2 gated delta heads are not divisible by tensor x context parallel size=4"):
        check(tensor_model_parallel_size=2, context_parallel_size=2)


def test_a_decoder_behind_an_encoder_without_a_table_is_refused() -> None:
    config = AutoConfig.for_model("gemma3")
    with pytest.raises(ConfigError, match="the image encoder of gemma3: set strategy=fsdp"):
        decoder_family(config)
    assert decoder_family(config.get_text_config())[0].model_types == ("gemma3_text",)
