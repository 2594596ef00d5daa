"""Length balancing and token-budget micro-batches: rlsys against verl's seqlen_balancing, in one run.

    python scripts/bench/balance.py [--rows 8192] [--ranks 8 16 32 64] [--budgets 16384 65536] [--repeats 7]

For each distribution of lengths: the split of all rows over the ranks (equally many rows each), its imbalance (most
tokens a rank over the mean) and planning time (CPU milliseconds of the one thread that plans); then the micro-batches
of the first rank under a token budget, their fill (tokens over micro-batches x budget) and planning time. Padded is
what verl ships without removing padding.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers import machine, measure, verl_python  # pyrefly: ignore

Row = dict[str, Any]


def distributions(num_rows: int) -> dict[str, np.ndarray]:
    """Seeded lengths: what responses look like, and what is hard for balancing."""
    rng = np.random.default_rng(0)
    short, long = rng.integers(100, 300, num_rows), rng.integers(3000, 4096, num_rows)
    drawn = {
        "lognormal": rng.lognormal(np.log(0.3 * 4096), 0.8, num_rows).clip(1, 4096),
        "bimodal": np.where(rng.random(num_rows) < 0.5, short, long),
        "outlier": np.append(rng.integers(100, 2000, num_rows - 1), 32768),
        "equal": np.full(num_rows, 1000),
        "long tail": ((rng.pareto(1.2, num_rows) + 1) * 200).clip(1, 32768),
    }
    return {name: lengths.astype(np.int64) for name, lengths in drawn.items()}


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """(result, median CPU milliseconds)."""
    times, result = [], None
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append((time.process_time() - start) * 1e3)
    return result, statistics.median(times)


def planners(side: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(partition over ranks, micro-batches under a budget) of one side; both give lists of row indices."""
    if side == "rlsys":
        from rlsys.batching import micro_batches
        from rlsys.batching.partition import balanced_partitions

        return (lambda lengths, ranks: balanced_partitions(lengths, ranks, equal_size=True)), micro_batches

    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import (  # pyrefly: ignore
        get_seqlen_balanced_partitions,
        rearrange_micro_batches,
    )

    def micro(lengths: np.ndarray, budget: int) -> list[list[int]]:
        mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]
        rows = TensorDict({"input_ids": torch.zeros(len(lengths), 1), "attention_mask": mask}, len(lengths))
        return rearrange_micro_batches(rows, budget)[1]

    return (lambda lengths, ranks: get_seqlen_balanced_partitions(lengths.tolist(), ranks, True)), micro


def measure_side(side: str, num_rows: int, ranks: Sequence[int], budgets: Sequence[int], repeats: int) -> list[Row]:
    """One row for every distribution and number of ranks."""
    partition, micro = planners(side)
    rows = []
    for name, lengths in distributions(num_rows).items():
        for num_ranks in ranks:
            parts, plan_ms = timed(lambda: partition(lengths, num_ranks), repeats)  # noqa: B023
            loads = [int(lengths[part].sum()) for part in parts]
            mine = lengths[np.sort(parts[0])]
            fills = {}
            for budget in (max(budget, int(lengths.max())) for budget in budgets):
                batches, micro_ms = timed(lambda: micro(mine, budget), min(repeats, 3))  # noqa: B023
                fills[budget] = (int(mine.sum()) / (len(batches) * budget), micro_ms)
            rows.append(
                {
                    "lengths": name,
                    "ranks": num_ranks,
                    "imbalance": max(loads) * num_ranks / int(lengths.sum()),
                    "plan_ms": plan_ms,
                    "micro": fills,
                    "padded": float(lengths.sum() / (len(lengths) * lengths.max())),
                }
            )
    return rows


def report(ours: list[Row], theirs: list[Row]) -> None:
    """A table of both sides and the ratios that matter."""
    print(f"machine: {machine()}\n")
    print(
        f"{'lengths':11}{'ranks':>6} | {'imbalance':>10}{'verl':>9} | {'plan ms':>8}{'verl':>9}{'ratio':>8} | ", end=""
    )
    print("fill by budget: rlsys / verl (plan ms)")
    for mine, peer in zip(ours, theirs, strict=True):
        fills = ", ".join(
            f"{budget}: {fill:.3f} / {peer['micro'][budget][0]:.3f} ({plan_ms:.1f} / {peer['micro'][budget][1]:.1f})"
            for budget, (fill, plan_ms) in mine["micro"].items()
        )
        ratio = peer["plan_ms"] / mine["plan_ms"]
        print(f"{mine['lengths']:11}{mine['ranks']:6} | {mine['imbalance']:10.4f}{peer['imbalance']:9.4f} | ", end="")
        print(f"{mine['plan_ms']:8.2f}{peer['plan_ms']:9.1f}{ratio:8.1f} | {fills}")
    ratios = [peer["plan_ms"] / mine["plan_ms"] for mine, peer in zip(ours, theirs, strict=True)]
    worse = sum(mine["imbalance"] > peer["imbalance"] + 1e-4 for mine, peer in zip(ours, theirs, strict=True))
    print(f"\nplanning: {statistics.geometric_mean(ratios):.0f} x verl (geometric mean), at least {min(ratios):.1f} x")
    print(f"longest plan: {max(row['plan_ms'] for row in ours):.2f} ms; goal 5 ms for 8192 rows")
    print(
        f"largest imbalance: {max(row['imbalance'] for row in ours):.4f}, "
        f"verl {max(row['imbalance'] for row in theirs):.4f}"
    )
    print(f"cases with a worse balance than verl's: {worse} of {len(ours)}")
    padded = {row["lengths"]: f"{row['padded']:.2f}" for row in ours}
    print(f"useful tokens: packed 1.00 by construction, padded to the longest {padded}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--side", choices=("rlsys", "verl"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        rows = measure_side(options.side, options.rows, options.ranks, options.budgets, options.repeats)
        print(json.dumps({"rows": [{**row, "micro": list(row["micro"].items())} for row in rows]}))
        return
    arguments = [f"--rows={options.rows}", f"--repeats={options.repeats}"]
    arguments += ["--ranks", *map(str, options.ranks), "--budgets", *map(str, options.budgets)]
    sides = []
    for side, python in (("rlsys", Path(sys.executable)), ("verl", verl_python())):
        rows = measure(python, __file__, [f"--side={side}", *arguments], timeout_s=1800)["rows"]
        sides.append([{**row, "micro": {budget: result for budget, result in row["micro"]}} for row in rows])  # noqa: C416
    report(*sides)


if __name__ == "__main__":
    main()
