"""The protocols between packages: training and rollout engines, weight transfer, sources of batches.

Letters: B rows, R response tokens, V vocabulary. Tensors named by the DataProto fields are padded: prompts on the
left, responses on the right; every per-token output is aligned with `responses` and has shape (B, R).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rlsys.protocol import DataProto
    from rlsys.types import ModelRequest, ResponseDelta, StepReport, TransferReport, WeightLayout

Output = Literal[
    "log_probs", "entropy", "values", "scores", "sum_pi_squared", "topk_log_probs", "topk_ids", "routed_experts"
]
"""Of each response token; `values` is the scalar head on the state before the token, `scores` on the token itself.
`topk_log_probs` and `topk_ids` (B, R, K) are of the rows' `teacher_ids`, else of the `topk` most likely tokens;
`routed_experts` (B, P + R, layers, experts of a token), int16, -1 at padding, of every token."""
State = Mapping[str, Any]
"""What a part of a run continues from: the JSON values that it wrote into a checkpoint."""
Part = Literal["params", "grads", "optimizer"]


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum and the count it is to be divided by, so that splitting a batch never changes the gradient.

    `total` is a scalar that requires grad; `count` a number (tokens, sequences); `metrics` maps a name to its own
    (sum, count). Engines add the parts of all micro-batches and ranks and divide once. Numbers may be scalars on the
    device, which engines read after the last micro-batch, so that none waits for its kernels.
    """

    total: "Tensor"
    count: "float | Tensor"
    metrics: "Mapping[str, tuple[float | Tensor, float | Tensor]]" = field(default_factory=dict)


LossFn = Callable[[Mapping[str, "Tensor"], "TensorDict"], LossSum]
"""(outputs of one micro-batch, its rows) -> LossSum; outputs are (b, R) tensors by name."""


@runtime_checkable
class TrainEngine(Protocol):
    """A model, its optimizer and their shards; every method is collective over the engine's ranks."""

    dp_rank: int
    dp_size: int
    is_collect: bool
    """Whether this rank's results are the ones to collect (one rank per data-parallel group)."""

    def forward(
        self, batch: "DataProto", outputs: Sequence[Output], *, temperature: float = 1.0, topk: int = 0
    ) -> "dict[str, Tensor]":
        """Per-token outputs (B, R) or (B, R, topk) of this rank's rows in their order, float32, zero at padding."""

    def forward_backward(
        self, batch: "DataProto", loss_fn: LossFn, *, outputs: Sequence[Output] = ("log_probs",), temperature: float = 1
    ) -> dict[str, float]:
        """Accumulate gradients of the loss sum; returns the metrics as global means plus `loss`."""

    def optim_step(self) -> "StepReport":
        """Divide by the global count since the last step, clip, refuse a non-finite norm, step, zero, schedule."""

    def weight_layout(self) -> "WeightLayout": ...
    def local_tensors(self) -> "Mapping[str, Tensor]":
        """The local tensors that `weight_layout` names; read-only views of the live parameters."""

    def weights(self, bucket_bytes: int) -> "Iterator[list[tuple[str, Tensor]]]":
        """Full HF tensors gathered bucket by bucket: slow, for tests and as the fallback."""

    def exported(self, bucket_bytes: int) -> "Iterator[list[tuple[str, Tensor]]]":
        """The same as an export has them, in the types of the checkpoint that the model came from."""

    def save(self, path: Path, what: Literal["resume", "export", "adapter"]) -> None: ...
    def begin_save(self, path: Path) -> Any:
        """Save to resume from in the background: `finish()` of the result commits it, `is_written` does not wait."""

    def load(self, path: Path) -> None: ...
    def move(self, parts: Sequence[Part], device: str) -> None: ...
    def adapters_disabled(self) -> AbstractContextManager[None]:
        """The model without its LoRA adapters, as the reference of its own training."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Token in, token out; serves one weight version at a time and stamps it on every token it makes."""

    def exchange(
        self, new: "Sequence[ModelRequest]" = (), *, wait_s: float, cancel: Collection[str] = ()
    ) -> "list[ResponseDelta]":
        """Hand in requests, drop those whose rids are in `cancel`, and take what was sampled since the last exchange.

        Returns within about `wait_s`, at once when nothing runs any more; the engine decodes on in between.
        """

    def compute_log_prob(self, batch: "DataProto", *, temperature: float = 1.0) -> "Tensor":
        """Log-probabilities (B, R) of the given responses under the served weights."""

    def weight_layout(self) -> "WeightLayout": ...
    def local_tensors(self) -> "Mapping[str, Tensor]": ...
    def begin_update(self) -> None:
        """Stop at the next token; the engine is quarantined until `finish_update`, and what runs is kept or given back.

        The latter comes with Finish.ABORT in the next exchange.
        """

    def load(self, bucket: "Sequence[tuple[str, Tensor]]") -> None: ...
    def finish_update(self, version: int) -> None: ...
    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...
    def health(self) -> dict[str, object]: ...
    def close(self) -> None: ...


@runtime_checkable
class WeightTransfer(Protocol):
    """Brings the actor's weights to the rollout engines; held by the controller. `version` is that of the last push."""

    @property
    def version(self) -> int | None: ...
    def push(self, version: int) -> "TransferReport": ...
    def validate(self) -> object: ...


class StoredTensor(Protocol):
    """A tensor of which boxes are read from where it is stored; `dtype` is safetensors' name of its type, as BF16."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def read(self, start: Sequence[int], shape: Sequence[int]) -> "Tensor": ...


class ExperienceSource(Protocol):
    """Where training batches come from; trainer.source, trainer.async_source and trainer.epochs implement it."""

    def next(self) -> "DataProto":
        """The graded batch of the next step."""

    def settle(self) -> None:
        """Wait for whatever must end before weights change."""
        return

    def published(self, version: int) -> None:
        """Engines serve this version from now on."""
        return

    def save(self, folder: Path) -> dict[str, object]:
        """Keep what is not yet trained on in the folder of a checkpoint; returns the rest of the state."""

    def load(self, state: State, folder: Path) -> None:
        """Continue from what `save` returned and kept."""

    def close(self) -> None:
        return
