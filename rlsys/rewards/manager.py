"""From generated rows to rewards: decode, grade in the pool, place each score on the last token of its response.

B rows, P prompt and R response tokens. `naive` and `dapo` are built in; others come by `register` or from a file, in
either of verl's forms: `__call__(data, return_dict)` or `async run_single(data)`.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.algorithms.filters import overlong_penalty
from rlsys.algorithms.masked import at_last_token
from rlsys.algorithms.registry import Registry
from rlsys.config.schema.algorithm import GradingConfig
from rlsys.config.schema.jobs import GradedJob, PPOConfig
from rlsys.protocol import DataProto, object_array, response_lengths
from rlsys.protocol.rows import compute_response_mask
from rlsys.rewards.pool.pool import RewardItem, RewardPool, RewardResult, reward_metrics
from rlsys.telemetry.log import get_logger
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import ConfigError, RewardError, raised_as, result_within
from rlsys.utils.plugins import load_from_file, named_arguments

log = get_logger(__name__)


@dataclass(frozen=True)
class Graded:
    """The rewards of a batch.

    `rm_scores` (B, R) float32 is zero except on last tokens. `extra` are columns (B,) of the graders' other values,
    always with `reward_status`; `metrics` go by name.
    """

    rm_scores: Tensor
    extra: Mapping[str, np.ndarray]
    metrics: Mapping[str, float] = field(default_factory=dict)


class RewardManager(Protocol):
    """Grades a batch of generated rows."""

    def grade(self, data: DataProto) -> Graded: ...


ARGUMENTS = (
    *("tokenizer", "pool", "reward", "reward_fn_key", "max_response_length", "deadline_s"),
    *("config", "num_examine", "compute_score", "overlong_buffer_cfg", "max_resp_len"),
)
"""What a manager's __init__ may name beside its own reward.reward_kwargs; `compute_score` grades a row in the pool."""
_MANAGERS: Registry[Callable[..., RewardManager]] = Registry("reward manager", takes=None)
register = _MANAGERS.register
"""Makes a class available as `reward.reward_manager.name`."""


def reward_manager_class(reward: GradingConfig) -> Callable[..., RewardManager]:
    """The class of the configured manager; ConfigError for reward_kwargs that it does not take, or lacks."""
    chosen, own = reward.reward_manager, reward.reward_kwargs.model_extra or {}
    if chosen.source == "register":
        with raised_as(ConfigError, "reward.reward_manager.name", ValueError):
            cls = _MANAGERS.get(chosen.name)
    else:
        assert chosen.module.path is not None, "checked with the configuration"
        cls = load_from_file(chosen.module.path, chosen.module.name, key="reward.reward_manager.module.path")
    signature = inspect.signature(cls)
    try:
        for bind in (signature.bind_partial, signature.bind):  # the first does not complain of missing ones
            bind(**own, **named_arguments(cls, dict.fromkeys(ARGUMENTS)))
    except TypeError as error:
        takes = ", ".join(name for name in signature.parameters if name not in ARGUMENTS) or "no keys"
        raise ConfigError(f"reward.reward_kwargs: {cls.__name__}: {error}; of its own it takes {takes}") from error
    penalizes = named_arguments(cls, dict.fromkeys(("overlong_buffer_cfg", "reward", "config")))
    if reward.reward_kwargs.overlong_buffer_cfg.enable and not penalizes:
        why = f"{cls.__name__} does not take it; set it to false, or name overlong_buffer_cfg in its __init__"
        raise ConfigError(f"reward.reward_kwargs.overlong_buffer_cfg.enable = True: {why}")
    return cls


def build_reward_manager(cfg: GradedJob, tokenizer: Tokenizer, pool: RewardPool) -> RewardManager:
    """The configured manager: registered by name, or a class from a file.

    Of ARGUMENTS and the reward_kwargs it gets those that its __init__ names.
    """
    reward, longest, deadline_s = cfg.reward, cfg.data.max_response_length, cfg.trainer.deadlines.reward_s
    cls, kwargs = reward_manager_class(reward), reward.reward_kwargs
    results: list[RewardResult] = []
    values = (
        *(tokenizer, pool, reward, cfg.data.reward_fn_key, longest, deadline_s, cfg, 0, _scorer(pool, results)),
        *(kwargs.overlong_buffer_cfg, kwargs.max_resp_len or longest),
    )
    manager = cls(**named_arguments(cls, dict(zip(ARGUMENTS, values, strict=True)) | (kwargs.model_extra or {})))
    if cls is PoolRewardManager:
        return manager
    if hasattr(manager, "grade") or hasattr(manager, "run_single") or callable(manager):
        return _CustomManager(manager, results, cfg)
    raise ConfigError(f"reward.reward_manager: {cls.__name__} has none of grade, run_single and __call__")


@register("naive", "dapo")
@dataclass(kw_only=True)
class PoolRewardManager:
    """Grades every row in the pool; with an overlong buffer (dapo) long responses lose some of their reward.

    The buffer is DAPO's soft penalty (arXiv 2503.14476, eq. 13): over its last tokens before the longest response it
    falls linearly from 0 to `-penalty_factor`. Its `log` adds `overlong_reward` and `overlong` to the extra values.
    `deadline_s` bounds the grading of one batch (DeadlineError).
    """

    tokenizer: Tokenizer
    pool: RewardPool
    config: GradedJob
    reward_fn_key: str = "data_source"
    max_response_length: int
    deadline_s: float | None = None
    before: list[RewardResult] = field(default_factory=list, init=False)

    def grade(self, data: DataProto) -> Graded:
        """Rewards of all rows; RewardError where more than `reward.max_failed` of them could not be graded."""
        results = self.pool.score(reward_items(data, self.tokenizer, self.reward_fn_key), deadline_s=self.deadline_s)
        check_failures(results, self.before, self.config)
        given = self.config.reward.reward_kwargs
        overlong, longest = given.overlong_buffer_cfg, given.max_resp_len or self.max_response_length
        rewards = torch.tensor([r.score for r in results], dtype=torch.float32)
        extra = extra_columns(results)
        if overlong.enable:
            penalty = overlong_penalty(response_lengths(data), overlong, max_length=longest).float()
            rewards = rewards + penalty
            if overlong.log:
                extra |= {"overlong_reward": penalty.numpy(), "overlong": (penalty < 0).numpy()}
        return Graded(at_last_token(rewards, compute_response_mask(data)), extra, reward_metrics(results))


def check_failures(new: Sequence[RewardResult], before: list[RewardResult], cfg: GradedJob) -> None:
    """Warn where rows got no score, with the cause of the first; RewardError if more than a share of `max_failed`.

    Asynchronous runs grade prompts as they end: those `before` count too, until there are as many as a step has.
    """
    results = [*before, *new]
    if isinstance(cfg, PPOConfig) and cfg.trainer.max_staleness:
        before[:] = results if len(results) < cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n else []
    if before or not (lost := [result for result in results if result.status != "ok"]):
        return
    late = sum(result.status == "timeout" for result in lost)
    first = f"{len(lost)} of {len(results)} answers could not be graded ({late} timed out). First: {lost[0].message}"
    check_share(len(lost), len(results), first, cfg.reward.max_failed)


def check_share(num_lost: int, num_all: int, first: str, max_failed: float) -> None:
    """Warn with `first` of those that have no score; RewardError if they are more than a share of `max_failed`."""
    if num_lost > max_failed * num_all:
        raise RewardError(f"{first}\nMore than reward.max_failed={max_failed:g} of a batch; this step is not saved.")
    log.warning("%s", first)


def reward_items(data: DataProto, tokenizer: Tokenizer, reward_fn_key: str = "data_source") -> list[RewardItem]:
    """The graders' arguments for each row: its response as text without special tokens, and its columns."""
    responses, columns = data.tensors["responses"], data.non_tensor_batch
    if reward_fn_key not in columns:
        raise ConfigError(f"data.reward_fn_key={reward_fn_key}: choose from the columns {', '.join(sorted(columns))}")
    items = []
    for row, length in enumerate(response_lengths(data).tolist()):
        text = str(tokenizer.decode(responses[row, :length].tolist(), skip_special_tokens=True))
        extra = dict(columns["extra_info"][row] or {}) if "extra_info" in columns else {}
        if "__num_turns__" in columns:
            extra["num_turns"] = columns["__num_turns__"][row]
        extra.setdefault("rollout_reward_scores", {})
        truth = (columns["reward_model"][row] or {}).get("ground_truth") if "reward_model" in columns else None
        items.append(RewardItem(str(columns[reward_fn_key][row]), text, truth, extra))
    return items


def extra_columns(results: Sequence[RewardResult]) -> dict[str, np.ndarray]:
    """A column for every key that a grader returned; numbers where all rows have one, else objects with None.

    What could not be graded has 0 where others have numbers.
    """
    graded = [result for result in results if result.status == "ok"] or results  # others have an `acc` of their own
    keys = dict.fromkeys(key for result in graded for key in result.extra)
    zeros = {key: 0.0 for one in graded for key, value in one.extra.items() if isinstance(value, bool | int | float)}
    rows = [one.extra if one.status == "ok" else {**zeros, **one.extra} for one in results]
    columns = {key: _column([row.get(key) for row in rows]) for key in keys}
    return columns | {"reward_status": _column([result.status for result in results])}


def _column(values: Sequence[Any]) -> np.ndarray:
    held = [str(v) if isinstance(v, int) and abs(v) > 2**1023 else v for v in values]  # no float holds those
    if all(isinstance(v, bool | int | float) for v in held):
        return np.array([float(v) for v in held])
    return object_array(held)


# --- custom managers ---


def _scorer(pool: RewardPool, results: list[RewardResult]) -> Callable[..., dict[str, object]]:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: object, extra_info: Any = None, **_: object
    ) -> dict[str, object]:
        (result,) = pool.score([RewardItem(data_source, solution_str, ground_truth, extra_info)])
        results.append(result)
        return {**result.extra, "score": result.score}

    return compute_score


class _CustomManager:
    """Gives a manager the method `grade` if it has one of verl's two forms, and names it in what goes wrong; `results`
    are those of its `compute_score`."""

    def __init__(self, manager: Any, results: list[RewardResult], cfg: GradedJob) -> None:
        self._manager, self._results, self._cfg, self._before = manager, results, cfg, list[RewardResult]()
        cls, path = type(manager), cfg.reward.reward_manager.module.path
        self._who = f"reward.reward_manager {cls.__name__} of {path or cls.__module__}"
        self._lock = threading.Lock()

    def grade(self, data: DataProto) -> Graded:
        """RewardError for what it raises and for rewards that are not finite or of another shape, DeadlineError if the
        manager hangs.

        Without grading processes there is no deadline, so that `breakpoint()` works in the manager.
        """
        max_s = self._cfg.trainer.deadlines.reward_s if self._cfg.reward.num_workers else None
        with self._lock:  # training and validation grade at the same time
            self._results.clear()
            call = in_daemon_thread(lambda: self._rewards(data), name="reward-manager")
            graded = result_within(call, max_s, who=self._who, stage="reward", hint="raise trainer.deadlines.reward_s")
            scores = graded.rm_scores
            if scores.shape != data.tensors["responses"].shape or not scores.float().isfinite().all():
                raise RewardError(f"{self._who}: must give finite numbers only, of the shape of the responses")
            check_failures(self._results, self._before, self._cfg)
            return replace(graded, metrics=reward_metrics(self._results)) if self._results else graded

    def _rewards(self, data: DataProto) -> Graded:
        """What the manager gives; RewardError for what it raises."""
        with raised_as(RewardError, self._who):
            if hasattr(self._manager, "grade"):
                return self._manager.grade(data)
            if hasattr(self._manager, "run_single"):
                return asyncio.run(self._one_by_one(data))
            answer = self._manager(data, return_dict=True)
            extra = {key: _column(list(values)) for key, values in answer.get("reward_extra_info", {}).items()}
            return Graded(answer["reward_tensor"], extra)

    async def _one_by_one(self, data: DataProto) -> Graded:
        rows = [data[row : row + 1] for row in range(len(data))]
        answers = await asyncio.gather(*(self._manager.run_single(row) for row in rows))
        results = [RewardResult(float(a["reward_score"]), a.get("reward_extra_info", {}), "ok", 0.0) for a in answers]
        scores = torch.tensor([r.score for r in results], dtype=torch.float32)
        return Graded(at_last_token(scores, compute_response_mask(data)), extra_columns(results))
