"""Asynchronous training against synchronous training on the same devices, with long-tailed answer lengths.

    python scripts/bench/async.py
    python scripts/bench/async.py --out runs/async --steps 20 --longest 16384 --median 400 --batch 64 --answers 8 \\
      --devices 2 -- actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.name=vllm

Without a model after `--`, one with random weights trains on the CPU with the hf engine. Lengths are lognormal, fixed
by each answer's sampling seed, so every schedule completes the same answers to the same prompts. Half of the devices
(at least one process) generate, the others train. Runs, one after the other: synchronous, `max_staleness` of each of
--ks, the same with all prompts in progress that this allows, `reproducible` at the largest two, and a schedule that
trains on whatever finishes first and admits prompts by AReaL's formula, (k + version + 1) batches less those that have
started; --kinds chooses among these four: free, full, repeat, first. A run is ended after --steps steps beyond
the first 2 k + 2, in which its window fills, and before it runs empty, or after --deadline-s; one that is in --out
already is kept, so that each may have a call of its own. Printed are tokens per second of those steps, their ratio to
synchronous, mean and largest age, idle shares, the seconds of a push, the share of a step that waits for it, the
trainer's microseconds for each token, and the number of steps.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("free", "full", "repeat", "first")
GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(solution_str.encode()) % 7
"""


def make_model(folder: Path, width: int) -> None:
    """A model with random weights, its tokenizer and prompts."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from scripts.start_model import build_tokenizer

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=262, num_key_value_heads=2, max_position_embeddings=1 << 15, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(str(folder))
    row = {"data_source": "rlsys/arithmetic", "reward_model": {"ground_truth": "2"}}
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", **row}) + "\n" for n in range(512)))
    (folder / "grader.py").write_text(GRADER)


def run_child(args: argparse.Namespace, overrides: list[str]) -> int:
    """One run of the main job with forced lengths; `full` and `first` replace its window."""
    import rlsys.fleet.fleet
    import trainer.assembly
    import trainer.prompt_groups
    from rlsys.rollout.batch import to_requests
    from rlsys.types import ModelRequest
    from trainer.main_ppo import main
    from trainer.staleness_window import StalenessWindow

    class FullWindow(StalenessWindow):
        lead = property(lambda self: float(self.most_ahead), lambda self, _: None)  # type: ignore[assignment]

    class FirstFinished(FullWindow):
        def take(self) -> list[int] | None:
            taken = sorted(self.finished)[: self.groups_per_step]
            if len(taken) < self.groups_per_step:
                return None
            self.finished.difference_update(taken)
            self._order = [number for number in self._order if number not in taken]
            self.trained += len(taken)
            return taken

        def check_age(self, oldest_version: int) -> int:
            return self.step - 2 - oldest_version

    def with_lengths(batch: Any) -> list[ModelRequest]:
        requests = []
        for request in to_requests(batch):
            length = args.median * random.Random(request.gconfig.seed).lognormvariate(0.0, args.sigma)
            params = replace(request.gconfig, max_new_tokens=max(1, min(args.longest, int(length))))
            requests.append(replace(request, gconfig=params))
        return requests

    rlsys.fleet.fleet.to_requests = with_lengths
    trainer.prompt_groups.to_requests = with_lengths
    windows = {"full": FullWindow, "first": FirstFinished}
    trainer.assembly.StalenessWindow = windows.get(args.child, StalenessWindow)  # type: ignore[misc]
    return main(overrides)


def overrides_of(args: argparse.Namespace, folder: Path, kind: str, k: int, more: list[str]) -> list[str]:
    """The main job's command line for a run."""
    own = any(one.startswith("actor_rollout_ref.model.path=") for one in more)
    rows, prefix = args.out / "model", "actor_rollout_ref"
    workers = max(1, args.devices // 2)
    return [
        *([] if own else [f"{prefix}.model.path={rows}", "trainer.device=cpu"]),
        *(f"data.train_files={rows}/rows.jsonl", f"reward.custom_reward_function.path={rows}/grader.py"),
        *(f"data.train_batch_size={args.batch}", f"{prefix}.rollout.n={args.answers}", "data.max_prompt_length=64"),
        *(f"data.max_response_length={args.longest}", f"{prefix}.rollout.ignore_eos=true", "reward.num_workers=1"),
        *(f"{prefix}.actor.ppo_mini_batch_size={args.batch}", f"{prefix}.actor.use_dynamic_bsz=true"),
        f"{prefix}.actor.ppo_max_token_len_per_gpu={2 * args.longest + 128}",
        *("algorithm.adv_estimator=grpo", "algorithm.rollout_correction.rollout_is=token"),
        *(f"trainer.n_gpus_per_node={max(1, args.devices - workers)}", f"trainer.rollout_workers={workers}"),
        *(f"trainer.max_staleness={k}", f"trainer.reproducible={str(kind == 'repeat').lower()}"),
        f"{prefix}.rollout.full_determinism={str(kind == 'repeat').lower()}",
        *(f"trainer.total_training_steps={args.steps + 3 * k + 2}", f"trainer.default_local_dir={folder}"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.resume_mode=disable"),
        *(f"{prefix}.rollout.parity.freq=-1", "trainer.logger=[jsonl]"),
        *more,
    ]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps so far."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()] if path.exists() else []


def run_until(command: list[str], folder: Path, num_steps: int, deadline_s: float) -> None:
    """Run a job until it has done so many steps, or until the deadline; RuntimeError if it fails before."""
    shutil.rmtree(folder, ignore_errors=True)
    end_s = time.monotonic() + deadline_s
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
        while job.poll() is None and time.monotonic() < end_s and len(metrics_of(folder)) < num_steps:
            time.sleep(0.2)
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
        elif len(metrics_of(folder)) < num_steps:
            raise RuntimeError(f"the run in {folder} ended with {job.returncode}")


def measure(args: argparse.Namespace, kind: str, k: int, more: list[str]) -> dict[str, float]:
    """Tokens per second, ages and idle shares of a run, over the steps after those in which its window fills."""
    folder, first = args.out / f"{kind}_{k}", 2 * k + 2
    own = [f"--{name}={getattr(args, name)}" for name in ("out", "median", "sigma", "longest")]
    command = [sys.executable, __file__, f"--child={kind}", *own, "--", *overrides_of(args, folder, kind, k, more)]
    if not metrics_of(folder)[first:]:
        run_until(command, folder, first + args.steps, args.deadline_s)
    lines = metrics_of(folder)[first:][: args.steps]
    if not lines:
        raise RuntimeError(f"the run in {folder} did too few steps in {args.deadline_s:g} s")

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in lines)

    seconds, tokens = total("perf/time_per_step"), total("perf/total_num_tokens")

    def share(name: str) -> float:
        return sum(line.get(name, 0.0) * line["perf/time_per_step"] for line in lines) / seconds

    return {
        "steps": len(lines),
        "push_share": total("timing_s/update_weights") / seconds,
        "tokens_per_s": tokens / seconds,
        "max_age": max(line.get("training/staleness_max", 0.0) for line in lines),
        "us_a_token": 1e6 * (total("timing_s/old_log_prob") + total("timing_s/update_actor")) / tokens,
        "staleness": total("training/staleness") / len(lines),
        "trainer_idle": share("perf/trainer_idle"),
        "rollout_idle": share("perf/rollout_idle"),
        "seconds": total("weights/seconds") / len(lines),
    }


def main() -> int:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async"))
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    for name, default in (
        ("steps", 10),
        ("longest", 512),
        ("median", 24),
        ("batch", 8),
        ("answers", 4),
        ("width", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--deadline-s", type=float, default=1800.0)
    parser.add_argument("--ks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    args, more = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    args.out = args.out.absolute()
    sys.path[:0] = [str(ROOT)]
    if args.child:
        return run_child(args, more)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "model").exists():
        make_model(args.out / "model", args.width)
    of_kind = {"free": args.ks, "full": args.ks, "repeat": args.ks[-2:], "first": args.ks}
    runs = [("free", 0), *((kind, k) for kind in args.kinds for k in of_kind[kind])]
    results: dict[str, dict[str, float]] = {}
    print(
        "run          tokens/s   ratio   age mean   max   trainer idle   rollout idle   push in s   share   us   steps"
    )
    for kind, k in runs:
        one = results[f"{kind} {k}"] = measure(args, kind, k, more)
        one["ratio"] = one["tokens_per_s"] / results["free 0"]["tokens_per_s"]
        shown = f"{one['tokens_per_s']:8.0f}   {one['ratio']:5.2f}   {one['staleness']:8.2f}   {one['max_age']:3.0f}"
        idle = f"{one['trainer_idle']:12.2f}   {one['rollout_idle']:12.2f}"
        push = f"{one['seconds']:9.4f}   {one['push_share']:5.3f}"
        print(f"{kind:>6} k={k}   {shown}   {idle}   {push}   {one['us_a_token']:2.0f}   {one['steps']:5}", flush=True)
    (args.out / "async.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
