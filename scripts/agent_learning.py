"""A tiny model learns to use a tool: runs of the main job over seeds, synchronous and asynchronous, with equal samples.

    python scripts/agent_learning.py --out runs/agent --seeds 1 2 3 4 5 --ks 0 4
    python scripts/agent_learning.py --out runs/sleep --seeds 1 --ks 0 2 --steps 18 40 --lookahead 1 --tool-s 2
    python scripts/agent_learning.py --out runs/python --seeds 1 --ks 0 --steps 24 --tool python

The start model (0.8M parameters, warmed up here by SFT in a few minutes on one core) answers a product of two-digit
numbers, which it cannot compute, mostly with "?" and sometimes with a call of a calculator, whose result it then
repeats. It is rewarded for the right result. Each run takes a minute or two on one core; those that are there already
are kept. With --tool-s the calculator sleeps, lognormally distributed with this mean. With --tool python it is the job
of config/agent_python.yaml with this small model, which writes programs. Printed are the mean rewards of
the first three and the last ten steps, seconds a step, the seconds of training until the mean of five steps in a row
reached a reward, and how far apart the runs of two k end.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCORE = "critic/score/mean"
FIRST, LAST = 3, 10
REWARDS, SMOOTHED = (0.8, 0.9, 0.95), 5
TOOL_SHARE = 0.2
NUM_HELD_OUT = 64
TOOLS = '''
import asyncio, os
from random import Random

from rlsys.agent.tools import function_tool


@function_tool()
async def calc(q: str) -> str:
    """Compute a product.

    Args:
        q: Two numbers with * between them.
    """
    mean = float(os.environ.get("TOOL_MEAN_S", 0.0))
    if mean:
        await asyncio.sleep(min(20.0, Random(q).lognormvariate(0.0, 1.0) * mean / 1.6487))
    left, right = q.split("*")
    return str(int(left) * int(right))
'''


def call_of(question: str, tool: str) -> str:
    """How the model writes a call of the tool."""
    if tool == "python":
        return f"```python\nprint({question})\n```"
    return json.dumps({"name": "calc", "arguments": {"q": question}})


def make_start(folder: Path, tool: str) -> None:
    """The start model and the prompts."""
    from prepare_data import write_rows  # pyrefly: ignore
    from start_model import WarmUp, build_tokenizer, model_config, warm_up  # pyrefly: ignore

    random, model = Random(0), folder / "model"
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.shuffle(pairs)
    settings = WarmUp(num_steps=1400, num_unsure_steps=0)
    texts = []
    for number in range(settings.num_steps * settings.batch_size):
        left, right = pairs[number % len(pairs)]
        question, result = f"{left}*{right}", str(left * right)
        talk = [{"role": "user", "content": f"{question}="}]
        is_last = number > 0.8 * settings.num_steps * settings.batch_size
        if is_last and random.random() > TOOL_SHARE:
            talk.append({"role": "assistant", "content": "?"})
        else:
            talk += [{"role": "assistant", "content": call_of(question, tool)}, {"role": "tool", "content": result}]
            talk.append({"role": "assistant", "content": result})
        texts.append({"messages": talk})
    model.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps(model_config(), indent=2))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    write_rows(folder / "sft.parquet", texts)
    rows = [
        {
            "data_source": "rlsys/arithmetic",
            "prompt": [{"role": "user", "content": f"{a}*{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        }
        for a, b in pairs
    ]
    write_rows(folder / "train.parquet", rows[:-NUM_HELD_OUT])
    write_rows(folder / "test.parquet", rows[-NUM_HELD_OUT:])
    (folder / "tools.py").write_text(TOOLS)
    warm_up(model, folder / "sft.parquet", settings)


def run(options: argparse.Namespace, seed: int, k: int, num_steps: int, more: list[str]) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    folder, start, rollout = options.out / f"k{k}-seed{seed}", options.out / "start", "actor_rollout_ref.rollout"
    if not (folder / "done").exists():
        calculator = [
            *("data.max_prompt_length=24", "data.max_response_length=72", f"{rollout}.n=4", "reward.num_workers=1"),
            *("algorithm.adv_estimator=grpo", f"{rollout}.workflow=ToolWorkflow", f"{rollout}.multi_turn.format=json"),
            *(f"{rollout}.multi_turn.function_tool_path={start}/tools.py", f"{rollout}.agent.num_workers=4"),
            *(f"{rollout}.multi_turn.max_assistant_turns=2", f"{rollout}.agent.max_concurrent=1024"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        ]
        python = ["--config-name=agent_python", f"data.val_files={start}/test.parquet"]
        command = [
            *(sys.executable, "-m", "trainer.main_ppo", f"data.train_files={start}/train.parquet"),
            *(f"actor_rollout_ref.model.path={start}/model", f"trainer.default_local_dir={folder}"),
            *(f"data.seed={seed}", f"{rollout}.seed={seed}", f"data.train_batch_size={options.prompts}"),
            *(f"actor_rollout_ref.actor.ppo_mini_batch_size={options.prompts}",),
            *("actor_rollout_ref.actor.use_dynamic_bsz=true", f"actor_rollout_ref.actor.optim.lr={options.lr}"),
            *("actor_rollout_ref.model.enable_gradient_checkpointing=false", f"{rollout}.parity.freq=-1"),
            *(f"trainer.max_staleness={k}", "trainer.backend=local", "trainer.device=cpu", "trainer.logger=[jsonl]"),
            *(f"trainer.total_training_steps={num_steps}", "trainer.resume_mode=disable"),
            *([f"trainer.lookahead={options.lookahead}"] if k else []),
            *(python if options.tool == "python" else calculator),
            *more,
        ]
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOOL_MEAN_S": str(options.tool_s)}
        with (folder / "log.txt").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)
        (folder / "done").touch()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if SCORE in line]


def mean(lines: list[dict[str, Any]], name: str = SCORE) -> float:
    """The mean of a metric over steps."""
    return statistics.fmean(line[name] for line in lines)


def seconds_until(lines: list[dict[str, Any]], reward: float) -> float:
    """Seconds of the steps up to the first whose mean over the last SMOOTHED steps is this reward; inf without one."""
    for end in range(SMOOTHED, len(lines) + 1):
        if mean(lines[end - SMOOTHED : end]) >= reward:
            return sum(line["perf/time_per_step"] for line in lines[:end])
    return math.inf


def main() -> int:
    """Run what is asked for and print how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--ks", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--steps", type=int, nargs="+", default=[80], help="one number, or one for each of --ks")
    parser.add_argument("--lookahead", type=int, default=0, help="trainer.lookahead of the asynchronous runs")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--tool", choices=["calculator", "python"], default="calculator")
    parser.add_argument("--tool-s", type=float, default=0.0)
    options, more = parser.parse_known_args()
    sys.path.insert(0, str(ROOT))
    if not (options.out / "start" / "model" / "model.safetensors").exists():
        make_start(options.out / "start", options.tool)
    last: dict[int, list[float]] = {k: [] for k in options.ks}
    steps = options.steps * len(options.ks) if len(options.steps) == 1 else options.steps
    for seed in options.seeds:
        for k, num_steps in zip(options.ks, steps, strict=True):
            lines = run(options, seed, k, num_steps, more)
            last[k].append(mean(lines[-LAST:]))
            seconds = mean(lines[2:], "perf/time_per_step")
            until = ", ".join(f"{seconds_until(lines, reward):.1f} s to {reward:g}" for reward in REWARDS)
            oldest = max(line.get("training/staleness_max", 0.0) for line in lines)
            print(
                f"seed {seed} k={k}: reward {mean(lines[:FIRST]):.3f} -> {last[k][-1]:.3f} in {len(lines)} steps, "
                f"{seconds:.2f} s a step, largest age {oldest:.0f}; {until}",
                flush=True,
            )
    for k in options.ks[1:]:
        differences = [a - b for a, b in zip(last[k], last[options.ks[0]], strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        print(f"k={k} less k={options.ks[0]}: {statistics.fmean(differences):+.4f}, standard error {error:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
