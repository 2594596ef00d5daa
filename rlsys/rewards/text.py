"""Answers that are plain text: numbers in prose, exact text, a pattern, one of several phrases."""

import re
import string
from collections.abc import Mapping

from rlsys.rewards.math import graded, last_boxed, verdict

NUMBER = re.compile(r"(?:(?<![\w.)])[-+\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def last_number(text: str) -> str | None:
    """The last number of the text without its thousands separators; a minus after a digit is an operator."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "").replace("\u2212", "-").lstrip("+") if numbers else None


def numeric(solution_str: str, ground_truth: object) -> dict[str, object]:
    """1 when the last boxed expression, or without one the last number, equals the ground truth."""
    boxed = last_boxed(solution_str)
    return graded(last_number(solution_str) if boxed is None else boxed, ground_truth)


def exact(solution_str: str, ground_truth: object) -> dict[str, object]:
    """1 when the text, apart from white space around and between words, is the ground truth."""
    answer, wanted = (" ".join(str(text).split()) for text in (solution_str, ground_truth))
    return verdict(answer, answer == wanted)


def regex(solution_str: str, ground_truth: object) -> dict[str, object]:
    """1 when the pattern in the ground truth is found in the text; `pred` is its first group, or all it matched."""
    match = re.search(str(ground_truth), solution_str)
    return verdict(match and (match.group(1 if match.re.groups else 0) or ""), match is not None)


def exact_match(
    solution_str: str, ground_truth: object, *, format_score: float = 0.0, score: float = 1.0
) -> dict[str, object]:
    """`score` when the last <answer>...</answer> is one of the targets, without case, articles and punctuation.

    The ground truth is a text, a list of texts, or {"target": either}. An answer that is wrong gets `format_score`.
    """
    targets = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    accepted = {_bare(str(t)) for t in (targets if isinstance(targets, (list, tuple)) else [targets])}
    answers = TAGGED.findall(solution_str)
    answer = answers[-1].strip() if answers else None
    return verdict(answer, answer is not None and _bare(answer) in accepted, score=score, format_score=format_score)


def _bare(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", "".join(c for c in text.lower() if c not in string.punctuation)).split())
