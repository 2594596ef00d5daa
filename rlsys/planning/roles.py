"""What one trained or scoring role takes of a device: what it holds, and what its passes add at their highest.

Bytes by owner; see rlsys.planning.footprint for the letters. FSDP keeps float32 parameters (their own masters), gathers
layers in the computing type and reduces gradients in float32; Megatron keeps half-precision parameters, float32
gradients for good, and masters and moments spread over its data-parallel ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlsys.config.schema.model import OptimConfig
from rlsys.models.megatron.blocks import Settings
from rlsys.models.megatron.family import Head
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.planning import footprint as fp
from rlsys.types import HFConfig

if TYPE_CHECKING:
    from rlsys.models.lora import LoraSettings

Bytes = dict[str, int]
PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER = "parameters", "gradients", "masters", "optimizer"
GATHERED, ACTIVATIONS, LOGITS = "gathered", "activations", "logits"


@dataclass(frozen=True)
class Pass:
    """The largest of `count` micro-batches of a rank: its tokens, how many of them are responses, and those of images,
    which all that share sequences have."""

    tokens: int
    responses: int
    count: int
    images: int = 0


@dataclass(frozen=True)
class Computing:
    """How passes run: `c` bytes of the computing type, on "cuda" or "cpu"; `compiled` by FSDP's use_torch_compile."""

    c: int
    device: str
    recompute: bool
    entropy: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class FsdpRole:
    """A role on FSDP2: `ranks` share one copy, `tp` of them each matrix; with `lora_rank` only adapters are trained.

    Unless it `reshards`, what a forward pass has gathered stays until the backward pass, or the end of scoring.
    """

    model: fp.Decoder
    how: Computing
    ranks: int
    master: int
    trained: bool
    head: Head = "lm"
    on_host: bool = False
    lora_rank: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    tp: int = 1
    reshards: bool = True

    @cached_property
    def _split(self) -> fp.Decoder:
        """The model with its matrices as a rank sees them in a pass."""
        sizes = ("parameters", "outer", "layer", "vocab", "q", "kv", "ffn")
        return replace(self.model, **{name: getattr(self.model, name) // self.tp for name in sizes})

    @property
    def _adapters(self) -> int:
        return self.lora_rank * self.model.adaptable

    def held(self) -> Bytes:
        """Between calls; nothing on the device where FSDP2 itself keeps it on the host."""
        if self.on_host:
            return {}
        moments = self.moments_bytes() // self.ranks if self.trained else 0
        return {PARAMETERS: self.master * (self.model.parameters + self._adapters) // self.ranks, OPTIMIZER: moments}

    def moments_bytes(self) -> int:
        """Of all ranks; 8-bit moments have two scales for every 256 elements, Muon one moment in the layers."""
        count = self._num_trained
        if self.optim.override_optimizer_config.optimizer_cpu_offload:
            return 0
        if self.optim.optimizer == "AdamW8bit":
            return 2 * count + 2 * fp.WIDE * count // 256
        outer = 0 if self._adapters else self.model.outer
        return self.master * (count + outer if self.optim.optimizer == "Muon" else 2 * count)

    @property
    def _num_trained(self) -> int:
        return self._adapters or self.model.parameters - self.model.encoder.frozen

    def scoring(self, size: Pass) -> Bytes:
        """A forward pass at its highest, in a layer or in the head."""
        images, encoding = fp.image_bytes(self._split, size.images, c=self.how.c, trained=False)
        inside = images + max(encoding, fp.layer_passing_bytes(self._split, size.tokens, c=self.how.c, backward=False))
        head = images + fp.head_hidden_bytes(self._split, size.tokens, size.responses, c=self.how.c, backward=False)
        return _higher(
            {GATHERED: self._gathered(self._prefetched), ACTIVATIONS: inside},
            {GATHERED: self._gathered(0), ACTIVATIONS: head, LOGITS: _logits(self, size, backward=False)},
        )

    def training(self, size: Pass) -> Bytes:
        """Forward and backward at their highest: in the head, in the last layer, or when the rest is reduced."""
        d, c, how = self._split, self.how.c, self.how
        grads = 0 if self.on_host else self.master * self._num_trained // self.ranks
        saved, full = fp.layer_saved_bytes(d, size.tokens, c=c, fused=False), not self.lora_rank
        encodes = bool(self.lora_rank) or not d.encoder.frozen
        images, encoding = fp.image_bytes(d, size.images, c=c, trained=encodes, recompute=how.recompute)
        kept = images + d.num_layers * (fp.checkpoint_bytes(d, size.tokens, c=c) if how.recompute else saved)
        extra = (saved if how.recompute else 0) + fp.layer_passing_bytes(d, size.tokens, c=c, backward=True)
        head = fp.head_hidden_bytes(d, size.tokens, size.responses, c=c, backward=True)
        added = fp.WIDE * self.tp / self.ranks if size.count > 1 else 0  # reduced, to be added to those there
        layer_comm = int((c + fp.WIDE * self._prefetched + added) * d.layer) if full else 0
        outer_comm = int((c + fp.WIDE + added) * d.outer) if full else 0
        summed, logits = grads if size.count > 1 else 0, _logits(self, size, backward=True)
        with_head = summed + (c * d.vocab * d.hidden if full and self.head == "lm" else 0)
        return _higher(
            {GRADIENTS: summed, GATHERED: self._gathered(0), ACTIVATIONS: kept + head, LOGITS: logits},
            {GRADIENTS: with_head, GATHERED: self._gathered(self._prefetched) + layer_comm, ACTIVATIONS: kept + extra},
            {GRADIENTS: grads, GATHERED: c * d.outer + outer_comm, ACTIVATIONS: images + encoding},
        )

    def _gathered(self, layers: int) -> int:
        """What is outside of layers and so many of them, or all, in the computing type."""
        d = self._split
        return self.how.c * (d.outer + d.layer * layers if self.reshards else d.parameters)

    @property
    def _prefetched(self) -> int:
        return 2 if self.ranks > self.tp else 1


@dataclass(frozen=True)
class MegatronRole:
    """A role on the rank of Megatron's stage `pp_rank` that holds the first part of everything.

    `fused`: Transformer Engine's layers. With `lora` only adapters are trained. `dp` and `expert_dp` ranks share the
    optimizer of the dense part and of experts.
    """

    hf_config: HFConfig
    how: Computing
    sizes: ParallelSizes
    ranks: int
    pp_rank: int = 0
    head: Head = "lm"
    trained: bool = True
    fused: bool = True
    lora: "LoraSettings | None" = None
    moments: int = 2
    """How many moments of a parameter are on the device."""
    recompute: Settings = field(default_factory=dict)
    """Settings of Megatron, of which those named recompute_* count."""

    @cached_property
    def model(self) -> fp.Decoder:
        return fp.decoder_of(self.hf_config, head=self.head)

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.sizes, pp_rank=self.pp_rank)

    @cached_property
    def held_here(self) -> fp.Held:
        held = fp.held_at(self.hf_config, self.place, head=self.head)
        return held if self.pp_rank else replace(held, dense=held.dense + self.model.encoder.parameters)

    @cached_property
    def adapters(self) -> fp.Held | None:
        if self.lora is None:
            return None
        return fp.adapters_at(self.hf_config, self.place, self.lora, head=self.head, te=self.fused)

    @property
    def dp(self) -> int:
        return self.ranks // (self.sizes.tp * self.sizes.pp)

    @property
    def expert_dp(self) -> int:
        return max(1, self.ranks // (self.sizes.expert_tp * self.sizes.ep * self.sizes.pp))

    def moments_bytes(self) -> int:
        """Of all ranks; those of adapters as if all stages had as many."""
        trained = self.adapters.parameters * self.sizes.pp if self.adapters else self.model.parameters
        return self.moments * fp.WIDE * trained

    def held(self) -> Bytes:
        """Between calls: gradients stay, in float32."""
        here = self.adapters or self.held_here
        frozen = 0 if self.pp_rank else self.model.encoder.frozen
        own = (here.dense - frozen) // self.dp + here.experts // self.expert_dp
        parameters = self.how.c * (self.held_here.parameters + (self.adapters.parameters if self.adapters else 0))
        if not self.trained:
            return {PARAMETERS: parameters}
        return {
            PARAMETERS: parameters,
            GRADIENTS: fp.WIDE * (here.parameters - frozen),
            MASTERS: fp.WIDE * own if self.how.c < fp.WIDE else 0,
            OPTIMIZER: self.moments * fp.WIDE * own,
        }

    def scoring(self, size: Pass) -> Bytes:
        inside = fp.layer_passing_bytes(self.model, size.tokens, c=self.how.c, tp=self.sizes.tp, backward=False)
        images, encoding = self._images(size, trained=False)
        inside = images + max(encoding, inside + self._merged(1))
        if not self.place.is_last_stage:
            return {ACTIVATIONS: inside}
        head = images + fp.head_hidden_bytes(self.model, size.tokens, size.responses, c=self.how.c, backward=False)
        return _higher({ACTIVATIONS: inside}, {ACTIVATIONS: head, LOGITS: _logits(self, size, backward=False)})

    def training(self, size: Pass) -> Bytes:
        d, c, sizes = self.model, self.how.c, self.sizes
        images, encoding = self._images(size, trained=not d.encoder.frozen)
        layers, again = self._chunk_bytes(size)
        kept = self._chunks_in_flight(size.count) * layers + images * min(size.count, self.sizes.pp)
        extra = self._merged(3 if self.fused else 2) + again
        extra = max(encoding, extra + fp.layer_passing_bytes(d, size.tokens, c=c, tp=sizes.tp, backward=True))
        if not self.place.is_last_stage:
            return {ACTIVATIONS: kept + extra}
        head = fp.head_hidden_bytes(d, size.tokens, size.responses, c=c, backward=True)
        in_head = {ACTIVATIONS: kept + head, LOGITS: _logits(self, size, backward=True)}
        return _higher({ACTIVATIONS: kept + extra}, in_head)

    def layer_saved_bytes(self, size: Pass) -> int:
        """What a layer keeps for its backward pass."""
        s, d, c = self.sizes, self.model, self.how.c
        sharing = {"tp": s.tp, "routed_tp": max(1, s.tp // s.expert_tp)}
        return fp.layer_saved_bytes(d, size.tokens, c=c, fused=self.fused, shared_norms=s.sequence_parallel, **sharing)

    def _chunk_bytes(self, size: Pass) -> tuple[int, int]:
        """What the layers of a chunk keep of one micro-batch, and what recomputing some adds to that at its highest.

        Selective recomputation is planned as saving nothing.
        """
        s, layers, saved = self.sizes, self.held_here.num_layers // self.sizes.vp, self.layer_saved_bytes(size)
        point = fp.checkpoint_bytes(self.model, size.tokens, c=self.how.c) // (s.tp if s.sequence_parallel else 1)
        granularity, number = self.recompute.get("recompute_granularity"), self.recompute.get("recompute_num_layers")
        number = min(number or 1, layers)
        if granularity == "full" and self.recompute.get("recompute_method") == "block":  # the first ones, each alone
            return number * point + (layers - number) * saved, saved if number == layers else 0
        if granularity == "full":  # groups of so many layers
            return -(-layers // number) * point, number * saved
        return layers * saved, 0

    def _images(self, size: Pass, *, trained: bool) -> tuple[int, int]:
        """Of the encoder, which the first stage has whole; it does not recompute."""
        return fp.image_bytes(self.model, 0 if self.pp_rank else size.images, c=self.how.c, trained=trained)

    def _merged(self, times: int) -> int:
        """Merged weights of a layer with adapters, and their gradient."""
        return times * self.how.c * self.adapters.merged if self.adapters else 0

    def _chunks_in_flight(self, count: int) -> int:
        """Chunks of all micro-batches that wait for their backward pass (1F1B, or interleaved)."""
        s = self.sizes
        if s.vp == 1:
            return min(count, s.pp - self.pp_rank)
        return min(count * s.vp, 2 * (s.pp - self.pp_rank - 1) + (s.vp - 1) * s.pp + 1)


Role = FsdpRole | MegatronRole


def _logits(role: Role, size: Pass, *, backward: bool) -> int:
    """Bytes of logits at their highest; a value head has none."""
    if role.head != "lm":
        return 0
    tp = role.tp if isinstance(role, FsdpRole) else role.sizes.tp
    trained = not role.lora_rank if isinstance(role, FsdpRole) else role.adapters is None
    sizes = {"c": role.how.c, "device": role.how.device, "backward": backward, "entropy": role.how.entropy}
    return fp.logits_bytes(role.model, size.responses, trained=trained, tp=tp, **sizes)


def _higher(*candidates: Bytes) -> Bytes:
    return max(candidates, key=lambda owners: sum(owners.values()))


def together(parts: Sequence[Mapping[str, int]]) -> Bytes:
    """Bytes of several by owner."""
    return sum(map(Counter, parts), Counter[str]())
