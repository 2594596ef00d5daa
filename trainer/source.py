"""Where the batches of a synchronous run come from: prompts, completions and rewards, made when they are asked for.

A batch is made by the weights that are served then. Asynchronous runs use trainer.async_source, reproducible ones
trainer.epochs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rlsys.interfaces import ExperienceSource, State
from rlsys.protocol import DataProto, object_array
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import ConfigError
from trainer.generation import GAUGES, REQUESTS, GradedRollout

log = get_logger(__name__)
WARN_EVERY = 10
"""Generated batches of a step after which a filter that keeps too few prompts is reported."""


class Prompts(Protocol):
    """Prompts in a fixed order that can be resumed anywhere."""

    def next(self) -> DataProto: ...
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True)
class GroupFilter:
    """DAPO's dynamic sampling: keep prompts whose samples differ in `metric`."""

    keep: Callable[[DataProto], tuple[DataProto, dict[str, float]]]
    max_calls: int

    def check(self, num_batches: int, num_kept: int, num_wanted: int) -> None:
        """ConfigError after `max_calls` generated batches that were too few, else a warning after each WARN_EVERY."""
        why = f"after {num_batches} generated batches only {num_kept} of {num_wanted} prompts have samples that differ"
        how = "change algorithm.filter_groups.max_num_gen_batches (0 is no limit) or data.gen_batch_size"
        why = f"{why}; {how}, or choose data that the model neither always nor never solves"
        if 0 < self.max_calls <= num_batches:
            raise ConfigError(why)
        if num_batches % WARN_EVERY == 0:
            log.warning(why)


@dataclass
class RolloutSource(ExperienceSource):
    """Makes one training batch a step, in step order, each a function of the data order, seeds and weights only.

    Between two calls of `next` nothing is generated. `counted` returns the fleet's counts since its last call, those of
    pushes and validations included.
    """

    prompts: Prompts
    rollout: GradedRollout
    prompts_per_step: int
    group_filter: GroupFilter | None
    counted: Callable[[], dict[str, float]] = dict
    step: int = 0

    def next(self) -> DataProto:
        """The graded batch of the next step."""
        self.step += 1
        num_rows = self.prompts_per_step * self.rollout.num_answers
        kept, metrics = list[DataProto](), dict[str, list[float]]()
        num_kept = call = 0
        while num_kept < num_rows:
            batch, new = self.rollout.make(self.prompts.next(), step=self.step, call=call)
            call += 1
            if self.group_filter is not None:
                batch, counts = self.group_filter.keep(batch)
                new |= counts
            for name, value in new.items():
                metrics.setdefault(name, []).append(value)
            kept.append(batch)
            num_kept += len(batch)
            if self.group_filter is not None and num_kept < num_rows:
                self.group_filter.check(call, num_kept // self.rollout.num_answers, self.prompts_per_step)
        whole = (kept[0] if len(kept) == 1 else joined(kept))[:num_rows]
        counts = {name: float(count) for name, count in self.counted().items() if name not in REQUESTS}
        whole.meta_info["source_metrics"] = {**reduced(metrics), **counts, "rollout/num_gen_batches": float(call)}
        return whole

    def save(self, folder: Path) -> dict[str, object]:
        """The state for a checkpoint; nothing has to be kept in its folder."""
        return {"prompts": self.prompts.state_dict(), "step": self.step}

    def load(self, state: State, folder: Path) -> None:
        """Continue from a checkpoint of a synchronous run; ConfigError for another one."""
        if "step" not in state:
            raise ConfigError(f"{folder} is of an asynchronous run; set trainer.max_staleness as in the run to resume")
        self.prompts.load_state_dict(state["prompts"])
        self.step = state["step"]


def reduced(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """One number per metric from several calls: the largest maximum, mean of means, last gauge, sum of counters."""
    how: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "mean": fmean}
    how |= dict.fromkeys(GAUGES, itemgetter(-1))
    return {name: float(how.get(name.rpartition("/")[2], sum)(values)) for name, values in metrics.items()}


def is_time(name: str) -> bool:
    """Whether a metric is a measured time."""
    return "seconds" in name or name.startswith("timing")


def joined(parts: Sequence[DataProto]) -> DataProto:
    """The rows of batches that were graded separately, as one batch with the graders' columns of all of them.

    Where a part lacks a column that a grader returned for others, its rows get None. Rows without a score get 0 in
    columns of numbers, as they do inside one graded batch. Routes of experts, which only complete answers have, are -1
    for the others.
    """
    _fill_routed_experts(parts)
    keys = sorted({key for part in parts for key in part.meta_info.get("reward_extra_keys", ())})
    values = {key: [value for part in parts for value in part.non_tensor_batch.get(key, ())] for key in keys}
    numeric_keys = {key for key in keys if any(isinstance(value, float) for value in values[key])}
    complete = list[DataProto]()
    for part in parts:
        columns = dict(part.non_tensor_batch)
        statuses = columns.get("reward_status", columns.get("episode_end", ["ok"] * len(part)))
        for key in keys:
            if key not in columns:
                scored = ("ok", "stop") if key == "acc" else ("ok",)  # a workflow that scores its episode gives no acc
                unscored_value = 0.0 if key in numeric_keys else None
                columns[key] = object_array([None if status in scored else unscored_value for status in statuses])
        complete.append(DataProto(part.batch, columns, part.meta_info | ({"reward_extra_keys": keys} if keys else {})))
    return DataProto.concat(complete)


def _fill_routed_experts(parts: Sequence[DataProto]) -> None:
    """Give every part the column `routed_experts` if one has it."""
    routes = [part.tensors["routed_experts"] for part in parts if "routed_experts" in part.tensors]
    for part in (part for part in parts if routes and "routed_experts" not in part.tensors):
        part.tensors["routed_experts"] = routes[0].new_full((len(part), *routes[0].shape[1:]), -1)
