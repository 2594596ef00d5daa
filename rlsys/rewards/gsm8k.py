"""Grade-school problems: the number after "####", or the last number of the text."""

import re
from typing import Literal

from rlsys.rewards.math import verdict

MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")
TAIL_CHARS = 300


def extract_solution(solution_str: str, *, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The answer near the end: strict all number characters after the last "#### ", flexible the last number."""
    text = solution_str[-TAIL_CHARS:]
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}: must be 'strict' or 'flexible'")
    if method == "strict":
        return marked[-1].replace(",", "") if (marked := MARKED.findall(text)) else None
    numbers = [number for number in NUMBER.findall(text) if any(c.isdigit() for c in number)]
    return numbers[-1].replace(",", "").rstrip(".") if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, object]:
    """`score` for the right number, `format_score` for another one, 0 for none."""
    answer = extract_solution(solution_str, method=method)
    return verdict(answer, answer == str(ground_truth).replace(",", "").strip(), score=score, format_score=format_score)
