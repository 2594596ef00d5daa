"""What the training engines share: a TrainEngine (rlsys/interfaces.py) over the steps in which engines differ.

B rows of this rank, b rows of a micro-batch, R response tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from rlsys.config.schema.model import CheckpointConfig, ModelConfig, OptimConfig, PolicyModelConfig
from rlsys.engines import checkpoint, export
from rlsys.engines.checkpoint import Saving
from rlsys.engines.mesh import EngineRanks, gather_json, sum_over_ranks
from rlsys.engines.micro_batches import MicroBatches, Pack
from rlsys.engines.optimizer import BaseOptimizer
from rlsys.interfaces import LossFn, Output, Part, TrainEngine
from rlsys.models.hf import Head, read_config
from rlsys.models.host_offload import HostOffload
from rlsys.models.lora import LoraSettings, adapter_config, to_saved_name
from rlsys.models.packing import to_device
from rlsys.protocol import DataProto
from rlsys.types import EXPORT_FILE_BYTES, StepReport, WeightUpdateMeta
from rlsys.utils.atomic import write_whole

CONTENTS = frozenset({"model", "optimizer", "extra"})
"""Parts of a resumable checkpoint; the worker writes hf_model beside it."""


RanksT = TypeVar("RanksT", bound=EngineRanks)
OptimizerT = TypeVar("OptimizerT", bound=BaseOptimizer)
Counted = Mapping[str, tuple[float, float]]
"""Metrics as (sum, count) of the rows of this rank, the same on all ranks that share them."""
Compute = Callable[[Sequence[Output], float, int], Mapping[str, Tensor]]
"""(outputs, temperature, topk) -> outputs (M,) or (M, topk) of the response tokens of a pack, by name."""
Visit = Callable[[Pack, Compute], Tensor | None]
"""Takes a pack and what computes its outputs; in training it returns the loss sum to differentiate."""


@dataclass(frozen=True)
class TrainEngineOptions:
    """What every engine takes beside its model and how this is sharded.

    Without `optim` the engine only computes (reference and reward models); a schedule that decays needs `total_steps`.
    Steps of a schedule are training steps, each of `updates_per_step` optimizer steps.
    `training` and `scoring` size the micro-batches of forward_backward and forward, `training` both without `scoring`.
    """

    head: Head = "lm"
    device: str = "cpu"
    optim: OptimConfig | None = None
    grad_clip: float = 1.0
    total_steps: int = -1
    updates_per_step: int = 1
    freeze_vision_tower: bool = False
    checkpoint: CheckpointConfig = CheckpointConfig()  # noqa: RUF009
    training: MicroBatches = MicroBatches(rows=1)  # noqa: RUF009
    scoring: MicroBatches | None = None


class BaseTrainEngine(TrainEngine, ABC, Generic[RanksT, OptimizerT]):
    """A model, its optimizer and their shards over all ranks of the default process group; methods are collective."""

    optimizer: OptimizerT | None = None

    def __init__(self, model: ModelConfig, ranks: RanksT, options: TrainEngineOptions) -> None:
        self.model_config, self.ranks, self.head = model, ranks, options.head
        self.dp_rank, self.dp_size, self.is_collect = ranks.dp_rank, ranks.dp_size, ranks.is_collect
        self.config = read_config(model)
        self._saved_dtype: Any = self.config.dtype  # building the model changes it
        self.training, self.scoring = options.training, options.scoring or options.training
        self.save_contents = CONTENTS.intersection(options.checkpoint.save_contents)
        self.load_contents = CONTENTS.intersection(options.checkpoint.load_contents)
        self._count, self._step_share = 0.0, 1 / options.updates_per_step
        self._saving: Saving | None = None
        self._offload = HostOffload(self._settle)

    @torch.no_grad()
    def forward(
        self, batch: DataProto, outputs: Sequence[Output], *, temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """Per-token outputs (B, R) or (B, R, topk) of this rank's rows, float32 on their device, zero at padding."""
        rows = batch.tensors
        shape, device = tuple(rows["responses"].shape), self.ranks.device
        shapes = {name: (*shape, topk) if name.startswith("topk") else shape for name in outputs}
        results: dict[str, Tensor] = {name: torch.zeros(whole, device=device) for name, whole in shapes.items()}

        def collect(pack: Pack, compute: Compute) -> None:
            for name, values in compute(outputs, temperature, topk).items():
                if pack.index is not None:
                    results[name][to_device(pack.index, device)] = pack.tokens.scatter(values).to(results[name])

        with self._own_groups():
            self._run(batch, self.scoring, collect, backward=False)
            for values in results.values():
                self._share(values)
        return {name: values.to(rows.device or "cpu") for name, values in results.items()}

    def forward_backward(
        self, batch: DataProto, loss_fn: LossFn, *, outputs: Sequence[Output] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, float]:
        """Add the gradients of the loss sum to those there; returns global means of the metrics and `loss`."""
        if self.optimizer is None:
            raise ValueError("this engine has no optimizer: it only computes")
        rows = batch.tensors
        pairs = list[tuple[str, tuple[float | Tensor, float | Tensor]]]()

        def loss_of(pack: Pack, compute: Compute) -> Tensor:
            token_outputs = compute(outputs, temperature, 0)
            connected = torch.stack([values.sum() for values in token_outputs.values()]).sum() * 0.0
            if pack.index is None:
                return connected
            micro_rows = rows[pack.index].apply(partial(to_device, device=self.ranks.device), device=self.ranks.device)
            loss = loss_fn({name: pack.tokens.scatter(values) for name, values in token_outputs.items()}, micro_rows)
            pairs.extend({"loss": (loss.total.detach(), loss.count), **loss.metrics}.items())
            return loss.total if loss.total.requires_grad else connected + loss.total

        with self._own_groups():
            counted = self._run(batch, self.training, loss_of, backward=True)
            numbers = _on_host([number for _, pair in pairs for number in pair], self.ranks.device)
            own = [{name: (total, count)} for (name, _), total, count in zip(pairs, numbers[::2], numbers[1::2])]
            sums = sum_over_ranks([*own, counted])
            totals = sum_over_ranks(gather_json(sums if self.ranks.reports_loss else {}, self.ranks.loss_group))
        self._count += totals["loss"][1] if "loss" in totals else 0.0
        return {name: value / count if count else 0.0 for name, (value, count) in totals.items()}

    def optim_step(self) -> StepReport:
        """Divide the gradients by the global count since the last step, clip, refuse what is not finite, step."""
        if self.optimizer is None:
            raise ValueError("this engine has no optimizer: it only computes")
        self._settle()
        with self._own_groups():
            report = self.optimizer.step(self._count, self._step_share)
        self._count = 0.0
        return report

    def save(self, path: Path, what: Literal["resume", "export", "adapter"]) -> None:
        """Write a checkpoint atomically; a CheckpointError leaves the one that was there unchanged."""
        path, adapter = Path(path), None
        with self._offload.restored():
            if what == "resume":
                self._begin_save(path).finish()
                return
            if (own := self._adapter()) is not None:
                settings, layers, tensors = own
                saved = {to_saved_name(name): tensor for name, tensor in tensors.items()}
                adapter = saved, adapter_config(settings, layers, self.model_config.path or "")
            export.write(path, self._exported() if what == "export" else (), self._write_settings, adapter=adapter)

    def _settle(self) -> None:
        """Wait until the tensors that are saved in the background may change, or their memory be freed."""
        if self._saving is not None:
            self._saving.copied.wait()

    def _begin_save(self, path: Path, *, copies: bool = False) -> Saving:
        header = {} if self.optimizer is None else self.optimizer.header()
        return Saving(path, self._state(self.save_contents), header, settings=self._write_settings, copies=copies)

    def begin_save(self, path: Path) -> Saving:
        """Write a checkpoint to resume from in the background; what `finish` of the result commits is of now."""
        assert self._saving is None or self._saving.is_written, "the copies are still being written"
        with self._offload.restored():
            self._saving = self._begin_save(Path(path), copies=True)
        return self._saving

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Write the weights in Hugging Face format to `meta.weights_path`, where servers read them."""
        self.save(Path(meta.weights_path), "export")

    def _write_settings(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the tokenizer's files, as they go with the weights."""
        model = self.model_config
        exported = export.exported_config(self.config, self.head, self._saved_dtype or self._weight_dtype)
        served = model if isinstance(model, PolicyModelConfig) else PolicyModelConfig()
        export.write_settings(folder, exported, [Path(path) for path in (model.path, served.tokenizer_path) if path])
        if served.custom_chat_template:
            write_whole(folder / "chat_template.jinja", served.custom_chat_template.encode(), durable=True)

    def load(self, path: Path) -> None:
        """Restore what `save(path, "resume")` wrote, on any number of ranks and any layout."""
        with self._offload.restored():
            kind = getattr(self.optimizer, "kind", None) if "optimizer" in self.load_contents else None
            header = checkpoint.load(Path(path), self._state(self.load_contents), optimizer=kind)
        if self.optimizer is not None and "optimizer" in self.load_contents:
            self.optimizer.set_num_updates(int(header["num_updates"]))
            self.optimizer.lr_steps = header.get("lr_steps", header["num_updates"] * self._step_share)

    def _own_groups(self) -> AbstractContextManager[None]:
        """Make this engine's process groups the current ones, for libraries that keep them in globals."""
        return nullcontext()

    def move(self, parts: Sequence[Part], device: str) -> None:
        """Take the named parts to `device`; on the host they cannot be read."""
        for part in parts:
            if device == "cpu" and self.ranks.device.type != "cpu":
                self._offload.offload(part, self._tensors_of(part))
            elif device != "cpu":
                self._offload.restore(part)

    @abstractmethod
    def _tensors_of(self, part: Part) -> list[Tensor]:
        """Tensors of a part that are on the device."""

    def _share(self, values: Tensor) -> None:
        """Give every rank the outputs that only some have computed, in place."""

    def exported(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The trained tensors in the types of an export, gathered bucket by bucket."""
        dtype = self._saved_dtype or self._weight_dtype
        for bucket in self.weights(bucket_bytes):
            yield [(name, tensor.to(dtype) if export.is_cast(name, tensor) else tensor) for name, tensor in bucket]

    def _exported(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Every tensor of an export, bucket by bucket."""
        return self.exported(EXPORT_FILE_BYTES)

    @property
    @abstractmethod
    def _weight_dtype(self) -> torch.dtype: ...

    @abstractmethod
    def _run(self, batch: DataProto, size: MicroBatches, visit: Visit, *, backward: bool) -> Counted:
        """Visit every micro-batch; with `backward` add up the gradients of what `visit` returns. Returns metrics."""

    @abstractmethod
    def _state(self, contents: frozenset[str]) -> checkpoint.Contents: ...

    @abstractmethod
    def _adapter(self) -> tuple[LoraSettings, list[str], dict[str, Tensor]] | None:
        """LoRA settings, names of the adapted layers and whole factors by name; None without adapters."""


def _on_host(numbers: Sequence[float | Tensor], device: torch.device) -> list[float]:
    """The numbers; those that are tensors are brought from the device in one copy."""
    tensors = [number.to(device, torch.float64) for number in numbers if isinstance(number, Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(copied) if isinstance(number, Tensor) else float(number) for number in numbers]
