"""Generated, verifiable tasks as verl rows: our own arithmetic, and products, gcd and chain_sum of reasoning-gym."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

from rlsys.data.arithmetic import MAX_REPEATS, problems, prompt_row
from rlsys.utils.errors import ConfigError

REASONING_GYM: dict[str, dict[str, Any]] = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 10},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
"""Task -> the settings of reasoning-gym's generator: the easiest, which a model of 135M parameters solves in part."""

SUFFIX = {"chain_sum": " Give only the result as your final answer."}
NUM_ARITHMETIC = 500

TASKS = ("arithmetic", *REASONING_GYM)
MAX_HELD_OUT = 0.2


def make_split(
    task: str, *, num_train: int, num_val: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows to validate on; no question is in both.

    `task` is one of TASKS or "mix", which takes equal parts of all. Where a task has fewer different questions than
    asked for, validation gets at most a fifth of them and training repeats its own.
    """
    if min(num_train, num_val) < 1:
        raise ConfigError(f"--train {num_train} --val {num_val}: both must be at least 1")
    if task == "mix":
        parts = [
            make_split(t, num_train=-(-num_train // len(TASKS)), num_val=-(-num_val // len(TASKS)), seed=seed)
            for t in TASKS
        ]
        train, val = ([row for rows in zip(*split) for row in rows] for split in zip(*parts))
        return _numbered(train[:num_train], "train"), _numbered(val[:num_val], "test")
    rows = list(_different_rows(task, num_train + num_val, seed=seed))
    num_val = min(num_val, max(1, int(len(rows) * MAX_HELD_OUT))) if len(rows) < num_train + num_val else num_val
    val, train = rows[:num_val], rows[num_val:]
    return _numbered(islice(cycle(train), num_train), "train"), _numbered(val, "test")


def _different_rows(task: str, num_rows: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """`num_rows` rows with different questions, fewer when no more seem to come."""
    if task == "arithmetic":
        easy_ones = problems(min(num_rows, NUM_ARITHMETIC), seed=seed)
        yield from (prompt_row(problem, index=0, split="") for problem in easy_ones)
        return
    if task not in REASONING_GYM:
        raise ConfigError(f"--task {task}: must be one of {', '.join((*TASKS, 'mix'))}")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"--task {task} needs reasoning-gym: pip install 'rlsys[smollm2]'") from error
    dataset = reasoning_gym.create_dataset(task, size=2**31 - 1, seed=seed, **REASONING_GYM[task])
    seen: set[str] = set()
    index = num_repeats = 0
    while len(seen) < num_rows and num_repeats < MAX_REPEATS:
        entry = dataset[index]
        index += 1
        num_repeats += 1
        if entry["question"] not in seen:
            seen.add(entry["question"])
            num_repeats = 0
            yield reasoning_gym_row(task, entry)


def reasoning_gym_row(task: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A verl row of what reasoning-gym generated."""
    question, answer = str(entry["question"]) + SUFFIX.get(task, ""), str(entry["answer"])
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "", "index": 0, "question": question, "answer": answer},
    }


def _numbered(rows: Any, split: str) -> list[dict[str, Any]]:
    return [
        {**row, "extra_info": {**row["extra_info"], "split": split, "index": index}} for index, row in enumerate(rows)
    ]
