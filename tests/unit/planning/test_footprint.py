"""Bytes of a decoder: by hand for tiny shapes, and against the caches that the rollout makes."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rlsys.config.engines import float8_block
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.models.lora import LoraSettings
from rlsys.models.megatron.adapter_factors import factors_of, plan_adapters
from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.models.megatron.rules import extents
from rlsys.planning import footprint as fp
from rlsys.planning.roles import Computing, MegatronRole, Pass
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.hf.kv_cache import ColumnCache
from rlsys.types import ModelRequest, SamplingParams
from rlsys.utils.errors import ConfigError
from scripts.model_shapes import SHAPES

TINY = fp.decoder_of(SHAPES["tiny"])
LAYER = (64 * 64 + 64) + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
"""q and k, v with biases, o, the gated MLP, two norms."""


def test_elements_of_a_tiny_decoder() -> None:
    assert TINY.layer == LAYER == 30976
    assert TINY.outer == 250 * 64 + 64
    assert TINY.parameters == 4 * LAYER + 250 * 64 + 64 == 139968
    assert (TINY.q, TINY.kv, TINY.ffn, TINY.routed, TINY.largest) == (64, 32, 96, 0, 16000)
    assert TINY.adaptable == 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))


def test_a_token_passes_through_its_routed_experts_only() -> None:
    moe = fp.decoder_of(SHAPES["tiny-moe"])
    assert (moe.routed, moe.ffn) == (8, 8 * 48)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_stages_and_tensor_ranks_hold_the_whole(shape: str) -> None:
    config = SHAPES[shape]
    places = [RankPlace(ParallelSizes(pp=2, first_layers=_first(config)), pp_rank=rank) for rank in range(2)]
    held = [fp.held_at(config, place) for place in places]
    twice = config["vocab_size"] * config["hidden_size"] if config["tie_word_embeddings"] else 0
    assert sum(part.parameters for part in held) == fp.decoder_of(config).parameters + twice
    assert sum(part.num_layers for part in held) == config["num_hidden_layers"]


def _first(config: dict[str, int]) -> int | None:
    return config["num_hidden_layers"] // 2 if config["num_hidden_layers"] % 2 else None


def test_experts_are_counted_apart_from_the_dense_part() -> None:
    config = SHAPES["tiny-moe"]
    held = fp.held_at(config, RankPlace(ParallelSizes(ep=4)))
    assert held.experts == 4 * 2 * 3 * 64 * 48
    assert held.dense == fp.decoder_of(config).parameters - 4 * 8 * 3 * 64 * 48
    assert family_of(config).dims(config)["experts"] == 8


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), r".*layers\.[02]\..*proj"])
@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(2, 2), ParallelSizes(2, 4, ep=2, etp=1)])
def test_adapters_are_those_that_the_engine_makes(
    shape: str, targets: str | tuple[str, ...], sizes: ParallelSizes
) -> None:
    config, lora = SHAPES[shape], LoraSettings(4, target_modules=targets)
    if sizes.ep > 1 and shape == "tiny":
        sizes = replace(sizes, ep=1)
    family = family_of(config)
    plan = plan_adapters(lora, family.shards(config, RankPlace(), te=True), family.hf_shapes(config))
    for stage in range(sizes.pp):
        place = RankPlace(sizes, pp_rank=stage)
        held = family.shards(config, place, te=True)
        factors = factors_of(plan, held, family.shards(config, place.without_tensor_parallelism(), te=True))
        counts = {local: sum(prod(s.box.shape) for one in of for s in one.shards) for local, of in factors.items()}
        merged = Counter[str]()
        for local in counts:
            merged[local.rpartition(".")[0]] += prod(extents(held)[local])
        counted, experts = fp.adapters_at(config, place, lora, te=True), [n for n in counts if fp.EXPERTS in n]
        assert counted.parameters == sum(counts.values())
        assert counted.experts == sum(counts[name] for name in experts)
        assert (counted.merged, counted.num_layers) == (max(merged.values(), default=0), 4 // sizes.pp)


def test_saved_and_passing_activations_by_hand() -> None:
    plain = 10 * (16 * 64 + 2 * 64 + 2 * (2 * 64 + 2 * 32 + 4 * 96))
    assert fp.layer_saved_bytes(TINY, 10, c=2, fused=False) == plain
    fused = 10 * (2 * 4 * 64 + 2 * (2 * 64 + 2 * 32 + 3 * 96))
    assert fp.layer_saved_bytes(TINY, 10, c=2, fused=True) == fused
    halved = fp.layer_saved_bytes(TINY, 10, c=2, fused=True, tp=2, shared_norms=True)
    assert halved == fused // 2
    sparse = replace(TINY, routed=8)
    sent, four = 10 * 2 * 2 * 8 * 64, {"c": 2, "fused": True, "tp": 4, "shared_norms": True}
    assert fp.layer_saved_bytes(sparse, 10, routed_tp=4, **four) == (fused + sent) // 4
    for expert_tp, over in ((1, 4), (2, 2), (4, 1), (None, 1)):  # with parts of experts, the rows of all these ranks
        sizes = ParallelSizes(tp=4, etp=expert_tp, sequence_parallel=True)
        role = MegatronRole(SHAPES["30B-A3B"], Computing(2, "cuda", recompute=False), sizes, 8)
        saved = fp.layer_saved_bytes(role.model, 10, routed_tp=over, **four)
        assert role.layer_saved_bytes(Pass(10, 5, 1)) == saved
    assert fp.checkpoint_bytes(TINY, 10, c=2) == 10 * 64 * 2


def test_chunks_of_logits() -> None:
    big = fp.decoder_of(SHAPES["7B"])
    chunk, slope = 4 * ((1 << 28) // 152064) * 152064, 4 * 152064 * 3584
    sizes = {"c": 2, "device": "cuda", "entropy": False}
    assert fp.logits_bytes(big, 5000, backward=False, trained=True, **sizes) == 2 * chunk
    logits = fp.logits_bytes(big, 5000, backward=True, trained=True, **sizes)
    assert logits == chunk * 3 // 2 + 2 * slope
    assert fp.logits_bytes(big, 5000, backward=True, trained=False, **sizes) == chunk * 5 // 2
    few = fp.logits_bytes(big, 10, backward=False, trained=True, **sizes)
    assert few == 2 * 4 * 10 * 152064


@pytest.mark.parametrize(
    ("prompt", "response", "columns"), [(10, 4, 14), (100, 256, 356), (100, 300, 534), (9, 520, 781)]
)
def test_columns_grow_as_the_decoder_lets_them(
    prompt: int, response: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    relayout = ColumnCache.relayout

    def noted(cache: ColumnCache, rows: int, **sizes: Any) -> None:
        made.append(sizes["num_columns"])
        relayout(cache, rows, **sizes)

    monkeypatch.setattr(ColumnCache, "relayout", noted)
    small = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=1024,
    )
    engine = HFRollout(
        AutoModelForCausalLM.from_config(small),
    )
    engine.generate([ModelRequest((1,) * prompt, SamplingParams(max_new_tokens=response, ignore_eos=True))])
    engine.close()
    assert fp.cache_columns(prompt, response) == max(made) == columns


def test_the_cache_is_that_of_the_rollout() -> None:
    cache = ColumnCache(4, num_rows=3, num_columns=20)
    keys = torch.zeros(3, 2, 1, 16)
    for layer in cache.columns:
        layer.lazy_initialization(keys, keys)
    held = sum(buffer.nbytes for layer in cache.columns for buffer in layer.buffers)
    assert fp.cache_bytes(TINY, 3, 20, c=4) == held


@pytest.mark.parametrize(
    ("shape", "tp", "ep", "block"),
    [
        ("135M", 1, 1, 64),  # hidden 576, keys 192
        ("0.5B", 1, 1, 128),
        ("0.5B", 2, 1, 64),  # queries 448
        ("30B-A3B", 4, 1, 64),  # an expert's 768 in four
        ("30B-A3B", 4, 4, 128),
        ("671B", 16, 1, 128),
        ("671B", 32, 1, 64),  # an expert's 2048 in 32
    ],
)
def test_float8_blocks_divide_what_a_rank_holds(shape: str, tp: int, ep: int, block: int) -> None:
    rollout = GenerationConfig(tensor_model_parallel_size=tp, expert_parallel_size=ep)
    assert float8_block(SHAPES[shape], rollout) == block
    assert float8_block({"text_config": SHAPES[shape], "hidden_size": 7}, rollout) == block


def test_what_no_block_divides_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"96 wide on a rank, no multiples of 64.*quantization=null, or a smaller .*tensor"
    ):
        float8_block(SHAPES["30B-A3B"], GenerationConfig(tensor_model_parallel_size=8))
