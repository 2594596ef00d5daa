"""FSDPEngine: a transformers model trained on FSDP2, on 1..n ranks, on CPU (gloo) or CUDA (NCCL).

Letters: b rows of a micro-batch, B rows of this rank, R response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rlsys.engines import checkpoint, export
from rlsys.engines.fsdp.optim import OptimSettings, ShardedAdamW
from rlsys.engines.fsdp.sharding import (
    HeldWeights,
    fill,
    full_of,
    materialise,
    parameters_by_name,
    reshard,
    shard_model,
    tied_names,
    weight_layout,
)
from rlsys.engines.mesh import Parallel, Ranks, gather_json, make_ranks, max_over_ranks, sum_over_ranks
from rlsys.engines.micro_batches import MicroBatches, split_rows
from rlsys.interfaces import LossFn, Output, Part
from rlsys.models import lora as adapters
from rlsys.models.hf import Head, ModelSource, build, check_names, open_weights, read_config
from rlsys.models.packing import TokenRows, empty_rows, token_rows
from rlsys.models.stacked import AsHeld, by_stack, saved_parts
from rlsys.models.token_model import TokenModel
from rlsys.models.ulysses import kv_repeats
from rlsys.types import StepReport, WeightLayout
from rlsys.utils.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlsys.protocol import DataProto

Content = Literal["model", "optimizer", "extra"]
ALL_CONTENTS: tuple[Content, ...] = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class Precision:
    """torch dtype names: `master` is what parameters and optimizer are kept in, `compute` what the model runs in."""

    compute: str = "float32"
    master: str = "float32"


@dataclass(frozen=True)
class FsdpOptions:
    """How FSDP2 handles memory: see torch.distributed.fsdp.fully_shard. `cpu_offload` acts on CUDA only."""

    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    cpu_offload: bool = False


class FSDPEngine:
    """A TrainEngine (rlsys/interfaces.py) over all ranks of the default process group; every method is collective.

    Without `optimizer` the engine only computes (reference and reward models). `training` and `scoring` size the
    micro-batches of forward_backward and forward. `packed` is verl's use_remove_padding.
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
        precision: Precision = Precision(),
        parallel: Parallel = Parallel(),  # noqa: B008
        fsdp: FsdpOptions = FsdpOptions(),
        packed: bool = True,
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: adapters.LoraSettings | None = None,
        save_contents: Sequence[Content] = ALL_CONTENTS,
        load_contents: Sequence[Content] = ALL_CONTENTS,
        chunk_elements: int | None = None,
    ) -> None:
        self.ranks: Ranks = make_ranks(device, parallel)
        self.source, self.head = source, head
        self.training, self.scoring = training, scoring or training
        self.save_contents, self.load_contents = tuple(save_contents), tuple(load_contents)
        self.config = read_config(source)
        if self.ranks.sp_size > 1:
            kv_repeats(self.config.num_attention_heads, self.config.num_key_value_heads, self.ranks.sp_size)
        if parallel.sp_size > 1 and attention is not None:
            raise ConfigError(f"ulysses_sequence_parallel_size goes with the engine's own attention, not {attention}")
        plain = build(
            self.config, head=head, packed=packed, attention=attention, trust_remote_code=source.trust_remote_code
        )
        self._stacks = by_stack(saved_parts(plain))
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(getattr(torch, precision.master))
            parameter.requires_grad_(optimizer is not None)
        self.lora = adapters.add_adapters(plain, lora) if lora is not None else None
        if gradient_checkpointing:
            plain.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = TokenModel(plain, packed=packed, group=self.ranks.sp_group, chunk_elements=chunk_elements)
        shard_model(self.model, self.ranks, compute_dtype=getattr(torch, precision.compute), **vars(fsdp))
        home = torch.device("cpu") if fsdp.cpu_offload else self.ranks.device
        materialise(self.model, home)
        self._load_initial_weights()
        self.optimizer = self._make_optimizer(optimizer) if optimizer is not None else None
        self._count = 0.0

    def _load_initial_weights(self) -> None:
        parameters = parameters_by_name(self.model)
        base = {adapters.hf_name(name): p for name, p in parameters.items() if not adapters.is_adapter(name)}
        shapes = {name: tuple(p.shape) for name, p in base.items()}
        weights = AsHeld(open_weights(self.source, self.config, head=self.head), self._stacks, shapes)
        kept = {name.removeprefix("model.") for name, _ in self.model.named_buffers()}
        if untrained := sorted(kept & set(weights.names())):
            raise ConfigError(f"{self.config.model_type} saves buffers ({untrained[0]}): train it by strategy=megatron")
        check_names(shapes, weights, aliases=tied_names(self.model))
        fill(base, weights, self.ranks)
        if self.lora is not None:
            own = {name: p for name, p in parameters.items() if adapters.is_adapter(name)}
            values = adapters.adapter_weights(self.lora, {name: tuple(p.shape) for name, p in own.items()})
            check_names({n: tuple(p.shape) for n, p in own.items()}, values)
            fill(own, values, self.ranks)

    def _make_optimizer(self, settings: OptimSettings) -> ShardedAdamW:
        trained = {name: p for name, p in parameters_by_name(self.model).items() if p.requires_grad}
        return ShardedAdamW(trained, settings, self.ranks.shard_group)

    @property
    def dp_rank(self) -> int:
        return self.ranks.dp_rank

    @property
    def dp_size(self) -> int:
        return self.ranks.dp_size

    @property
    def is_collect(self) -> bool:
        """Whether this rank's results are the ones to collect: the first of each sequence-parallel group."""
        return self.ranks.sp_rank == 0

    def _micro_batches(self, rows: TensorDict, size: MicroBatches) -> Iterator[tuple[Tensor | None, TokenRows]]:
        """(row numbers, tokens) of each micro-batch; None and an idle pack once only other ranks have rows left."""
        lengths = rows["attention_mask"].sum(dim=1).tolist()
        for part in split_rows(lengths, size, agree=max_over_ranks, num_sharing=self.ranks.sp_size):
            if part:
                index = torch.tensor(part)
                yield index, token_rows(rows[index]).to(self.ranks.device)
            else:
                yield None, empty_rows(self.ranks.device)

    @torch.no_grad()
    def forward(self, batch: DataProto, outputs: Sequence[Output], *, temperature: float = 1.0) -> dict[str, Tensor]:
        """Per-token outputs (B, R) of this rank's rows, float32 on the rows' device, zero at padding."""
        self.model.eval()
        rows = batch.tensors
        results: dict[str, Tensor] = {
            name: torch.zeros(rows["responses"].shape, device=rows.device) for name in outputs
        }
        for index, tokens in self._micro_batches(rows, self.scoring):
            found = self.model(tokens, tuple(outputs), temperature)
            if index is not None:
                for name, values in found.items():
                    results[name][index] = tokens.scatter(values).to(results[name])
        reshard(self.model)
        return results

    def forward_backward(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        outputs: Sequence[Output] = ("log_probs",),
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Add the gradients of the loss sum to those there; returns global means of the metrics and `loss`."""
        self.model.train()
        rows = batch.tensors
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for index, tokens in self._micro_batches(rows, self.training):
            found = self.model(tokens, tuple(outputs), temperature)
            connected = torch.stack([values.sum() for values in found.values()]).sum() * 0.0
            if index is None:
                connected.backward()
                continue
            micro_rows = rows[index].to(self.ranks.device)
            loss = loss_fn({name: tokens.scatter(values) for name, values in found.items()}, micro_rows)
            (loss.total if loss.total.requires_grad else connected + loss.total).backward()
            for name, (total, count) in {"loss": (float(loss.total.detach()), loss.count), **loss.metrics}.items():
                sums[name][0] += float(total)
                sums[name][1] += float(count)
        total = sum_over_ranks(gather_json(sums, self.ranks.dp_group))
        self._count += total["loss"][1] if "loss" in total else 0.0
        return {name: value / count if count else 0.0 for name, (value, count) in total.items()}

    def optim_step(self) -> StepReport:
        """Divide the gradients by the global count since the last step, clip, refuse what is not finite, step."""
        if self.optimizer is None:
            raise ValueError("this engine has no optimizer: it only computes")
        report = self.optimizer.step(self._count)
        self._count = 0.0
        return report

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by parameter name, divided by the global count so far; for tests and diagnosis."""
        named = parameters_by_name(self.model).items()
        return {name: full_of(p.grad) / self._count for name, p in named if p.grad is not None}

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """The model without its LoRA adapters, as the reference of its own training."""
        with adapters.adapters_off(self.model):
            yield

    def _held(self) -> HeldWeights:
        adapted = adapters.adapted_weights(self.model.model) if self.lora is not None else {}
        return HeldWeights(parameters_by_name(self.model), adapted, self._stacks)

    def weight_layout(self) -> WeightLayout:
        """The boxes of HF tensors on this rank (adapters merged)."""
        return weight_layout(self._held().base, self.ranks, tied_names(self.model), self._stacks)

    def local_tensors(self) -> Mapping[str, Tensor]:
        """The tensors of `weight_layout`: live parameters, read only; adapted weights are merged anew at each call."""
        return self._held().local()

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole HF tensors, adapters merged, bucket by bucket; they may alias parameters: copy, do not keep."""
        return self._held().full(bucket_bytes)

    def save(self, path: Path, what: Literal["resume", "export"]) -> None:
        """Write a checkpoint that is there wholly or not at all; a CheckpointError leaves an old one alone."""
        if what == "export":
            self._export(Path(path))
        else:
            checkpoint.save(Path(path), self._state(self.save_contents), self.ranks.rank, self._header())

    def load(self, path: Path) -> None:
        """Restore what `save(path, "resume")` wrote, on any number of ranks."""
        header = checkpoint.load(Path(path), self._state(self.load_contents), self.ranks.rank)
        if self.optimizer is not None and "optimizer" in self.load_contents:
            self.optimizer.set_num_updates(int(header["num_updates"]))

    def _state(self, contents: Sequence[Content]) -> checkpoint.State:
        parameters = parameters_by_name(self.model)
        moments = self.optimizer.moments() if self.optimizer is not None else {}
        return checkpoint.State(
            model=parameters if "model" in contents else {},
            moments=moments if "optimizer" in contents else {},
            parameters=parameters,
            extra="extra" in contents,
            shard_size=self.ranks.shard_size,
        )

    def _export(self, path: Path) -> None:
        held = self._held()
        adapter = None
        if self.lora is not None:
            tensors = {n: full_of(p) for n, p in parameters_by_name(self.model).items() if adapters.is_adapter(n)}
            layers = [name.removesuffix(".weight") for name in adapters.adapted_weights(self.model.model)]
            settings = adapters.adapter_config(self.lora, layers, self.source.path or "")
            adapter = ({adapters.to_saved_name(n): t for n, t in tensors.items()}, settings)
        dtype = next(iter(held.base.values())).dtype
        export.write(
            path,
            held.full(export.FILE_BYTES),
            self.ranks.rank,
            export.exported_config(self.config, self.head, dtype),
            source_dir=Path(self.source.path) if self.source.path else None,
            adapter=adapter,
        )

    def _header(self) -> dict[str, Any]:
        return {"num_updates": self.optimizer.num_steps if self.optimizer is not None else 0}

    def move(self, parts: Sequence[Part], device: str) -> None:
        """Take the named parts to `device` ("cpu" frees the accelerator) until they are moved back.

        Gradients go where their parameters go: "grads" by itself moves nothing.
        """
        reshard(self.model)
        if "params" in parts:
            self.model.to(device)
            if self.optimizer is not None:
                self.optimizer.rebind()
        if "optimizer" in parts and self.optimizer is not None:
            self.optimizer.move(device)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
