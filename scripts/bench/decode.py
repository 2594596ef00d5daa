"""Tokens per second of our engine around vLLM or SGLang, of the same SGLang used directly, and of the engine alone.

    python scripts/bench/decode.py sglang models/SmolLM2 --rows 512 --tokens 256
    python scripts/bench/decode.py vllm 7B --fp8 --rows 64 256     # random weights of that shape, in FP8 and bfloat16

Eight answers to each prompt, sampled to their full length. Ours come with both log-probabilities, as DataProto rows;
every engine has a process of its own, the engine alone with the same options (`scripts/bench/step.py`) and the largest
number of rows.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
from scripts.model_shapes import SHAPES  # noqa: E402

PROMPT_TOKENS, ANSWERS = 100, 8
WARM, TIMED = 1, 3


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
    for quantization in ("fp8", None) if args.fp8 else (None,):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            measured = pool.submit(ours, args.engine, path, rows, counts, args.tokens, quantization)
            rates |= measured.result(args.deadline_s)
    for count in counts if args.fp8 else ():
        fp8, plain = rates[f"ours in FP8, {count} rows"], rates[f"ours, {count} rows"]
        print(f"ours, {count} rows: FP8 {fp8:,.0f}, bfloat16 {plain:,.0f} tokens/s, {fp8 / plain:.2f}", flush=True)
    work = {"model": str(path), "tp": 1, "rows": len(rows), "prompts": len(prompts), "cuda": cuda}
    work |= {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": args.tokens, "max_num_seqs": len(rows)}
    work["vocab_size"] = vocab_size
    alone = offline(args.engine, work, args.deadline_s)
    rates |= {f"alone, {name}": rate for name, rate in alone.items()}
    for name, rate in rates.items():
        print(f"{args.engine} {name}: {rate:,.0f} tokens/s; ours / this {rates[f'ours, {len(rows)} rows'] / rate:.2f}")
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
    kind: str,
    model: Path,
    rows: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    num_tokens: int,
    quantization: Literal["fp8"] | None,
) -> dict[str, float]:
    """Rates of our engine with the first `counts` of the rows, and of the same SGLang asked directly."""
    from rlsys.types import ModelRequest, SamplingParams

    engine = _engine(kind, model, len(rows), PROMPT_TOKENS + num_tokens, quantization)

    def work(count: int, turn: int) -> None:
        engine.generate(
            [
                ModelRequest(ids, SamplingParams(num_tokens, ignore_eos=True, seed=turn * len(rows) + row))
                for row, ids in enumerate(rows[:count])
            ]
        )

    name = "ours in FP8" if quantization else "ours"
    rates = {f"{name}, {count} rows": best_rate(count * num_tokens, partial(work, count)) for count in counts}
    if kind == "sglang" and not quantization:
        for name, logprob in (("directly", False), ("directly, with log-probabilities", True)):
            rates[name] = best_rate(len(rows) * num_tokens, _asked_directly(engine, rows, num_tokens, logprob))
    engine.close()
    return rates


def _engine(kind: str, model: Path, num_rows: int, length: int, quantization: Literal["fp8"] | None) -> Any:
    import torch

    from rlsys.config.schema.rollout import GenerationConfig
    from rlsys.rollout.base import EngineContext

    cuda = torch.cuda.is_available()
    config = GenerationConfig(
        max_num_seqs=num_rows, max_model_len=length, enforce_eager=not cuda, quantization=quantization
    )
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
