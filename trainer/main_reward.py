"""python -m trainer.main_reward FILE ROWS: score dumped rollouts, or a data file, by a reward function.

Of a data file the ground truths are scored as if they were the answers: a function that accepts them gives each the
best score. Needs neither torch nor a model.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from rlsys.data.dataset import parse_rows
from rlsys.data.files import read_rows
from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool, RewardResult
from rlsys.telemetry.jsonl import JsonObject
from rlsys.utils.errors import ConfigError, DataError

SHOWN_CHARS = 48


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each row and a summary; 0, 1 if a row could not be scored, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m trainer.main_reward", description=__doc__)
    parser.add_argument("file", help="Python file of the reward function")
    parser.add_argument("rows", help="dumped rollouts (rollouts/1.jsonl) or a data file")
    parser.add_argument("--name", default="compute_score", help="name of the function")
    parser.add_argument("--reward_kwargs", type=json.loads, default={}, help="more arguments of the function, as JSON")
    parser.add_argument("--answer_key", default="answer", help="column of the ground truth, where it has another name")
    parser.add_argument("--limit", type=int, default=100, help="score this many rows")
    parser.add_argument("--num_workers", type=int, default=2, help="0 grades in this process: breakpoint() works")
    parser.add_argument("--timeout_s", type=float, default=10.0, help="seconds for a row")
    given = parser.parse_args(argv)
    if given.limit < 0 or not isinstance(given.reward_kwargs, dict):
        parser.error("--limit must not be negative, --reward_kwargs must be a JSON object")
    try:
        rows = islice(read_rows(given.rows), given.limit)
        items, _ = parse_rows(rows, lambda row: _item(row.values, given.answer_key), bad_rows="skip")
        grader = Grader(given.file, given.name, given.reward_kwargs)
        with RewardPool(grader, num_workers=given.num_workers, timeout_s=given.timeout_s) as pool:
            pool.start()
            results = pool.score(items)
    except (ConfigError, DataError) as error:
        print(f"rlsys: {error}", file=sys.stderr)
        return 2
    for number, (item, result) in enumerate(zip(items, results, strict=True)):
        print(f"{number:5}  {_line(item, result)}")
    lost = [result.status for result in results if result.status != "ok"]
    scores = [result.score for result in results if result.status == "ok"]
    mean = f"mean {fmean(scores):.4g}, from {min(scores):.4g} to {max(scores):.4g}" if scores else "no scores"
    print(f"{len(items)} rows: {mean}; {lost.count('error')} errors, {lost.count('timeout')} timeouts")
    return 1 if lost else 0


def _item(row: JsonObject, answer_key: str) -> RewardItem:
    model = row.get("reward_model")
    own = model.get("ground_truth") if isinstance(model, dict) else None
    truths = (row.get("gts"), own, row.get("ground_truth"), row.get(answer_key))
    if (truth := next((truth for truth in truths if truth is not None), None)) is None:
        raise DataError(f"a row has no ground truth, only {', '.join(sorted(row))}: set --answer_key=<column>")
    answer = row.get("output", truth)
    return RewardItem(str(row.get("data_source", "custom")), str(answer), truth, row.get("extra_info"))


def _line(item: RewardItem, result: RewardResult) -> str:
    texts = [" ".join(str(text).split())[-SHOWN_CHARS:] for text in (item.solution, item.ground_truth)]
    note = result.message or " ".join(f"{key}={value}" for key, value in result.extra.items())
    score = f"{result.score:8.4g}" if result.status == "ok" else f"{result.status:>8}"
    return f"{score}  {result.seconds:7.3f} s  {texts[0]!r} for {texts[1]!r}  {note}".rstrip()


if __name__ == "__main__":
    raise SystemExit(main())
