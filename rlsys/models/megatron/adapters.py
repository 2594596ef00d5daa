"""Low-rank adapters on Megatron's linear layers: they compute with W + scale * B @ A, merged again for each use.

The forward pass communicates nothing, and what it merges is not kept for the backward pass. A factor that a rank holds
whole beside a part of its weight gets a part of its gradient there; `sum_shared_gradients` adds the parts up, once a
step.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core import parallel_state as mpu

from rlsys.models.megatron.adapter_factors import EXPERTS, Factors
from rlsys.models.megatron.rules import extents
from rlsys.types import Shard
from rlsys.utils.errors import ConfigError

UNSUPPORTED_SETTINGS = ("fp8", "fp4", "use_transformer_engine_op_fuser", "delay_wgrad_compute", "cpu_offloading")
"""Megatron's settings that round merged weights, or read a layer's parameters without their adapters."""


def add_adapters(chunks: Sequence[Any], factors: Mapping[str, Sequence[Factors]]) -> None:
    """Add the adapters, not yet filled, to the linear layers of this rank's chunks, in place.

    ConfigError for settings of Megatron that would bypass them.
    """
    if factors and (unsupported := [name for name in UNSUPPORTED_SETTINGS if getattr(chunks[0].config, name, None)]):
        names = ", ".join(unsupported)
        raise ConfigError(f"adapters do not work with {names}: remove it from override_transformer_config")
    layers: dict[str, dict[str, Sequence[Factors]]] = defaultdict(dict)
    for local, of_weight in factors.items():
        place, _, attribute = local.rpartition(".")
        layers[place][attribute] = of_weight
    for place, weights in layers.items():
        number, _, path = place.partition(".")
        layer = chunks[int(number)].get_submodule(path)
        layer.lora = LayerAdapters(layer, weights, expert=EXPERTS in place)
        layer.__class__ = _adapted(type(layer), tuple(weights))
    for chunk in chunks if factors else ():
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_differentiable)


def _differentiable(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Recomputed layers give gradients only where their input asks for one, and the embedding is frozen."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


class LayerAdapters(nn.Module):
    """The adapters of one linear layer, by the names of its weights: "weight", or "weight3" of grouped experts."""

    def __init__(self, layer: nn.Module, weights: Mapping[str, Sequence[Factors]], *, expert: bool) -> None:
        super().__init__()
        self.enabled = True
        self._weights, self._now = dict(weights), {}
        for attribute, of_weight in weights.items():
            base: Any = layer._parameters[attribute]
            for factors in of_weight:
                self._add(factors, base, expert=expert)
            if (order := _order(of_weight, len(base))) is not None:
                self.register_buffer(f"{attribute}_order", torch.tensor(order, device=base.device), persistent=False)

    def _add(self, factors: Factors, base: Any, *, expert: bool) -> None:
        """Parameters that Megatron's data parallelism takes for what their weight is: part of an expert, or not."""
        everywhere = not factors.partial and getattr(base, "sequence_parallel", False)
        for local, shape in extents(factors.shards).items():
            name = local.rpartition(".")[2]
            parameter: Any = nn.Parameter(base.new_empty(shape))
            parameter.allreduce = getattr(base, "allreduce", True)
            if everywhere or name.endswith(f"_{factors.partial}"):
                parameter.partial_over = "experts" if expert else "tensors"
            self.register_parameter(name, parameter)

    def merged(self, attribute: str, base: Tensor) -> Tensor:
        """The weight that the layer computes with, differentiable in the adapters."""
        of_weight = self._weights[attribute]
        rank = of_weight[0].a.box.shape[0]
        a = [self._of(factors.a) for factors in of_weight]
        b = [self._of(factors.b[0]) if factors.b else base.new_empty(0, rank) for factors in of_weight]
        left = b[0] if len(b) == 1 else torch.block_diag(*b)
        order = self._buffers.get(f"{attribute}_order")
        if order is not None:
            left = nn.functional.pad(left, (0, 0, 0, 1)).index_select(0, order)
        return torch.addmm(base, left, a[0] if len(a) == 1 else torch.cat(a), alpha=of_weight[0].scale)

    def _of(self, shard: Shard) -> Tensor:
        return getattr(self, shard.local.rpartition(".")[2])

    def weight(self, attribute: str, base: Tensor) -> Tensor:
        if not self.enabled:
            return base
        return self._now[attribute] if attribute in self._now else self.merged(attribute, base)

    @contextmanager
    def in_use(self, base: Mapping[str, Any]) -> Iterator[None]:
        """Merge the weights for the block; the backward pass merges them again instead of keeping them."""
        if not self.enabled:
            yield
            return
        self._now = {attribute: self.merged(attribute, base[attribute]) for attribute in self._weights}
        places = {tensor.untyped_storage().data_ptr(): attribute for attribute, tensor in self._now.items()}

        def pack(tensor: Tensor) -> object:
            attribute = places.get(tensor.untyped_storage().data_ptr())
            if attribute is None:
                return tensor
            return attribute, tensor.size(), tensor.stride(), tensor.storage_offset()

        @torch.no_grad()
        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            attribute, *view = saved
            return self.merged(attribute, base[attribute]).as_strided(*view)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            for tensor in self._now.values():
                tensor.untyped_storage().resize_(0)
            self._now = {}


def _order(of_weight: Sequence[Factors], num_rows: int) -> list[int] | None:
    """For each row of a local weight its row among those of all B, or one past them for a row without an adapter; None
    where they are in order."""
    rows = [row for factors in of_weight for row in factors.rows]
    if rows == list(range(num_rows)):
        return None
    position = {row: at for at, row in enumerate(rows)}
    return [position.get(row, len(rows)) for row in range(num_rows)]


class _AdaptedLayer:
    """What a linear layer with adapters does otherwise: its weights are merged ones."""

    lora: LayerAdapters
    _parameters: Mapping[str, object]

    def forward(self, *args: object, **options: object) -> object:
        with self.lora.in_use(self._parameters):
            return super().forward(*args, **options)  # type: ignore[misc]


@cache
def _adapted(kind: type, attributes: tuple[str, ...]) -> type:
    def of(attribute: str) -> property:
        return property(lambda layer: layer.lora.weight(attribute, layer._parameters[attribute]))

    return type(f"Adapted{kind.__name__}", (_AdaptedLayer, kind), {name: of(name) for name in attributes})


@torch.no_grad()
def merged_weight(chunks: Sequence[nn.Module], local: str) -> Tensor:
    """A local weight with its adapters merged, a fresh tensor."""
    place, _, attribute = local.rpartition(".")
    number, _, path = place.partition(".")
    layer: Any = chunks[int(number)].get_submodule(path)
    return layer.lora.merged(attribute, layer._parameters[attribute])


@contextmanager
def adapters_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """The model as it was before the adapters, within the block."""
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LayerAdapters)]
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


@torch.no_grad()
def sum_shared_gradients(chunks: Sequence[nn.Module]) -> None:
    """Make whole, in place, the gradients of which every rank has a part of a sum; collective."""
    groups = {
        "tensors": mpu.get_tensor_model_parallel_group(),
        "experts": mpu.get_expert_tensor_parallel_group(check_initialized=False),
    }
    for over, group in groups.items():
        parameters = [p for chunk in chunks for p in chunk.parameters() if getattr(p, "partial_over", None) == over]
        grads: list[Any] = [p.main_grad for p in parameters if p.requires_grad]  # type: ignore[attr-defined]
        if grads and dist.get_world_size(group) > 1:
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_([grad.view(-1) for grad in grads], list(flat.split([g.numel() for g in grads])))
