"""From generated rows to rewards: decode, grade in the pool, place each score on the last token of its response.

B rows, P prompt and R response tokens. `naive` and `dapo` are built in; others come by `register` or from a file, in
either of verl's forms: `__call__(data, return_dict)` or `async run_single(data)`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlsys.algorithms.filters import overlong_penalty
from rlsys.config.vocabulary import REWARD_MANAGERS
from rlsys.protocol import DataProto, object_array, response_lengths
from rlsys.rewards.pool.pool import RewardItem, RewardPool, RewardResult, reward_metrics
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import ConfigError
from rlsys.utils.plugins import load_from_file

log = get_logger(__name__)


class Detokenizer(Protocol):
    """What a manager needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class OverlongBuffer:
    """DAPO's soft penalty for long responses (arXiv 2503.14476, eq. 13).

    Over the last `num_tokens` before `max_response_tokens` it falls linearly from 0 to `-penalty_factor`. `log` adds
    `overlong_reward` and `overlong` to the extra values.
    """

    max_response_tokens: int
    num_tokens: int
    penalty_factor: float = 1.0
    log: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.num_tokens <= self.max_response_tokens:
            raise ConfigError(
                f"reward.reward_kwargs.overlong_buffer_cfg.len={self.num_tokens}: "
                f"must be from 1 to max_resp_len={self.max_response_tokens}"
            )

    def penalty(self, lengths: Tensor) -> Tensor:
        """The addend to the rewards (B,): 0 up to the buffer, then falling."""
        limit, size = self.max_response_tokens, self.num_tokens
        penalty = overlong_penalty(lengths, max_length=limit, buffer_length=size, penalty_factor=self.penalty_factor)
        return penalty.float()


@dataclass(frozen=True)
class Graded:
    """The rewards of a batch.

    `rm_scores` (B, R) float32 is zero except on last tokens. `extra` are columns (B,) of the graders' other values,
    always with `acc` and `reward_status`; `metrics` go by name.
    """

    rm_scores: Tensor
    extra: Mapping[str, np.ndarray]
    metrics: Mapping[str, float] = field(default_factory=dict)


class RewardManager(Protocol):
    """Grades a batch of generated rows."""

    def grade(self, data: DataProto) -> Graded: ...


ManagerFactory = Callable[..., RewardManager]
_FACTORIES: dict[str, ManagerFactory] = {}


def register(name: str) -> Callable[[ManagerFactory], ManagerFactory]:
    """Make a manager available as `reward.reward_manager.name`; it is called as `build_reward_manager` says."""

    def add(factory: ManagerFactory) -> ManagerFactory:
        if _FACTORIES.setdefault(name, factory) is not factory:
            raise ValueError(f"a reward manager named {name!r} already exists")
        return factory

    return add


def build_reward_manager(
    name: str,
    *,
    tokenizer: Detokenizer,
    pool: RewardPool,
    reward_fn_key: str = "data_source",
    overlong_buffer: OverlongBuffer | None = None,
    deadline_s: float | None = None,
) -> RewardManager:
    """The registered manager `name`. `deadline_s` bounds the grading of one batch (DeadlineError)."""
    if name not in _FACTORIES:
        raise ConfigError(f"reward.reward_manager.name={name}: must be one of {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name](
        tokenizer=tokenizer,
        pool=pool,
        reward_fn_key=reward_fn_key,
        overlong_buffer=overlong_buffer,
        deadline_s=deadline_s,
    )


@register("dapo")
@register("naive")
class PoolRewardManager:
    """Grades every row in the pool; with an `overlong_buffer` (dapo) long responses lose some of their reward."""

    def __init__(
        self,
        *,
        tokenizer: Detokenizer,
        pool: RewardPool,
        reward_fn_key: str = "data_source",
        overlong_buffer: OverlongBuffer | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._tokenizer, self._pool, self._reward_fn_key = tokenizer, pool, reward_fn_key
        self._overlong_buffer, self._deadline_s = overlong_buffer, deadline_s

    def grade(self, data: DataProto) -> Graded:
        """Rewards of all rows."""
        results = self._pool.score(
            reward_items(data, self._tokenizer, self._reward_fn_key), deadline_s=self._deadline_s
        )
        warn_of_failures(results)
        lengths = response_lengths(data)
        rewards = torch.tensor([r.score for r in results], dtype=torch.float32)
        extra = extra_columns(results)
        if self._overlong_buffer is not None:
            penalty = self._overlong_buffer.penalty(lengths)
            rewards = rewards + penalty
            if self._overlong_buffer.log:
                extra |= {"overlong_reward": penalty.numpy(), "overlong": (penalty < 0).numpy()}
        num_tokens = data.tensors["responses"].shape[1]
        return Graded(place_on_last_token(rewards, lengths, num_tokens), extra, reward_metrics(results))

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """verl's older form; existing `rm_scores` are returned unchanged."""
        if data.batch is not None and "rm_scores" in set(data.batch.keys()):
            graded = Graded(data.tensors["rm_scores"], {})
        else:
            graded = self.grade(data)
        if not return_dict:
            return graded.rm_scores
        extra = {key: column.tolist() for key, column in graded.extra.items()}
        return {"reward_tensor": graded.rm_scores, "reward_extra_info": extra}


assert set(_FACTORIES) == set(REWARD_MANAGERS)


def warn_of_failures(results: Sequence[RewardResult]) -> None:
    """Warn where rows got no score, with the cause of the first: metrics only count them."""
    lost = [result for result in results if result.status != "ok"]
    if lost:
        first = f"{lost[0].status}: {lost[0].message}"
        log.warning("%d of %d rows got no score; the first one: %s", len(lost), len(results), first)


def reward_items(data: DataProto, tokenizer: Detokenizer, reward_fn_key: str = "data_source") -> list[RewardItem]:
    """The graders' arguments for each row: its response as text without special tokens, and its columns."""
    responses, columns = data.tensors["responses"], data.non_tensor_batch
    if reward_fn_key not in columns:
        raise ConfigError(f"data.reward_fn_key={reward_fn_key}: choose from the columns {', '.join(sorted(columns))}")
    items = []
    for row, length in enumerate(response_lengths(data).tolist()):
        text = tokenizer.decode(responses[row, :length].tolist(), skip_special_tokens=True)
        extra = dict(columns["extra_info"][row] or {}) if "extra_info" in columns else {}
        if "__num_turns__" in columns:
            extra["num_turns"] = columns["__num_turns__"][row]
        extra.setdefault("rollout_reward_scores", {})
        truth = (columns["reward_model"][row] or {}).get("ground_truth") if "reward_model" in columns else None
        items.append(RewardItem(str(columns[reward_fn_key][row]), text, truth, extra))
    return items


def place_on_last_token(rewards: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """(B, num_tokens) float32: each reward at the last token of its response; an empty response gets none."""
    placed = torch.zeros(len(rewards), num_tokens, dtype=torch.float32)
    rows = torch.nonzero(lengths > 0).squeeze(-1)
    placed[rows, lengths[rows] - 1] = rewards[rows].float()
    return placed


def extra_columns(results: Sequence[RewardResult]) -> dict[str, np.ndarray]:
    """A column for every key that a grader returned; numbers where all rows have one, else objects with None."""
    keys = dict.fromkeys(key for result in results for key in result.extra)
    columns = {key: _column([result.extra.get(key) for result in results]) for key in keys}
    return columns | {"reward_status": _column([result.status for result in results])}


def _column(values: Sequence[Any]) -> np.ndarray:
    if all(isinstance(v, bool | int | float) for v in values):
        return np.array([float(v) for v in values])
    return object_array(values)


# --- managers written for verl ---


def load_reward_manager(
    path: str,
    name: str,
    *,
    tokenizer: Detokenizer,
    pool: RewardPool,
    reward_fn_key: str = "data_source",
    config: Any = None,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> RewardManager:
    """A manager class from a local file.

    Of `tokenizer`, `pool`, `reward_fn_key`, `config`, `num_examine`, `compute_score` (which grades one row in the pool)
    and `reward_kwargs`, its __init__ gets those that it names.
    """
    cls = load_from_file(path, name, key="reward.reward_manager.module")
    offered = {
        "tokenizer": tokenizer,
        "pool": pool,
        "reward_fn_key": reward_fn_key,
        "config": config,
        "num_examine": 0,
        "compute_score": _scorer(pool),
        **(reward_kwargs or {}),
    }
    parameters = inspect.signature(cls).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    manager = cls(**{k: v for k, v in offered.items() if takes_all or k in {p.name for p in parameters}})
    if hasattr(manager, "grade"):
        return manager
    if hasattr(manager, "run_single") or callable(manager):
        return _VerlManager(manager)
    raise ConfigError(f"reward.reward_manager.module.name={name}: it has none of grade, run_single and __call__")


def _scorer(pool: RewardPool) -> Callable[..., dict[str, Any]]:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
    ) -> dict[str, Any]:
        result = pool.score([RewardItem(data_source, solution_str, ground_truth, extra_info)])[0]
        return {**result.extra, "score": result.score}

    return compute_score


class _VerlManager:
    """Gives a manager in one of verl's two forms the method `grade`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def grade(self, data: DataProto) -> Graded:
        if hasattr(self._manager, "run_single"):
            return asyncio.run(self._one_by_one(data))
        answer = self._manager(data, return_dict=True)
        extra = {key: _column(list(values)) for key, values in answer.get("reward_extra_info", {}).items()}
        return Graded(answer["reward_tensor"], extra)

    async def _one_by_one(self, data: DataProto) -> Graded:
        rows = [data[row : row + 1] for row in range(len(data))]
        answers = await asyncio.gather(*(self._manager.run_single(row) for row in rows))
        results = [RewardResult(float(a["reward_score"]), a.get("reward_extra_info", {}), "ok", 0.0) for a in answers]
        rewards = torch.tensor([r.score for r in results], dtype=torch.float32)
        num_tokens = data.tensors["responses"].shape[1]
        return Graded(place_on_last_token(rewards, response_lengths(data), num_tokens), extra_columns(results))
