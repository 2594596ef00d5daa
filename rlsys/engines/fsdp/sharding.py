"""FSDP2 over a TokenModel: wrapping, filling shards from a tensor source, who holds which box of which HF tensor."""

import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlsys.config.schema.model import ShardConfig
from rlsys.engines.fsdp.optim import local_of
from rlsys.engines.mesh import Ranks
from rlsys.models.hf import TensorSource, dtype_name, fill_shards, layer_modules, saved_tensors_of, shared_names
from rlsys.models.lora import AdaptedWeight, hf_name, is_adapter
from rlsys.models.stacked import Stacks, as_saved, saved_aliases, saved_shapes, shards_of
from rlsys.models.token_model import TokenModel
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.boxes import buckets
from rlsys.utils.hosts import host_id

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes into outputs


def shard_model(model: TokenModel, ranks: Ranks, shard: ShardConfig) -> None:
    """Shard every block, the scalar head (which stays in float32) and the rest over the mesh.

    Gradients are reduced as float32 sums, not averages: the engine divides by the global count.
    """
    compute_dtype = getattr(torch, dtype_name(shard.dtype, ranks.device.type))
    reduce_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    offload = CPUOffloadPolicy() if shard.offload_policy and ranks.device.type == "cuda" else OffloadPolicy()
    options: dict[str, Any] = {"mesh": ranks.mesh, "offload_policy": offload}
    layers: list[Any] = layer_modules(model.model)
    for layer in layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=shard.reshard_after_forward, **options)
        if shard.use_torch_compile:
            layer.forward = torch.compile(layer.forward)
    if not model.is_lm:
        exact = MixedPrecisionPolicy(param_dtype=reduce_dtype, reduce_dtype=reduce_dtype)
        fully_shard(model.model.score, mp_policy=exact, **options)
    fully_shard(model, mp_policy=policy, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if shard.forward_prefetch:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])


def materialise(model: TokenModel, device: torch.device) -> None:
    """Give the sharded parameters memory (not yet values) on `device` and the buffers their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def reshard(model: nn.Module) -> None:
    """Drop what is gathered: after a forward without a backward the outermost parameters still are."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameters_by_name(model: TokenModel) -> dict[str, Tensor]:
    """Sharded parameters by their name in the transformers model, a tied one once, and the buffers that are saved with
    them, which every rank has whole."""
    reshard(model)
    return {name.removeprefix("model."): p for name, p in saved_tensors_of(model).items()}


def tied_names(model: TokenModel, stacks: Stacks) -> dict[str, str]:
    """Names whose data lives under another name, as both are saved."""
    reshard(model)
    named = [(name.removeprefix("model."), p) for name, p in model.named_parameters(remove_duplicate=False)]
    return saved_aliases({hf_name(name): hf_name(held) for name, held in shared_names(named).items()}, stacks)


def held_shards(name: str, parameter: Tensor, ranks: Ranks, stacks: Stacks) -> Iterator[Shard]:
    """The rows of `parameter` on this rank as boxes of the tensors it is saved as.

    FSDP2 cuts dimension 0 into ceil(n / ranks) rows; last parts may be empty.
    """
    rows, zeros = parameter.shape[0], (0,) * (parameter.ndim - 1)
    start = min(ranks.shard_rank * -(-rows // ranks.shard_size), rows) if isinstance(parameter, DTensor) else 0
    box = Box(name, (start, *zeros), tuple(local_of(parameter).shape))
    if name in stacks:
        yield from shards_of(stacks[name], box)
    elif box.shape[0]:
        yield Shard(box, name, (0,) * len(box.shape))


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], source: TensorSource, ranks: Ranks, stacks: Stacks) -> None:
    """Copy this rank's rows of each parameter from the source, which has them by the names they are saved by."""
    for name, parameter in parameters.items():
        fill_shards(local_of(parameter), list(held_shards(name, parameter, ranks, stacks)), source)


def weight_layout(
    parameters: Mapping[str, Tensor], ranks: Ranks, aliases: Mapping[str, str], stacks: Stacks
) -> WeightLayout:
    """What this rank holds, as boxes of HF tensors under the names they are saved by, the parts of `stacks` one by one.

    A rank without rows of a tensor has no shard of it.
    """
    shards, shapes, dtypes = list[Shard](), dict[str, tuple[int, ...]](), dict[str, str]()
    for name, parameter in parameters.items():
        shards += held_shards(name, parameter, ranks, stacks)
        saved = saved_shapes(name, parameter.shape, stacks)
        shapes |= saved
        dtypes |= dict.fromkeys(saved, str(parameter.dtype).removeprefix("torch."))
    return WeightLayout(
        rank=ranks.rank, host=host_id(), shards=tuple(shards), full_shapes=shapes, dtypes=dtypes, aliases=dict(aliases)
    )


class HFWeights:
    """The model's weights under HF names: base tensors, with the adapters' products added where there are adapters.

    Whole tensors of `stacks` are given part by part, as they are saved.
    """

    def __init__(self, parameters: Mapping[str, Tensor], adapted: Mapping[str, AdaptedWeight], stacks: Stacks) -> None:
        self._stacks = stacks
        self._adapters = {name: p for name, p in parameters.items() if is_adapter(name)}
        self.base = {hf_name(name): p for name, p in parameters.items() if not is_adapter(name)}
        self._adapted = adapted

    @torch.no_grad()
    def local(self) -> dict[str, Tensor]:
        """This rank's boxes. Collective where there are adapters; adapted ones are fresh tensors, the others live."""
        return {name: self._merged(name, local_of(p), whole=False) for name, p in self.base.items()}

    @torch.no_grad()
    def full(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole tensors as they are saved, in buckets of about `bucket_bytes`; collective.

        They may alias parameters: copy, keep none.
        """
        for names in buckets({name: p.numel() * p.element_size() for name, p in self.base.items()}, bucket_bytes):
            bucket = list[tuple[str, Tensor]]()
            for name in names:
                tensor = self._merged(name, full_of(self.base[name]), whole=True)
                bucket += as_saved(name, tensor, self._stacks).items()
            yield bucket

    def _merged(self, name: str, base: Tensor, *, whole: bool) -> Tensor:
        adapted = self._adapted.get(name)
        if adapted is None:
            return base
        b = self._adapters[adapted.b]
        b_rows = full_of(b) if whole else local_of(b)
        return base + (adapted.scale * (b_rows.float() @ full_of(self._adapters[adapted.a]).float())).to(base.dtype)


def full_of(parameter: Tensor) -> Tensor:
    """The whole tensor of a DTensor, gathered over its mesh."""
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
