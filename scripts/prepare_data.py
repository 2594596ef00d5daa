"""Write verifiable tasks, generated or of the hub, as verl-style parquet: OUT/train.parquet and OUT/test.parquet.

python scripts/prepare_data.py --task mix --train 4096 --val 256 --out data/mix --seed 1

Tasks: arithmetic of our own, and products, gcd and chain_sum of reasoning-gym; `mix` has equal parts of these. `python`
asks for products of three-digit numbers, to be computed by a Python tool. `shapes` asks about pictures of coloured
shapes: how many, where, which is larger.

gsm8k, math, dapo, geo3k and countdown are datasets of the hub in the rows that verl's own scripts make of them (needs
`pip install -e '.[datasets]'`): all of their rows, unless --train or --val says how many. HF_ENDPOINT, HF_HOME and
HF_TOKEN count. countdown, whose first 1024 rows are for validation, needs a reward function of yours.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.rewards.math import last_boxed
from rlsys.utils.errors import ConfigError

MAX_REPEATS = 2000
REASONING_GYM: dict[str, dict[str, Any]] = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 10},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
"""Task -> the settings of reasoning-gym's generator: the easiest, which a model of 135M parameters solves in part."""

SUFFIX = {"chain_sum": " Give only the result as your final answer."}
NUM_ARITHMETIC = 500
HUB = {
    "gsm8k": ("openai/gsm8k:main:train", "openai/gsm8k:main:test"),
    "math": ("DigitalLearningGmbH/MATH-lighteval:train", "DigitalLearningGmbH/MATH-lighteval:test"),
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k:train", "BytedTsinghua-SIA/AIME-2024:train"),
    "geo3k": ("hiyouga/geometry3k:train", "hiyouga/geometry3k:test"),
    "countdown": ("Jiayi-Pan/Countdown-Tasks-3to4:train", ""),
}
"""Task -> the splits to train on and to validate on; "" takes the first rows of the former."""
FOUR_HASHES = ' Let\'s think step by step and output the final answer after "####".'
BOXED = " Let's think step by step and output the final answer within \\boxed{}."
GEOMETRY = (
    " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
COUNTDOWN = (
    "Using the numbers {}, create an equation that equals {}. You can use basic arithmetic operations (+, -, *, /) and "
    "each number can only be used once. Show your work in <think> </think> tags and return the final answer in "
    "<answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)

DATA_SOURCE = "rlsys/arithmetic"
TASKS = ("arithmetic", *REASONING_GYM)
PYTHON_QUESTION = "Use Python to compute. Write code in a ```python block``` that prints the result. What is {} * {}?"
MAX_HELD_OUT = 0.2
Style = Literal["words", "symbols"]


@dataclass(frozen=True)
class Problem:
    """`left` `operator` `right`."""

    left: int
    operator: Literal["+", "-", "*"]
    right: int

    @property
    def answer(self) -> int:
        if self.operator == "*":
            return self.left * self.right
        return self.left + self.right if self.operator == "+" else self.left - self.right

    def question(self, style: Style) -> str:
        """As a sentence for a language model, or as "12+34="."""
        if style == "symbols":
            return f"{self.left}{self.operator}{self.right}="
        return f"Calculate {self.left} {self.operator} {self.right}. Give only the result as your final answer."


def prompt_row(problem: Problem, *, index: int, split: str, style: Style = "words") -> dict[str, Any]:
    """A row in verl's columns."""
    question = problem.question(style)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": str(problem.answer)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS, "python", "shapes", "mix", *HUB], default="mix")
    parser.add_argument("--train", type=int, metavar="N", help="rows to train on (4096, of the hub all)")
    parser.add_argument("--val", type=int, metavar="M", help="rows to validate on (256, of the hub all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.task not in HUB:
        options.train = 4096 if options.train is None else options.train
        options.val = 256 if options.val is None else options.val
    try:
        if options.task in HUB:
            train, val = hub_splits(options.task, options.train, options.val)
            for name, rows in (("train", train), ("test", val)):
                write_rows(options.out / f"{name}.parquet", rows)
                print(f"{options.out / name}.parquet: {len(rows)} rows of {rows[0]['data_source']}")
            return 0
        train, val = make_split(options.task, num_train=options.train, num_val=options.val, seed=options.seed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for name, rows, wanted in (("train", train, options.train), ("test", val, options.val)):
        path = options.out / f"{name}.parquet"
        write_rows(path, rows)
        num_different = len({row["extra_info"]["question"] for row in rows})
        fewer = f" (not {wanted}: the task has too few different questions)" if len(rows) < wanted else ""
        print(f"{path}: {len(rows)} rows{fewer}, {num_different} different questions")
    return 0


def hub_splits(task: str, num_train: int | None, num_val: int | None) -> tuple[list[Any], list[Any]]:
    """Rows of a dataset of the hub in verl's columns, for training and validation. ConfigError that says why not."""
    from rlsys.utils.hub import open_rows

    train, val = HUB[task]
    held_out = 0 if val else num_val or 1024

    def rows(name: str, split: str, first: int, count: int | None) -> list[dict[str, Any]]:
        taken = islice(open_rows([name]), first, first + count if count else None)
        return [hub_row(task, row, split=split, index=index) for index, row in enumerate(taken)]

    return rows(train, "train", held_out, num_train), rows(val or train, "test", 0, num_val or held_out)


def hub_row(task: str, row: Mapping[str, Any], *, split: str, index: int) -> dict[str, Any]:
    """One row in verl's columns."""
    if task == "dapo":
        return dict(row)
    more: dict[str, Any] = {}
    truth: Any
    if task == "gsm8k":
        question, truth = row["question"] + FOUR_HASHES, row["answer"].rpartition("####")[2].strip().replace(",", "")
    elif task == "math":
        question, truth = row["problem"] + BOXED, last_boxed(row["solution"]) or ""
    elif task == "countdown":
        question = COUNTDOWN.format(list(row["nums"]), row["target"])
        truth = {"target": row["target"], "numbers": list(row["nums"])}
    else:
        question, truth, more = row["problem"] + GEOMETRY, row["answer"], {"images": list(map(_png, row["images"]))}
    return {
        "data_source": "countdown" if task == "countdown" else HUB[task][0].partition(":")[0],
        "prompt": [{"role": "user", "content": question}],
        **more,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": row.get("question", row.get("problem", question)),
        },
    }


def _png(image: Any) -> dict[str, bytes]:
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return {"bytes": buffer.getvalue()}


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
    if task == "python":
        random = Random(seed)
        pairs = {(random.randint(100, 999), random.randint(100, 999)): None for _ in range(num_rows)}
        yield from (python_row(*pair) for pair in pairs)
        return
    if task == "shapes":
        from scripts.shapes import rows

        yield from islice(rows(seed=seed), num_rows)
        return
    if task not in REASONING_GYM:
        raise ConfigError(f"--task {task}: must be one of {', '.join((*TASKS, 'mix'))}")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"--task {task} needs reasoning-gym: pip install -e '.[smollm2]'") from error
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


def python_row(left: int, right: int) -> dict[str, Any]:
    """A verl row that asks for a product."""
    question = PYTHON_QUESTION.format(left, right)
    return {
        "data_source": "text/number",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(left * right)},
        "extra_info": {"split": "", "index": 0, "question": question, "answer": str(left * right)},
    }


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


def problems(
    num: int, *, seed: int, operators: str = "+-*", max_digits: int = 2, product_digits: int = 1
) -> list[Problem]:
    """`num` different problems, or nearly all there are.

    Factors have up to `product_digits` digits, other numbers up to `max_digits`; each number of digits and each
    operator is equally likely, so that small numbers are not rare. Raises ValueError for unknown operators.
    """
    if not operators or set(operators) - set("+-*"):
        raise ValueError(f"operators={operators!r}: must be some of + - *")
    random = Random(seed)
    unique: dict[Problem, None] = {}
    num_repeats = 0
    while len(unique) < num and num_repeats < MAX_REPEATS:
        operator = random.choice(operators)
        digits = product_digits if operator == "*" else max_digits
        left, right = (random.randrange(10 ** random.randint(1, digits)) for _ in range(2))
        problem = Problem(left, operator, right)  # pyrefly: ignore[bad-argument-type]
        num_repeats = num_repeats + 1 if problem in unique else 0
        unique[problem] = None
    return list(unique)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as parquet, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), beside)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:  # a folder that cannot be written
        print(error, file=sys.stderr)
        sys.exit(2)
