"""The same GRPO job by rlsys, verl and TRL on one GPU, several times in rotated order: seconds by phase.

    python scripts/bench/head_to_head.py --shape 0.5B --out runs/h2h                     # rlsys, and peers if installed
    python scripts/bench/head_to_head.py --shape 1.5B --systems rlsys-sglang rlsys-vllm --steps 12 --repeats 3
    python scripts/bench/head_to_head.py --systems trl rlsys-vllm --steps 8 --skip 2 --repeats 2 --seconds 480
    python scripts/bench/head_to_head.py --systems trl rlsys-vllm --steps 8 --skip 2 --repeats 1 --profile
    python scripts/bench/head_to_head.py --model models/SmolLM2 --natural --systems rlsys-vllm verl trl
    python scripts/bench/head_to_head.py --dry-run            # the command of every system, and nothing is started
    python scripts/bench/head_to_head.py --shape tiny --systems rlsys-hf --steps 3 --skip 1 --repeats 1 --prompts 4

Random weights with a byte-level tokenizer, or a `--model` with its own, 64 prompts of 64 to 192 characters, 8 answers
each, forced to `--new` tokens or `--natural`, a cheap reward that differs within a group; packs of 16,384 tokens, no
recomputation, bfloat16 over float32 masters in all systems (`rlsys-auto` chooses its own sizes, `rlsys-compile`
compiles its layers). verl runs with free_cache_engine=False, fsdp2 and fused kernels, TRL in the vLLM of its process
with and without sleep (`trl`, `trl-sleep`), or without the text that vLLM makes of each token (`trl-ids`; rlsys never
asks for it). A peer runs in this interpreter or the one of `--python NAME=PATH`; where it cannot be imported it is
left out, and named. Loading is counted apart, as the time to the first finished step. The table is over all runs whose
results lie in `--out`, so that a call may make one run; one that is cut at its deadline counts with the steps it made.

`--profile` has rlsys and TRL make one more step, under torch.profiler and not counted, and prints a second table: the
seconds of kernels in each phase of that step, its seconds, and the share of them in which no kernel runs. Profiles slow
launches, so that idle shares are upper bounds. verl has no profile of the process that generates, and is left out.

`--alone` then has each engine of rlsys draw as many rows of these lengths in a process of its own, without weights,
training or a job around it, with and without log-probabilities: what generation in the job is of that rate.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.kernels import by_range, read_trace
from scripts.bench.step import offline, read_rate, roofline
from scripts.model_shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
LEAST_RUN_S = 60.0
PHASES = ("wall", "gen", "old_log_prob", "update_actor", "update_weights", "switch", "rest")
POLICY, ANSWERS = "actor_rollout_ref", 8
WORDS = ("what is the sum of", "product value when a train", "leaves city at noon and how many", "apples are left")
RANGES = {
    **{phase: phase for phase in PHASES[1:]},
    **dict.fromkeys(("exchange", "generate_sequences"), "gen"),
    "compute_log_prob": "old_log_prob",
    **dict.fromkeys(("sleep", "wake", "move"), "switch"),
    **dict.fromkeys(("reshard_weights", "send_weights", "receive_weights", "weight_step"), "update_weights"),
}
"""The phase of each range of a profile: TRL's are called as the phases, those of rlsys as the workers' methods."""
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n    {body}\n"
TRL_CODE = Path(__file__).with_name("trl_job.py")
SYSTEM = re.compile(r"rlsys(-auto|-compile)*-(hf|vllm|sglang)|verl|trl(-sleep|-ids)?")


def write_rows(folder: Path, count: int) -> None:
    """Prompts as parquet in verl's form, and the reward function."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, rows = random.Random(7), []
    for number in range(count):
        size, text = draw.randint(64, 192), f"Q{number}: "
        while len(text) < size:
            text += draw.choice(WORDS) + " "
        prompt = [{"role": "user", "content": f"{text[: size - 1]}?"}]
        grading = {"style": "rule", "ground_truth": "0"}
        extra = {"index": number, "split": "train"}
        rows.append({"data_source": "h2h", "prompt": prompt, "reward_model": grading, "extra_info": extra})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:8]), folder / "test.parquet")
    body = "return (sum(map(ord, solution_str[:200])) % 11) / 10.0"
    folder.joinpath("reward.py").write_text(REWARD.format(body=body))


def write_model(folder: Path, shape: str) -> None:
    """Random weights of a known shape and a tokenizer in which a character is a token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from scripts.bench.train_step import write_checkpoint

    folder.mkdir(parents=True)
    size = SHAPES[shape]["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 4]
    vocab = {letter: number for number, letter in enumerate(letters)}
    vocab |= {f"<d{number}>": number for number in range(len(vocab), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "model_max_length": 32768}
    ends = {"eos_token": f"<d{size - 1}>", "pad_token": f"<d{size - 2}>"}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(settings | ends))
    folder.joinpath("generation_config.json").write_text(json.dumps({"eos_token_id": [size - 1], "do_sample": True}))
    write_checkpoint(shape, folder, "cuda" if torch.cuda.is_available() else "cpu")


def common(args: argparse.Namespace, steps: int) -> list[str]:
    """The settings that rlsys and verl share, under verl's keys."""
    job, model = args.out / "job", args.model
    return [
        *(
            "algorithm.adv_estimator=grpo",
            f"data.train_files={job}/train.parquet",
            f"data.val_files={job}/test.parquet",
        ),
        *(f"data.train_batch_size={args.prompts}", "data.max_prompt_length=192", "data.shuffle=False"),
        *(f"data.max_response_length={args.new}", f"{POLICY}.model.path={model}", f"{POLICY}.rollout.n={ANSWERS}"),
        *(f"{POLICY}.actor.ppo_mini_batch_size={args.prompts}", f"{POLICY}.actor.optim.lr=1e-6"),
        f"{POLICY}.rollout.ignore_eos={not args.natural}",
        f"{POLICY}.rollout.max_model_len={192 + args.new}",
        f"reward.custom_reward_function.path={job}/reward.py",
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"trainer.total_training_steps={steps}"),
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        "trainer.resume_mode=disable",
    ]


SIZES = (
    *(f"{POLICY}.model.enable_gradient_checkpointing=False", f"{POLICY}.actor.use_dynamic_bsz=True"),
    *(f"{POLICY}.actor.ppo_max_token_len_per_gpu=16384", f"{POLICY}.rollout.max_num_seqs=512"),
)
VERL = (
    *(f"{POLICY}.model.use_remove_padding=True", f"{POLICY}.model.use_fused_kernels=True"),
    *(f"{POLICY}.actor.strategy=fsdp2", f"{POLICY}.rollout.free_cache_engine=False", f"{POLICY}.rollout.name=vllm"),
    *("trainer.logger=['console','file']", "algorithm.use_kl_in_reward=False", f"{POLICY}.actor.use_kl_loss=False"),
    f"{POLICY}.rollout.tensor_model_parallel_size=1",
)


def command_of(system: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """How a system is started; it leaves metrics.jsonl in `folder`."""
    python = dict(pair.split("=", 1) for pair in args.python).get(system.split("-")[0], sys.executable)
    steps = args.steps + args.profile
    if system.startswith("trl"):
        given = [str(args.out / "job"), str(args.model), str(folder), str(steps), str(args.new), str(args.prompts)]
        chosen = {"--sleep": system.endswith("sleep"), "--ids": system.endswith("ids")}
        chosen |= {"--natural": args.natural, "--profile": args.profile}
        given += ["--memory", str(args.memory), *(option for option, is_chosen in chosen.items() if is_chosen)]
        return [python, str(TRL_CODE), *given]
    out = f"trainer.default_local_dir={folder}"
    by_hand = [*SIZES, f"{POLICY}.rollout.gpu_memory_utilization={args.memory}"]
    if system == "verl":
        words = [*common(args, args.steps), *by_hand, *VERL, out, f"hydra.run.dir={folder}"]
        return [python, "-m", "verl.trainer.main_ppo", *words]
    engine = system.split("-")[-1]
    sizes = [] if "auto" in system else by_hand
    name = f"{POLICY}.rollout.name={engine}"
    compiled = [f"{POLICY}.actor.fsdp_config.use_torch_compile=true"] * ("compile" in system)
    profiler = ["global_profiler.tool=torch", f"global_profiler.steps=[{steps}]"] * args.profile
    files = ["trainer.logger=[jsonl]", f"{POLICY}.actor.checkpoint.save_contents=[extra]"]  # the peers save nothing
    words = [*common(args, steps), *sizes, *compiled, *profiler, name, *files, out, *args.more]
    return [python, "-m", "trainer.main_ppo", *words]


def usage_error(args: argparse.Namespace) -> str:
    """What is wrong with the arguments; empty if they can be measured."""
    if not args.systems or (unknown := [name for name in args.systems if not SYSTEM.fullmatch(name)]):
        ours = "rlsys-ENGINE, rlsys-auto-ENGINE, rlsys-compile-ENGINE (hf, vllm, sglang)"
        given = ", ".join(unknown) if args.systems else "none"
        return f"--systems: {given}: choose from {ours}, verl, trl, trl-sleep, trl-ids; key=value comes before them"
    if small := [name for name in ("steps", "repeats", "prompts", "new") if getattr(args, name) < 1]:
        return f"--{small[0]}: must be at least 1"
    if args.steps <= (least := max(1, args.skip)):
        return f"--steps {args.steps} --skip {args.skip}: no step is counted; set --steps {least + 1} or more"
    pairs = [pair.partition("=")[::2] for pair in args.python]
    if odd := [peer for peer, path in pairs if not path or not (args.dry_run or shutil.which(path))]:
        return f"--python: {odd[0]}: set {odd[0]}=PATH of an interpreter that exists, e.g. verl=/venv/bin/python"
    if args.alone and args.natural:
        return "--alone: the engine alone draws answers of one length; remove --natural"
    if args.model and not args.dry_run and not (args.model / "config.json").is_file():
        return f"--model: {args.model}: no folder with a config.json; leave it out for random weights of --shape"
    return ""


def is_peer(system: str) -> bool:
    return not system.startswith("rlsys")


def is_there(system: str, args: argparse.Namespace) -> bool:
    peer = system.split("-")[0]
    return not is_peer(system) or f"{peer}=" in " ".join(args.python) or importlib.util.find_spec(peer) is not None


@contextmanager
def gpu_samples(samples: list[int]) -> Iterator[None]:
    """MiB in use on the first visible GPU, several times a second."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "250"]
    try:
        process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield
        return
    reader = threading.Thread(target=lambda: samples.extend(int(line) for line in process.stdout or () if line.strip()))
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        reader.join()


def run(system: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run: seconds of every step by phase, peak memory of the GPU, and seconds to the first finished step."""
    folder.mkdir(parents=True)
    metrics, arrived, samples = folder / "metrics.jsonl", list[float](), list[int]()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment["VERL_FILE_LOGGER_PATH"] = str(metrics)
    started_s = time.perf_counter()
    with (folder / "log.txt").open("w") as log, gpu_samples(samples):
        command = command_of(system, args, folder)
        job = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        wanted = args.steps + 2 * args.profile  # a checkpoint is not waited for, a profile is
        while job.poll() is None and len(arrived) < wanted and time.perf_counter() - started_s < args.deadline_s:
            time.sleep(0.02)
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            arrived += [time.perf_counter() - started_s] * (lines - len(arrived))
        for ending in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(job.pid, ending)
                job.wait(15)
    kept = read_steps(metrics, arrived[: args.steps], args.skip)
    if len(arrived) < args.steps or not kept:
        print(f"{system}: exit code {job.returncode}, {len(arrived)} steps:", file=sys.stderr)
        print((folder / "log.txt").read_text()[-2500:], file=sys.stderr)
    traces = sorted(folder.glob("profile/*.json.gz")) if args.profile else []
    profile = kernel_phases(traces[0]) if traces else {}
    peak_gib = [max(samples) / 1024] if samples else []
    return {"system": system, "steps": kept, "first_s": arrived[:1], "peak_gib": peak_gib, "profile": profile}


def read_steps(metrics: Path, arrived: list[float], skip: int) -> list[dict[str, float]]:
    """Seconds by phase of the steps after the first `skip`, from a file of metrics and when its lines were there.

    A last line that was cut while it was written does not count; verl has its metrics under `data`.
    """
    lines = []
    for text in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        lines.append(line.get("data", line))
    steps = [phases(line, after - before) for line, before, after in zip(lines[1:], arrived, arrived[1:])]
    return steps[max(0, skip - 1) :]


def phases(line: Mapping[str, Any], wall: float) -> dict[str, float]:
    """Seconds of a step by phase, with TRL's own timers under the same names, and the mean length of an answer.

    rlsys writes its metrics while it pushes: the push counts in full, `rest` is less what the step does not wait for.
    """
    parts = {phase: float(line.get(f"timing_s/{phase}", 0.0)) for phase in PHASES[1:-1]}
    parts["update_weights"] = float(line.get("weights/seconds", parts["update_weights"]))
    tokens = float(line.get("response_length/mean", 0.0))
    return {"wall": wall, **parts, "rest": wall - sum(parts.values()), "tokens": tokens}


def kernel_phases(trace: Path) -> dict[str, dict[str, float]]:
    """Seconds of kernels and of time, and the idle share, by phase of a profiled step."""
    times = by_range(read_trace(trace), RANGES)
    return {
        phase: {"kernel_s": time.kernel_s, "wall_s": time.wall_s, "idle_share": time.idle_share}
        for phase, time in times.items()
    }


def kernel_table(results: list[dict[str, Any]]) -> str:
    """Medians over the repeats of what `kernel_phases` returned; a column for each system, those of rlsys first."""
    systems = sorted(dict.fromkeys(result["system"] for result in results), key=is_peer)
    of = {name: [one["profile"] for one in results if one["system"] == name and one.get("profile")] for name in systems}
    rows = [["kernel s / s, idle", *systems], ["---"] * (len(systems) + 1)]
    there = {phase for profiles in of.values() for profile in profiles for phase in profile}
    for phase in (phase for phase in (*PHASES[1:], "outside") if phase in there):
        row = [phase]
        for name in systems:
            inside = [profile[phase] for profile in of[name] if phase in profile]
            kernel_s, wall_s, idle = (
                statistics.median([one[key] for one in inside] or [0.0]) for key in ("kernel_s", "wall_s", "idle_share")
            )
            text = f"{kernel_s:.2f} / {wall_s:.2f}, {idle:.0%}" if kernel_s else f"no kernels / {wall_s:.2f}"
            row.append(text if inside else "" if of[name] else "no profile")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table(results: list[dict[str, Any]]) -> str:
    """Lowest / median / highest over the steps of all repeats and, of the others, the median over the first's.

    A column for each system, those of rlsys first.
    """
    systems = sorted(dict.fromkeys(result["system"] for result in results if result["steps"]), key=is_peer)
    rows = [["seconds", *systems], ["---"] * (len(systems) + 1)]
    of = {
        name: [step for result in results if result["system"] == name for step in result["steps"]] for name in systems
    }
    for phase in PHASES:
        values = [[step[phase] for step in of[name]] for name in systems]
        medians = [statistics.median(v) for v in values]
        ratios = [
            f" = {median / medians[0]:.2f}x" if number and medians[0] else "" for number, median in enumerate(medians)
        ]
        cells = zip(values, medians, ratios, strict=True)
        rows.append([phase, *(f"{min(v):.2f} / {median:.2f} / {max(v):.2f}{ratio}" for v, median, ratio in cells)])
    lengths = [statistics.median(step.get("tokens", 0.0) for step in of[name]) for name in systems]
    rows.append(["tokens of an answer, mean", *(f"{length:.0f}" for length in lengths)])
    for key, digits in (("first_s", 0), ("peak_gib", 1)):
        cells = []
        for name in systems:
            values = [value for one in results if one["system"] == name for value in _listed(one[key])]
            cells.append(f"{statistics.median(values):.{digits}f}" if values else "")
        rows.append([key, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def alone_lines(results: list[dict[str, Any]], args: argparse.Namespace) -> Iterator[str]:
    """The generation of each system of rlsys beside its engine alone and what reading memory allows, measured once."""
    rows, prompt = args.prompts * ANSWERS, 128
    work = {"model": str(args.model), "tp": 1, "rows": rows, "prompts": args.prompts, "max_num_seqs": rows}
    work |= {"prompt_tokens": prompt, "answer_tokens": args.new, "cuda": shutil.which("nvidia-smi") is not None}
    with ProcessPoolExecutor(1, get_context("spawn")) as reader:
        read = reader.submit(read_rate, "cuda" if work["cuda"] else "cpu").result()
    limit, rates = roofline(str(args.model), 1, rows, prompt, args.new, read), dict[str, dict[str, float]]()
    for system in sorted({result["system"] for result in results if result["steps"] and not is_peer(result["system"])}):
        if (engine := system.rpartition("-")[2]) == "hf":
            continue
        if engine not in rates:
            rates[engine] = offline(engine, work, args.deadline_s)
        steps = [step["gen"] for result in results if result["system"] == system for step in result["steps"]]
        rate = rows * args.new / statistics.median(steps)
        for kind, alone in rates[engine].items():
            job = f"{rate:,.0f} tokens/s in the job"
            yield f"{system}: {job}; {engine} alone, {kind}: {alone:,.0f}; job / alone {rate / alone:.2f}"
        yield f"{system}: roofline {limit:,.0f} tokens/s at {read / 1e9:,.0f} GB/s; job / roofline {rate / limit:.2f}"


def _listed(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5B")
    parser.add_argument("--model", type=Path, help="a folder with weights and a tokenizer, instead of a shape")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory that engines may take")
    parser.add_argument("--systems", nargs="*", default=["rlsys-vllm", "rlsys-auto-vllm", "verl", "trl", "trl-sleep"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="first steps that are not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--natural", action="store_true", help="answers end where the model ends them")
    parser.add_argument("--profile", action="store_true", help="one more step, for a table of kernels by phase")
    parser.add_argument("--alone", action="store_true", help="measure the engines of rlsys alone, too")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    parser.add_argument("--deadline-s", type=float, default=400.0, help="longest one run may take")
    parser.add_argument("--seconds", type=float, default=86400.0, help="longest all runs may take")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--out", type=Path, default=Path("runs/head_to_head"))
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings of rlsys only")
    args = parser.parse_intermixed_args()
    if problem := usage_error(args):
        parser.error(problem)
    args.out = args.out.absolute()
    args.model = (args.model or args.out / args.shape).absolute()
    if args.dry_run:
        print("\n".join(f"{name}: {shlex.join(command_of(name, args, args.out / name))}" for name in args.systems))
        return 0
    here = [system for system in args.systems if is_there(system, args)]
    if missing := [system for system in args.systems if system not in here]:
        print(f"not installed, and so not measured: {', '.join(missing)}", flush=True)
    if not here:
        return 1
    if not (args.out / "job").exists():
        (args.out / "job").mkdir(parents=True)
        write_rows(args.out / "job", args.prompts * (args.steps + args.profile))
    if not args.model.exists():
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:  # what it takes of the GPU ends with it
            writer.submit(write_model, args.model, args.shape).result()
    saved = args.out / "head_to_head.json"
    results = json.loads(saved.read_text()) if saved.exists() else []
    end_s, longest_s = time.monotonic() + args.seconds, args.deadline_s
    for repeat in range(args.repeats):
        turn = repeat % len(here)
        for system in here[turn:] + here[:turn]:
            args.deadline_s = min(longest_s, end_s - time.monotonic())
            if args.deadline_s < LEAST_RUN_S:
                print(f"repeat {repeat + 1}, {system}: no time is left")
                continue
            results.append(run(system, args, args.out / f"{repeat}-{system}-{time.time_ns()}"))
            saved.write_text(json.dumps(results))
            walls = [round(step["wall"], 2) for step in results[-1]["steps"]]
            print(
                f"repeat {repeat + 1}, {system}: first step after {results[-1]['first_s']} s, then {walls}", flush=True
            )
    length = f"of at most {args.new}" if args.natural else f"of {args.new}"
    print(f"\n{args.model.name}, {args.prompts} x {ANSWERS} answers {length} tokens, {len(results)} runs")
    print(table(results))
    if args.profile:
        print(f"\n{kernel_table(results)}")
    for line in alone_lines(results, args) if args.alone else ():
        print(line, flush=True)
    return 0 if all(result["steps"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
