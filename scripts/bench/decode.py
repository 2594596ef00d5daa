"""Tokens per second of our engine around vLLM or SGLang, of the same SGLang used directly, and of the engine alone.

    python scripts/bench/decode.py sglang models/SmolLM2 --rows 512 --tokens 256

Eight answers to each prompt, sampled to their full length. Ours come with both log-probabilities, as DataProto rows;
the engine alone is a process of its own with the same options (`scripts/bench/step.py`).
"""

import argparse
import random
import sys
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
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
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="longest the engine alone may take")
    parser.add_argument("--fp8", action="store_true", help="ours with rollout.quantization=fp8 too (vllm on a GPU)")
    args = parser.parse_args()
    import torch
    from step import offline  # pyrefly: ignore[missing-import]
    from transformers import AutoConfig

    from rlsys.types import ModelRequest, SamplingParams

    cuda = torch.cuda.is_available()
    vocab_size = AutoConfig.from_pretrained(args.model, local_files_only=True).get_text_config().vocab_size
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(args.rows // ANSWERS)]
    rows = [prompt for prompt in prompts for _ in range(ANSWERS)]
    make = partial(_engine, args.engine, args.model, len(rows), PROMPT_TOKENS + args.tokens, cuda=cuda)

    def ours(turn: int) -> None:
        engine.generate(
            [
                ModelRequest(ids, SamplingParams(args.tokens, ignore_eos=True, seed=turn * len(rows) + row))
                for row, ids in enumerate(rows)
            ]
        )

    rates = {}
    if args.fp8:
        engine = make(quantization="fp8")
        rates["ours in FP8"] = best_rate(len(rows) * args.tokens, ours)
        engine.close()
    engine = make()
    rates["ours"] = best_rate(len(rows) * args.tokens, ours)
    if args.engine == "sglang":
        for name, logprob in (("directly", False), ("directly, with log-probabilities", True)):
            rates[name] = best_rate(len(rows) * args.tokens, _asked_directly(engine, rows, args.tokens, logprob))
    engine.close()
    work = {"model": str(args.model), "tp": 1, "rows": len(rows), "prompts": len(prompts), "cuda": cuda}
    work |= {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": args.tokens, "max_num_seqs": len(rows)}
    work["vocab_size"] = vocab_size
    alone = offline(args.engine, work, args.deadline_s)
    rates |= {f"alone, {name}": rate for name, rate in alone.items()}
    for name, rate in rates.items():
        print(f"{args.engine} {name}: {rate:,.0f} tokens/s; ours / this {rates['ours'] / rate:.2f}")
    return 0


def _engine(
    kind: str, model: Path, num_rows: int, length: int, *, cuda: bool, quantization: Literal["fp8"] | None = None
) -> Any:
    from rlsys.config.schema.rollout import GenerationConfig
    from rlsys.rollout.base import EngineContext

    config = GenerationConfig(
        max_num_seqs=num_rows, max_model_len=length, enforce_eager=not cuda, quantization=quantization
    )
    context = EngineContext(device="cuda" if cuda else "cpu")
    if kind == "vllm":
        from rlsys.rollout.vllm.engine import VLLMRollout

        return VLLMRollout(model, config, context)
    from rlsys.rollout.sglang.engine import SGLangRollout

    return SGLangRollout(model, config, context)


def _asked_directly(engine: Any, rows: list[tuple[int, ...]], num_tokens: int, logprob: bool) -> Any:
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
