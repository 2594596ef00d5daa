"""Tools that come with rlsys: Python and a calculator, both in the sandbox, and search over a local text file."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlsys.agent.tools import BaseTool
from rlsys.rewards.sandbox.run import run_python


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    run = run_python(code)
    if run.status == "exit":
        return run.stdout.strip() or "(nothing was printed)"
    return "\n".join([*run.stdout.splitlines(), *run.stderr.splitlines()[-1:]]) or run.status


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and brackets, e.g. "(2+3)*4".
    """
    return python(f"print({expression.strip()})")


class SearchTool(BaseTool):
    """The passages of a text file that fit a query best (BM25); config: `index`, one passage a line, and `top_k`."""

    async def execute(self, instance_id: str, parameters: Mapping[str, Any], **kwargs: object) -> str:
        passages, counts, frequency, mean_length = _load_index(self.config["index"])

        def score(at: int) -> float:
            total, length = 0.0, sum(counts[at].values())
            for word in _words(str(parameters.get("query", ""))):
                weight = math.log(1 + (len(passages) - frequency[word] + 0.5) / (frequency[word] + 0.5))
                total += weight * counts[at][word] * 2.5 / (counts[at][word] + 0.375 + 1.125 * length / mean_length)
            return total

        ranked = sorted(range(len(passages)), key=lambda at: (-score(at), at))[: self.config.get("top_k", 3)]
        return "\n".join(f"[{number}] {passages[at]}" for number, at in enumerate(ranked, 1))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def _load_index(path: str) -> tuple[list[str], list[Counter[str]], Counter[str], float]:
    passages = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    counts = [Counter(_words(passage)) for passage in passages]
    frequency = Counter(word for count in counts for word in count)
    return passages, counts, frequency, sum(map(Counter.total, counts)) / max(1, len(counts))
