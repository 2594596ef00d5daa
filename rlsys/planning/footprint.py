"""Bytes that a decoder's tensors take while it is trained or scored: arithmetic on config.json, checked against runs.

`d` are the sizes of the decoder: `ffn` is the MLP width that a token passes through, `q` and `kv` are the widths of
queries and of keys (of values alike). `c` are the bytes of the computing type. Norms are computed in float32. A gated
delta layer keeps keys and queries projected, convolved and normed, and values projected, convolved, with their gate,
and what comes of them before the norm, after it and after the gate, with queries and keys for each head of values.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from rlsys.config.engines import float8_block, rollout_backend, share_of_free
from rlsys.config.schema.rollout import GenerationConfig, RolloutConfig
from rlsys.models.megatron.family import Head, family_of
from rlsys.models.megatron.parallel import RankPlace
from rlsys.types import LOGITS_CHUNK_ELEMENTS, HFConfig

if TYPE_CHECKING:
    from rlsys.models.lora import LoraSettings

WIDE = 4
"""Bytes of float32."""
LAYER = "model.layers."
ENCODER = "image_encoder"
EXPERTS = ".experts."


@dataclass(frozen=True)
class Blocks:
    """Sizes of equal layers in elements: `layer` is the largest, `outer` what is outside of all."""

    layer: int
    outer: int
    num_layers: int
    hidden: int
    q: int
    kv: int
    ffn: int
    routed: int
    adaptable: int
    """Sum of inputs and outputs of all linear layers inside the blocks: a rank of adapters on all costs so much."""


@dataclass(frozen=True)
class ImageEncoder(Blocks):
    """What a vision-language model has beside its decoder. An image token stands for `pixels` pixels in `patches`, each
    `patch` numbers; it has `deep` features for layers beside its own. `frozen` parameters are not trained.
    """

    patches: int
    pixels: int
    patch: int
    deep: int
    frozen: int

    @property
    def parameters(self) -> int:
        return self.outer + self.num_layers * self.layer


NO_IMAGES = ImageEncoder(*[0] * len(fields(ImageEncoder)))
"""What a model of text has."""


@dataclass(frozen=True)
class Decoder(Blocks):
    """Sizes of a whole model, its image encoder included."""

    parameters: int
    largest: int
    vocab: int
    num_experts: int
    num_sparse: int
    in_experts: int
    in_dense: int
    """Weights of the matrices of all layers that are not experts'."""
    active: int
    """Weights of all layers that multiply a token."""
    attended: int
    """Multiplications of a token with one that it attends to, in all layers."""
    cached: int
    """Elements of a token in the cache of a serving engine, in all layers."""
    cache_heads: int
    """Ranks that such a cache can be split over."""
    encoder: ImageEncoder


def encoder_of(hf_config: HFConfig) -> ImageEncoder:
    """The image encoder that `rlsys.planning.image_encoder` found."""
    return ImageEncoder(**hf_config[ENCODER]) if ENCODER in hf_config else NO_IMAGES


def decoder_of(hf_config: HFConfig, *, head: Head = "lm") -> Decoder:
    """The sizes of the model of a config.json; ConfigError for a family without a table."""
    return _decoder(json.dumps(hf_config), head)


@lru_cache
def _decoder(config: str, head: Head) -> Decoder:
    hf_config = json.loads(config)
    family = family_of(hf_config)
    shapes, sizes = family.hf_shapes(hf_config, head=head), family.dims(hf_config)
    layers = Counter[str]()  # parameters of each layer by its number, under "" of what is outside of all
    for name, shape in shapes.items():
        layers[name.split(".")[2] if name.startswith(LAYER) else ""] += prod(shape)
    inner = [(name, shape) for name, shape in shapes.items() if name.startswith(LAYER) and not name.endswith("bias")]
    matrices = [(name, shape) for name, shape in inner if len(shape) > 1]
    encoder = encoder_of(hf_config)
    outer = layers.pop("") + encoder.outer
    layers.update({f"image {number}": encoder.layer for number in range(encoder.num_layers)})
    num_experts = sizes.get("experts") or 1
    routed = int(hf_config.get("num_experts_per_tok") or 0) if sizes.get("experts") else 0
    sparse = routed * sizes.get("expert_ffn", 0) + sizes.get("shared_ffn", 0)
    num_sparse = sum(family.is_sparse(hf_config, layer) for layer in range(sizes["layers"]))
    in_experts = sum(prod(shape) for name, shape in matrices if EXPERTS in name)
    in_dense = sum(prod(shape) for _, shape in matrices) - in_experts
    q, kv = _attention_widths(hf_config, sizes)
    attending = sum(not family.is_linear(hf_config, layer) for layer in range(sizes["layers"]))
    latent = hf_config.get("kv_lora_rank")
    return Decoder(
        parameters=outer + sum(layers.values()),
        layer=max(layers.values()),
        outer=outer,
        largest=max(prod(shape) for shape in shapes.values()),
        num_layers=sizes["layers"],
        hidden=sizes["hidden"],
        vocab=sizes["vocab"],
        q=max(q, sizes.get("gated_q", 0), 3 * sizes.get("delta_k", 0) + 5 * sizes.get("delta_v", 0)),
        kv=kv,
        ffn=max(sparse, sizes["ffn"] if num_sparse < sizes["layers"] else 0),
        routed=routed,
        num_experts=num_experts,
        num_sparse=num_sparse,
        in_experts=in_experts,
        in_dense=in_dense,
        active=in_dense + in_experts * routed // num_experts,
        attended=attending * 2 * (kv if latent else q),
        cached=sizes["layers"] * (latent + hf_config["qk_rope_head_dim"] if latent else 2 * kv),
        cache_heads=1 if latent else sizes["groups"],
        adaptable=sum(sum(shape) for _, shape in matrices if len(shape) == 2) + encoder.adaptable,
        encoder=encoder,
    )


def served_bytes(hf_config: HFConfig, rollout: GenerationConfig, *, c: int) -> int:
    """Bytes of the weights on a rank of a rollout engine, in its largest stage; data-parallel ranks share only experts.

    All that is outside of the layers is counted, as vLLM keeps embeddings and head of some models in every stage.
    """
    d, stages, copies = decoder_of(hf_config), rollout.pipeline_model_parallel_size, rollout.data_parallel_size
    layers, ranks = -(-d.num_layers // stages), rollout.replica_size // stages
    experts = d.in_experts * min(layers, d.num_sparse) // max(1, d.num_sparse)
    held = (copies * (d.outer + (d.parameters - d.outer - d.in_experts) * layers // d.num_layers) + experts) // ranks
    matrices = (copies * d.in_dense * layers // d.num_layers + experts) // ranks if rollout.quantization else 0
    return c * (held - matrices) + matrices + (scale_bytes(matrices, hf_config, rollout) if matrices else 0)


def engine_bytes(rollout: RolloutConfig, whole: int, beside: int) -> int:
    """Weights and cache of an engine that takes a share of a device of `whole` bytes, `beside` of them taken before."""
    free = max(0, whole - (beside if rollout_backend(rollout.name).cache_share_of == "free" else 0))
    return int(free * share_of_free(rollout.gpu_memory_utilization, free, whole, ranks=rollout.replica_size))


def served_cache(d: Decoder, rollout: GenerationConfig) -> int:
    """Elements of a token in the cache of a rank of a rollout engine, in its largest stage."""
    layers = -(-d.num_layers // rollout.pipeline_model_parallel_size)
    return d.cached // d.num_layers * layers // min(rollout.tensor_model_parallel_size, d.cache_heads)


def scale_bytes(elements: int, hf_config: HFConfig, rollout: GenerationConfig) -> int:
    """Bytes of the scales of matrices in FP8, a float32 for each block."""
    return WIDE * elements // float8_block(hf_config, rollout) ** 2


def _attention_widths(hf_config: HFConfig, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Widths of queries and of keys and values as attention sees them; latent attention expands its own."""
    if "kv_lora_rank" not in hf_config:
        return sizes["q"], sizes["kv"]
    heads = hf_config["num_attention_heads"]
    q = heads * (hf_config["qk_nope_head_dim"] + hf_config["qk_rope_head_dim"])
    return q, (q + heads * hf_config["v_head_dim"]) // 2


@dataclass(frozen=True)
class Held:
    """Elements that a Megatron rank holds of the dense part and of experts, and how many layers.

    `merged`, of adapters only: the weights of the largest layer that has some.
    """

    dense: int
    experts: int
    num_layers: int
    merged: int = 0

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


def held_at(hf_config: HFConfig, place: RankPlace, *, head: Head = "lm") -> Held:
    """What Megatron's rank at `place` holds, which context parallelism does not change."""
    return _held(json.dumps(hf_config), replace(place, sizes=replace(place.sizes, cp=1)), head)


@lru_cache(maxsize=4096)
def _held(config: str, place: RankPlace, head: Head) -> Held:
    hf_config = json.loads(config)
    family = family_of(hf_config)
    shapes = family.local_shapes(hf_config, place, family.shards(hf_config, place, head=head))
    experts = sum(prod(shape) for name, shape in shapes.items() if EXPERTS in name)
    layers = sum(len(chunk) for chunk in family.layers_of(hf_config, place))
    return Held(sum(prod(shape) for shape in shapes.values()) - experts, experts, layers)


def adapters_at(hf_config: HFConfig, place: RankPlace, lora: "LoraSettings", *, head: Head = "lm", te: bool) -> Held:
    """What Megatron's rank at `place` holds of adapters; `te`: with Transformer Engine's modules."""
    return _adapters(json.dumps(hf_config), replace(place, sizes=replace(place.sizes, cp=1)), lora, head, te)


@lru_cache(maxsize=4096)
def _adapters(config: str, place: RankPlace, lora: "LoraSettings", head: Head, te: bool) -> Held:
    """Counted from the boxes of weights: B has the rows of all, A the columns of one of each weight."""
    hf_config, adapted, merged = json.loads(config), _adapted(config, lora, head, te), Counter[str]()
    shards = family_of(hf_config).shards(hf_config, place, head=head, te=te)
    here = {(s.local, s.box.tensor): s.box.shape[1] for s in shards if s.box.tensor in adapted}
    counts = [(s.local, s.box.shape[0]) for s in shards if s.box.tensor in adapted]
    counts += [(local, columns) for (local, _), columns in here.items()]
    experts = lora.rank * sum(count for local, count in counts if EXPERTS in local)
    with_some = {local for local, _ in here}
    for shard in (shard for shard in shards if shard.local in with_some):
        merged[shard.local.rpartition(".")[0]] += prod(shard.box.shape)
    layers = sum(len(chunk) for chunk in family_of(hf_config).layers_of(hf_config, place))
    dense = lora.rank * sum(count for _, count in counts) - experts
    return Held(dense, experts, layers, merged=max(merged.values(), default=0))


@lru_cache
def _adapted(config: str, lora: "LoraSettings", head: Head, te: bool) -> Collection[str]:
    from rlsys.models.megatron.adapter_factors import plan_adapters

    hf_config, family = json.loads(config), family_of(json.loads(config))
    whole = family.shards(hf_config, RankPlace(), head=head, te=te)
    return plan_adapters(lora, whole, family.hf_shapes(hf_config, head=head)).adapted.keys()


def layer_saved_bytes(
    d: Blocks, tokens: int, *, c: int, fused: bool, tp: int = 1, shared_norms: bool = False, routed_tp: int = 1
) -> int:
    """What one layer keeps for its backward pass: transformers' modules, or Transformer Engine's where `fused`.

    `tp` ranks share the matrices; `shared_norms` (sequence parallelism) the rest too, and `routed_tp` what
    experts get and give: whole experts are sent a rank's own part of the sequence.
    """
    norms, routed = tp if shared_norms else 1, c * 2 * d.routed * d.hidden // routed_tp
    if fused:
        return tokens * (c * 4 * d.hidden // norms + c * (2 * d.q + 2 * d.kv + 3 * d.ffn) // tp + routed)
    return tokens * ((16 + c) * d.hidden // norms + c * (2 * d.q + 2 * d.kv + 4 * d.ffn) // tp + routed)


def layer_passing_bytes(d: Blocks, tokens: int, *, c: int, tp: int = 1, backward: bool) -> int:
    """What comes and goes inside one layer: gradients of the MLP and a norm, or activations that are not kept."""
    return tokens * (c * ((2 if backward else 3) * d.ffn // tp) + 8 * d.hidden + (0 if backward else c * 2 * d.hidden))


def checkpoint_bytes(d: Blocks, tokens: int, *, c: int) -> int:
    """The input of one layer, which is all that is kept where activations are recomputed."""
    return tokens * c * d.hidden


def image_bytes(d: Decoder, image_tokens: int, *, c: int, trained: bool, recompute: bool = False) -> tuple[int, int]:
    """What image tokens keep while their pass lasts, and what their encoder takes beside that at its highest; patches
    are merged into features by two linear layers, in the width of all that become one."""
    encoder, patches = d.encoder, image_tokens * d.encoder.patches
    made = image_tokens * (1 + encoder.deep) * c * d.hidden + patches * encoder.patch * WIDE
    passing = layer_passing_bytes(encoder, patches, c=c, backward=trained)
    if not trained:
        return made, passing
    saved = layer_saved_bytes(encoder, patches, c=c, fused=False)
    point = checkpoint_bytes(encoder, patches, c=c)
    kept = encoder.num_layers * (point if recompute else saved) + 4 * (1 + encoder.deep) * point
    return made + kept, passing + (saved if recompute else 0)


def head_hidden_bytes(d: Decoder, tokens: int, responses: int, *, c: int, backward: bool) -> int:
    """Final norm and the states that go into the head."""
    return d.hidden * (tokens * (8 if backward else 2 * c) + responses * c * (2 if backward else 1))


def logits_bytes(
    d: Decoder, responses: int, *, c: int, device: str, backward: bool, trained: bool, entropy: bool, tp: int = 1
) -> int:
    """Chunks of logits in float32 and the gradient of the output weight, at their highest (`rlsys.models.logprobs`)."""
    vocab = -(-d.vocab // tp)
    chunk = WIDE * vocab * min(max(1, LOGITS_CHUNK_ELEMENTS[device] // vocab), responses)
    if not backward:
        return chunk * (3 if entropy else 2)
    narrow, slope = chunk * c // WIDE if c < WIDE else 0, WIDE * vocab * d.hidden if trained else 0
    return narrow + slope + max((3 if entropy else 2) * chunk, chunk + (slope if c < WIDE else 0))


def cache_columns(prompt: int, response: int, *, step: int = 256) -> int:
    """Columns that HFRollout's cache grows to: room for `step` tokens, then half as much again (`rollout.decode`)."""
    column = prompt + min(response, step)
    while column < prompt + response:
        column += max(min(prompt + response - column, step), column // 2)
    return column


def cache_bytes(d: Decoder, rows: int, columns: int, *, c: int) -> int:
    """Keys and values of all layers."""
    return 2 * d.num_layers * rows * columns * d.kv * c


def drawing_bytes(d: Decoder, rows: int, *, c: int) -> int:
    """Logits of one token for every row, scaled, as probabilities."""
    return rows * d.vocab * (c + 3 * WIDE)
