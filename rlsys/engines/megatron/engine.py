"""MegatronEngine: a model of Megatron-Core, cut by tensors, stages and experts, on CPU (gloo) or CUDA (NCCL).

B rows of this rank, R response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.models import lora as adapters
from rlsys.models.megatron import start  # noqa: F401

# isort: split

from megatron.core import parallel_state as mpu

from rlsys.engines import checkpoint, export
from rlsys.engines.fsdp.optim import OptimSettings
from rlsys.engines.megatron.groups import MegatronRanks, current, make_ranks
from rlsys.engines.megatron.offload import Parking
from rlsys.engines.megatron.optim import MegatronAdamW
from rlsys.engines.megatron.run import Pack, make_packs, run
from rlsys.engines.megatron.state import MegatronState
from rlsys.engines.megatron.weights import HeldModel, Merged
from rlsys.engines.mesh import gather_json, sum_over_ranks
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossFn, Output, Part
from rlsys.models.hf import Head, ModelSource, TensorSource, check_names, open_weights, read_config
from rlsys.models.megatron.adapters import adapters_off, add_adapters
from rlsys.models.megatron.build import TokenGPT, build_chunks
from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.options import ModelOptions
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.types import StepReport, WeightLayout
from rlsys.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

Content = Literal["model", "optimizer", "extra"]
ALL_CONTENTS: tuple[Content, ...] = ("model", "optimizer", "extra")


def in_own_groups(method: Any) -> Any:
    """Run a method with Megatron's groups of its engine."""

    @wraps(method)
    def inside(self: MegatronEngine, *args: Any, **options: Any) -> Any:
        with current(self.ranks.sizes):
            return method(self, *args, **options)

    return inside


class MegatronEngine:
    """A TrainEngine (rlsys/interfaces.py) over all ranks of the default process group; every method is collective.

    Without `optimizer` the engine only computes (reference and reward models). `training` and `scoring` size the
    micro-batches of forward_backward and forward; rows are always packed. ConfigError, before any memory is taken, for
    a model Megatron does not know or sizes it cannot be cut into.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        head: Head = "lm",
        device: str = "cpu",
        optimizer: OptimSettings | None = None,
        training: MicroBatches = MicroBatches(rows=1),  # noqa: B008
        scoring: MicroBatches | None = None,
        sizes: ParallelSizes = ParallelSizes(),  # noqa: B008
        options: ModelOptions = ModelOptions(),  # noqa: B008
        lora: adapters.LoraSettings | None = None,
        save_contents: Sequence[Content] = ALL_CONTENTS,
        load_contents: Sequence[Content] = ALL_CONTENTS,
    ) -> None:
        self.source, self.head, self.options = source, head, options
        self.training, self.scoring = training, scoring or training
        self.save_contents, self.load_contents = tuple(save_contents), tuple(load_contents)
        self.config = read_config(source)
        hf_config = self.config.to_dict()
        family = family_of(hf_config)
        self.ranks: MegatronRanks = make_ranks(device, sizes)
        family.check(hf_config, self.ranks.place)
        if lora is not None and options.fp8 is not None:
            raise ConfigError("adapters are merged into weights that fp8 would round: leave fp8 out, or lora_rank=0")
        with current(sizes):
            chunks = build_chunks(
                family, hf_config, sizes, options, scalar_head=head == "scalar", device=self.ranks.device
            )
            self.held = HeldModel(family, hf_config, head == "scalar", self.ranks, chunks, lora)
            add_adapters(chunks, self.held.factors)
            self._weights = open_weights(source, self.config, head=head, as_saved=True)
            check_names(self.held.base_shapes, self._weights, aliases=[*self._carried(), *self._aliases()])
            self.held.meet()
            self.held.mark_parts()
            self.held.mark_trained(optimizer is not None)
            weights = self._with_adapters(self._weights)
            self.held.fill(weights)
            self.optimizer: MegatronAdamW | None = None
            if optimizer is not None:
                self.optimizer = MegatronAdamW(chunks, optimizer, dtype=getattr(torch, options.dtype))
                self._state().fill_masters(weights)
        self._weights = None if source.path is None else self._weights
        self._parking, self._count = Parking(), 0.0

    def _with_adapters(self, weights: TensorSource) -> TensorSource:
        plan = self.held.adapters
        if plan is None:
            return weights
        values = adapters.adapter_weights(plan.settings, plan.shapes)
        check_names(plan.shapes, values)
        return adapters.Beside(weights, values)

    def _aliases(self) -> Sequence[str]:
        return list(self.held.family.aliases(self.held.hf_config))

    def _carried(self) -> Sequence[str]:
        """Tensors that the checkpoint has and that are not trained, such as those of multi-token prediction."""
        return list(self.held.family.carried(self.held.hf_config))

    @property
    def chunks(self) -> Sequence[TokenGPT]:
        return self.held.chunks

    @property
    def dp_rank(self) -> int:
        return self.ranks.dp_rank

    @property
    def dp_size(self) -> int:
        return self.ranks.dp_size

    @property
    def is_collect(self) -> bool:
        """Whether this rank's results are the ones to collect: one rank of each data-parallel group."""
        return self.ranks.is_collect

    def _packs(self, rows: Any, size: MicroBatches) -> list[Pack]:
        config, sizes = self.chunks[0].config, self.ranks.sizes
        multiple = sizes.tp if config.sequence_parallel else 1
        multiple *= 16 if self.options.fp8 else 1
        equal = sizes.pp > 1 or (sizes.ep > 1 and config.moe_token_dispatcher_type == "allgather")
        return make_packs(rows, size, self.ranks, multiple=multiple, equal=equal)

    @in_own_groups
    @torch.no_grad()
    def forward(self, batch: DataProto, outputs: Sequence[Output], *, temperature: float = 1.0) -> dict[str, Tensor]:
        """Per-token outputs (B, R) of this rank's rows, float32 on the rows' device, zero at padding."""
        rows = batch.tensors
        shape = rows["responses"].shape
        results: dict[str, Tensor] = {name: torch.zeros(shape, device=self.ranks.device) for name in outputs}

        def finish(pack: Pack, hidden: Tensor) -> None:
            found = self.chunks[-1].token_outputs(hidden, pack.tokens, outputs, temperature)
            if pack.index is not None:
                for name, values in found.items():
                    results[name][pack.index] = pack.tokens.scatter(values).to(results[name])

        for chunk in self.chunks:
            chunk.eval()
        packs = self._packs(rows, self.scoring)
        run(self.chunks, packs, finish, hidden_size=self.config.hidden_size, backward=False)
        for values in results.values():
            self._from_last_stage(values)
        return {name: values.to(rows.device or "cpu") for name, values in results.items()}

    def _from_last_stage(self, values: Tensor) -> None:
        if self.ranks.sizes.pp > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, last, group=mpu.get_pipeline_model_parallel_group())

    @in_own_groups
    def forward_backward(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        outputs: Sequence[Output] = ("log_probs",),
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Add the gradients of the loss sum to those there; returns global means of the metrics and `loss`."""
        if self.optimizer is None:
            raise ValueError("this engine has no optimizer: it only computes")
        rows = batch.tensors
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

        def finish(pack: Pack, hidden: Tensor) -> Tensor:
            found = self.chunks[-1].token_outputs(hidden, pack.tokens, outputs, temperature)
            connected = torch.stack([values.sum() for values in found.values()]).sum() * 0.0
            if pack.index is None:
                return connected
            micro_rows = rows[pack.index].to(self.ranks.device)
            loss = loss_fn({name: pack.tokens.scatter(values) for name, values in found.items()}, micro_rows)
            for name, (total, count) in {"loss": (float(loss.total.detach()), loss.count), **loss.metrics}.items():
                sums[name][0] += float(total)
                sums[name][1] += float(count)
            return loss.total if loss.total.requires_grad else connected + loss.total

        for chunk in self.optimizer.chunks:
            chunk.train()
        packs = self._packs(rows, self.training)
        run(self.optimizer.chunks, packs, finish, hidden_size=self.config.hidden_size, backward=True)
        total = sum_over_ranks(gather_json(sums if self.ranks.speaks_for_loss else {}))
        self._count += total["loss"][1] if "loss" in total else 0.0
        return {name: value / count if count else 0.0 for name, (value, count) in total.items()}

    @in_own_groups
    def optim_step(self) -> StepReport:
        """Divide the gradients by the global count since the last step, clip, refuse what is not finite, step."""
        if self.optimizer is None:
            raise ValueError("this engine has no optimizer: it only computes")
        report = self.optimizer.step(self._count)
        self._count = 0.0
        return report

    @in_own_groups
    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by HF name, divided by the global count so far; for tests and diagnosis."""
        assert self.optimizer is not None
        with self.optimizer.whole_gradients() as found:
            local = {name: found[p] for name, p in self.held.parameters.items() if p.requires_grad}
            names = [name for name in self.held.full_shapes if name not in self.held.untrained]
            buckets = self.held.full(local, 1 << 30, names=names, dtype=torch.float32)
            return {name: tensor / self._count for bucket in buckets for name, tensor in bucket}

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """The model without its LoRA adapters, as the reference of its own training."""
        with adapters_off(self.chunks):
            yield

    def weight_layout(self) -> WeightLayout:
        """The boxes of HF tensors on this rank (adapters merged)."""
        return self.held.layout()

    def local_tensors(self) -> Mapping[str, Tensor]:
        """The tensors of `weight_layout`: live parameters, read only; adapted weights are merged anew at each call."""
        return dict(Merged(self.held))

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole HF tensors, adapters merged, bucket by bucket."""
        return self.held.full(Merged(self.held), bucket_bytes, names=self.held.base_shapes)

    def save(self, path: Path, what: Literal["resume", "export"]) -> None:
        """Write a checkpoint that is there wholly or not at all; a CheckpointError leaves an old one alone."""
        path = Path(path)
        if what == "resume":
            header = {"num_updates": self.optimizer.num_steps if self.optimizer is not None else 0}
            with self._parking.home():
                checkpoint.save(path, self._state(self.save_contents), self.ranks.rank, header)
            return
        dtype = getattr(torch, self.options.dtype)
        export.write(
            path,
            self._exported(),
            self.ranks.rank,
            export.exported_config(self.config, self.head, dtype),
            source_dir=Path(self.source.path) if self.source.path else None,
            adapter=self._adapter(),
        )

    def _adapter(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What peft loads: whole factors under its names, and its settings."""
        plan = self.held.adapters
        if plan is None:
            return None
        buckets = self.held.full(self.held.local(), export.FILE_BYTES, names=plan.shapes)
        tensors = {adapters.to_saved_name(name): tensor.cpu() for bucket in buckets for name, tensor in bucket}
        layers = [name.removesuffix(".weight") for name in plan.adapted]
        return tensors, adapters.adapter_config(plan.settings, layers, self.source.path or "")

    def _exported(self) -> Iterator[list[tuple[str, Tensor]]]:
        """All tensors of an export: the trained ones, then those that were only carried along."""
        yield from self.weights(export.FILE_BYTES)
        if self._weights is not None:
            there = self._weights.names()
            for name, shape in self.held.family.carried(self.held.hf_config).items():
                if name in there:
                    yield [(name, self._weights.read(name, (0,) * len(shape), shape))]

    def load(self, path: Path) -> None:
        """Restore what `save(path, "resume")` wrote, on any number of ranks and any sizes."""
        with self._parking.home():
            header = checkpoint.load(Path(path), self._state(self.load_contents), self.ranks.rank)
        if self.optimizer is not None and "optimizer" in self.load_contents:
            self.optimizer.set_num_updates(int(header["num_updates"]))

    def _state(self, contents: Sequence[Content] = ALL_CONTENTS) -> MegatronState:
        names = {parameter: name for name, parameter in self.held.parameters.items()}
        pieces = self.optimizer.pieces(names) if self.optimizer is not None else []
        return MegatronState(self.held, tuple(pieces), frozenset(contents))

    def move(self, parts: Sequence[Part], device: str) -> None:
        """Take the named parts to `device` ("cpu" frees the accelerator) until they are moved back."""
        for part in parts:
            if device == "cpu" and self.ranks.device.type != "cpu":
                self._parking.send(part, self._tensors_of(part))
            elif device != "cpu":
                self._parking.fetch(part)

    def _tensors_of(self, part: Part) -> list[Tensor]:
        parameters = list(self.held.local().values())
        if part == "params" or self.optimizer is None:
            return parameters if part == "params" else []
        if part == "grads":
            return [buffer.grad_data for buffer in self.optimizer.grad_buffers()]
        shared = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        own = [tensor for piece in self._state().pieces for tensor in piece.tensors.values()]
        return [tensor for tensor in own if tensor.untyped_storage().data_ptr() not in shared]
