"""Where the time of a policy update and of a log-prob pass is spent: seconds, kernels, idle share, memory.

    python scripts/bench/update_profile.py                                    # SmolLM2-135M's and Qwen2.5-0.5B's shapes
    python scripts/bench/update_profile.py --shapes 0.5B --max-tokens 65536 --out profile.json
    python scripts/bench/update_profile.py --device cpu --shapes tiny --rows 8 --profiled 4 --response 16

Random weights, answers of one length to prompts of several, as the head-to-head job has them. `PPOActor` computes
log-probs with entropy and updates once, as in a run of GRPO; medians of several repeats after two of warm-up. A
profile of fewer rows gives the kernels that take most and the share of time in which no kernel runs. `--variants` are
measured one after the other: `ours`; ours with keys and values repeated (`repeat`) or with the statistics of logits
as separate kernels (`plain_head`); and what ours might do: torch's fused RMSNorm (`norm`), by `use_torch_compile`
compiled layers (`compile`), what one micro-batch gathered kept for the next (`keep`), or together (`compile+keep`).
Gradient norms and mean log-probs say whether they compute the same.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.fsdp.sharding import reshard
from rlsys.engines.micro_batches import MicroBatches
from rlsys.models import attention, logprobs
from rlsys.models.flops import ModelFlops, measured_flops
from rlsys.models.hf import read_config
from rlsys.protocol import DataProto
from rlsys.roles.actor import PPOActor
from scripts.bench.kernels import profile_call
from scripts.bench.train_step import write_checkpoint

GIB = 1 << 30


def make_rows(num: int, prompt: int, response: int, vocab: int) -> DataProto:
    """Rows with prompts of a third of `prompt` to all of it and full responses, with what an update needs."""
    draw = torch.Generator().manual_seed(0)
    columns = torch.arange(prompt + response)
    prompts = torch.randint(prompt // 3, prompt + 1, (num, 1), generator=draw)
    mask = (columns >= prompt - prompts).expand(num, -1).long()
    ids = torch.randint(0, vocab, mask.shape, generator=draw) * mask
    responses = mask[:, prompt:].contiguous()
    advantages = torch.randn(num, 1, generator=draw).expand(num, response) * responses
    tensors = {
        "input_ids": ids,
        "responses": ids[:, prompt:],
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
        "response_mask": responses,
        "advantages": advantages,
    }
    return DataProto.from_dict(tensors)


def timed(work: Callable[[], object], repeats: int, cuda: bool) -> list[float]:
    """Seconds of each of `repeats` calls after two of warm-up."""
    seconds = []
    for _ in range(repeats + 2):
        started_s = perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started_s)
    return sorted(seconds[2:])


def kernels(work: Callable[[], object], cuda: bool, most: int) -> dict[str, Any]:
    """The kernels of one call by total time, the share of its time without any, and how often the host waited."""
    time, num_waits = profile_call(work, cuda=cuda)
    return {
        "wall_s": round(time.wall_s, 4),
        "idle_share": round(time.idle_share, 3),
        "num_kernels": time.num_kernels,
        "host_waits": num_waits,
        "top": [
            (round(spent_s, 4), time.runs[name], name[:110]) for name, spent_s in islice(time.by_name.items(), most)
        ],
    }


def kernels_of(variant: str) -> AbstractContextManager[object]:
    """Repeated keys and values, or the statistics of logits as separate kernels."""
    grouped = attention._varlen

    def repeated(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return grouped(query, key, value, *rest)

    if variant == "repeat":
        return patch.object(attention, "_varlen", repeated)
    return patch.object(logprobs, "_fused", lambda made: made) if variant == "plain_head" else nullcontext()


def change_engine(variant: str, engine: FSDPEngine) -> None:
    """Give the model fused norms, or keep what is gathered from one micro-batch to the next."""
    run = engine._run

    def keep_gathered(*args: Any, **options: Any) -> None:
        run(*args, **options)
        reshard(engine.model)

    if "keep" in variant:
        engine._run = keep_gathered  # pyrefly: ignore
    for module in engine.model.modules():
        if "keep" in variant and isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        if "norm" in variant and type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_fused_norm, module)


def _fused_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def measure(shape: str, variant: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=args.recompute)
    size = MicroBatches(max_tokens=args.max_tokens)
    optim = OptimConfig(lr=1e-6)
    shard = ShardConfig(use_torch_compile="compile" in variant)
    engine = FSDPEngine(
        model, TrainEngineOptions(device=args.device, optim=optim, training=size, scoring=size), shard=shard
    )
    change_engine(variant, engine)
    config = read_config(model)
    rows = make_rows(args.rows, args.prompt, args.response, config.vocab_size)
    actor = PPOActor(engine, ActorConfig())
    result: dict[str, Any] = {"case": f"{shape} {variant}", "max_tokens": args.max_tokens, "recompute": args.recompute}

    def score(batch: DataProto) -> DataProto:
        return actor.compute_logp(batch, entropy=True)

    def update(batch: DataProto) -> dict[str, float]:
        return actor.train_batch(batch)

    lengths = rows.tensors["attention_mask"].sum(1).tolist()
    flops = ModelFlops(config).forward(lengths, num_head_tokens=int(rows.tensors["response_mask"].sum()))
    peak = measured_flops(torch.device(args.device), **({"size": 8192} if cuda else {}))
    started_s = perf_counter()
    rows = rows.union(score(rows))
    result["mean_log_prob"] = float(rows.tensors["old_log_probs"].double().mean())
    result["grad_norm"] = update(rows)["actor/grad_norm"]
    result["first_s"] = round(perf_counter() - started_s, 1)
    few = rows[: args.profiled]
    for name, work, times in (("old_log_prob", score, 1), ("update", update, 3)):
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = timed(lambda work=work: work(rows), args.repeats, cuda)
        middle = seconds[len(seconds) // 2]
        result[name] = {
            "seconds": [round(one, 4) for one in seconds],
            "tokens_per_s": round(sum(lengths) / middle),
            "mfu_of_measured_matmul": round(times * flops / middle / peak, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if cuda else None,
            "profile": kernels(lambda work=work: work(few), cuda, args.top),
        }
    return result


def show(result: dict[str, Any]) -> None:
    print(
        f"\n== {result['case']}: micro-batches of {result['max_tokens']} tokens, recompute={result['recompute']}, "
        f"mean log-prob {result['mean_log_prob']:.6f}, gradient norm {result['grad_norm']:.6f}, "
        f"first pass and update {result['first_s']} s"
    )
    for name in ("old_log_prob", "update"):
        part, inside = result[name], result[name]["profile"]
        print(
            f"{name}: {part['seconds']} s, {part['tokens_per_s']:,} tokens/s, MFU {part['mfu_of_measured_matmul']}, "
            f"peak {part['peak_gib']} GiB; profiled {inside['wall_s']} s, idle {inside['idle_share']:.1%}, "
            f"{inside['num_kernels']} kernels, {inside['host_waits']} waits of the host"
        )
        for seconds, calls, kernel in inside["top"]:
            print(f"  {seconds:8.4f} s {calls:6d} x  {kernel}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="*", default=["135M", "0.5B"])
    parser.add_argument("--variants", nargs="*", default=["ours"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--profiled", type=int, default=96, help="rows of the profiled call")
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    room = "/dev/shm" if Path("/dev/shm").is_dir() else None
    results = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(dir=room) as folder:
            write_checkpoint(shape, Path(folder), args.device)
            for variant in args.variants:
                with kernels_of(variant):
                    results.append(measure(shape, variant, Path(folder), args))
                show(results[-1])
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
