"""A GRPO step by phases, the same work by a schedule that pads and gathers, and the engine's own offline rate.

    python scripts/bench/step.py --out runs/step -- --config-name smollm2 actor_rollout_ref.rollout.name=vllm
    python scripts/bench/step.py --out runs/step7b --shape 7B --tokenizer models/SmolLM2 -- --config-name smollm2 \\
      actor_rollout_ref.rollout.name=vllm trainer.allocation_mode='vllm[r]:d2t2|megatron[a]:t2p2'

What follows `--` is the main job's command line; answers are drawn to their full length, or with `--natural` to where
the model ends them, which both schedules then see alike. With `--shape` the model has random weights of a known shape.
Runs, one after the other: our job; the job as schedules that pad do it (fixed micro-batches of padded rows, rows
unbalanced, weights gathered in buckets and loaded by the engine); the engine alone, on one replica's share of the same
number of tokens, with and without log-probabilities, with CUDA graphs for as many sequences as ours. Generation is also
set beside the roofline of decoding: each token reads every weight once for the batch, and its row's keys and values, at
the rate at which this device reads memory. The bubble is the share of a step in which no device generates or trains.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
POLICY = "actor_rollout_ref"
PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "switch")
BUSY = ("gen", "old_log_prob", "update_actor")
SKIPPED = 2
"""First steps, in which kernels are compiled and caches are filled."""


def padded(micro_rows: int, megatron: bool) -> list[str]:
    """Overrides that make our job work as padding schedules do; the rows of Megatron stay packed."""
    rows = [
        *(f"{POLICY}.actor.use_dynamic_bsz=false", f"{POLICY}.actor.ppo_micro_batch_size_per_gpu={micro_rows}"),
        *(f"{POLICY}.rollout.log_prob_micro_batch_size_per_gpu={micro_rows}", "trainer.balance_batch=false"),
        *(f"{POLICY}.rollout.checkpoint_engine.backend=gather",),
        f"{POLICY}.rollout.checkpoint_engine.update_weights_bucket_megabytes=512",
    ]
    return rows if megatron else [*rows, f"{POLICY}.model.use_remove_padding=false"]


def run_job(folder: Path, overrides: list[str], *, steps: int, natural: bool, deadline_s: float) -> dict[str, float]:
    """Means over the later steps of one run of the main job."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fixed = [
        *(f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}", "trainer.save_freq=-1"),
        *(
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            f"{POLICY}.rollout.ignore_eos={str(not natural).lower()}",
        ),
        *("trainer.resume_mode=disable", "trainer.logger=[jsonl]", f"{POLICY}.actor.checkpoint.save_contents=[model]"),
    ]
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "trainer.main_ppo", *overrides, *fixed]
        code = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, timeout=deadline_s, check=False
        ).returncode
    if code:
        print((folder / "log.txt").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"the job in {folder} ended with {code}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][SKIPPED:]
    return {key: mean(line[key] for line in lines) for key in lines[-1] if all(key in line for line in lines)}


def resolved(overrides: list[str]) -> Any:
    """The job's configuration, as the job itself resolves it."""
    from rlsys.config import load_config

    return load_config(overrides)


def offline(
    engine: str, work: dict[str, Any], deadline_s: float, *, env: dict[str, str] | None = None
) -> dict[str, float]:
    """Tokens a second of the engine alone, in a process of its own, with and without log-probabilities."""
    command = [sys.executable, str(Path(__file__).resolve()), "--alone", json.dumps(work | {"engine": engine})]
    env = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=env, check=False)
    if done.returncode:
        print(done.stdout[-1500:], done.stderr[-3000:], file=sys.stderr)
        return {}
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def alone(work: dict[str, Any]) -> dict[str, float]:
    """What `offline` starts: `rows` answers of `answer_tokens` to random prompts, the second of two turns timed."""
    import random

    draw, most = random.Random(0), work.get("vocab_size", 10_000)
    prompts = [[draw.randrange(10, most) for _ in range(work["prompt_tokens"])] for _ in range(work["prompts"])]
    rows = [prompt for prompt in prompts for _ in range(work["rows"] // work["prompts"])]
    generate = {"vllm": _vllm_alone, "sglang": _sglang_alone}[work["engine"]](work)
    rates = {}
    for name, logprobs in (("plain", False), ("with_logprobs", True))[: 1 + work.get("logprobs", True)]:
        for _ in range(2):
            started_s = perf_counter()
            num_tokens = generate(rows, logprobs)
            rates[name] = num_tokens / (perf_counter() - started_s)
    return rates


def _vllm_alone(work: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams

    options = work.get("options", {}) | ({} if work["cuda"] else {"enforce_eager": True})
    engine = LLM(
        work["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=work["tp"],
        max_num_seqs=work["max_num_seqs"],
        max_model_len=work["prompt_tokens"] + work["answer_tokens"],
        gpu_memory_utilization=0.8 if work["cuda"] else 0.3,
        **options,
    )

    def generate(rows: list[list[int]], logprobs: bool) -> int:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=work["answer_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
        )
        outputs = engine.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in outputs)

    return generate


def _sglang_alone(work: dict[str, Any]) -> Any:
    from sglang import Engine

    graphs = {"cuda_graph_max_bs_decode": min(work["max_num_seqs"], 512)}
    cpu = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    engine = Engine(
        model_path=work["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        tp_size=work["tp"],
        max_running_requests=work["max_num_seqs"],
        mem_fraction_static=0.8 if work["cuda"] else 0.2,
        log_level="error",
        **(graphs if work["cuda"] else cpu),
    )

    def generate(rows: list[list[int]], logprobs: bool) -> int:
        params = {"temperature": 1.0, "max_new_tokens": work["answer_tokens"], "ignore_eos": True}
        outputs = engine.generate(input_ids=rows, sampling_params=params, return_logprob=logprobs)
        return sum(answer["meta_info"]["completion_tokens"] for answer in outputs)

    return generate


def shares(name: str, metrics: dict[str, float], ranks: int) -> str:
    """One line a schedule: seconds of every phase, and what part of the step they are."""
    step = metrics["timing_s/step"]
    parts = [(phase, metrics.get(f"timing_s/{phase}", 0.0)) for phase in PHASES]
    rest = step - sum(seconds for _, seconds in parts)
    phases = "  ".join(f"{phase} {seconds:.3f} ({seconds / step:.1%})" for phase, seconds in [*parts, ("rest", rest)])
    rate = metrics["perf/total_num_tokens"] / step / ranks
    mfu = metrics.get("perf/mfu/actor", float("nan"))
    bubble = 1 - sum(seconds for phase, seconds in parts if phase in BUSY) / step
    return (
        f"{name}: step {step:.3f} s, {rate:,.0f} tokens/s a device, MFU of the update {mfu:.3f}, bubble {bubble:.1%}\n"
        f"  {phases}"
    )


def read_rate(device: str) -> float:
    """Bytes a second at which a device reads its memory: the best sum over 2 GiB of several."""
    import torch

    values, took = torch.zeros(1 << 29, device=device), []  # integers are added more slowly than read
    for _ in range(6):
        started_s = perf_counter()
        values.sum().item()
        took.append(perf_counter() - started_s)
    return values.nbytes / min(took)


def roofline(path: str, tp: int, rows: int, prompt: float, answer: float, rate: float) -> float:
    """Tokens a second of `rows` answers in bfloat16 by a dense model if only memory is waited for.

    On average half an answer is held; of an embedding that is not the output layer too only single rows are read.
    """
    from rlsys.config.schema.model import ModelConfig
    from rlsys.models.hf import build, read_config

    config = read_config(ModelConfig(path=path))
    text = config.get_text_config()
    model: Any = build(config, head="lm", packed=False)
    spared = 0 if text.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    weights = 2 * (sum(p.numel() for p in model.parameters()) - spared)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cached = 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * head * (prompt + answer / 2)
    return rows * rate * tp / (weights + rows * cached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/step"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-rows", type=int, default=8, help="rows of a padded micro-batch")
    parser.add_argument("--shape", help="random weights of this shape, e.g. 7B")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer a random model gets")
    parser.add_argument("--natural", action="store_true", help="answers end where the model ends them")
    parser.add_argument("--only", nargs="*", default=["ours", "padded", "offline"])
    parser.add_argument("--deadline-s", type=float, default=400.0, help="longest one run may take")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, job = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if args.alone:
        print(json.dumps(alone(json.loads(args.alone))))
        return 0
    if args.shape:
        job = [*job, f"{POLICY}.model.path={random_model(args.shape, args.out / args.shape, args.tokenizer)}"]
    cfg = resolved(job)
    rollout, tp = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node + cfg.trainer.rollout_workers
    replicas = (cfg.trainer.rollout_workers or ranks) // tp
    results: dict[str, Any] = {}
    peer = padded(args.micro_rows, cfg.actor_rollout_ref.actor.strategy == "megatron")
    for name, more in (("ours", []), ("padded", peer)):
        if name in args.only:
            limits = {"steps": args.steps, "natural": args.natural, "deadline_s": args.deadline_s}
            results[name] = run_job(args.out / name, [*job, *more], **limits)
            print(shares(name, results[name], ranks), flush=True)
    if {"ours", "padded"} <= set(results):
        ratio = results["padded"]["timing_s/step"] / results["ours"]["timing_s/step"]
        print(f"padded / ours: {ratio:.2f}  (padded schedule: {' '.join(peer)})")
    if "ours" in results and "offline" in args.only and not args.natural and rollout.name in ("vllm", "sglang"):
        ours = results["ours"]
        rows = cfg.data.train_batch_size * rollout.n // replicas
        answer = round(ours["response_length/mean"])
        work = {
            "model": str(cfg.actor_rollout_ref.model.path),
            "tp": tp,
            "rows": rows,
            "prompts": rows // rollout.n,
            "prompt_tokens": round(ours["prompt_length/mean"]),
            "answer_tokens": answer,
            "max_num_seqs": rollout.max_num_seqs,
            "cuda": "perf/max_memory_allocated_gb" in ours and has_cuda(),
        }
        results["offline"] = offline(rollout.name, work, args.deadline_s)
        rate = rows * answer / ours["timing_s/gen"]
        read = read_rate("cuda" if work["cuda"] else "cpu")
        limit = roofline(work["model"], tp, rows, work["prompt_tokens"], answer, read)
        bound = f"roofline {limit:,.0f} tokens/s at {read / 1e9:,.0f} GB/s"
        print(f"generation, a replica: {rate:,.0f} tokens/s; {bound}; ours / roofline {rate / limit:.2f}")
        for name, alone_rate in results["offline"].items():
            print(
                f"generation, a replica: {rate:,.0f} tokens/s; engine alone, {name}: {alone_rate:,.0f}; "
                f"ours / alone {rate / alone_rate:.2f}"
            )
    (args.out / "step.json").write_text(json.dumps(results))
    return 0


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def random_model(shape: str, folder: Path, tokenizer: Path | None) -> Path:
    """Random weights of a known shape with a given tokenizer, written once."""
    from train_step import write_checkpoint  # pyrefly: ignore[missing-import]

    if tokenizer is None:
        raise SystemExit("--shape needs --tokenizer, a folder with tokenizer files")
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for file in tokenizer.iterdir():
            if file.suffix != ".safetensors" and file.name != "config.json":
                shutil.copy(file, folder)
        write_checkpoint(shape, folder, "cuda" if has_cuda() else "cpu")
    return folder.resolve()


if __name__ == "__main__":
    raise SystemExit(main())
