"""FSDPEngine: a transformers model trained on FSDP2, on 1..n ranks, on CPU (gloo) or CUDA (NCCL)."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.engines.base import BaseTrainEngine, Counted, TrainEngineOptions, Visit
from rlsys.engines.fsdp import sharding
from rlsys.engines.fsdp.optim import ShardedOptimizer, full_of, local_of
from rlsys.engines.fsdp.sharding import FSDPState, parameters_by_name, tied_names
from rlsys.engines.mesh import Ranks, make_ranks, max_over_ranks
from rlsys.engines.micro_batches import MicroBatches, Pack, packs_of, split_rows
from rlsys.interfaces import Part
from rlsys.models import lora
from rlsys.models.attention import kv_repeats
from rlsys.models.hf import build, check_names, layer_modules, open_weights
from rlsys.models.stacked import as_saved, saved_shapes, saved_stacks
from rlsys.models.token_model import TokenModel
from rlsys.models.vision import has_images, is_tower
from rlsys.protocol import DataProto
from rlsys.types import Shard, WeightLayout
from rlsys.utils.grouping import buckets
from rlsys.utils.hosts import host_id


class FSDPEngine(BaseTrainEngine[Ranks, ShardedOptimizer]):
    """A TrainEngine over all ranks of the default process group; every method is collective.

    `sp_size` ranks share each sequence (Ulysses). Gradient checkpointing and LoRA of `model` apply where `optim` is
    given.
    """

    def __init__(
        self,
        model: ModelConfig,
        options: TrainEngineOptions = TrainEngineOptions(),  # noqa: B008
        *,
        shard: ShardConfig = ShardConfig(),  # noqa: B008
        sp_size: int = 1,
    ) -> None:
        tp_size, optim = shard.tensor_parallel_size, options.optim
        ranks = make_ranks(options.device, fsdp_size=shard.fsdp_size, sp_size=sp_size, tp_size=tp_size)
        super().__init__(model, ranks, options)
        self.shard = shard
        if sp_size > 1:
            text = self.config.get_text_config()
            kv_repeats(text.num_attention_heads, text.num_key_value_heads, sp_size * ranks.tp_size)
        packed = model.use_remove_padding
        plain = build(self.config, head=self.head, packed=packed, trust_remote_code=model.trust_remote_code)
        self._stacks = saved_stacks(plain)
        self.is_vision = has_images(self.config)
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(self._weight_dtype)
        if (tp_mesh := ranks.tp_mesh) is not None:
            sharding.split_matrices(plain, tp_mesh, sharding.tensor_parallel_plan(plain, model, ranks.tp_size))
        plain.requires_grad_(optim is not None)
        self.lora = lora.lora_settings(model, seed=shard.seed) if optim is not None else None
        if self.lora is not None:
            lora.add_adapters(plain, self.lora)
        for name, parameter in plain.named_parameters() if options.freeze_vision_tower else ():
            parameter.requires_grad_(parameter.requires_grad and not is_tower(name))
        self._adapted = lora.adapted_weights(plain) if self.lora is not None else {}
        if optim is not None and model.enable_gradient_checkpointing:
            plain.gradient_checkpointing_enable({"use_reentrant": False})
        inside = {id(p) for layer in layer_modules(plain) for p in layer.parameters() if p.ndim == 2}
        matrices = [name for name, p in plain.named_parameters() if id(p) in inside]
        self.model = TokenModel(plain, packed=packed, group=self.ranks.sp_group)
        sharding.shard_model(self.model, self.ranks, shard)
        sharding.materialise(self.model, torch.device("cpu") if shard.offload_policy else self.ranks.device)
        self._load_initial_weights()
        if optim is not None:
            trained = {name: p for name, p in parameters_by_name(self.model).items() if p.requires_grad}
            groups = [self.ranks.mesh.get_group("shard"), *([tp_mesh.get_group()] if tp_mesh else [])]
            self.optimizer = ShardedOptimizer(
                trained, optim, groups, matrices=matrices, grad_clip=options.grad_clip, total_steps=options.total_steps
            )

    def _load_initial_weights(self) -> None:
        base = self._parameters()
        shapes = {saved: s for n, p in base.items() for saved, s in saved_shapes(n, p.shape, self._stacks).items()}
        weights = open_weights(self.model_config, self.config, head=self.head, seed=self.shard.seed)
        never_read = self.model.model._keys_to_ignore_on_load_unexpected or ()
        unused = [name for name in weights if any(re.search(pattern, name) for pattern in never_read)]
        check_names(shapes, weights, aliases=[*tied_names(self.model, self._stacks), *unused])
        sharding.fill(base, weights, self.ranks, self._stacks)
        if self.lora is not None:
            factors = self._factors()
            values = lora.adapter_weights(self.lora, {name: tuple(p.shape) for name, p in factors.items()})
            sharding.fill(factors, values, self.ranks, {})

    def _parameters(self) -> dict[str, Tensor]:
        """The model's sharded parameters and saved buffers by HF name."""
        named = parameters_by_name(self.model).items()
        return {lora.hf_name(name): p for name, p in named if not lora.is_adapter(name)}

    def _factors(self) -> dict[str, Tensor]:
        """The sharded factors of the adapters."""
        return {name: p for name, p in parameters_by_name(self.model).items() if lora.is_adapter(name)}

    @property
    def _weight_dtype(self) -> torch.dtype:
        return getattr(torch, self.shard.model_dtype)

    def _run(self, batch: DataProto, size: MicroBatches, visit: Visit, *, backward: bool) -> Counted:
        self.model.train(backward)
        lengths = batch.tensors["attention_mask"].sum(dim=1).tolist()
        parts = split_rows(lengths, size, agree=max_over_ranks, num_sharing=self.ranks.sp_size)
        for made in packs_of(batch, parts, self.model.model if self.is_vision else None):
            pack = Pack(made.index, made.tokens.to(self.ranks.device))
            if (loss := visit(pack, partial(self.model, pack.tokens))) is not None:
                loss.backward()
        if not backward:
            sharding.reshard(self.model)
        return {}

    def adapters_disabled(self) -> AbstractContextManager[None]:
        return lora.adapters_off(self.model)

    def weight_layout(self) -> WeightLayout:
        """What this rank holds, as boxes of HF tensors under the names they are saved by, parts of stacks one by one.

        A rank without rows of a tensor has no shard of it.
        """
        shards: list[Shard] = []
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        for name, parameter in self._parameters().items():
            shards += sharding.held_shards(name, parameter, self.ranks, self._stacks)
            saved = saved_shapes(name, parameter.shape, self._stacks)
            shapes |= saved
            dtypes |= dict.fromkeys(saved, str(parameter.dtype).removeprefix("torch."))
        aliases = tied_names(self.model, self._stacks)
        return WeightLayout(self.ranks.rank, host_id(), tuple(shards), shapes, dtypes, aliases)

    @torch.no_grad()
    def local_tensors(self) -> Mapping[str, Tensor]:
        """This rank's boxes. Collective where there are adapters; adapted ones are fresh tensors, the others live."""
        factors = self._factors() if self._adapted else {}
        return {name: self._merged(name, p, factors, local_of) for name, p in self._parameters().items()}

    @torch.no_grad()
    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole tensors as they are saved, in buckets of about `bucket_bytes`; they may alias parameters: keep none."""
        base, factors = self._parameters(), self._factors()
        for names in buckets({name: p.numel() * p.element_size() for name, p in base.items()}, bucket_bytes):
            tensors = ((name, self._merged(name, base[name], factors, full_of)) for name in names)
            yield [part for name, tensor in tensors for part in as_saved(name, tensor, self._stacks).items()]

    def _merged(
        self, name: str, parameter: Tensor, factors: Mapping[str, Tensor], part_of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """A part of a weight, with that of its adapters' product added if it has them."""
        part, adapted = part_of(parameter), self._adapted.get(name)
        if adapted is None:
            return part
        product = part_of(factors[adapted.b]).float() @ full_of(factors[adapted.a]).float()
        return part + (adapted.scale * product).to(part.dtype)

    def _state(self, contents: frozenset[str]) -> FSDPState:
        moments = self.optimizer.moments() if self.optimizer is not None and "optimizer" in contents else {}
        return FSDPState(self.ranks, self._stacks, parameters_by_name(self.model), moments, contents)

    def _adapter(self) -> tuple[lora.LoraSettings, list[str], dict[str, Tensor]] | None:
        if self.lora is None:
            return None
        factors = {name: full_of(p) for name, p in self._factors().items()}
        return self.lora, [name.removesuffix(".weight") for name in self._adapted], factors

    def _tensors_of(self, part: Part) -> list[Tensor]:
        """Gradients follow their parameters; with offload_policy FSDP2 moves them itself."""
        sharding.reshard(self.model)
        tensors = list[Tensor]()
        if part == "params":
            tensors = [tensor for p in self.model.parameters() for tensor in (p, p.grad) if tensor is not None]
        elif part == "optimizer" and self.optimizer is not None:
            tensors = list(self.optimizer.moments().values())
        return [local_of(tensor) for tensor in tensors if tensor.device.type == self.ranks.device.type]
