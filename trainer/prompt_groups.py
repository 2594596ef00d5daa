"""The groups of an asynchronous run from their start to the step that trains on them, and how checkpoints keep them.

A group is one prompt with its answers. Its sampling seeds depend on the prompt's place in the data alone, so that a run
draws the same tokens for a prompt at any `max_staleness` while weights are equal.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsys.config.schema.trainer import TrainerConfig
from rlsys.fleet.fleet import RolloutFleet
from rlsys.interfaces import State
from rlsys.protocol import DataProto, WireError
from rlsys.rollout.batch import SEEDS, from_responses, to_requests, with_request_seeds
from rlsys.rollout.partial import PartialResponse
from rlsys.types import Finish, ModelRequest, ModelResponse
from rlsys.utils.errors import CheckpointError, ConfigError, RolloutError, raised_as
from trainer.generation import GradedRollout, meta_of_all_calls
from trainer.source import GroupFilter, Prompts, is_time, joined, reduced
from trainer.staleness_window import StalenessWindow

OPEN, WAITING, NUMBER, EPISODES = "open_prompts.dp", "waiting_groups.dp", "group_number", "open_episodes.jsonl"


class UnansweredError(RolloutError):
    """The episodes of a prompt have ended without an answer, as they do where their workflow rejects it."""


@dataclass(eq=False)
class PromptGroup:
    """A prompt's rows and its answers so far; `graded` are the completed rows with their scores, `failure` is why there
    are none."""

    number: int
    rows: DataProto
    answers: list[PartialResponse]
    graded: DataProto | None = None
    failure: Exception | None = None

    @property
    def is_complete(self) -> bool:
        return all(answer.finish is not None for answer in self.answers)

    def completed(self) -> DataProto:
        """The rows with the answers so far; an unfinished one has the finish reason `abort`."""
        completed = from_responses(self.rows, [answer.response() for answer in self.answers])
        columns = {**self.rows.non_tensor_batch, **completed.non_tensor_batch}
        return DataProto(completed.batch, columns, meta_of_all_calls(self.rows.meta_info))


class PromptGroups:
    """Starts groups as the window allows, and hands out those of a step once they are graded; has no threads."""

    def __init__(
        self,
        window: StalenessWindow,
        prompts: Prompts,
        rollout: GradedRollout,
        *,
        group_filter: GroupFilter | None,
        failures: TrainerConfig,
    ) -> None:
        self.window, self._prompts, self._rollout = window, prompts, rollout
        self._filter, self._failures = group_filter, failures
        self._groups: dict[int, PromptGroup] = {}
        self._rows: DataProto | None = None  # of the prompts that were drawn last
        self._num_used = self._num_batches = 0  # prompts of these that have started; calls of prompts.next()
        self._prompts_before = prompts.state_dict()
        self._in_a_row, self._filtered = Counter[str](), 0
        self._metrics: dict[str, list[float]] = {}

    @property
    def open(self) -> list[PromptGroup]:
        """The groups that are neither trained on nor skipped, in the order of the data."""
        return [self._groups[number] for number in self.window.open]

    def start(self) -> None:
        """Start the groups that may start now; they have no answers yet."""
        while self.window.room:
            rows, number = self._next_rows(), self.window.start()
            answers = [PartialResponse(request) for request in self._requests(number, rows)]
            self._groups[number] = PromptGroup(number, rows, answers)

    def grade(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Grade complete groups and return metrics for `add`; the only method that may run beside the others."""
        batch, metrics = self._rollout.grade(DataProto.concat([group.completed() for group in groups]))
        size = self._rollout.num_answers
        for number, group in enumerate(groups):
            group.graded = batch[number * size : (number + 1) * size]
        return metrics

    def add(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the step that is taken next."""
        for name, value in metrics.items():
            self._metrics.setdefault(name, []).append(value)

    def finish(self, group: PromptGroup) -> None:
        """A graded group waits for its step, or is skipped by the filter; ConfigError if that skips too many."""
        assert group.graded is not None
        self._in_a_row.clear()
        if self._filter is not None:
            kept, metrics = self._filter.keep(group.graded)
            self.add(metrics)
            if not len(kept):
                self._skip(group, "filtered")
                self._filtered += 1
                num_batches, rest = divmod(self._filtered, self.window.groups_per_step)
                if not rest and len(self.window.finished) < self.window.groups_per_step:
                    self._filter.check(num_batches, len(self.window.finished), self.window.groups_per_step)
                return
        self.window.finish(group.number)

    def fail(self, group: PromptGroup, error: Exception) -> None:
        """Skip a group that cannot be completed; RolloutError once too many have failed.

        Unanswered ones may be more: only where a whole step has none with an answer something is wrong.
        """
        reason = "unanswered" if isinstance(error, UnansweredError) else "failed"
        self._skip(group, reason)
        self._in_a_row[reason] += 1
        in_a_row = self._in_a_row[reason]
        failed = self.window.skipped["failed"]
        limit, share = self._failures.max_failed_in_a_row, self._failures.max_failed_share
        most_in_a_row = limit if reason == "failed" else max(limit, self.window.groups_per_step)
        if in_a_row > most_in_a_row or failed > max(limit, share * self.window.issued):
            lost = f"{in_a_row} prompts in a row and {failed} of {self.window.issued} in all"
            most = f"trainer.max_failed_in_a_row={limit} or trainer.max_failed_share={share:g}"
            why = f"generation failed for {lost}, more than {most} allows; the last error: {error}"
            raise RolloutError(why) from error

    def take(self) -> DataProto | None:
        """The batch of the next step, or None while it is incomplete."""
        if (numbers := self.window.take()) is None:
            return None
        groups = [self._groups.pop(number) for number in numbers]
        batch = joined([group.graded for group in groups if group.graded is not None])
        branches = [row["versions"] for rows in batch.non_tensor_batch.get("branches", ()) for row in rows]
        versions = torch.cat([batch.tensors["weight_versions"].flatten(), *map(torch.tensor, branches)])
        oldest = versions[versions >= 0].min() if bool((versions >= 0).any()) else self.window.step - 2
        age = self.window.check_age(int(oldest))
        counts = {f"rollout/groups_{name}": float(count) for name, count in self.window.counts().items()}
        batch.meta_info["source_metrics"] = {**reduced(self._metrics), **counts, "training/staleness_max": float(age)}
        self._metrics.clear()
        self._filtered = 0
        return batch

    def save(self, folder: Path) -> dict[str, object]:
        """Write open groups with their answers so far and groups that wait; returns the rest of the state."""
        files: dict[str, list[DataProto]] = {WAITING: [], OPEN: []}
        for group in self.open:
            graded = group.graded if group.number in self.window.finished else None
            rows = group.completed() if graded is None else graded
            if graded is None:
                rows.tensors[SEEDS] = group.rows.tensors[SEEDS]
            columns = {**rows.non_tensor_batch, NUMBER: np.full(len(rows), group.number)}
            files[OPEN if graded is None else WAITING].append(DataProto(rows.batch, columns, dict(rows.meta_info)))
        for name, parts in files.items():
            if parts:
                _write_parts(folder / name, parts)
        prompts = {"prompts": self._prompts_before, "prompts_now": self._prompts.state_dict()}
        prompts |= {"used": self._num_used, "batches": self._num_batches}
        metrics = {name: list(values) for name, values in self._metrics.items() if not is_time(name)}
        return {**prompts, "metrics": metrics, "window": self.window.state_dict()}

    def load(self, state: State, folder: Path) -> None:
        """Restore what `save` wrote, or the state of a synchronous run; ConfigError if they do not fit."""
        self._prompts.load_state_dict(state["prompts"])
        used = state.get("used")
        if self._prompts.state_dict().get("epoch") != state["prompts"].get("epoch"):
            # the rows have changed: begin after the epochs of all open prompts
            used = 0
            self._prompts.load_state_dict(state.get("prompts_now", state["prompts"]))
        self._prompts_before = self._prompts.state_dict()
        if "window" not in state:
            self._num_batches = state["step"]
            self.window.issued = self.window.trained = state["step"] * self.window.groups_per_step
            return
        saved = state["window"]
        if (per_step := saved["groups_per_step"]) != self.window.groups_per_step:
            raise ConfigError(f"{folder}: set data.train_batch_size to the value of the run, {per_step}")
        more = max(0, self.window.lookahead - saved.get("lookahead", self.window.lookahead))
        if (least := saved["max_staleness"] + more) > self.window.max_staleness:
            raise ConfigError(f"{folder} has prompts of older weights; set trainer.max_staleness={least} or more")
        self.window.load_state_dict(saved)
        self._num_batches = state["batches"] - bool(used)
        if used:
            self._draw()
            self._num_used = used
            now = self._prompts.state_dict()
            if state.get("prompts_now", now) != now:
                self._prompts.load_state_dict(state["prompts_now"])
        self._metrics = {name: list(values) for name, values in state["metrics"].items()}
        self._groups |= {group: PromptGroup(group, rows, [], rows) for group, rows in _parts(folder / WAITING)}
        self._groups |= {n: PromptGroup(n, rows, self._saved_answers(n, rows)) for n, rows in _parts(folder / OPEN)}
        if missing := sorted(set(self.window.open) ^ set(self._groups)):
            raise CheckpointError(f"{folder}: the open prompts {missing[:5]} are not those of {OPEN} and {WAITING}")
        own = _sampled(self._rows, self._rollout.num_answers) if self._rows is not None else {}
        for group in self._groups.values():
            for name, was in _sampled(group.rows, len(group.rows)).items():
                if name in own and own[name] != was:
                    why = "set data.max_*_length and actor_rollout_ref.rollout.* as in the run that is resumed"
                    raise ConfigError(f"{folder} has open prompts of {name}={was}, and here it is {own[name]}; {why}")

    def _skip(self, group: PromptGroup, reason: str) -> None:
        del self._groups[group.number]
        self.window.skip(group.number, reason)

    def _draw(self) -> None:
        self._prompts_before = self._prompts.state_dict()
        self._num_batches += 1
        self.add({"rollout/num_gen_batches": 1.0})
        self._rows = with_request_seeds(self._rollout.rows(self._prompts.next(), step=self._num_batches))
        self._num_used = 0

    def _next_rows(self) -> DataProto:
        """The rows of the next prompt."""
        size = self._rollout.num_answers
        if self._rows is None or self._num_used * size == len(self._rows):
            self._draw()
        assert self._rows is not None
        rows = self._rows[self._num_used * size : (self._num_used + 1) * size]
        self._num_used += 1
        return rows

    def _requests(self, number: int, rows: DataProto) -> list[ModelRequest]:
        return [replace(request, rid=f"{number}.{row}") for row, request in enumerate(to_requests(rows))]

    def _saved_answers(self, number: int, rows: DataProto) -> list[PartialResponse]:
        """The answers so far in the rows of a checkpoint."""
        lengths = rows.tensors["response_mask"].sum(1).tolist()
        names = ("responses", "rollout_log_probs", "rollout_sampled_log_probs", "weight_versions")
        answers = []
        for row, request in enumerate(self._requests(number, rows)):
            tokens, full, sampled, versions = (rows.tensors[name][row, : lengths[row]].tolist() for name in names)
            finish = Finish(rows.non_tensor_batch["finish_reason"][row])
            ended = None if finish is Finish.ABORT else finish
            routes = None
            if ended is not None and "routed_experts" in rows.tensors:
                routes = rows.tensors["routed_experts"][row][rows.tensors["attention_mask"][row] == 1]
            answers.append(PartialResponse(request, tokens, full, sampled, versions, ended, routes))
        return answers


class OpenAnswers:
    """The answers of open groups, generated by a fleet; `running` has the futures of unfinished ones.

    Only `grade` is thread-safe: a caller with threads holds a lock for the other methods.
    """

    by_episodes, hint = False, ""

    def __init__(self, groups: PromptGroups, fleet: RolloutFleet) -> None:
        self.groups, self.fleet = groups, fleet
        self.running: dict[PromptGroup, dict[int, Future[Any]]] = {}
        """By row of a group, but for answers that are complete: futures of responses, or of episodes."""

    def submit(self, groups: Sequence[PromptGroup]) -> None:
        """Start all answers of groups but those that a checkpoint has complete."""
        unfinished = [(group, row) for group in groups for row, a in enumerate(group.answers) if a.finish is None]
        futures = self.fleet.submit([group.answers[row] for group, row in unfinished])
        self.running |= {group: {} for group in groups}
        for (group, row), future in zip(unfinished, futures, strict=True):
            self.running[group][row] = future

    def advance(self, limits: Mapping[PromptGroup, float]) -> list[PromptGroup]:
        """Continue answers up to their group's number of tokens each; returns the groups that are complete then."""
        short = [
            (group, row, limit)
            for group, limit in limits.items()
            for row, answer in enumerate(group.answers)
            if answer.finish is None and len(answer.tokens) < limit
        ]
        short.sort(key=lambda entry: -len(entry[0].answers[entry[1]].tokens))
        futures = self.fleet.submit([_up_to(group.answers[row], limit) for group, row, limit in short], together=True)
        for (group, row, limit), future in zip(short, futures, strict=True):
            group.answers[row] = _continued(group.answers[row], future.result(), limit)
        return [group for group in limits if group.graded is None and group.is_complete]

    def has_ended(self, group: PromptGroup) -> bool:
        """Whether all answers that were submitted have ended."""
        return group in self.running and all(future.done() for future in self.running[group].values())

    def grade(self, groups: Sequence[PromptGroup]) -> list[Mapping[str, float]]:
        """Grade groups whose answers have ended, or note why they cannot be; returns metrics."""
        for group in groups:
            for row, future in self.running.get(group, {}).items():
                if future.cancelled():
                    continue
                if isinstance(error := future.exception(), Exception):
                    group.failure = error
                else:
                    group.answers[row] = _continued(group.answers[row], future.result())
        complete = [group for group in groups if group.is_complete and group.failure is None]
        return [self.groups.grade(complete)] if complete else []

    def finish(self, groups: Sequence[PromptGroup], metrics: Sequence[Mapping[str, float]]) -> None:
        """Groups that are graded wait for their step, those that failed are skipped."""
        for counts in metrics:
            self.groups.add(counts)
        for group in groups:
            self.running.pop(group, None)
            if group.failure is not None:
                self.groups.fail(group, group.failure)
            elif group.graded is not None:
                self.groups.finish(group)

    def save(self, folder: Path) -> dict[str, object]:
        """Keep finished groups and the tokens drawn so far beside a checkpoint; returns the rest of the state."""
        unfinished = {answer.request.rid: answer for answer in self.fleet.unfinished()}
        for group, futures in self.running.items():
            for row, future in futures.items():
                answer = group.answers[row]
                if answer.finish is None and answer.request.rid not in unfinished and future.exception() is None:
                    group.answers[row] = _continued(answer, future.result())
                elif answer.finish is None:
                    group.answers[row] = unfinished.get(answer.request.rid, answer)
        return self.groups.save(folder)

    def load(self, state: State, folder: Path) -> None:
        """Continue from a checkpoint; ConfigError for prompts that are answered in another way."""
        self.groups.load(state, folder)
        if self.groups.open and (folder / EPISODES).exists() != self.by_episodes:
            why = "set actor_rollout_ref.rollout.workflow, agent and multi_turn as in the run that is resumed"
            kind = "without" if self.by_episodes else "of"
            raise ConfigError(f"{folder} has open prompts {kind} episodes; {why}")


def _up_to(answer: PartialResponse, max_tokens: float) -> PartialResponse:
    """A copy of the answer whose request ends at `max_tokens`, or at its own limit."""
    own = answer.request.gconfig
    params = replace(own, max_new_tokens=int(min(own.max_new_tokens, max_tokens)))
    return PartialResponse.of(replace(answer.request, gconfig=params), answer.response())


def _continued(answer: PartialResponse, response: ModelResponse, limit: float = inf) -> PartialResponse:
    """The answer with this response; it is unfinished if only the `limit` of an epoch ended it."""
    after = PartialResponse.of(answer.request, response)
    is_cut = response.stop_reason is Finish.LENGTH and len(after.tokens) == limit and after.room > 0
    if not is_cut:
        after.finish, after.routed_experts = response.stop_reason, response.routed_experts
    return after


def _write_parts(path: Path, parts: Sequence[DataProto]) -> None:
    """Write groups to a file, each with the columns of its own graders: a column of others would not be its own."""
    own = [{key: one.non_tensor_batch.pop(key) for key in one.meta_info.pop("reward_extra_keys", ())} for one in parts]
    whole = joined(parts)
    whole.meta_info["extra_columns"] = own
    whole.save_to_disk(str(path))


def _parts(path: Path) -> list[tuple[int, DataProto]]:
    """The groups in a file of a checkpoint, which is missing if there were none."""
    if not path.exists():
        return []
    with raised_as(CheckpointError, f"{path}, prompts of an asynchronous run, cannot be read", WireError, OSError):
        rows = DataProto.load_from_disk(path)
    numbers = rows.non_tensor_batch.pop(NUMBER)
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    extra = rows.meta_info.pop("extra_columns", ())
    parts = [rows[at:end] for at, end in pairwise(starts)]
    for part, columns in zip(parts, extra):  # files of earlier versions have none
        part.non_tensor_batch |= columns
        part.meta_info = part.meta_info | {"reward_extra_keys": sorted(columns)}
    return [(int(numbers[at]), part) for at, part in zip(starts, parts)]


def _sampled(rows: DataProto, num_answers: int) -> dict[str, object]:
    """The settings by which these rows are completed, which all rows of a step share."""
    return {**rows.meta_info, "n": num_answers, "prompt_length": rows.tensors["prompts"].shape[1]}
