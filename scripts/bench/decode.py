"""Tokens per second of our engine around vLLM or SGLang, of the same SGLang used directly, and of the engine alone.

    python scripts/bench/decode.py sglang models/SmolLM2 --rows 512 --tokens 256
    python scripts/bench/decode.py vllm 7B --fp8 --rows 64 256 --cases ours-2     # random weights, in FP8 and bfloat16
    python scripts/bench/decode.py vllm 0.5B --cases ours ours-2 alone inside inside-sync inside-2 --host-profile

Eight answers to each prompt, sampled to their full length. Ours come with both log-probabilities, as DataProto rows;
every engine has a process of its own, the engine alone with the same options (`scripts/bench/step.py`) and the largest
number of rows. Cases of vLLM: `ours-2` with its model runner 2; vLLM alone, as it chooses (`alone`), or in the process
that steps it, as ours is: with runner 1 (`inside`), without asynchronous scheduling (`inside-sync`), with runner 2
(`inside-2`). With `--host-profile` ours also prints where the host's time of a step goes.
"""

import argparse
import os
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from scripts.model_shapes import SHAPES  # noqa: E402

PROMPT_TOKENS, ANSWERS = 100, 8
WARM, TIMED = 1, 3
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", RUNNER: "0"}
ALONE: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "alone": ({}, {}),
    "inside": (INSIDE, {"async_scheduling": True}),
    "inside-sync": (INSIDE, {"async_scheduling": False}),
    "inside-2": (INSIDE | {RUNNER: "1"}, {"async_scheduling": True}),
}
"""The environment and the options of vLLM alone."""


def best_rate(num_tokens: int, work: Any) -> float:
    """The best of some turns after warm-up."""
    took = []
    for turn in range(WARM + TIMED):
        started_s = perf_counter()
        work(turn)
        took.append(perf_counter() - started_s)
    return num_tokens / min(took[WARM:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("model", help="a folder, or a shape of scripts/model_shapes.py")
    parser.add_argument("--rows", type=int, nargs="+", default=[512])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="longest that an engine may take")
    parser.add_argument("--fp8", action="store_true", help="ours with rollout.quantization=fp8 too (vllm on a GPU)")
    parser.add_argument("--cases", nargs="+", default=["ours", "alone"], choices=["ours", "ours-2", *ALONE])
    parser.add_argument(
        "--scheduler-steps", type=int, nargs="+", help="num_scheduler_steps of ours-2, one after another"
    )
    parser.add_argument("--host-profile", action="store_true", help="where our host's time of a step goes (vllm)")
    parser.add_argument("--out", type=Path, default=Path("runs/decode"), help="where random weights are written")
    args = parser.parse_args()
    import torch
    from step import offline  # pyrefly: ignore[missing-import]
    from transformers import AutoConfig

    cuda = torch.cuda.is_available()
    path = random_weights(args.model, args.out) if args.model in SHAPES else Path(args.model)
    vocab_size = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size
    draw = random.Random(0)
    counts = sorted(args.rows)
    prompts = [tuple(draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(counts[-1] // ANSWERS)]
    rows, rates = [prompt for prompt in prompts for _ in range(ANSWERS)], dict[str, float]()
    cases = [("ours", "0", None), *(("ours-2", "1", steps) for steps in args.scheduler_steps or [None])]
    engines: list[tuple[str, str, dict[str, Any]]] = []
    for case, runner, steps in [one for one in cases if one[0] in args.cases]:
        name = f"{case}, {steps} steps a schedule" if steps else case
        settings: dict[str, Any] = {"num_scheduler_steps": steps} if steps else {}
        if args.fp8:  # DeepGEMM compiles for minutes if graphs of all sizes are captured
            settings["cudagraph_capture_sizes"] = counts
        engines.append((name, runner, settings))
        if args.fp8:
            engines.append((f"{name} in FP8", runner, settings | {"quantization": "fp8"}))
    for name, runner, settings in engines:
        os.environ[RUNNER] = runner
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            work = partial(ours, name, args.engine, path, rows, (counts, args.tokens))
            measured = pool.submit(work, settings, host_profile=args.host_profile)
            rates |= measured.result(args.deadline_s)
    os.environ.pop(RUNNER, None)
    for name in [f"{name}, {count} rows" for name, _, one in engines if "quantization" in one for count in counts]:
        plain = rates[name.replace(" in FP8", "")]
        print(f"{name}: {rates[name]:,.0f}, bfloat16 {plain:,.0f} tokens/s, {rates[name] / plain:.2f}", flush=True)
    work = {"model": str(path), "tp": 1, "rows": len(rows), "prompts": len(prompts), "cuda": cuda}
    work |= {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": args.tokens, "max_num_seqs": len(rows)}
    work["vocab_size"] = vocab_size
    for case in [case for case in ALONE if case in args.cases]:
        env, options = ALONE[case]
        asked = {"options": options, "logprobs": case == "alone"}
        alone = offline(args.engine, work | asked, args.deadline_s, env=env)
        rates |= {f"{case}, {name}": rate for name, rate in alone.items()}
    first = rates[f"{engines[-1][0]}, {len(rows)} rows"] if engines else 0.0
    for name, rate in rates.items():
        print(f"{args.engine} {name}: {rate:,.0f} tokens/s; ours / this {first / rate:.2f}")
    return 0


def random_weights(shape: str, out: Path) -> Path:
    """The folder of a model of a known shape, written once."""
    import torch
    from train_step import write_checkpoint  # pyrefly: ignore[missing-import]

    folder = (out / shape).resolve()
    if not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(shape, folder, "cuda" if torch.cuda.is_available() else "cpu")
    return folder


def ours(
    name: str,
    kind: str,
    model: Path,
    rows: Sequence[tuple[int, ...]],
    sizes: tuple[Sequence[int], int],
    settings: Mapping[str, Any],
    *,
    host_profile: bool,
) -> dict[str, float]:
    """Rates of our engine with these settings, and of the same SGLang; `sizes` are numbers of rows, and tokens."""
    from rlsys.types import ModelRequest, SamplingParams

    counts, num_tokens = sizes
    engine = _engine(kind, model, len(rows), PROMPT_TOKENS + num_tokens, settings)

    def work(count: int, turn: int) -> None:
        engine.generate(
            [
                ModelRequest(ids, SamplingParams(num_tokens, ignore_eos=True, seed=turn * len(rows) + row))
                for row, ids in enumerate(rows[:count])
            ]
        )

    rates = {f"{name}, {count} rows": best_rate(count * num_tokens, partial(work, count)) for count in counts}
    if kind == "sglang" and "quantization" not in settings:
        for name, logprob in (("directly", False), ("directly, with log-probabilities", True)):
            rates[name] = best_rate(len(rows) * num_tokens, _asked_directly(engine, rows, num_tokens, logprob))
    if host_profile:
        print(f"{name}: {_host_profile(engine, partial(work, len(rows), WARM + TIMED))}", flush=True)
    engine.close()
    return rates


def _host_profile(engine: Any, work: Any) -> str:
    """Milliseconds of a step by part: vLLM's scheduler, its model runner, our sampling in it, and what is outside."""
    core, took = engine.engine.engine_core.engine_core, dict[str, float]()
    sampler = engine._sampling.sampler
    parts = ((core.scheduler, "schedule"), (core.scheduler, "update_from_output"), (sampler, "set_rows"))
    parts += ((core.model_executor, "execute_model"), (core.model_executor, "sample_tokens"), (sampler, "force"))
    parts += ((engine, "_report"), (engine, "_end"), (engine, "_add"), (engine, "_step"), (core, "step_fn"))
    for owner, name in parts:
        setattr(owner, name, partial(_timed, getattr(owner, name), name, took))
    took |= dict.fromkeys([name for _, name in parts], 0.0) | {"steps": 0.0}
    started_s = perf_counter()
    work()
    whole, took = perf_counter() - started_s, dict(took)
    steps = took.pop("steps")
    known = ("schedule", "execute_model", "sample_tokens", "update_from_output")
    took["waiting for the GPU, and the rest of step_fn"] = took["step_fn"] - sum(took[name] for name in known)
    took["outside of _step"] = whole - took["_step"]
    return ", ".join(f"{name} {1e3 * seconds / steps:.2f}" for name, seconds in ({"all": whole} | took).items())


def _timed(call: Any, name: str, took: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    started_s = perf_counter()
    try:
        return call(*args, **kwargs)
    finally:
        took[name] += perf_counter() - started_s
        took["steps"] += name == "force"


def _engine(kind: str, model: Path, num_rows: int, length: int, settings: Mapping[str, Any]) -> Any:
    import torch

    from rlsys.config.schema.rollout import GenerationConfig
    from rlsys.rollout.base import EngineContext

    cuda = torch.cuda.is_available()
    config = GenerationConfig(max_num_seqs=num_rows, max_model_len=length, enforce_eager=not cuda, **settings)
    context = EngineContext(device="cuda" if cuda else "cpu")
    if kind == "vllm":
        from rlsys.rollout.vllm.engine import VLLMRollout

        return VLLMRollout(model, config, context)
    from rlsys.rollout.sglang.engine import SGLangRollout

    return SGLangRollout(model, config, context)


def _asked_directly(engine: Any, rows: Sequence[tuple[int, ...]], num_tokens: int, logprob: bool) -> Any:
    """The same SGLang, sampling itself, request by request."""
    running = engine._engine_thread
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}

    def work(_: int) -> None:
        ask = running.engine.async_generate
        waiting = [
            running.submit(ask(input_ids=list(ids), sampling_params=params, return_logprob=logprob)) for ids in rows
        ]
        wait(waiting)

    return work


if __name__ == "__main__":
    raise SystemExit(main())
