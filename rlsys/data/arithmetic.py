"""Sums, differences and products of small numbers, made up from a seed: verifiable tasks that need no download."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

DATA_SOURCE = "rlsys/arithmetic"
Style = Literal["words", "symbols"]
MAX_REPEATS = 2000


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
    found: dict[Problem, None] = {}
    num_repeats = 0
    while len(found) < num and num_repeats < MAX_REPEATS:
        operator = random.choice(operators)
        digits = product_digits if operator == "*" else max_digits
        left, right = (random.randrange(10 ** random.randint(1, digits)) for _ in range(2))
        problem = Problem(left, operator, right)  # pyrefly: ignore[bad-argument-type]
        num_repeats = num_repeats + 1 if problem in found else 0
        found[problem] = None
    return list(found)


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
