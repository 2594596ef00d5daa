"""Tokens per second of HFRollout beside transformers' own generate and the time of the bare matrix products.

    python scripts/bench/hf_rollout.py [--model DIR | --shape tiny|smollm2] [--rows 16] [--samples 1] [--prompt 64]
                                       [--new 64] [--threads 1] [--repeats 3] [--device cpu] [--dtype float32]

Both sides complete the same left-padded prompts with as many sampled tokens each at temperature 1 without truncation,
in turns within one run; best of the repeats. `--samples n` asks for n completions of each prompt, as GRPO does. Only
HFRollout also returns two log-probabilities a token. The limit counts all products of the model's linear layers with as
many rows as are decoded, prefill included, and nothing else: no attention, no norms, no sampling.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import machine  # pyrefly: ignore
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlsys.rollout.hf.engine import HFRollout, load_causal_lm
from rlsys.types import ModelRequest, SamplingParams


def build(shape: str) -> Any:
    """A model of random weights."""
    if shape == "tiny":
        config = Qwen2Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return Qwen2ForCausalLM(config)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def prompts_of(args: argparse.Namespace, vocabulary: int) -> list[tuple[int, ...]]:
    """Rows of prompts between three quarters of the length and the whole; `samples` equal ones in a row."""
    generator = torch.Generator().manual_seed(0)
    distinct = args.rows // args.samples
    lengths = [args.prompt - i % max(1, args.prompt // 4) for i in range(distinct)]
    rows = [tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist()) for length in lengths]
    return [row for row in rows for _ in range(args.samples)]


def timed(call: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ours(engine: HFRollout, prompts: list[tuple[int, ...]], num_new: int) -> None:
    params = [SamplingParams(num_new, ignore_eos=True, seed=row) for row in range(len(prompts))]
    answers = engine.generate([ModelRequest(ids, how) for ids, how in zip(prompts, params, strict=True)])
    assert all(len(answer.output_tokens) == num_new for answer in answers)


def theirs(model: Any, prompts: list[tuple[int, ...]], num_new: int) -> None:
    width = max(map(len, prompts))
    ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([(0,) * (width - len(p)) + (1,) * len(p) for p in prompts], device=model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )
    assert out.shape[1] == width + num_new


@torch.inference_mode()
def linear_s(model: Any, num_rows: int, device: str, *, with_head: bool = True) -> float:
    """Seconds for one product of each linear layer with `num_rows` rows."""
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and (with_head or m is not head)]
    inputs = {n: torch.randn(num_rows, n, device=device, dtype=model.dtype) for n in {m.in_features for m in layers}}
    return min(timed(lambda: [layer(inputs[layer.in_features]) for layer in layers], device) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", choices=["tiny", "smollm2"], default="smollm2")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    def make() -> Any:
        if args.model:
            return load_causal_lm(args.model, load_format="auto", dtype=args.dtype, device=args.device)
        return build(args.shape).to(args.device, getattr(torch, args.dtype))

    mine, peer = make(), make().eval()
    engine, prompts = HFRollout(mine), prompts_of(args, peer.config.vocab_size)
    num_tokens = args.rows * args.new
    best = {"HFRollout": 0.0, "transformers": 0.0}
    for call, name in ((ours, "HFRollout"), (theirs, "transformers")):
        call(engine if name == "HFRollout" else peer, prompts, 4)
    for _ in range(args.repeats):
        best["HFRollout"] = max(
            best["HFRollout"], num_tokens / timed(lambda: ours(engine, prompts, args.new), args.device)
        )
        best["transformers"] = max(
            best["transformers"], num_tokens / timed(lambda: theirs(peer, prompts, args.new), args.device)
        )
    prompt_tokens = sum(len(p) for p in prompts[:: args.samples])
    products_s = linear_s(peer, args.rows, args.device) * args.new
    products_s += linear_s(peer, min(prompt_tokens, 2048), args.device, with_head=False) * max(1, prompt_tokens / 2048)
    best["matrix products alone"] = num_tokens / products_s
    print(machine())
    where = f"{args.dtype} on {args.device}, {args.threads} thread(s)"
    rows = f"{args.rows} rows, {args.samples} a prompt, {args.prompt} + {args.new} tokens"
    print(f"{args.model or args.shape}, {where}: {rows}")
    for name, rate in best.items():
        print(f"  {name:24s} {rate:10.1f} tokens/s")
    print(f"  HFRollout / transformers            {best['HFRollout'] / best['transformers']:.2f}x")
    print(f"  HFRollout / matrix products alone   {best['HFRollout'] / best['matrix products alone']:.2f}x")


if __name__ == "__main__":
    main()
