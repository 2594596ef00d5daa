"""Times GAE and GRPO over a whole batch against a loop over tokens (rows) and against copying the inputs once.

python scripts/bench/advantage.py [--rows 1024] [--tokens 8192] [--verl-python PATH]

The loops are what PPO code commonly does. With --verl-python, a Python in which verl can be imported, verl's own
functions are timed too, in the same run.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlsys.algorithms.advantage import gae, grpo

VERL = """
import sys, time, torch, numpy as np
from verl.trainer.ppo import core_algos as c
rows, tokens, repeats = map(int, sys.argv[1:])
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
r, v = torch.randn(rows, tokens, generator=g), torch.randn(rows, tokens, generator=g)
m = torch.ones(rows, tokens)
def best(f):
    times = []
    for _ in range(repeats):
        start = time.process_time(); f(); times.append(time.process_time() - start)
    return min(times)
print(best(lambda: c.compute_gae_advantage_return(r, v, m, 0.99, 0.95)),
      best(lambda: c.compute_grpo_outcome_advantage(r, m, np.arange(rows) // 8)))
"""


def best_s(function: Callable[[], object], repeats: int) -> float:
    """the least processor time of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def gae_loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """One vector operation per token, from the right."""
    following, running = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        following = torch.where(mask[:, t], values[:, t], following)
        advantages.append(running)
    return torch.stack(advantages[::-1], dim=1)


def grpo_loop(rewards: Tensor, mask: Tensor, ids: list[int]) -> Tensor:
    """One scalar operation per row."""
    scores = rewards.sum(dim=1)
    groups: dict[int, list[Tensor]] = {}
    for row, group in enumerate(ids):
        groups.setdefault(group, []).append(scores[row])
    stats = {group: (torch.stack(members).mean(), torch.stack(members).std()) for group, members in groups.items()}
    for row, group in enumerate(ids):
        scores[row] = (scores[row] - stats[group][0]) / (stats[group][1] + 1e-6)
    return scores.unsqueeze(1) * mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verl-python")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(args.rows, args.tokens, generator=draw) for _ in range(2))
    mask = torch.ones(args.rows, args.tokens, dtype=torch.bool)
    holes = torch.rand(args.rows, args.tokens, generator=draw) > 0.2
    ids = torch.arange(args.rows) // 8
    peers = [float("nan")] * 2
    if args.verl_python:
        sizes = [str(n) for n in (args.rows, args.tokens, args.repeats)]
        out = subprocess.run([args.verl_python, "-c", VERL, *sizes], capture_output=True, text=True, check=True)
        peers = [float(x) for x in out.stdout.split()[-2:]]

    def ours(counted: Tensor) -> object:
        return gae(token_level_rewards=rewards, values=values, response_mask=counted, gamma=0.99, lam=0.95)

    copy = best_s(lambda: (rewards.clone(), values.clone()), args.repeats)
    looped = best_s(lambda: gae_loop(rewards, values, mask, 0.99, 0.95), args.repeats)
    rows_looped = best_s(lambda: grpo_loop(rewards, mask, ids.tolist()), args.repeats)
    grouped = best_s(lambda: grpo(token_level_rewards=rewards, response_mask=mask, group_ids=ids), args.repeats)
    print(f"{args.rows} x {args.tokens}, torch {torch.__version__}, 1 thread, processor time, best of {args.repeats}")
    for name, took, loop, peer in (
        ("gae", best_s(lambda: ours(mask), args.repeats), looped, peers[0]),
        ("gae, 20 % observations", best_s(lambda: ours(holes), args.repeats), looped, peers[0]),
        ("grpo", grouped, rows_looped, peers[1]),
    ):
        print(
            f"{name:24} {took * 1e3:8.1f} ms | copying the inputs {took / copy:5.1f}x of {copy * 1e3:.1f} ms"
            f" | loop {loop / took:5.1f}x as long | verl {peer / took:5.1f}x as long",
            file=sys.stdout,
        )


if __name__ == "__main__":
    main()
