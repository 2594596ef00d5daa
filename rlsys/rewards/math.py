"""Mathematical answers, compared by math-verify (symbolically, not as text).

math-verify parses LaTeX by a grammar and plain arithmetic by sympy; neither runs what the model wrote. Its own time
limit needs the main thread and counts as a wrong answer, so it is switched off here in favour of `time_limit`.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
THOUGHT_THEN_BOX = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
TAIL_CHARS = 300

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no time limit of its own


def compute_score(solution_str: str, ground_truth: Any, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """1 when the last boxed expression equals the ground truth, 0 otherwise and without a box."""
    return graded(last_boxed(solution_str), ground_truth, timeout_s=timeout_s)


def compute_score_anywhere(solution_str: str, ground_truth: Any, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """As `compute_score`, but without a box the last expression of the text counts."""
    answer = last_boxed(solution_str) or last_expression(solution_str[-TAIL_CHARS:], timeout_s=timeout_s)
    return graded(answer, ground_truth, timeout_s=timeout_s)


def compute_score_dapo(solution_str: str, ground_truth: Any, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """DAPO's rule: 1 when what follows the last "Answer:" near the end is right, -1 otherwise (arXiv 2503.14476)."""
    answers = ANSWER_LINE.findall(solution_str[-TAIL_CHARS:])
    answer = answers[-1].strip().strip("$") if answers else None
    verdict = graded(last_boxed(answer) or answer if answer else None, ground_truth, timeout_s=timeout_s)
    return {**verdict, "score": 1.0 if verdict["acc"] else -1.0}


def compute_score_geometry(solution_str: str, ground_truth: Any, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """0.9 for the boxed answer and 0.1 for the form "<think>...</think> ... \\boxed{...}"."""
    verdict = graded(last_boxed(solution_str), ground_truth, timeout_s=timeout_s)
    form = 0.1 if THOUGHT_THEN_BOX.fullmatch(solution_str.strip()) else 0.0
    return {**verdict, "score": 0.9 * verdict["acc"] + form}


def graded(answer: str | None, ground_truth: Any, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Score, accuracy and the answer found, in the form of verl's extra values."""
    right = answer is not None and equal(answer, str(ground_truth), timeout_s=timeout_s)
    return {"score": float(right), "acc": float(right), "pred": answer or ""}


def last_boxed(text: str) -> str | None:
    """What is inside the last complete \\boxed{...} or \\fbox{...}, braces matched."""
    for start in sorted((m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)), reverse=True):
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end].strip()
    return None


def last_expression(text: str, *, timeout_s: float = 5.0) -> str | None:
    """The expression that math-verify takes for the answer of a text in prose. Raises TimeoutError."""
    from math_verify import parse

    with time_limit(timeout_s):
        expressions = parse(text, parsing_timeout=None)  # pyrefly: ignore[bad-argument-type]
    return str(expressions[-1]) if expressions else None


def equal(answer: str, ground_truth: str, *, timeout_s: float = 5.0) -> bool:
    """Whether two answers are the same text or the same mathematical object. Raises TimeoutError."""
    if answer.strip() == ground_truth.strip():
        return True
    from math_verify import parse, verify

    with time_limit(timeout_s):
        gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)  # pyrefly: ignore[bad-argument-type]
        parsed = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyrefly: ignore[bad-argument-type]
        return bool(gold and parsed) and verify(gold, parsed, timeout_seconds=None)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`; ignored outside the main thread.

    The alarm repeats, so that code which swallows the first one ends too and does not pass for an answer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    fired = False

    def ring(*_: object) -> None:
        nonlocal fired
        fired = True
        raise TimeoutError(f"not decided within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if fired:
        raise TimeoutError(f"not decided within {seconds:g} s")
