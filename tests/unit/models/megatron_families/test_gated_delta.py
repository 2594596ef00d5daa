"""How gated delta layers and gated attention lie in Megatron, against what transformers makes of its projections."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

from rlsys.engines.megatron.weights import load_shards
from rlsys.models.hf import in_memory
from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.planning.footprint import decoder_of
from tests.contracts.train_engine import TP2_SP, Case, megatron_engine, one_step, reference
from tests.fla_stand_in import HAS_PACKED_DELTA
from tests.ranks import run_ranks
from tests.tiny_vision import QWEN35, vision_rows
from tests.unit.engines.test_megatron_vision import WORLDS, expected_of, stepped
from tests.unit.models.megatron_families.tiny import CONFIGS

TP, HIDDEN, KEYS, VALUES, K, V = 2, 32, 4, 8, 6, 5


def filled(name: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A random model and what each tensor-parallel rank holds of it."""
    config, draw = CONFIGS[name], torch.Generator().manual_seed(0)
    family, ranks = family_of(config), []
    model = {n: torch.randn(shape, generator=draw) for n, shape in family.hf_shapes(config).items()}
    for rank in range(TP):
        place = RankPlace(ParallelSizes(tp=TP, etp=1), tp_rank=rank)
        shards = family.shards(config, place)
        local = {n: torch.full(shape, torch.nan) for n, shape in family.local_shapes(config, place, shards).items()}
        load_shards(in_memory(model), shards, local)
        ranks.append({n.removeprefix("0.decoder.layers."): t for n, t in local.items()})
    return model, ranks


def of_ranks(whole: Tensor) -> tuple[Tensor, ...]:
    return whole.chunk(TP)


def test_input_projections_of_qwen3_next_are_split_as_transformers_splits_their_outputs() -> None:
    model, ranks = filled("qwen3-next")
    with torch.device("meta"):
        layer = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**CONFIGS["qwen3-next"]), 0)
    qkvz, ba = (model[f"model.layers.0.linear_attn.in_proj_{part}.weight"].T[None] for part in ("qkvz", "ba"))
    parts = [x.reshape(HIDDEN, -1).T for x in layer.fix_query_key_value_ordering(qkvz, ba)]
    assert [len(part) for part in parts] == [KEYS * K, KEYS * K, VALUES * V, VALUES * V, VALUES, VALUES]
    for rank, pieces in zip(ranks, zip(*map(of_ranks, parts), strict=True), strict=True):
        assert torch.equal(rank["0.self_attention.in_proj.weight"], torch.cat(pieces))


def test_what_qwen3_5_stores_apart_and_convolutions_keep_their_heads_together() -> None:
    model, ranks = filled("qwen3.5")
    prefix = "model.layers.0.linear_attn."
    sizes = [KEYS * K, KEYS * K, VALUES * V]
    projected = model[f"{prefix}in_proj_qkv.weight"].split(sizes)
    parts = [*projected, *(model[f"{prefix}in_proj_{part}.weight"] for part in "zba")]
    convolved = model[f"{prefix}conv1d.weight"].split(sizes)
    own = "0.self_attention."
    for number, rank in enumerate(ranks):
        assert torch.equal(rank[own + "in_proj.weight"], torch.cat([of_ranks(part)[number] for part in parts]))
        assert torch.equal(rank[own + "conv1d.weight"], torch.cat([of_ranks(part)[number] for part in convolved]))
        assert torch.equal(rank[own + "A_log"], of_ranks(model[f"{prefix}A_log"])[number])
        assert torch.equal(rank[own + "out_norm.weight"], model[f"{prefix}norm.weight"])


def test_gates_lie_below_the_queries_of_their_group() -> None:
    model, ranks = filled("qwen3.5")
    groups, size = 2, 16
    prefix = "model.layers.1.self_attn."
    queries, gates = model[f"{prefix}q_proj.weight"].view(groups, 4, 2, size, HIDDEN).unbind(2)
    keys, values = (model[f"{prefix}{part}_proj.weight"].view(groups, 1, size, HIDDEN) for part in "kv")
    whole = torch.cat([queries, gates, keys, values], dim=1).flatten(0, 2)
    for rank, piece in zip(ranks, of_ranks(whole), strict=True):
        assert torch.equal(rank["1.self_attention.linear_qkv.weight"], piece)


@pytest.mark.skipif(not HAS_PACKED_DELTA, reason="needs megatron-core>=0.19")
def test_ranks_that_share_heads_have_the_gradients_of_the_reference() -> None:
    expected = reference("qwen3.5", "lm")[2]
    case = Case(rows=3, megatron=TP2_SP)
    for rank in run_ranks(2, one_step, megatron_engine, "qwen3.5", "lm", case):
        assert rank["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(rank["gradients"][name].double(), gradient, rtol=2e-3, atol=1e-6, msg=name)


@pytest.mark.skipif(not HAS_PACKED_DELTA, reason="needs megatron-core>=0.19")
@pytest.mark.parametrize("layout", ["one", "sp", "pp", "cp"])
def test_images_have_the_log_probs_and_gradients_of_transformers(layout: str) -> None:
    rows = vision_rows(QWEN35)
    scores, gradients = expected_of(QWEN35, rows)
    for own_scores, own_gradients in run_ranks(WORLDS.get(layout, 2), stepped, QWEN35, layout, {}):
        mask = rows.tensors["response_mask"].bool()
        torch.testing.assert_close(own_scores.double()[mask], scores[mask], rtol=0, atol=2e-6)
        assert own_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[name].double(), gradient, rtol=2e-3, atol=1e-6, msg=name)


PUBLISHED = [
    ("qwen3_next", {}, 79.7, 48),
    ("qwen3_5_moe_text", {"num_experts": 256, "num_hidden_layers": 40, "moe_intermediate_size": 512}, 34.7, 40),
]


@pytest.mark.parametrize(("model_type", "sizes", "billions", "layers"), PUBLISHED)
def test_published_sizes_are_met(model_type: str, sizes: dict[str, Any], billions: float, layers: int) -> None:
    """Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B have 3B active parameters; one layer in four attends."""
    config = AutoConfig.for_model(model_type, **sizes).to_dict()
    family, decoder = family_of(config), decoder_of(config)
    assert round(decoder.parameters / 1e9, 1) == billions
    assert decoder.active / 1e9 == pytest.approx(3, abs=0.6)
    assert decoder.attended == layers // 4 * 2 * 16 * 256
    older = {key: value for key, value in config.items() if key != "layer_types"}
    assert family.hf_shapes(older) == family.hf_shapes(config)


def test_the_layer_for_multi_token_prediction_is_carried() -> None:
    config = CONFIGS["qwen3.5"]
    carried = family_of(config).carried(config)
    assert carried["mtp.fc.weight"] == (32, 64)
    assert carried["mtp.layers.0.self_attn.q_proj.weight"] == (2 * 8 * 16, 32)
    assert carried["mtp.layers.0.mlp.down_proj.weight"] == (32, 64)
    own = {"norm", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
    assert {name.split(".")[1] for name in carried} == {"layers", *own}
    sparse = CONFIGS["qwen3-next"]
    assert "mtp.layers.0.mlp.experts.7.up_proj.weight" in family_of(sparse).carried(sparse)
    assert prod(family_of(sparse).carried(sparse)["mtp.layers.0.mlp.shared_expert_gate.weight"]) == 32
