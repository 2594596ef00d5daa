"""Model FLOPs utilisation (MFU) of a role, under verl's names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from transformers import PretrainedConfig

from rlsys.models.flops import ModelFlops
from rlsys.protocol import DataProto
from rlsys.telemetry.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class MfuMeter:
    """`peak` is the total FLOP/s of the ranks that share their rows."""

    model: PretrainedConfig
    peak: float
    lm_head: bool = True
    clock: Callable[[], float] = perf_counter

    @contextmanager
    def __call__(self, name: str, rows: DataProto, *, epochs: int | None = None) -> Iterator[dict[str, float]]:
        """Time the work inside; the dict that it yields has `perf/mfu/{name}` afterwards.

        `epochs` are the passes over `rows` forward and backward; None is one pass forward. The dict stays empty for
        models whose FLOPs cannot be counted.
        """
        metrics: dict[str, float] = {}
        start_s = self.clock()
        yield metrics
        seconds = self.clock() - start_s
        try:
            mask = rows.tensors["attention_mask"]
            num_predicted = int(mask[:, -rows.tensors["responses"].shape[1] :].sum()) if self.lm_head else 0
            forward = ModelFlops(self.model).forward(mask.sum(1).tolist(), num_head_tokens=num_predicted)
        except (AttributeError, TypeError, ValueError) as error:
            log.debug("no MFU of a %s: %s", type(self.model).__name__, error)
            return
        metrics[f"perf/mfu/{name}"] = forward * (1 if epochs is None else 3 * epochs) / (seconds * self.peak)
