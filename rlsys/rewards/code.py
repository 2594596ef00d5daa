"""Programs graded by test cases, as in APPS, TACO and CodeContests; run in the sandbox."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlsys.rewards.sandbox.run import SandboxLimits, SandboxRun, run_python

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
CALL = """
if __name__ == "__main__":
    import json as _json
    _arguments = [_json.loads(line) for line in _INPUT.split("\\n")]
    _function = getattr(Solution(), _NAME) if "Solution" in globals() else globals()[_NAME]
    print("\\n" + _json.dumps(_function(*_arguments)))
"""


def compute_score(
    solution_str: str,
    ground_truth: object,
    *,
    continuous: bool = True,
    timeout_s: float = 4.0,
    memory_limit_mb: int = 1024,
    max_cases: int = 10,
    sandbox_url: str | None = None,
    max_concurrent: int = 64,
) -> dict[str, object]:
    """Share of the test cases passed by the last fenced block, or the whole text; all or nothing unless `continuous`.

    `ground_truth` is {"inputs": [...], "outputs": [...]} or that as JSON, with "fn_name" for functions instead of
    programs (an input then is a list of arguments or one JSON text a line). The first `max_cases` are run, `timeout_s`
    each; with a `sandbox_url` by that SandboxFusion server, `max_concurrent` at a time. Raises ValueError for a ground
    truth of another form.
    """
    cases = read_cases(ground_truth)[:max_cases]
    limits = SandboxLimits(wall_s=timeout_s, cpu_s=timeout_s, memory_bytes=memory_limit_mb << 20)
    source = (FENCED.findall(solution_str) or [solution_str])[-1]
    programs = [_program(source, case) for case in cases]
    if sandbox_url is None:
        runs = [run_python(code, stdin=stdin, limits=limits) for code, stdin in programs]
    else:
        from rlsys.rewards.sandbox.remote import run_remotely

        runs = run_remotely(sandbox_url, programs, limits, max_concurrent=max_concurrent)
    verdicts = [_verdict(run, case) for run, case in zip(runs, cases)]
    share = verdicts.count("pass") / len(verdicts)
    passed = float(share == 1.0)
    first_bad = next((v for v in verdicts if v != "pass"), "")
    return {"score": share if continuous else passed, "acc": passed, "passed": share, "verdict": first_bad or "pass"}


def read_cases(ground_truth: object) -> list[tuple[str | None, object, object]]:
    """(function name or None, input, output) of each test case."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping) or not truth.get("inputs") or "outputs" not in truth:
        raise ValueError("the ground truth of a program must be {'inputs': [...], 'outputs': [...]}")
    inputs, outputs, name = truth["inputs"], truth["outputs"], truth.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if name is not None and not str(name).isidentifier():
        raise ValueError(f"fn_name={name!r} is not the name of a function")
    return [(name, given, wanted) for given, wanted in zip(inputs, outputs)]


def _program(source: str, case: tuple[str | None, Any, object]) -> tuple[str, str]:
    """The code to run and its standard input."""
    name, given, _ = case
    if name is None:
        return source, _text(given)
    lines = given if isinstance(given, str) else "\n".join(json.dumps(argument) for argument in given)
    return f"{source}\n_INPUT, _NAME = {lines!r}, {name!r}\n{CALL}", ""


def _verdict(run: SandboxRun, case: tuple[str | None, object, object]) -> str:
    name, _, wanted = case
    if run.status == "failed":
        lines = run.stderr.strip().splitlines()
        return f"failed: {lines[-1][:200]}" if lines else "failed"
    if run.status != "exit":
        return run.status
    if name is None:
        right = same_output(run.stdout, _text(wanted))
    else:
        right = _same_value(run.stdout.rstrip().rpartition("\n")[2], wanted)
    return "pass" if right else "wrong answer"


def _text(lines: object) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, (list, tuple)) else str(lines)


def same_output(actual: str, wanted: str) -> bool:
    """Equal line by line and word by word; numbers with a point or an exponent may differ by 1e-6 of their size."""
    lines, wanted_lines = ([line.split() for line in text.rstrip().splitlines()] for text in (actual, wanted))
    is_same_shape = [len(words) for words in lines] == [len(words) for words in wanted_lines]
    return is_same_shape and all(_same_word(a, b) for pair in zip(lines, wanted_lines) for a, b in zip(*pair))


def _same_word(actual: str, wanted: str) -> bool:
    if actual == wanted:
        return True
    with suppress(ValueError):
        near = math.isclose(float(actual), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
        return near and any(c in wanted for c in ".eE")
    return False


def _same_value(actual: str, wanted: object) -> bool:
    """Functions: equal as JSON; a list of one, as APPS wraps results, counts as its element too."""
    try:
        value = json.loads(actual)
        wanted = json.loads(wanted) if isinstance(wanted, str) else json.loads(json.dumps(wanted))
    except (ValueError, RecursionError):
        return False
    return value == wanted or (isinstance(wanted, list) and len(wanted) == 1 and value == wanted[0])
