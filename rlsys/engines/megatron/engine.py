"""MegatronEngine: a model of Megatron-Core, split by tensors, stages and experts, on CPU (gloo) or CUDA (NCCL)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.config.schema.megatron import MegatronConfig, MegatronShardConfig, MegatronTrainConfig
from rlsys.config.schema.model import ModelConfig
from rlsys.models import lora
from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlsys.engines.base import BaseTrainEngine, Counted, TrainEngineOptions, Visit
from rlsys.engines.megatron.groups import MegatronRanks, current, make_ranks
from rlsys.engines.megatron.optim import MegatronAdamW
from rlsys.engines.megatron.weights import MegatronState, ModelShards
from rlsys.engines.mesh import gather_json, max_over_ranks, sum_over_ranks
from rlsys.engines.micro_batches import MicroBatches, Pack, packs_of, split_rows
from rlsys.interfaces import LossFn, Output, Part
from rlsys.models.context import pack_multiple
from rlsys.models.hf import TensorSource, build, check_names, dtype_name, open_weights, read_whole
from rlsys.models.megatron.adapters import adapters_off, add_adapters
from rlsys.models.megatron.build import TokenGPT, build_chunks, packed_arguments, weigh_router_losses
from rlsys.models.megatron.family import decoder_family
from rlsys.models.megatron.image_tower import ImageTower
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.models.megatron.router_replay import NO_ROUTE, RouterReplay
from rlsys.models.packing import padded_each, padded_to
from rlsys.models.vision import has_images
from rlsys.protocol import DataProto
from rlsys.types import EXPORT_FILE_BYTES, WeightLayout
from rlsys.utils.errors import ConfigError


class MegatronEngine(BaseTrainEngine[MegatronRanks, MegatronAdamW]):
    """A TrainEngine over all ranks of the default process group; every method is collective; rows are always packed.

    Recomputation and LoRA of `model` apply where `optim` is given.
    ConfigError, before any memory is allocated, for a model that has no family or that `megatron` cannot split.
    """

    def __init__(
        self,
        model: ModelConfig,
        options: TrainEngineOptions = TrainEngineOptions(),  # noqa: B008
        *,
        megatron: MegatronShardConfig = MegatronConfig(),  # noqa: B008
    ) -> None:
        sizes = ParallelSizes.from_config(megatron)
        ranks = make_ranks(options.device, sizes)
        super().__init__(model, ranks, options)
        config = self.config
        family, hf_config = decoder_family(config)
        family.check(hf_config, ranks.place)
        self.tower: ImageTower | None = None
        if has_images(config):
            whole = build(config, head=options.head, packed=False, trust_remote_code=model.trust_remote_code)
            self.tower = ImageTower(whole, family, len(family.layers_of(hf_config, replace(ranks.place, pp_rank=0))[0]))
            family = self.tower.family
        seed = megatron.seed if isinstance(megatron, MegatronTrainConfig) else 0
        settings = lora.lora_settings(model, seed=seed) if options.optim is not None else None
        if settings is not None and self.tower is not None:
            raise ConfigError("Megatron adapts models of text only: set lora_rank=0, or strategy=fsdp")
        kind = "value" if options.head == "scalar" else "lm"
        with current(sizes):
            self.chunks: Sequence[TokenGPT] = build_chunks(
                family,
                hf_config,
                megatron,
                dtype=getattr(torch, dtype_name(megatron.dtype, options.device)),
                recompute=options.optim is not None and model.enable_gradient_checkpointing,
                fuse_gradients=options.optim is not None and settings is None,
                head=kind,
                device=ranks.device,
                tower=self.tower,
            )
            self.held = ModelShards(family, hf_config, kind, ranks, self.chunks, settings, options.freeze_vision_tower)
            add_adapters(self.chunks, self.held.factors)
            base = open_weights(model, config, head=options.head, seed=seed)
            check_names(self.held.base_shapes, base, aliases=[*family.carried(hf_config), *family.aliases(hf_config)])
            _ = self.held.dtypes  # gathered here, where all ranks are
            self.held.mark_parameters(trained=options.optim is not None)
            weights: TensorSource = base
            if (plan := self.held.adapters) is not None:
                weights = {**base, **lora.adapter_weights(plan.settings, plan.shapes)}
            self.held.fill(weights)
            if options.optim is not None:
                self.optimizer = MegatronAdamW(
                    self.chunks, options.optim, grad_clip=options.grad_clip, total_steps=options.total_steps
                )
                self._state().fill("master", weights)
        self._recorder: RouterReplay | None = None
        self._router_losses = self.chunks[0].config.moe_aux_loss_coeff, self.chunks[0].config.moe_z_loss_coeff
        self._counted = 0.0
        self._carried = base if model.path is not None else {}

    @property
    def _weight_dtype(self) -> torch.dtype:
        return self.chunks[0].config.params_dtype

    def _own_groups(self) -> AbstractContextManager[None]:
        return current(self.ranks.place.sizes)

    def forward(
        self, batch: DataProto, outputs: Sequence[Output], *, temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """As TrainEngine's; `routed_experts` are the routes that the routers choose, see rlsys.interfaces.Output."""
        numbers = [name for name in outputs if name != "routed_experts"]
        if len(numbers) == len(outputs):
            return super().forward(batch, outputs, temperature=temperature, topk=topk)
        config = self.chunks[0].config
        shape = (*batch.tensors["input_ids"].shape, config.num_layers, config.moe_router_topk)
        routes = torch.full(shape, NO_ROUTE, dtype=torch.int16, device=self.ranks.device)
        self._recorder = RouterReplay(self.chunks, routes, record=True)
        try:
            results = super().forward(batch, numbers, temperature=temperature, topk=topk)
            with self._own_groups():
                return {**results, "routed_experts": self._recorder.recorded().to(batch.tensors.device or "cpu")}
        finally:
            self._recorder = None

    def forward_backward(
        self, batch: DataProto, loss_fn: LossFn, *, outputs: Sequence[Output] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, float]:
        """As TrainEngine's; losses of routers are means over all tokens, whatever the loss is divided by."""
        if any(self._router_losses):
            nothing = torch.zeros_like(batch.tensors["responses"], dtype=torch.float32)
            given = {str(name): nothing[..., None] if "topk" in name else nothing for name in outputs}
            self._counted = float(loss_fn(given, batch.tensors).count)
        return super().forward_backward(batch, loss_fn, outputs=outputs, temperature=temperature)

    def _run(self, batch: DataProto, size: MicroBatches, visit: Visit, *, backward: bool) -> Counted:
        chunks = self.optimizer.chunks if backward and self.optimizer is not None else self.chunks
        for chunk in chunks:
            chunk.train(backward)

        packs = self._packs(batch, size)
        if backward and any(self._router_losses):
            tokens = sum(pack.tokens.num_tokens for pack in packs)
            ((count, tokens),) = sum_over_ranks(gather_json({"": (self._counted, tokens)})).values()
            weigh_router_losses(self.chunks[0].config, *self._router_losses, count / max(tokens, 1))
        routes = batch.tensors.get("routed_experts", None)
        replay = self._recorder if routes is None else RouterReplay(chunks, routes)
        with nullcontext() if replay is None else replay.installed():
            self._run_packs(chunks, packs, visit, backward=backward, replay=replay)
            return {} if replay is None else {"actor/routes_differ": replay.different(self.ranks.device)}

    def _run_packs(
        self, chunks: Sequence[Any], packs: Sequence[Pack], visit: Visit, *, backward: bool, replay: RouterReplay | None
    ) -> None:
        """Run every pack through all chunks by Megatron's schedule: one stage, 1F1B, or interleaved chunks.

        The last stage visits each pack; with `backward` the gradients of what `visit` returns are added up. Routers
        take the routes of `replay`.
        """
        if not packs:
            return

        def after(pack: Pack, hidden: Tensor, *, non_loss_data: bool = False) -> Any:
            loss = visit(pack, partial(self.chunks[-1].token_outputs, hidden, pack.tokens))
            return None if non_loss_data else (loss, torch.zeros((), dtype=torch.int, device=hidden.device), None)

        def forward(iterator: Iterator[Pack], chunk: Any) -> tuple[Tensor, Callable[..., object]]:
            pack = next(iterator)
            with nullcontext() if replay is None else replay.forward(chunk, pack.index, pack.tokens):
                return chunk(**packed_arguments(pack.tokens, pack.tokens.token_ids.device)), partial(after, pack)

        iterators = [iter(packs) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(packs),
            seq_length=packs[0].tokens.num_tokens,
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )

    def _packs(self, batch: DataProto, size: MicroBatches) -> list[Pack]:
        """As many packs on every rank, of one length where stages or ranks of experts exchange them.

        The ranks of one context-parallel group make the same packs. Interleaved stages take them in groups of as many
        as there are stages.
        """
        config, sizes = self.chunks[0].config, self.ranks.place.sizes
        lengths = batch.tensors["attention_mask"].sum(dim=1).tolist()
        parts = split_rows(lengths, size, agree=max_over_ranks, num_sharing=sizes.cp)
        parts += [[]] * (-len(parts) % (sizes.pp if sizes.vp > 1 else 1))
        packs = list(packs_of(batch, parts, None if self.tower is None else self.tower.model))
        if sizes.cp > 1:
            packs = [replace(pack, tokens=padded_each(pack.tokens, 2 * sizes.cp)) for pack in packs]
        lengths = [pack.tokens.num_tokens for pack in packs]
        if sizes.pp > 1 or (sizes.ep > 1 and config.moe_token_dispatcher_type == "allgather"):
            lengths = [max_over_ranks(max(lengths, default=0))] * len(packs)
        multiple = pack_multiple((sizes.tp if config.sequence_parallel else 1) * (16 if config.fp8 else 1), sizes.cp)
        return [
            Pack(pack.index, padded_to(pack.tokens, -(-length // multiple) * multiple).to(self.ranks.device))
            for pack, length in zip(packs, lengths, strict=True)
        ]

    def _share(self, values: Tensor) -> None:
        if self.ranks.place.sizes.pp > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, last, group=mpu.get_pipeline_model_parallel_group())

    def adapters_disabled(self) -> AbstractContextManager[None]:
        return adapters_off(self.chunks)

    def weight_layout(self) -> WeightLayout:
        return self.held.layout()

    def local_tensors(self) -> Mapping[str, Tensor]:
        merged = self.held.merged()
        return {name: merged(name) for name in dict.fromkeys(shard.local for shard in self.held.base_held)}

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return self.held.full(self.held.merged(), bucket_bytes, names=self.held.base_shapes)

    def _adapter(self) -> tuple[lora.LoraSettings, list[str], dict[str, Tensor]] | None:
        plan = self.held.adapters
        if plan is None:
            return None
        buckets = self.held.full(self.held.local().__getitem__, EXPORT_FILE_BYTES, names=plan.shapes)
        tensors = {name: tensor.cpu() for bucket in buckets for name, tensor in bucket}
        return plan.settings, [name.removesuffix(".weight") for name in plan.adapted], tensors

    def _exported(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The trained tensors, then those that the checkpoint has and that are only carried along."""
        yield from super()._exported()
        for name in self.held.family.carried(self.held.hf_config):
            if name in self._carried:
                yield [(name, read_whole(self._carried[name]))]

    def _state(self, contents: frozenset[str] = frozenset()) -> MegatronState:
        names = {parameter: name for name, parameter in self.held.parameters.items()}
        ranges = self.optimizer.ranges(names) if self.optimizer is not None else []
        return MegatronState(self.held, tuple(ranges), contents)

    def _tensors_of(self, part: Part) -> list[Tensor]:
        parameters = list(self.held.local().values())
        if part == "params" or self.optimizer is None:
            return parameters if part == "params" else []
        if part == "grads":
            return [buffer.grad_data for buffer in self.optimizer.grad_buffers()]
        shared = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        own = [tensor for part in self._state().ranges for tensor in part.tensors.values()]
        device = self.ranks.device.type
        return [t for t in own if t.device.type == device and t.untyped_storage().data_ptr() not in shared]
