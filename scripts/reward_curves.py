"""Reward curves over seeds from real runs of the main job.

    python scripts/reward_curves.py --config-name smollm2 --seeds 1 2 3 --out runs/curves [key=value ...]
    python scripts/reward_curves.py --plot runs/curves --picture docs/curves.png

Each seed is one run of `python -m trainer.main_ppo` with that seed for data order and sampling; a run that is there
already is resumed or, if complete, kept. `--parallel N` runs N at a time, each on its own GPUs where there are several.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

METRIC = "critic/score/mean"


def run(config_name: str, seed: int, out: Path, overrides: Sequence[str], gpu: int | None) -> int:
    """One training run; its folder is `{out}/{config_name}-seed{seed}`."""
    folder = out / f"{config_name}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "--config-name", config_name),
        *(f"trainer.default_local_dir={folder}", f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"),
        *overrides,
    ]
    env = dict(os.environ)
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (folder / "log.txt").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, check=False).returncode


def curves(out: Path) -> dict[str, dict[str, list[float]]]:
    """{job: {seed: scores by step}} of all runs under `out`."""
    by_job: dict[str, dict[str, list[float]]] = {}
    for path in sorted(out.glob("*-seed*/metrics.jsonl")):
        job, _, seed = path.parent.name.rpartition("-seed")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        by_job.setdefault(job, {})[seed] = [line[METRIC] for line in lines if METRIC in line]
    return by_job


def smooth(scores: Sequence[float], width: int = 5) -> list[float]:
    """The mean of each step and the few before it."""
    windows = (scores[max(0, end - width) : end] for end in range(1, len(scores) + 1))
    return [sum(window) / len(window) for window in windows]


def plot(by_job: dict[str, dict[str, list[float]]], picture: Path) -> None:
    """A panel a job: the mean over seeds, a band from the lowest to the highest, and each step's mean as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panels = plt.subplots(1, len(by_job), figsize=(5.2 * len(by_job), 3.6), squeeze=False, sharey=True)
    for panel, (job, seeds) in zip(panels[0], by_job.items()):
        steps = range(1, min(map(len, seeds.values())) + 1)
        scores = np.array([scores[: len(steps)] for scores in seeds.values()])
        smoothed = np.array([smooth(row) for row in scores.tolist()])
        panel.plot(steps, scores.mean(0), "C0o", markersize=2, alpha=0.5)
        band = f"lowest to highest of {len(seeds)} seeds"
        panel.fill_between(steps, smoothed.min(0), smoothed.max(0), color="C0", alpha=0.2, linewidth=0, label=band)
        panel.plot(steps, smoothed.mean(0), "C0", linewidth=1.8, label="mean of 5 steps and all seeds")
        panel.set(title=job, xlabel="step")
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("mean score of the training batch")
    panels[0][-1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def main() -> int:
    """Run what is asked for; the exit code is the worst of the runs'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", default="smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--picture", type=Path, default=Path("docs/curves.png"))
    asked, overrides = parser.parse_known_args()
    if asked.plot is not None:
        plot(curves(asked.plot), asked.picture)
        return 0
    gpus = [asked.gpus[i % len(asked.gpus)] if asked.gpus else None for i in range(len(asked.seeds))]
    with ThreadPoolExecutor(asked.parallel) as pool:
        codes = list(
            pool.map(lambda job: run(asked.config_name, job[0], asked.out, overrides, job[1]), zip(asked.seeds, gpus))
        )
    for job, seeds in curves(asked.out).items():
        for seed, scores in seeds.items():
            first, last = scores[: len(scores) // 6 + 1], scores[-(len(scores) // 6 + 1) :]
            before, after = sum(first) / len(first), sum(last) / len(last)
            print(f"{job} seed {seed}: {len(scores)} steps, mean score {before:.3f} at first, {after:.3f} at last")
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
