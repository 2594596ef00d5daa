"""Shards of simulated ranks: each element once a replica, the same bits when converted back, Megatron's own order."""

import importlib.util
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from rlsys.engines.megatron.weights import load_shards
from rlsys.models.hf import in_memory
from rlsys.models.megatron.family import Family, family_of
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.planning.footprint import decoder_of
from rlsys.planning.image_encoder import plan_facts
from rlsys.utils.errors import ConfigError
from tests.unit.models.megatron_families.assemble import full_tensors
from tests.unit.models.megatron_families.tiny import CONFIGS, DENSE, PLAIN_YARN, YARN

MODELS = [
    name for name in CONFIGS if name not in ("llama-linear-rope", "qwen3-moe-unnormalised", "glm4-moe-air", "mistral")
]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[name], **changes}


def random_model(family: Family, config: dict[str, Any]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=draw) for n, shape in family.hf_shapes(config).items()}


def places(tp: int, pp: int, vp: int, ep: int, etp: int) -> Iterator[RankPlace]:
    for t, p, e, x in product(range(tp), range(pp), range(ep), range(etp)):
        yield RankPlace(ParallelSizes(tp, pp, vp, 1, ep, etp), t, p, e, x)


def at(**sizes: int) -> RankPlace:
    return RankPlace(ParallelSizes(**sizes))  # type: ignore[arg-type]


def empty_locals(family: Family, config: dict[str, Any], place: RankPlace, **flags: Any) -> dict[str, Tensor]:
    """Local tensors full of what must not stay."""
    shapes = family.local_shapes(config, place, family.shards(config, place, **flags))
    return {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


def round_trip(config: dict[str, Any], ranks: list[RankPlace], **flags: Any) -> None:
    family = family_of(config)
    shapes, model = family.hf_shapes(config), random_model(family, config)
    holders = []
    for place in ranks:
        shards = family.shards(config, place, **flags)
        local = empty_locals(family, config, place, **flags)
        load_shards(in_memory(model), shards, local)
        assert all(prod(shard.box.shape) for shard in shards)
        assert not any(tensor.isnan().any() for tensor in local.values())
        held = sum(prod(shard.box.shape) for shard in shards)
        spare = sum(tensor.numel() for tensor in local.values()) - held
        assert spare <= 2 * place.sizes.tp * config["hidden_size"]
        holders.append((shards, in_memory(local)))
    back = dict(full_tensors(shapes, holders))
    assert list(back) == list(model)
    assert all(torch.equal(back[name], model[name]) for name in model)


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_gives_the_same_bits_back(name: str) -> None:
    config = config_of(name)
    expert_sizes = list(product((1, 2, 4), (1, 2))) if "num_experts_per_tok" in config else [(1, 1), (1, 2)]
    tried = set()
    if name == "gpt-oss":
        expert_sizes = [(1, 1), (2, 1), (4, 1)]
    for tp, (pp, vp), (ep, etp) in product((1, 2, 4), ((1, 1), (2, 1), (2, 2), (4, 1)), expert_sizes):
        te = (tp + vp + pp // 2 + ep // 2 + etp) % 2 == 0  # each of the names with every size
        round_trip(config, list(places(tp, pp, vp, ep, etp)), te=te)
        tried |= {(name, size, te) for name, size in zip(("tp", "pp", "vp", "ep", "etp"), (tp, pp, vp, ep, etp))}
    assert len(tried) == 2 * sum(map(len, ((1, 2, 4), (1, 2, 4), (1, 2), *map(set, zip(*expert_sizes)))))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_odd_sizes_give_the_same_bits_back(data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from((1, 2, 3, 4, 6)), "tp")
    groups = data.draw(st.sampled_from([g for g in range(1, 13) if g % tp == 0 or tp % g == 0]), "groups")
    heads = groups * data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if groups * n % tp == 0]), "per group")
    config = config_of(
        data.draw(st.sampled_from(["llama", "qwen2-tied", "qwen3"]), "family"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=data.draw(st.integers(1, 5), "head_dim") * (1 if groups % tp == 0 else tp),
        hidden_size=data.draw(st.integers(1, 9), "hidden"),
        intermediate_size=tp * data.draw(st.integers(1, 5), "ffn"),
        vocab_size=data.draw(st.integers(tp * tp, 60), "vocab"),
        num_hidden_layers=2,
    )
    pp = data.draw(st.sampled_from((1, 2)), "pp")
    round_trip(config, list(places(tp, pp, 1, 1, 1)))


def test_queries_keys_and_values_lie_group_by_group() -> None:
    config = config_of("qwen2-tied", num_key_value_heads=4)
    family, hidden, size = family_of(config), 32, 4
    model = random_model(family, config)
    prefix = "model.layers.1.self_attn."
    q, k, v = (model[f"{prefix}{part}_proj.weight"].view(4, -1, hidden) for part in "qkv")
    fused = torch.cat([q, k, v], dim=1).view(-1, hidden)
    biases = [model[f"{prefix}{part}_proj.bias"].view(4, -1) for part in "qkv"]
    for rank in range(size):
        local = _filled(config, model, RankPlace(ParallelSizes(tp=size), tp_rank=rank))
        own = "0.decoder.layers.1.self_attention."
        assert torch.equal(local[own + "linear_qkv.weight"], fused.chunk(size)[rank])
        assert torch.equal(local[own + "linear_qkv.bias"], torch.cat(biases, dim=1).view(-1).chunk(size)[rank])
        out = model[prefix + "o_proj.weight"].chunk(size, dim=1)[rank]
        assert torch.equal(local[own + "linear_proj.weight"], out)


def test_gate_is_stored_above_up_and_padding_is_zero() -> None:
    config = config_of("llama", vocab_size=9)
    model = random_model(family_of(config), config)
    local = _filled(config, model, RankPlace(ParallelSizes(tp=2), tp_rank=1))
    gate, up = (model[f"model.layers.2.mlp.{part}_proj.weight"].chunk(2)[1] for part in ("gate", "up"))
    assert torch.equal(local["0.decoder.layers.2.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    embedding = local["0.embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:4], model["model.embed_tokens.weight"][5:])
    assert embedding.shape == (5, 32)
    assert not embedding[4:].any()


def test_experts_are_numbered_from_the_first_of_the_rank() -> None:
    config = config_of("mixtral")
    model = random_model(family_of(config), config)
    place = RankPlace(ParallelSizes(ep=4, etp=2), ep_rank=1, etp_rank=1)
    w1, w3 = (model[f"model.layers.0.block_sparse_moe.experts.3.w{n}.weight"].chunk(2)[1] for n in (1, 3))
    one_by_one = _filled(config, model, place)["0.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"]
    grouped = _filled(config, model, place, te=True)["0.decoder.layers.0.mlp.experts.linear_fc1.weight1"]
    assert torch.equal(one_by_one, torch.cat([w1, w3]))
    assert torch.equal(grouped, one_by_one)


def test_transformer_engine_names() -> None:
    def names(model: str) -> set[str]:
        config = config_of(model)
        shards = family_of(config).shards(config, RankPlace(), te=True)
        return {shard.local.removeprefix("0.decoder.layers.") for shard in shards}

    dense = {name for name in names("qwen3") if name.startswith(("0.self", "0.mlp", "0.input", "0.pre"))}
    assert dense == {
        "0.self_attention.linear_qkv.layer_norm_weight",
        "0.self_attention.linear_qkv.weight",
        "0.self_attention.linear_proj.weight",
        "0.self_attention.q_layernorm.weight",
        "0.self_attention.k_layernorm.weight",
        "0.mlp.linear_fc1.layer_norm_weight",
        "0.mlp.linear_fc1.weight",
        "0.mlp.linear_fc2.weight",
    }
    latent = {name for name in names("deepseek-v3") if name.startswith("1.") and ".experts." not in name}
    assert latent == {
        "1.input_layernorm.weight",
        "1.self_attention.linear_q_down_proj.weight",
        "1.self_attention.linear_q_up_proj.layer_norm_weight",
        "1.self_attention.linear_q_up_proj.weight",
        "1.self_attention.linear_kv_down_proj.weight",
        "1.self_attention.linear_kv_up_proj.layer_norm_weight",
        "1.self_attention.linear_kv_up_proj.weight",
        "1.self_attention.linear_proj.weight",
        "1.pre_mlp_layernorm.weight",
        "1.mlp.router.weight",
        "1.mlp.router.expert_bias",
        "1.mlp.shared_experts.linear_fc1.weight",
        "1.mlp.shared_experts.linear_fc2.weight",
    }


def test_latent_down_projections_are_whole_in_transformer_engine_only() -> None:
    config = config_of("deepseek-v3")
    family, place = family_of(config), RankPlace(ParallelSizes(tp=2), tp_rank=1)
    name = "0.decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    shapes = [family.local_shapes(config, place, family.shards(config, place, te=te)) for te in (False, True)]
    assert [shape[name] for shape in shapes] == [(10, 32), (20, 32)]


def test_interleaved_and_uneven_pipelines() -> None:
    family = family_of(config_of("llama"))

    def split(layers: int, **sizes: Any) -> list[list[list[int]]]:
        config = config_of("llama", num_hidden_layers=layers)
        return [
            family.layers_of(config, RankPlace(ParallelSizes(**sizes), pp_rank=rank)) for rank in range(sizes["pp"])
        ]

    assert split(8, pp=2, vp=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert split(7, pp=3, first_layers=1) == [[[0]], [[1, 2, 3]], [[4, 5, 6]]]
    assert split(7, pp=2, last_layers=3) == [[[0, 1, 2, 3]], [[4, 5, 6]]]
    assert split(10, pp=3, vp=2, last_layers=2) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]


def test_tied_output_is_held_by_the_last_stage_too() -> None:
    config = config_of("qwen2-tied")
    family = family_of(config)
    last = family.shards(config, RankPlace(ParallelSizes(pp=2), pp_rank=1))
    assert {s.box.tensor for s in last if s.local == "0.output_layer.weight"} == {"model.embed_tokens.weight"}
    assert not any(s.local == "0.output_layer.weight" for s in family.shards(config, RankPlace()))
    assert family.aliases(config) == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(("head", "held"), [("value", {"score.weight", "score.bias"}), ("score", {"score.weight"})])
def test_scalar_heads_replace_the_output(head: Any, held: set[str]) -> None:
    config = config_of("qwen2-tied")
    family = family_of(config)
    shards = family.shards(config, RankPlace(ParallelSizes(tp=2), tp_rank=1), head=head)
    assert {s.box.tensor for s in shards if "output_layer" in s.local} == held
    assert held <= family.hf_shapes(config, head=head).keys()
    assert not family.model_args(config, tp_size=2, head=head)["share_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    ("model", "changes", "place", "words"),
    [
        (
            "llama",
            {},
            at(tp=3),
            "8 attention heads are not divisible by tensor_model_parallel_size=3",
        ),
        (
            "llama",
            {"num_key_value_heads": 8, "num_attention_heads": 24},
            at(tp=12),
            "neither a multiple",
        ),
        ("llama", {}, at(pp=3), "num_layers_in_last_pipeline_stage"),
        ("llama", {}, at(pp=4, vp=2), "4 layers cannot be split"),
        ("llama", {}, at(vp=2), "needs pipeline_model_parallel_size > 1"),
        ("llama", {}, at(ep=2), "without experts"),
        ("llama", {"vocab_size": 5}, at(tp=4), "leaves nothing"),
        ("llama", {"attention_bias": True}, RankPlace(), "attention_bias=True"),
        ("llama", {"hidden_act": "gelu"}, RankPlace(), "hidden_act='gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, RankPlace(), "rotary scaling"),
        ("llama", {"num_hidden_layers": None}, RankPlace(), "lacks num_hidden_layers"),
        ("gemma3", {"final_logit_softcapping": 30.0}, RankPlace(), "final_logit_softcapping=30.0"),
        ("gemma3", {"use_bidirectional_attention": True}, RankPlace(), "use_bidirectional_attention=True"),
        (
            "qwen3-moe",
            {},
            at(ep=3),
            "8 experts are not divisible by expert_model_parallel_size=3",
        ),
        ("qwen3-moe", {}, at(etp=3), "expert_tensor_parallel_size=3"),
        ("gemma3", {"rope_parameters": {"full_attention": PLAIN_YARN}}, RankPlace(), "known are default, linear;"),
        ("gpt-oss", {}, at(tp=2), "its experts are not split: set expert_tensor_parallel_size=1"),
        ("glm4-moe", {"rope_parameters": PLAIN_YARN}, RankPlace(), "yarn of whole heads"),
        ("deepseek-v3", {"num_experts_per_tok": 6}, RankPlace(), "2 x topk_group"),
        ("deepseek-v3", {"norm_topk_prob": False}, RankPlace(), "norm_topk_prob=False"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, RankPlace(), "quantization_config"),
    ],
)
def test_what_megatron_cannot_hold_or_compute_is_refused(
    model: str, changes: dict[str, Any], place: RankPlace, words: str
) -> None:
    config = config_of(model, **changes)
    with pytest.raises(ConfigError, match=words):
        family_of(config).check(config, place)


def test_unknown_families_are_named_beside_the_known() -> None:
    with pytest.raises(ConfigError, match="gpt2, only for deepseek_v3, gemma3_text, glm4_moe"):
        family_of({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    other_head = {"architectures": ["Qwen2ForTokenClassification"], "model_type": "qwen2"}
    assert family_of(other_head) is family_of(config_of("qwen2-tied"))


def test_windows_are_those_of_the_layer_types_or_of_all_layers() -> None:
    def windows(model: str, **changes: Any) -> tuple[Any, Any]:
        config = config_of(model, **changes)
        settings = family_of(config).transformer_config(config)
        return settings.get("window_size"), settings.get("window_attn_skip_freq")

    assert windows("gemma3") == ((4, 0), [1, 0, 1, 0])
    assert windows("mistral") == ((4, 0), [1, 1, 1, 1])
    assert windows("qwen2-tied", use_sliding_window=False, sliding_window=8) == (None, None)
    assert windows("llama", sliding_window=8) == (None, None)


def test_old_and_new_rotary_keys_mean_the_same() -> None:
    new = config_of("deepseek-v3")
    rope = dict(new["rope_parameters"])
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | {"rope_theta": rope.pop("rope_theta")}
    old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    family = family_of(new)
    assert family.transformer_config(old) == family.transformer_config(new)
    assert family.transformer_config(new)["rope_type"] == "yarn"


def test_published_sizes_are_met() -> None:
    """DeepSeek-V3 is published as 671B parameters and 14B more for multi-token prediction, less what is shared."""
    config = {
        **CONFIGS["deepseek-v3"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    }
    family = family_of(config)
    assert round(sum(map(prod, family.hf_shapes(config).values())) / 1e9) == 671
    extra = family.carried(config)
    assert round(sum(map(prod, extra.values())) / 1e9, 1) == 13.5
    assert extra["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert extra["model.layers.61.mlp.experts.255.up_proj.weight"] == (2048, 7168)


@pytest.mark.parametrize(("layers", "experts", "billions", "active"), [(24, 32, 20.9, 3.6), (36, 128, 116.8, 5.1)])
def test_published_sizes_of_gpt_oss_are_met(layers: int, experts: int, billions: float, active: float) -> None:
    """Active are the parameters that a token passes, the output head among them."""
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts}
    published = AutoConfig.for_model("gpt_oss", **sizes).to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    config = plan_facts(published)
    family_of(config).check(config, RankPlace(ParallelSizes(ep=8, etp=1)))
    decoder = decoder_of(config)
    assert round(decoder.parameters / 1e9, 1) == billions
    assert round((decoder.active + decoder.vocab * decoder.hidden) / 1e9, 1) == active


KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "rope_theta": 50000.0,
}
MOONLIGHT = {
    **KIMI,
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "routed_scaling_factor": 2.446,
}
KIMI_K2 = {
    **KIMI,
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.827,
    "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize(("config", "billions"), [(MOONLIGHT, 16), (KIMI_K2, 1026)])
def test_moonlight_and_kimi_k2_have_the_shape_of_deepseek_v3(config: dict[str, Any], billions: int) -> None:
    family = family_of(config)
    family.check(config, RankPlace(ParallelSizes()))
    assert round(sum(map(prod, family.hf_shapes(config).values())) / 1e9) == billions


def _filled(config: dict[str, Any], model: dict[str, Tensor], place: RankPlace, **flags: Any) -> dict[str, Tensor]:
    family = family_of(config)
    local = empty_locals(family, config, place, **flags)
    load_shards(in_memory(model), family.shards(config, place, **flags), local)
    return local


def test_the_example_of_the_guide_is_a_family(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    guide = (Path(__file__).resolve().parents[4] / "docs" / "megatron_family.md").read_text()
    (tmp_path / "family_of_the_guide.py").write_text(guide.split("```python\n")[1].split("```")[0])
    spec = importlib.util.spec_from_file_location("family_of_the_guide", tmp_path / "family_of_the_guide.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = AutoConfig.for_model("qwen2", **DENSE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = module.FAMILY.hf_shapes(config.to_dict())
    assert shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    module.FAMILY.check(config.to_dict(), RankPlace(ParallelSizes(tp=2)))
