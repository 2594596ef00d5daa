"""A family of models: which Hugging Face tensors a Megatron rank holds where, and Megatron's settings for them.

Everything here is arithmetic on a model's config.json; nothing imports Megatron. Families are tables in `families/`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

from packaging.specifiers import SpecifierSet

from rlsys.config.schema.megatron import MegatronShardConfig
from rlsys.models.megatron import blocks
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.models.megatron.rules import Dims, Rule, ShardFn, ShardIndex, extents, rules_of, whole_shapes
from rlsys.types import Box, HFConfig, Shapes, Shard
from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Head = Literal["lm", "value", "score"]

NEEDS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
SPARSE_NEEDS = (*NEEDS, "moe_intermediate_size", "num_experts_per_tok")

EMBEDDING, FINAL_NORM, SCORE, SCORE_BIAS = rules_of("embedding", "final_norm", "score", "score_bias")
OUTPUT, TIED_OUTPUT = rules_of("output", "tied_output")
PACKED_DELTA = "core/ssm/gated_delta_net"
"""The folder that Megatron-Core has since its gated delta layers take packed rows."""
WRONG_ON_HOPPER = SpecifierSet(">=3.4,<3.7.1")
"""Versions of Triton with which flash-linear-attention computes these layers' gradients on Hopper GPUs by TileLang."""
SETTINGS = read_table(__file__, "settings.toml")
"""What override_transformer_config may not change, and what it may."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Family:
    """One family: rules of every `layer` but those with `linear` attention, of the ones with `dense` or `sparse` MLPs,
    and of one `expert` or the `expert_stacks` of a layer; what it does not set is a plain decoder's: grouped-query
    attention and a gated MLP.

    `dims` reads the dimensions that the rules name from the HF config, `settings` the keyword arguments of Megatron's
    transformer configuration and `rope` GPTModel's rotary ones. The HF config must have the keys `needs`; keys in
    `only` must have one of the given values; `refuse` says what else is wrong. HF names in rules are below
    `model.layers.N.`, with `{e}` for the number of an expert. `mtp` is what a layer for multi-token prediction,
    numbered after the last, or from zero below `mtp_prefix`, has besides the tensors of a layer without linear
    attention. `window_rope` is `rope` of layers that attend to a window, where they have their own; `post_norms`: what
    attention and MLP give is normed too; `scaled_embedding`: embeddings are multiplied by the root of the hidden size.
    The decoder of a vision-language model has a `prefix` of its own, and beside it the tensors of the image encoder,
    `tower`: (HF name, local name, shape).
    """

    model_types: tuple[str, ...]
    dims: Callable[[HFConfig], dict[str, int]] = blocks.attention_dims
    settings: Callable[[HFConfig], blocks.Settings] = blocks.attention_settings
    rope: Callable[[HFConfig], blocks.Settings] = blocks.rope_args
    layer: tuple[Rule, ...] = blocks.ATTENTION
    linear: tuple[Rule, ...] = ()
    is_linear: Callable[[HFConfig, int], bool] = lambda hf_config, layer: False
    dense: tuple[Rule, ...] = blocks.GATED_MLP
    sparse: tuple[Rule, ...] = ()
    expert: tuple[Rule, ...] = ()
    expert_stacks: tuple[Rule, ...] = ()
    is_sparse: Callable[[HFConfig, int], bool] = lambda hf_config, layer: False
    needs: tuple[str, ...] = NEEDS
    only: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: blocks.ONLY)
    refuse: Callable[[HFConfig], str] = lambda hf_config: ""
    mtp: tuple[Rule, ...] = ()
    mtp_prefix: str = ""
    mla: bool = False
    window_rope: Callable[[HFConfig], blocks.Settings] | None = None
    post_norms: bool = False
    scaled_embedding: bool = False
    prefix: str = "model."
    tower: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    def check(self, hf_config: HFConfig, place: RankPlace) -> None:
        """ConfigError for a model Megatron would compute otherwise than transformers, or one `place` cannot hold."""
        lacking = [key for key in self.needs if hf_config.get(key) is None]
        if lacking:
            raise ConfigError(f"{self.model_types[0]}: config.json lacks {', '.join(lacking)}")
        odd = [
            f"{key}={hf_config[key]!r} (Megatron is given {' or '.join(map(repr, allowed))})"
            for key, allowed in self.only.items()
            if key in hf_config and hf_config[key] not in allowed
        ]
        refused = filter(None, [self.refuse(hf_config)])
        if self.expert_stacks and place.sizes.expert_tp > 1:
            odd.append("its experts are not split: set expert_tensor_parallel_size=1")
        if problems := [*odd, *refused, *_indivisible(self.dims(hf_config), place)]:
            raise ConfigError(f"{self.model_types[0]}: {'; '.join(problems)}")
        self.transformer_config(hf_config)
        self.rope(hf_config)
        self.layers_of(hf_config, place)

    def transformer_config(self, hf_config: HFConfig, dtype: object = None) -> blocks.Settings:
        """Keyword arguments of Megatron's TransformerConfig, or MLATransformerConfig when `mla`; no parallel sizes, and
        types only with a `dtype` of parameters and computation, which is torch's or its name."""
        settings = self.settings(hf_config)
        if dtype is not None:
            settings |= {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": str(dtype).endswith("bfloat16")}
        layers = range(settings["num_layers"])
        if self.linear:
            settings["linear_attention_freq"] = [int(self.is_linear(hf_config, layer)) for layer in layers]
        if self.sparse:
            settings["moe_layer_freq"] = [int(self.is_sparse(hf_config, layer)) for layer in layers]
        return settings

    def free_overrides(self, megatron: MegatronShardConfig, own: blocks.Settings) -> blocks.Settings:
        """The `override_transformer_config` that neither the model's `own` settings nor other keys decide.

        Overrides that repeat what is decided are left out; ConfigError for those that say otherwise.
        """
        overrides, sizes = megatron.override_transformer_config, ParallelSizes.from_config(megatron).arguments()
        sequence_parallel = megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1
        decided = {**SETTINGS["decided"], **own, **sizes, "sequence_parallel": sequence_parallel}
        taken = [name for name in overrides if name in decided and name not in SETTINGS["tunable"]["names"]]
        if wrong := ", ".join(sorted(name for name in taken if not _same(overrides[name], decided[name]))):
            raise ConfigError(f"override_transformer_config does not take {wrong}: remove it; {SETTINGS['instead']}")
        return {name: value for name, value in overrides.items() if name not in taken}

    def model_args(self, hf_config: HFConfig, *, tp_size: int, head: Head = "lm") -> blocks.Settings:
        """Keyword arguments of Megatron's GPTModel besides its configuration, specs and stage."""
        return {
            "vocab_size": ceil(self.dims(hf_config)["vocab"] / tp_size) * tp_size,
            "max_sequence_length": hf_config.get("max_position_embeddings", 4096),
            "share_embeddings_and_output_weights": head == "lm" and tied(hf_config),
            "position_embedding_type": "rope",
            **self.rope(hf_config),
        }

    def aliases(self, hf_config: HFConfig) -> dict[str, str]:
        """HF names a checkpoint may leave out, and the tensors whose data they have."""
        return {"lm_head.weight": f"{self.prefix}embed_tokens.weight"} if tied(hf_config) else {}

    def hf_shapes(self, hf_config: HFConfig, *, head: Head = "lm") -> Shapes:
        """The full shape of every HF tensor that is trained, in the order of the model; not those of `carried`."""
        return whole_shapes(self._shards(hf_config, RankPlace(), head, te=False))

    def carried(self, hf_config: HFConfig) -> Shapes:
        """HF tensors that Megatron does not hold and conversion passes on, where a checkpoint has them."""
        dims = self.dims(hf_config)
        index = ShardIndex(0, 1, dims)
        shards: list[Shard] = []
        own, sparse = self.mtp_prefix, bool(self.sparse)
        for number in range(dims.get("mtp_layers", 0)):
            hf = f"{own}layers.{number}." if own else f"{self.prefix}layers.{dims['layers'] + number}."
            for rules, prefix in ((self._layer_rules(sparse, dims), hf), (self.mtp, own or hf)):
                shards += [shard for rule in rules for shard in _rule_shards(rule, "", prefix, index, te=False)]
            shards += self._experts("", hf, RankPlace(), index, te=False) if sparse else ()
        return whole_shapes(shards)

    def layers_of(self, hf_config: HFConfig, place: RankPlace) -> list[list[int]]:
        """Global layer numbers of each virtual chunk of the stage `place.pp_rank`, by Megatron's own split.

        ConfigError where Megatron cannot split the layers so.
        """
        each = [n // place.sizes.vp for n in _stage_layers(self.dims(hf_config)["layers"], place.sizes)]
        starts = [chunk * sum(each) + sum(each[: place.pp_rank]) for chunk in range(place.sizes.vp)]
        return [list(range(start, start + each[place.pp_rank])) for start in starts]

    def shards(
        self, hf_config: HFConfig, place: RankPlace, *, head: Head = "lm", te: bool = False
    ) -> tuple[Shard, ...]:
        """What the rank at `place` holds, by Megatron's parameter names after the number of the chunk.

        `te`: by the Transformer Engine spec, which keeps norms inside the linear layers that follow them and whose
        experts are TEGroupedMLP rather than SequentialMLP. ConfigError as of `check`.
        """
        self.check(hf_config, place)
        return tuple(self._shards(hf_config, place, head, te))

    def local_shapes(self, hf_config: HFConfig, place: RankPlace, shards: Sequence[Shard]) -> Shapes:
        """The shape of each tensor that `shards` of `place` are in, padding of the vocabulary included."""
        rows = ceil(self.dims(hf_config)["vocab"] / place.sizes.tp)
        padded = {shard.local for shard in shards if shard.box.tensor.endswith(VOCABULARY)}
        return {name: (rows, *shape[1:]) if name in padded else shape for name, shape in extents(shards).items()}

    def _shards(self, hf_config: HFConfig, place: RankPlace, head: Head, te: bool) -> Iterator[Shard]:
        dims = self.dims(hf_config)
        tensor = ShardIndex(place.tp_rank, place.sizes.tp, dims)
        expert = ShardIndex(place.etp_rank, place.sizes.expert_tp, dims)
        chunks = self.layers_of(hf_config, place)
        if place.pp_rank == 0:
            for name, own, shape in self.tower:
                zeros = (0,) * len(shape)
                yield Shard(Box(name, zeros, shape), f"0.{own}", zeros)
            yield from _rule_shards(EMBEDDING, "0.", self.prefix, tensor, te)
        for chunk, layers in enumerate(chunks):
            for number, layer in enumerate(layers):
                local, hf = f"{chunk}.decoder.layers.{number}.", f"{self.prefix}layers.{layer}."
                sparse = self.is_sparse(hf_config, layer)
                for rule in self._layer_rules(sparse, dims, linear=self.is_linear(hf_config, layer)):
                    yield from _rule_shards(rule, local, hf, tensor, te)
                if sparse:
                    yield from self._experts(local, hf, place, expert, te)
        if place.is_last_stage:
            for rule, prefix in self._last_rules(hf_config, head, shared=place.sizes.pp == 1):
                yield from _rule_shards(rule, f"{len(chunks) - 1}.", prefix, tensor, te)

    def _last_rules(self, hf_config: HFConfig, head: Head, *, shared: bool = False) -> Iterator[tuple[Rule, str]]:
        """The final norm and what follows it, with the prefix of its names. `shared`: the stage holds the embedding
        too, so a tied output needs no copy."""
        yield FINAL_NORM, self.prefix
        if head != "lm":
            yield SCORE, ""
        if head == "value":
            yield SCORE_BIAS, ""
        if head == "lm" and not (tied(hf_config) and shared):
            yield (TIED_OUTPUT, self.prefix) if tied(hf_config) else (OUTPUT, "")

    def _layer_rules(self, sparse: bool, dims: Dims, *, linear: bool = False) -> list[Rule]:
        rules = (*(self.linear if linear else self.layer), *(self.sparse if sparse else self.dense))
        return [rule for rule in rules if not rule.when or dims[rule.when]]

    def _experts(self, local: str, hf: str, place: RankPlace, index: ShardIndex, te: bool) -> Iterator[Shard]:
        stacks = ShardIndex(place.ep_rank, place.sizes.ep, index.dims)
        for rule in self.expert_stacks:
            yield from _rule_shards(rule, local, hf, stacks, te)
        count = index.dims["experts"] // place.sizes.ep
        pieces = [(rule.local, list(rule.shard_fn(rule.parts(index.dims), index))) for rule in self.expert]
        for number in range(count):
            e = place.ep_rank * count + number
            for name, boxes in pieces:
                own = f"{name}{number}" if te else f"local_experts.{number}.{name}"
                for box, at in boxes:
                    yield Shard(Box(hf + box.tensor.format(e=e), box.start, box.shape), f"{local}mlp.experts.{own}", at)


def _same(value: object, decided: object) -> bool:
    """Whether a value of the configuration is what is decided: nothing, false and 0 are the same here."""
    if isinstance(decided, list | tuple):
        value, decided = [value] * len(decided) if isinstance(value, int) else value, [*decided]  # moe_layer_freq=1
    return (value or None) == (decided or None) or str(decided).removeprefix("torch.") == str(value)


def tied(hf_config: HFConfig) -> bool:
    """Whether the output layer is the embedding."""
    return bool(hf_config.get("tie_word_embeddings", False))


def find_family(hf_config: HFConfig) -> Family | None:
    """The family of a config.json, by its model_type; None without a table for it."""
    return known_families().get(hf_config.get("model_type", ""))


def family_of(hf_config: HFConfig) -> Family:
    """The family of a config.json, as `find_family` says; ConfigError names the known ones."""
    if (family := find_family(hf_config)) is not None:
        return family
    if "vision_config" in hf_config:
        raise ConfigError(f"{hf_config['model_type']} has an image encoder: no table of sizes to plan or split by")
    asked, known = hf_config.get("model_type"), ", ".join(sorted(known_families()))
    raise ConfigError(f"Megatron and the planner have no table for {asked}, only for {known}; FSDP trains it")


def decoder_family(config: "PretrainedConfig") -> tuple[Family, HFConfig]:
    """The family of the decoder of a transformers configuration and what it reads; ConfigError as of `family_of`, or
    for an encoder that `ImageTower` does not hold."""
    from rlsys.models.vision import has_images  # the planner reads families without torch

    if hasattr(config, "vision_config") and not has_images(config):
        raise ConfigError(f"Megatron does not hold the image encoder of {config.model_type}: set strategy=fsdp")
    hf_config = config.get_text_config().to_dict() | {"tie_word_embeddings": config.tie_word_embeddings}
    if not hasattr(config, "vision_config"):  # text has the same position in all dimensions
        (hf_config.get("rope_parameters") or {}).pop("mrope_section", None)
    return family_of(hf_config), hf_config


def need_packed_delta() -> None:
    """ConfigError unless what is installed computes gated delta layers on packed rows; none of it is imported."""
    folders = getattr(find_spec("megatron"), "submodule_search_locations", None) or ()
    lacking = [] if any(Path(folder, PACKED_DELTA).is_dir() for folder in folders) else ["'megatron-core>=0.19'"]
    lacking += ["flash-linear-attention"] if find_spec("fla") is None else []
    if find_spec("tilelang") is None and any(it.version in WRONG_ON_HOPPER for it in distributions(name="triton")):
        lacking.append("tilelang")
    if lacking:
        how = f"pip install {' '.join(lacking)} on Python 3.12, or set strategy=fsdp and use_remove_padding=false"
        raise ConfigError(f"Megatron computes gated delta layers on packed rows with other packages: {how}")


@cache
def known_families() -> dict[str, Family]:
    """The families of `families/` by model_type."""
    package = import_module("rlsys.models.megatron.families")
    modules = [import_module(f"{package.__name__}.{info.name}") for info in iter_modules(package.__path__)]
    families = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return {model_type: family for family in families for model_type in family.model_types}


def _rule_shards(rule: Rule, local: str, hf: str, index: ShardIndex, te: bool) -> Iterator[Shard]:
    shard_fn: ShardFn = (te and rule.te_shard_fn) or rule.shard_fn
    name = local + ((te and rule.te) or rule.local)
    for box, at in shard_fn([(hf + part, shape) for part, shape in rule.parts(index.dims)], index):
        yield Shard(box, name, at)


def _stage_layers(count: int, sizes: ParallelSizes) -> list[int]:
    """How many layers each pipeline stage holds."""
    if sizes.pp * sizes.vp > count:
        split = f"pipeline_model_parallel_size={sizes.pp} stages of {sizes.vp} chunks each"
        raise ConfigError(f"{count} layers cannot be split over {split}: each needs a layer")
    given = {stage: n for stage, n in ((0, sizes.first_layers), (sizes.pp - 1, sizes.last_layers)) if n is not None}
    per_stage = (count - sum(given.values())) // max(1, sizes.pp - len(given))
    stages = [given.get(stage, per_stage) for stage in range(sizes.pp)]
    if sum(stages) != count or any(n < 1 or n % sizes.vp for n in stages):
        last = count - (sizes.pp - 1) * sizes.vp * -(-count // (sizes.pp * sizes.vp))
        fits = f"={last}" if last > 0 and last % sizes.vp == 0 else ", or the first one's, so that the rest does"
        split = f"pipeline_model_parallel_size={sizes.pp} and {sizes.vp} virtual chunks"
        how = f"set override_transformer_config.num_layers_in_last_pipeline_stage{fits}"
        raise ConfigError(f"{count} layers do not split evenly over {split}: {how}")
    return stages


def _indivisible(dims: Dims, place: RankPlace) -> list[str]:
    tp, groups = place.sizes.tp, dims["groups"]
    names: Sequence[tuple[str, str, int, str]] = (
        ("heads", "attention heads", tp, "tensor_model_parallel_size"),
        ("ffn", "MLP channels", tp, "tensor_model_parallel_size"),
        ("shared_ffn", "channels of shared experts", tp, "tensor_model_parallel_size"),
        ("delta_heads", "gated delta heads", tp * place.sizes.cp, "tensor x context parallel size"),
        ("experts", "experts", place.sizes.ep, "expert_model_parallel_size"),
        ("expert_ffn", "channels of an expert", place.sizes.expert_tp, "expert_tensor_parallel_size"),
    )
    odd = [
        f"{dims[name]} {what} are not divisible by {key}={by}: set a divisor"
        for name, what, by, key in names
        if dims.get(name, 0) % by
    ]
    if groups % tp and tp % groups:
        odd.append(f"{groups} key-value heads are neither a multiple nor a divisor of tensor_model_parallel_size={tp}")
    if ceil(dims["vocab"] / tp) * (tp - 1) >= dims["vocab"]:
        odd.append(f"a vocabulary of {dims['vocab']} leaves nothing to some of {tp} tensor-parallel ranks")
    if place.sizes.vp > 1 and place.sizes.pp == 1:
        odd.append("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1")
    if not dims.get("experts") and place.sizes.ep > 1:
        odd.append("expert parallelism without experts: set expert_model_parallel_size=1")
    return odd
