"""Mathematical answers, compared by math-verify (symbolically, not as text).

math-verify parses LaTeX by a grammar and plain arithmetic by sympy; neither runs what the model wrote. Its own time
limit needs the main thread and counts as a wrong answer, so it is switched off: a comparison that takes too long is
ended with its process by the reward pool, and is a timeout.
"""

import logging
import re
from typing import Any

BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+([^\s{$][^$\n]*))")
ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
ANSWER_MARK = re.compile(r"(?i)answers?\s*(?::|is\b|are\b)")
VERB = re.compile(r"\b(?:is|are|be|equals)\b")
FORMULA = re.compile(r"\$\$?(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
PROSE = re.compile(r"(?<![\\{A-Za-z])(?:[A-Za-z]{3,}|so|it|we|of|or|in|to)(?![A-Za-z])")
THOUGHT_THEN_BOX = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
OTHER_BASE = re.compile(r"(?<![A-Za-z])\d[0-9A-F]*_\{?(?:\d|\\text)")
TAIL_CHARS, BOX_TAIL_CHARS = 300, 100

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no time limit of its own


def compute_score(solution_str: str, ground_truth: object) -> dict[str, object]:
    """1 when the last boxed expression equals the ground truth, 0 otherwise and without a box."""
    return graded(last_boxed(solution_str), ground_truth)


def compute_score_anywhere(solution_str: str, ground_truth: object) -> dict[str, object]:
    """As `compute_score`, but without a box the last expression of the text counts."""
    return graded(last_boxed(solution_str) or last_expression(solution_str[-TAIL_CHARS:]), ground_truth)


def compute_score_dapo(solution_str: str, ground_truth: object) -> dict[str, object]:
    """DAPO's rule (arXiv 2503.14476): 1 when the last "Answer:" near the end is right, -1 otherwise.

    Without such a line a box in the last 100 characters counts.
    """
    if lines := ANSWER_LINE.findall(solution_str[-TAIL_CHARS:]):
        formula = re.search(r"\$(.+?)\$", lines[-1])
        answer = re.sub(r"\\boxed\{(.*)\}", r"\1", formula[1] if formula else lines[-1]).strip()
    else:
        answer = last_boxed(solution_str[-BOX_TAIL_CHARS:])
    verdict = graded(answer, ground_truth)
    return {**verdict, "score": 1.0 if verdict["acc"] else -1.0}


def compute_score_geometry(solution_str: str, ground_truth: object) -> dict[str, Any]:
    """0.9 for the boxed answer and 0.1 for the form "<think>...</think> ... \\boxed{...}", right or wrong."""
    verdict = graded(last_boxed(solution_str), ground_truth)
    return {**verdict, "score": 0.9 * verdict["acc"] + 0.1 * bool(THOUGHT_THEN_BOX.fullmatch(solution_str.strip()))}


def graded(answer: str | None, ground_truth: object) -> dict[str, Any]:
    """The verdict on an answer, None for a text without one."""
    return verdict(answer, answer is not None and equal(answer, str(ground_truth)))


def verdict(answer: str | None, right: bool, *, score: float = 1.0, format_score: float = 0.0) -> dict[str, object]:
    """Score, accuracy and the answer, in the form of verl's extra values; `format_score` is that of a wrong answer."""
    value = 0.0 if answer is None else score if right else format_score
    return {"score": value, "acc": float(right), "pred": answer or ""}


def last_boxed(text: str) -> str | None:
    """The last complete \\boxed{...} or \\fbox{...}, braces matched; \\boxed without braces ends at a $ or line end."""
    for box in reversed(list(BOX.finditer(text))):
        if box[1] is not None:
            return box[1].strip()
        depth = 1
        for end in range(box.end(), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[box.end() : end].strip()
    return None


def last_expression(text: str) -> str | None:
    """The answer of a text without a box.

    After the last "answer is", the last formula in dollars or brackets; without one what follows the last verb if it
    has no words; else what math-verify takes for the answer.
    """
    marked = ANSWER_MARK.split(text)[-1]
    if formulas := FORMULA.findall(marked):
        return "".join(formulas[-1]).strip()
    bare = VERB.split(marked)[-1].strip().rstrip(".")
    if bare and not PROSE.search(bare):
        return bare
    return str(expressions[-1]) if (expressions := _parse(text)) else None


def equal(answer: str, ground_truth: str) -> bool:
    """Whether two answers are the same text or the same mathematical object; numbers of other bases only as text."""
    has_base = OTHER_BASE.search(answer + " " + ground_truth) is not None
    dropped = r"[\s{}]" if has_base else r"(?<!\w)\s|\s(?!\w)"
    bare_answer, bare_truth = (re.sub(dropped, "", text) for text in (answer, ground_truth))
    if has_base or bare_answer == bare_truth:
        return bare_answer == bare_truth
    from math_verify import verify

    return verify(_parse(f"\\boxed{{{ground_truth}}}"), _parse(f"\\boxed{{{answer}}}"), timeout_seconds=None)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyrefly: ignore[bad-argument-type]
