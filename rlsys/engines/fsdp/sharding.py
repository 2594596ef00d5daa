"""FSDP2 over a TokenModel: wrapping, filling shards from a tensor source, who holds which box of which HF tensor.

Checkpoints have tensors under the names and in the shapes in which transformers saves them, so that every engine loads
what another one saved.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor import parallel as tp
from transformers import PreTrainedModel

from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.engines.fsdp.optim import BLOCK_ELEMENTS, local_of, tensor_parallel_part
from rlsys.engines.mesh import Ranks
from rlsys.engines.tensor_files import StoredBoxes, read_tensor_index, saved_tensors
from rlsys.models.hf import TensorSource, dtype_name, fill_shards, layer_modules, saved_tensors_of, shared_names
from rlsys.models.logprobs import can_build_kernels
from rlsys.models.lora import hf_name
from rlsys.models.stacked import STACK_DIMS, Stacks, saved_aliases, saved_shapes, shards_of
from rlsys.models.token_model import TokenModel
from rlsys.models.vision import has_images
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import Box, Shard
from rlsys.utils.boxes import slices
from rlsys.utils.errors import ConfigError

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes into outputs


STYLES: Mapping[str, tuple[int | None, Callable[[], tp.ParallelStyle]]] = {
    "colwise": (0, tp.ColwiseParallel),
    "colwise_gather_output": (0, partial(tp.ColwiseParallel, output_layouts=Replicate())),
    "rowwise": (1, tp.RowwiseParallel),
    "rowwise_split_input": (1, partial(tp.RowwiseParallel, input_layouts=Replicate())),
    "embedding_rowwise": (0, partial(tp.RowwiseParallel, input_layouts=Replicate())),
    "replicated_with_grad_allreduce": (None, partial(tp.SequenceParallel, sequence_dim=1, use_local_output=True)),
}
"""By transformers' names of tensor parallelism: the dimension of a weight that is split, and torch's style."""


def tensor_parallel_plan(model: PreTrainedModel, settings: ModelConfig, size: int) -> dict[str, str]:
    """The style of every module that `size` ranks split: by transformers' plan of the model, and the vocabulary.

    ConfigError for a model that they cannot split.
    """
    text, names = model.config.get_text_config(), {id(module): name for name, module in model.named_modules()}
    rules = {**model.tp_plan, names[id(model.get_input_embeddings())]: "embedding_rowwise"}
    if not hasattr(model, "score"):
        rules[names[id(model.get_output_embeddings())]] = "colwise"
    heads = {name: getattr(text, name, None) or 0 for name in ("num_attention_heads", "num_key_value_heads")}
    indivisible = [f"{name}={count}" for name, count in heads.items() if count % size]
    plan: dict[str, str] = {}
    whole: list[str] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rule = re.sub(r"\.\d+(?=\.)", ".*", name)
        module, rule = (name, rule) if rule in rules else (name.rpartition(".")[0], rule.rpartition(".")[0])
        if rule not in rules:
            whole.append(name)
            continue
        plan[module] = rules[rule]
        dim, _ = STYLES.get(rules[rule], (None, None))
        if dim is not None and parameter.ndim > dim and parameter.shape[dim] % size:
            indivisible.append(f"the shape {tuple(parameter.shape)} of {name}")
    split = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    beside = [name for name in whole if split & {name.rpartition(".")[0], name.rsplit(".", 2)[0]}]
    unknown = [f"{name} ({style})" for name, style in plan.items() if style not in STYLES]
    if has_images(model.config) or settings.has_adapters:
        why = "low-rank adapters and image encoders are not split over ranks"
    elif unknown or beside or not any(style.startswith("rowwise") for style in plan.values()):
        why = f"transformers' plan of {text.model_type} does not say how to split {[*unknown, *beside, 'it'][0]}"
    elif indivisible:
        why = f"it does not divide {indivisible[0]}"
    else:
        return plan
    raise ConfigError(f"tensor_parallel_size={size}: {why}; set 1")


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Split the modules of `plan` over `mesh`, in place."""
    tp.parallelize_module(model, mesh, {name: STYLES[style][1]() for name, style in plan.items()}, src_data_rank=None)
    model.tie_weights()


def shard_model(model: TokenModel, ranks: Ranks, shard: ShardConfig) -> None:
    """Shard every block, the scalar head (which stays in float32) and the rest over the mesh.

    Gradients are reduced as float32 sums, not averages: the engine divides by the global count.
    """
    compute_dtype = getattr(torch, dtype_name(shard.dtype, ranks.device.type))
    reduce_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    offload = CPUOffloadPolicy() if shard.offload_policy and ranks.device.type == "cuda" else OffloadPolicy()
    options: dict[str, Any] = {"mesh": ranks.mesh, "offload_policy": offload}
    options["shard_placement_fn"] = partial(_cut, ranks.shard_size)
    layers: list[Any] = layer_modules(model.model)
    if compiles := shard.use_torch_compile and (ranks.device.type == "cpu" or can_build_kernels()):
        torch._dynamo.config.recompile_limit = 16  # a graph for each kind of layer, and each pass of each role; not 8
        torch._dynamo.config.specialize_float = True  # as symbols they end in a second trace of each layer
    for layer in layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=shard.reshard_after_forward, **options)
        if compiles:
            layer.forward = torch.compile(layer.forward, dynamic=True)  # packs differ in tokens and sequences
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


def _cut(num_ranks: int, parameter: nn.Parameter) -> ShardOf:
    """Dimension 0, or the rows of experts whose number ranks do not divide: FSDP2 would pad and gather whole ones."""
    uneven = parameter.ndim == STACK_DIMS and not isinstance(parameter, DTensor) and parameter.shape[0] % num_ranks
    return ShardOf(1 if uneven and not parameter.shape[1] % num_ranks else 0)


def _cut_dim(parameter: Tensor, ranks: Ranks) -> int:
    """The dimension that FSDP2 cuts."""
    placements = getattr(parameter, "placements", ())[: ranks.mesh.ndim]
    return next((place.dim for place in placements if isinstance(place, ShardOf)), 0)


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
    """The part of `parameter` on this rank as boxes of the tensors it is saved as.

    Of its part by tensor parallelism FSDP2 cuts a dimension into ceil(n / ranks) rows; last parts may be empty.
    """
    (dim, part), start = tensor_parallel_part(parameter), [0] * parameter.ndim
    if dim is not None:
        start[dim] = ranks.rank % ranks.tp_size * part[dim]
    if isinstance(parameter, DTensor):
        at = _cut_dim(parameter, ranks)
        start[at] += min(ranks.mesh.get_local_rank("shard") * -(-part[at] // ranks.shard_size), part[at])
    box = Box(name, tuple(start), tuple(local_of(parameter).shape))
    if name in stacks:
        yield from shards_of(stacks[name], box, parameter.shape)
    elif prod(box.shape):
        yield Shard(box, name, (0,) * len(box.shape))


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], source: TensorSource, ranks: Ranks, stacks: Stacks) -> None:
    """Copy this rank's rows of each parameter from the source, which has them by the names they are saved by."""
    for name, parameter in parameters.items():
        fill_shards(local_of(parameter), list(held_shards(name, parameter, ranks, stacks)), source)


@dataclass(frozen=True)
class FSDPState:
    """A Contents of rlsys.engines.checkpoint: sharded parameters by name, this rank's parts of the optimizer's moments
    by `<moment>.<name>`, and `parts` among "model", "optimizer" and "extra".

    What is named absmax are the scales of the blocks of a rank's 8-bit moments: a row of a matrix for each rank.
    """

    ranks: Ranks
    stacks: Stacks
    parameters: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    parts: frozenset[str]

    @property
    def layout(self) -> tuple[str, JsonObject]:
        sizes = {"world_size": self.ranks.world_size, "shard_size": self.ranks.copy_size}
        return "fsdp_config.json", {"FSDP_version": 2, **sizes}

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Prefix of the keys in the checkpoint, name of the sharded parameter, this rank's rows."""
        for name, parameter in self.parameters.items() if "model" in self.parts else ():
            yield "model.", name, local_of(parameter)
        for key, local in self.moments.items():
            moment, _, name = key.partition(".")
            if not moment.startswith("absmax"):
                yield f"optim.{moment}.", name, local

    def _scales(self) -> Iterator[tuple[str, Tensor]]:
        return ((key, local) for key, local in self.moments.items() if key.startswith("absmax"))

    def shapes(self) -> dict[str, Sequence[int]]:
        shapes: dict[str, Sequence[int]] = {
            prefix + saved: shape
            for prefix, name, _ in self._tensors()
            for saved, shape in saved_shapes(name, self.parameters[name].shape, self.stacks).items()
        }
        for key, _ in self._scales():
            parameter = self.parameters[key.partition(".")[2]]
            part, at = [*tensor_parallel_part(parameter)[1]], _cut_dim(parameter, self.ranks)
            part[at] = -(-part[at] // self.ranks.shard_size)
            shapes[f"optim.{key}"] = (self.ranks.copy_size, -(-prod(part) // BLOCK_ELEMENTS))
        return shapes

    def _boxes(self, *, once: bool = False) -> Iterator[tuple[str, Box, Tensor]]:
        """What this rank holds of each key, and its values, live; `once` without what tensor parallelism copies."""
        for prefix, name, local in self._tensors():
            if once and self.ranks.rank % self.ranks.tp_size and tensor_parallel_part(self.parameters[name])[0] is None:
                continue
            for shard in held_shards(name, self.parameters[name], self.ranks, self.stacks):
                yield prefix + shard.box.tensor, shard.box, local[slices(shard.local_start, shard.box.shape)]
        for key, scales in self._scales():
            if scales.numel():
                number = self.ranks.rank % self.ranks.copy_size
                yield f"optim.{key}", Box(key, (number, 0), (1, len(scales))), scales[None]

    def boxes(self) -> StoredBoxes:
        first_copy = self.ranks.rank < self.ranks.copy_size
        return ((key, box.start, values) for key, box, values in self._boxes(once=True) if first_copy)

    @torch.no_grad()
    def read(self, path: Path) -> None:
        source = saved_tensors(path, read_tensor_index(path) if "model" in self.parts or self.moments else {})
        for key, box, values in self._boxes():
            values.copy_(source[key].read(box.start, box.shape))
