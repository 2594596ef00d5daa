"""Layouts learned from engines that hide them: fused, stacked, transposed, padded, tied, cut, repeated, transformed."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights import decode, learn
from rlsys.weights.layout import dtype_of, shard_view, view_of
from rlsys.weights.learn import Learned, learn_layout
from rlsys.weights.plan import make_plan

Shapes = dict[str, tuple[int, ...]]
H, FFN, HEADS, KV, D, EXPERTS, VOCAB = 12, 20, 4, 2, 3, 4, 37


def hf_shapes(*, bias: bool = True, experts: bool = True) -> Shapes:
    shapes: Shapes = {"embed": (VOCAB, H), "norm": (H,)}
    shapes |= {"q": (HEADS * D, H), "k": (KV * D, H), "v": (KV * D, H), "o": (H, HEADS * D)}
    shapes |= {"q_bias": (HEADS * D,), "k_bias": (KV * D,), "v_bias": (KV * D,)} if bias else {}
    shapes |= {"gate": (FFN, H), "up": (FFN, H), "down": (H, FFN)}
    for e in range(EXPERTS if experts else 0):
        shapes |= {f"e{e}.gate": (FFN, H), f"e{e}.up": (FFN, H), f"e{e}.down": (H, FFN)}
    return shapes


class Opaque(nn.Module):
    """An engine with fused and stacked parameters, of which only `load` is known."""

    def __init__(self, dtype: torch.dtype, tp: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.tp, self.tp_size = tp, tp_size
        q, kv, ffn = HEADS * D // tp_size, KV * D // tp_size, FFN // tp_size
        self.rows = -(-VOCAB // 8) * 8 // tp_size
        sizes = {
            "embed": (self.rows, H),
            "norm": (H,),
            "qkv": (q + 2 * kv, H),
            "qkv_bias": (q + 2 * kv,),
            "o": (H, q),
            "gate_up": (2 * ffn, H),
            "down_t": (ffn, H),
            "w13": (EXPERTS, 2 * ffn, H),
            "w2": (EXPERTS, H, ffn),
            "cache": (5, 5),
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full(size, 7.0, dtype=dtype), requires_grad=False))

    def part(self, full: Tensor, dim: int = 0) -> Tensor:
        return full.chunk(self.tp_size, dim)[self.tp]

    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, full in tensors:
            self.load_one(name, full)

    def load_one(self, name: str, full: Tensor) -> None:
        q, kv, ffn = HEADS * D // self.tp_size, KV * D // self.tp_size, FFN // self.tp_size
        first = {"q": 0, "k": q, "v": q + kv, "gate": 0, "up": ffn}
        kind = name.removesuffix("_bias")
        if name == "embed":
            self.embed.zero_()
            own = full[self.tp * self.rows : (self.tp + 1) * self.rows]
            self.embed[: len(own)].copy_(own)
        elif name == "norm":
            self.norm.copy_(full)
        elif kind in ("q", "k", "v"):
            target = self.qkv_bias if name.endswith("_bias") else self.qkv
            target[first[kind] : first[kind] + len(full) // self.tp_size].copy_(self.part(full))
        elif name in ("gate", "up"):
            self.gate_up[first[name] : first[name] + ffn].copy_(self.part(full))
        elif name in ("o", "down"):
            self.o.copy_(self.part(full, 1)) if name == "o" else self.down_t.copy_(self.part(full, 1).t())
        else:
            expert, kind = int(name[1]), name.partition(".")[2]
            if kind == "down":
                self.w2[expert].copy_(self.part(full, 1))
            else:
                self.w13[expert, first[kind] : first[kind] + ffn].copy_(self.part(full))

    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named_parameters()}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def trainer_of(full: Mapping[str, Tensor]) -> WeightLayout:
    from rlsys.types import Shard
    from rlsys.weights.layout import whole_box

    shards = tuple(Shard(whole_box(n, t.shape), n, (0,) * t.ndim) for n, t in full.items())
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in full.items()}
    return WeightLayout(0, "", shards, {n: tuple(t.shape) for n, t in full.items()}, dtypes)


def assert_replay_is_the_loader(learned: Learned, engine: Any, full: Mapping[str, Tensor], load: Callable) -> None:
    """The engine filled by plan holds bitwise what its own loader makes of the same tensors."""
    load(list(full.items()))
    wanted = {name: tensor.clone() for name, tensor in engine().items()}
    for name, tensor in engine().items():
        tensor.copy_(torch.where(wanted[name] == 0, wanted[name], 99.0) if tensor.is_floating_point() else tensor)
    tensors = learned.tensors(engine())
    for copy in make_plan([trainer_of(full)], [learned.layout]).copies:
        source = view_of(full[copy.tensor], copy.start, copy.shape)
        view_of(tensors[copy.local], copy.local_start, copy.shape).copy_(source)
    written = {shard.local.partition("@")[0] for shard in learned.layout.shards}
    for name in written:
        assert torch.equal(engine()[name], wanted[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("chunk", [25, decode.CHUNK])
def test_an_opaque_engine_is_learned(monkeypatch: pytest.MonkeyPatch, dtype: str, tp_size: int, chunk: int) -> None:
    for module in (learn, decode):
        monkeypatch.setattr(module, "CHUNK", chunk)
    shapes = hf_shapes()
    full = random_tensors(shapes, dtype_of(dtype))
    for tp in range(tp_size):
        engine = Opaque(dtype_of(dtype), tp, tp_size)
        learned = learn_layout(engine.load, engine.tensors, shapes, dict.fromkeys(shapes, dtype), bucket_bytes=3000)
        assert not learned.loader_only
        assert learned.layout.full_shapes.keys() == shapes.keys()
        assert {shard.box.tensor for shard in learned.layout.shards} == set(shapes)
        held = sum(shard_view(learned.tensors(engine.tensors()), shard).numel() for shard in learned.layout.shards)
        assert held == sum(t.numel() for n, t in engine.tensors().items() if n != "cache") - H * (
            engine.rows - len(full["embed"][tp * engine.rows : (tp + 1) * engine.rows])
        )
        assert_replay_is_the_loader(learned, engine.tensors, full, engine.load)
        stacked = [shard for shard in learned.layout.shards if shard.box.tensor == "e2.up"]
        assert [(s.local, s.local_start) for s in stacked] == [("w13", (2, FFN // tp_size, 0))]


def test_keep_restores_the_previous_weights() -> None:
    engine = Opaque(torch.bfloat16)
    engine.load(list(random_tensors(hf_shapes(), torch.bfloat16, 3).items()))
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    shapes = hf_shapes()
    learn_layout(engine.load, engine.tensors, shapes, dict.fromkeys(shapes, "bfloat16"), keep=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.tensors().items())


class Odd(Opaque):
    """Scales one tensor, permutes the rows of another, keeps a third in eight bits and a fourth in float32."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.o = nn.Parameter(torch.zeros(H, HEADS * D, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(H), requires_grad=False)
        self.order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))

    def load_one(self, name: str, full: Tensor) -> None:
        if name == "embed":
            self.embed[:VOCAB].copy_(full[self.order])
        elif name == "up":
            self.gate_up[FFN:].copy_(full * 0.5)
        else:
            super().load_one(name, full)


def test_tensors_that_are_not_boxes_are_left_to_the_loader() -> None:
    engine, shapes = Odd(), hf_shapes(experts=False)
    dtypes = dict.fromkeys(shapes, "bfloat16")
    learned = learn_layout(engine.load, engine.tensors, shapes, dtypes, max_boxes=20)
    assert set(learned.layout.loader) == {"embed", "gate", "up", "o"}
    assert "more than 20 boxes" in learned.loader_only["embed"]
    assert "float8" in learned.loader_only["o"]
    assert "values" in learned.loader_only["up"]
    assert learned.layout.dtypes["norm"] == "float32"
    held = {name for name in shapes if name not in learned.layout.loader}
    assert {shard.box.tensor for shard in learned.layout.shards} == held


def test_tensors_that_a_loader_joins_in_float8_are_left_to_it() -> None:
    joined, alone = torch.zeros(5, 4, dtype=torch.float8_e4m3fn), torch.zeros(2, 4)

    def load(bucket: list[tuple[str, Tensor]]) -> None:
        given = dict(bucket)
        if {"q_a", "kv_a"} <= given.keys():  # as SGLang's DeepSeek, which waits for both
            joined.copy_(torch.cat([given["q_a"], given["kv_a"]]))
        if "norm" in given:
            alone.copy_(given["norm"])

    shapes: Shapes = {"q_a": (3, 4), "kv_a": (2, 4), "norm": (2, 4), "absent": (7, 4)}
    learned = learn_layout(load, lambda: {"joined": joined, "alone": alone}, shapes, dict.fromkeys(shapes, "float32"))
    assert learned.loader_only == dict.fromkeys(("q_a", "kv_a"), f"joined: {learn.IN_FLOAT8}")
    assert {shard.box.tensor for shard in learned.layout.shards} == {"norm"}


def test_float8_tensors_of_a_checkpoint_are_learned() -> None:
    """Numbers of both signs: 600 elements have digits up to 249."""
    held = {"fused": torch.zeros(30, 20, dtype=torch.float8_e4m3fn)}

    def load(bucket: list[tuple[str, Tensor]]) -> None:
        for name, full in bucket:
            bits = held["fused"].view(torch.uint8)
            (bits[:12] if name == "gate" else bits[12:]).copy_(full.view(torch.uint8))

    shapes: Shapes = {"gate": (12, 20), "up": (18, 20)}
    learned = learn_layout(load, lambda: held, shapes, dict.fromkeys(shapes, "float8_e4m3fn"))
    assert not learned.loader_only
    starts = {shard.box.tensor: shard.local_start for shard in learned.layout.shards}
    assert starts == {"gate": (0, 0), "up": (12, 0)}


def test_tied_and_missing_tensors() -> None:
    class Tied(Opaque):
        def load_one(self, name: str, full: Tensor) -> None:
            if name not in ("head", "unloaded"):
                super().load_one(name, full)

    engine = Tied(torch.bfloat16)
    shapes = {**hf_shapes(), "unloaded": (3, 3)}
    aliases = {"head": "embed"}
    learned = learn_layout(engine.load, engine.tensors, shapes, dict.fromkeys(shapes, "bfloat16"), aliases=aliases)
    assert learned.layout.aliases == aliases
    assert "unloaded" not in learned.layout.full_shapes


def test_a_replicated_tensor_is_filled_everywhere() -> None:
    copies = {"a": torch.zeros(4, 6), "b": torch.zeros(10, 3).t(), "c": torch.zeros(3, 4, 12)}

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        for _, full in tensors:
            copies["a"].copy_(full)
            copies["b"][:, 1:5].copy_(full[:, 3:].t())  # a transposed part inside a transposed tensor
            copies["b"][:, 6:10].copy_(full[:, :3].t())
            copies["c"][1, :, :6], copies["c"][2, :, 5:11] = full, full

    learned = learn_layout(load, lambda: copies, {"w": (4, 6)}, {"w": "float32"})
    assert not learned.loader_only
    assert_replay_is_the_loader(learned, lambda: copies, random_tensors({"w": (4, 6)}, torch.float32), load)


def test_real_models_are_learned() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 43,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    moe = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1)
    for model in (Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)), Qwen3MoeForCausalLM(moe)):
        engine = HFRollout(model, context=EngineContext(load_format="dummy"))
        known = engine.weight_layout()
        learned = learn_layout(
            engine.load, engine.local_tensors, known.full_shapes, known.dtypes, aliases=known.aliases, bucket_bytes=9000
        )
        shards = {(s.box.tensor, s.box.start, s.box.shape, s.local, s.local_start) for s in learned.layout.shards}
        assert shards == {(s.box.tensor, s.box.start, s.box.shape, s.local, s.local_start) for s in known.shards}
        assert not learned.loader_only


def test_an_error_of_the_loader_is_reported() -> None:
    def load(tensors: list[tuple[str, Tensor]]) -> None:
        raise KeyError("layers.7")

    with pytest.raises(WeightTransferError, match=r"loader refused .*layers\.7"):
        learn_layout(load, lambda: {"a": torch.zeros(2)}, {"w": (2,)}, {"w": "float32"})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_strided_part_is_learned(data: st.DataObject) -> None:
    """A random part of a tensor, reshaped and permuted, in a random place of a padded parameter."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)]
    order = data.draw(st.permutations(range(len(shape))))
    pads = [data.draw(st.integers(0, 2)) for _ in shape]
    flat = data.draw(st.booleans())
    inner = [sizes[d] for d in order]
    param = torch.zeros([n + 2 * pad for n, pad in zip(inner, pads, strict=True)])
    place = tuple(slice(pad, pad + n) for n, pad in zip(inner, pads, strict=True))
    line = torch.zeros(3 + torch.Size(sizes).numel())

    def load(tensors: list[tuple[str, Tensor]]) -> None:
        for _, full in tensors:
            part = full[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
            if flat:
                line[3:].copy_(part.reshape(-1))
            else:
                param[place].copy_(part.permute(order))

    local = {"p": line if flat else param}
    with patch.object(decode, "CHUNK", data.draw(st.sampled_from([1, 2, 5, 11, decode.CHUNK]))):
        learned = learn_layout(load, lambda: local, {"w": tuple(shape)}, {"w": "float32"})
    assert not learned.loader_only
    assert_replay_is_the_loader(learned, lambda: local, random_tensors({"w": tuple(shape)}, torch.float32), load)
