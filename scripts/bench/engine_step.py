"""Training steps of FSDPEngine against the same step in plain transformers, in one run: tokens/s, MFU, memory, ratio.

The plain step pads its rows, materialises all logits and steps torch's AdamW; both make the same micro-batches of rows
and the same mathematics (log-probabilities of the responses at temperature 1, mean over response tokens).

    python scripts/bench/engine_step.py [--device cuda] [--rows 64] [--micro-rows 8] [--model DIR]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum
from rlsys.models.flops import ModelFlops, peak_flops
from rlsys.models.hf import read_config
from rlsys.protocol import DataProto

SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 4096}
SMOLLM2_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
HEADS = {
    128: {"num_attention_heads": 4, "num_key_value_heads": 2},
    576: {"num_attention_heads": 9, "num_key_value_heads": 3},
}


def make_rows(num: int, prompt: int, response: int, vocab: int) -> DataProto:
    """Rows with prompts and responses of every length up to the widths, as a trained policy makes them."""
    draw = torch.Generator().manual_seed(0)
    columns = torch.arange(prompt + response)
    prompts = torch.randint(prompt // 4, prompt + 1, (num, 1), generator=draw)
    responses = torch.randint(response // 8, response + 1, (num, 1), generator=draw)
    mask = ((columns >= prompt - prompts) & (columns < prompt + responses)).long()
    ids = torch.randint(0, vocab, mask.shape, generator=draw) * mask
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "responses": ids[:, prompt:],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
            "response_mask": mask[:, prompt:],
        }
    )


def nll(outputs: Any, rows: Any) -> LossSum:
    mask = rows["response_mask"]
    return LossSum(-(outputs["log_probs"] * mask).sum(), mask.sum())


def engine_step(source: ModelConfig, args: argparse.Namespace, rows: DataProto) -> Callable[[], float]:
    budget = int(rows.tensors["attention_mask"].sum(1).float().mean() * args.micro_rows)
    engine = FSDPEngine(
        source,
        TrainEngineOptions(
            device=args.device,
            optim=OptimConfig(lr=1e-4),
            training=MicroBatches(max_tokens=max(budget, rows.tensors["attention_mask"].shape[1])),
        ),
    )

    def step() -> float:
        loss = engine.forward_backward(rows, nll)["loss"]
        engine.optim_step()
        return loss

    return step


def plain_step(source: ModelConfig, args: argparse.Namespace, rows: DataProto) -> Callable[[], float]:
    torch.manual_seed(0)
    config = read_config(source)
    model = (
        AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
        if source.path
        else AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ).to(args.device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    half = args.compute == "bfloat16"

    def step() -> float:
        total = 0.0
        count = float(rows.tensors["response_mask"].sum())
        for start in range(0, len(rows), args.micro_rows):
            part = rows.tensors[start : start + args.micro_rows].to(args.device)
            width = part["responses"].shape[1]
            with torch.autocast(args.device, dtype=torch.bfloat16, enabled=half):
                logits = model(
                    part["input_ids"], attention_mask=part["attention_mask"], position_ids=part["position_ids"]
                )
            scores = torch.log_softmax(logits.logits[:, -width - 1 : -1].float(), dim=-1)
            picked = scores.gather(2, part["responses"][..., None])[..., 0]
            loss = -(picked * part["response_mask"]).sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def measure(step: Callable[[], float], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the median step after two warm-ups, peak memory in GiB (CUDA), and the first loss."""
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = step(), []
    step()
    for _ in range(args.steps):
        start = perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"seconds": sorted(seconds)[len(seconds) // 2], "peak_gib": peak, "first_loss": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="a model directory; without it a random one of SmolLM2-135M's shape")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro-rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    args = parser.parse_args()
    args.compute = "bfloat16" if args.device == "cuda" else "float32"
    shape = SMOLLM2_135M if args.device == "cuda" else SMALL
    random = {"model_type": "llama", "tie_word_embeddings": True, **shape, **HEADS[shape["hidden_size"]]}
    source = ModelConfig(
        path=args.model and str(args.model),
        override_config={} if args.model else random,
        enable_gradient_checkpointing=args.gradient_checkpointing,
    )
    config = read_config(source)
    rows = make_rows(args.rows, args.prompt, args.response, config.vocab_size)
    lengths = rows.tensors["attention_mask"].sum(1).tolist()
    flops = 3 * ModelFlops(config).forward(lengths, num_head_tokens=int(rows.tensors["response_mask"].sum()))
    peak = peak_flops(torch.device(args.device))
    results = {}
    for name, make in {"transformers": plain_step, "rlsys": engine_step}.items():
        results[name] = measure(make(source, args, rows), args)
        seconds = results[name]["seconds"]
        results[name] |= {"tokens_per_s": sum(lengths) / seconds, "mfu": flops / seconds / peak}
        if args.device == "cuda":
            torch.cuda.empty_cache()
    ratio = results["rlsys"]["tokens_per_s"] / results["transformers"]["tokens_per_s"]
    padding = 1 - sum(lengths) / rows.tensors["attention_mask"].numel()
    print(json.dumps({**results, "ratio": ratio, "padding_share": padding, "peak_flops": peak}, indent=1))


if __name__ == "__main__":
    main()
