"""Where training batches come from: prompts, completions and rewards, made when asked for or one step ahead.

With `max_staleness` 0 a batch is made by the weights of the step that trains on it. With 1 the next batch is already
being made while the current one trains (rollouts have processes of their own), so its weights are one version behind.
The same object serves both; only the moment of making differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.protocol import DataProto, WireError
from rlsys.utils.errors import CheckpointError, ConfigError, DeadlineError

PENDING = "pending.dp"


class Prompts(Protocol):
    """Prompts in a fixed order that can be resumed anywhere."""

    def next(self) -> DataProto: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


Make = Callable[..., tuple[DataProto, dict[str, float]]]
"""(prompts, *, step, call) -> graded answers, those of a prompt neighbouring rows, and metrics."""
Keep = Callable[[DataProto], tuple[DataProto, dict[str, float]]]


@dataclass(frozen=True)
class GroupFilter:
    """DAPO's dynamic sampling: keep prompts whose samples differ in `metric`."""

    keep: Keep
    max_calls: int


class RolloutSource:
    """Makes one training batch a step, in step order, each a function of the data order, seeds and weights only."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        make: Make,
        prompts_per_step: int,
        num_samples: int,
        group_filter: GroupFilter | None,
        max_staleness: int,
        deadline_s: float,
    ) -> None:
        self._prompts, self._answers = prompts, make
        self._rows_per_step = prompts_per_step * num_samples
        self._num_samples = num_samples
        self._filter = group_filter
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="source") if max_staleness > 0 else None
        self._pending: Future[DataProto] | None = None
        self._step = 0

    def next(self) -> DataProto:
        """The graded batch of the next step."""
        if self._pool is None:
            self._step += 1
            return self._make(self._step)
        if self._pending is None:
            self._submit()
        batch = self._take()
        self._submit()
        return batch

    def settle(self) -> None:
        """Wait until nothing is being generated, so that weights may change and a checkpoint may be taken."""
        if self._pending is not None:
            try:
                self._pending.result(self._deadline_s)
            except TimeoutError as error:
                raise DeadlineError("the rollout fleet", "generate one step ahead", self._deadline_s) from error

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict(), "step": self._step, "ahead": self._pending is not None}

    def save_pending(self, folder: Path) -> None:
        """Keep the batch made ahead, without what was measured: equal runs have equal files."""
        self.settle()
        if self._pending is not None:
            batch = self._pending.result()
            metrics = {name: value for name, value in batch.meta_info["source_metrics"].items() if not is_time(name)}
            meta_info = {**batch.meta_info, "source_metrics": metrics}
            DataProto(batch.batch, batch.non_tensor_batch, meta_info).save_to_disk(str(folder / PENDING))

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._step = state["step"]
        if state["ahead"] and self._pool is not None:
            self._pending = Future()
            self._pending.set_result(_load_pending(folder / PENDING))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self) -> None:
        assert self._pool is not None
        self._step += 1
        self._pending = self._pool.submit(self._make, self._step)

    def _take(self) -> DataProto:
        self.settle()
        assert self._pending is not None
        batch, self._pending = self._pending.result(), None
        return batch

    def _make(self, step: int) -> DataProto:
        kept: list[DataProto] = []
        metrics: dict[str, float] = {}
        num_kept = call = 0
        while num_kept < self._rows_per_step:
            batch, new = self._answers(self._prompts.next(), step=step, call=call)
            metrics |= new
            call += 1
            if self._filter is not None:
                batch, new = self._filter.keep(batch)
                metrics |= new
            kept.append(batch)
            num_kept += len(batch)
            self._check_calls(call, num_kept)
        whole = kept[0] if len(kept) == 1 else DataProto.concat(kept)
        whole = whole[: self._rows_per_step]
        whole.meta_info["source_metrics"] = {**metrics, "rollout/num_gen_batches": float(call)}
        return whole

    def _check_calls(self, calls: int, num_kept: int) -> None:
        if self._filter is None or num_kept >= self._rows_per_step or not 0 < self._filter.max_calls <= calls:
            return
        raise ConfigError(
            f"after {calls} generated batches only {num_kept // self._num_samples} of "
            f"{self._rows_per_step // self._num_samples} prompts have samples that differ; raise "
            "algorithm.filter_groups.max_num_gen_batches or data.gen_batch_size, or choose data that the model "
            "neither always nor never solves"
        )


def is_time(name: str) -> bool:
    """Whether a metric is a measured time."""
    return "/seconds" in name or name.startswith("timing")


def _load_pending(path: Path) -> DataProto:
    try:
        return DataProto.load_from_disk(path)
    except (WireError, OSError) as error:
        raise CheckpointError(f"{path}, the batch made ahead, cannot be read: {error}") from error
