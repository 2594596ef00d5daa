"""A training step of MegatronEngine or FSDPEngine on all GPUs of this machine: tokens/s, MFU, memory.

    python scripts/bench/train_step.py --shape 0.5B                                # Megatron, one process a GPU
    python scripts/bench/train_step.py --shape 7B --tp 2 --recompute
    python scripts/bench/train_step.py --shape 7B --sequences 8 --unfused           # kernels of their own add gradients
    python scripts/bench/train_step.py --shape 0.5B --engine fsdp --json out.json
    python scripts/bench/train_step.py --shape 7B --engine fsdp --profile          # and the kernels of one more step
    python scripts/bench/train_step.py --shape 7B --layers 18 --engine fsdp --compile   # where 28 layers do not fit
    python scripts/bench/train_step.py --shape tiny --device cpu --ranks 2 --tp 2   # the same code here

Random weights of a known shape, full sequences, log-probabilities of all but 64 prompt tokens. MFU is given against
the data sheet and against the rate of a large matrix product measured in the same run. `--profile` adds a step that
is not timed with the others: milliseconds of the first rank's kernels by kind (NCCL's include the wait for other
ranks), and the share of the step in which none runs. Much idle time and short kernels: the step is bound by launches.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum, TrainEngine
from rlsys.models.flops import ModelFlops, measured_flops
from rlsys.models.hf import read_config
from rlsys.models.megatron.family import family_of
from rlsys.protocol import DataProto
from rlsys.utils.gpus import data_sheet_flops
from scripts.bench.kernels import profile_call
from scripts.model_shapes import SHAPES

PROMPT = 64


def write_checkpoint(shape: str, folder: Path, device: str, *, num_layers: int | None = None) -> None:
    """Random bfloat16 weights in Hugging Face's layout, a file a gigabyte, with the index that transformers reads.

    `num_layers` instead of the shape's own makes it smaller.
    """
    config = SHAPES[shape] | ({"num_hidden_layers": num_layers} if num_layers else {})
    folder.joinpath("config.json").write_text(json.dumps(config))
    part, files = dict[str, torch.Tensor](), dict[str, str]()
    for number, (name, size) in enumerate(shapes := sorted(family_of(config).hf_shapes(config).items())):
        drawn = torch.randn(size, device=device, dtype=torch.float32) * 0.02
        part[name] = (drawn + 1 if "norm" in name else drawn).to(torch.bfloat16).cpu()
        if sum(tensor.nbytes for tensor in part.values()) > 1 << 30 or number == len(shapes) - 1:
            save_file(part, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
            files |= dict.fromkeys(part, f"model-{number:05d}.safetensors")
            part = {}
    folder.joinpath("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def build(args: argparse.Namespace, folder: Path) -> TrainEngine:
    shard = ShardConfig(use_torch_compile=args.compile)
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=args.recompute)
    training, optim = MicroBatches(max_tokens=args.sequence * args.micro), OptimConfig(lr=1e-5)
    if args.engine == "fsdp":
        from rlsys.engines.fsdp.engine import FSDPEngine

        return FSDPEngine(model, TrainEngineOptions(device=args.device, optim=optim, training=training), shard=shard)
    from rlsys.engines.megatron.engine import MegatronEngine

    sizes = {"tensor_model_parallel_size": args.tp, "pipeline_model_parallel_size": args.pp}
    overrides = {"gradient_accumulation_fusion": False} if args.unfused else {}
    section = MegatronConfig(**sizes, fp8=args.fp8, override_transformer_config=overrides)
    return MegatronEngine(
        model, TrainEngineOptions(device=args.device, optim=optim, training=training), megatron=section
    )


def rows_of(args: argparse.Namespace, vocab: int, dp: int) -> DataProto:
    """`sequences` full sequences for each data-parallel rank; every rank draws its own."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, vocab, (max(1, args.sequences // dp), args.sequence), generator=draw)
    if dp < dist.get_world_size():
        dist.broadcast(ids, 0)
    ones = torch.ones_like(ids)
    tensors = {"input_ids": ids, "responses": ids[:, PROMPT:], "attention_mask": ones}
    return DataProto.from_dict(
        {**tensors, "position_ids": ones.cumsum(1) - 1, "response_mask": ones[:, PROMPT:].contiguous()}
    )


def nll(outputs: Any, rows: Any) -> LossSum:
    mask = rows["response_mask"]
    return LossSum(-(outputs["log_probs"] * mask).sum(), mask.sum())


def kernels(step: Callable[[], object], rank: int, cuda: bool) -> dict[str, Any] | None:
    """The kernels of one more step on the first rank, in milliseconds by kind; all ranks take part."""
    dist.barrier()
    if rank:
        step()
        return None
    time, num_waits = profile_call(step, cuda=cuda)
    print(
        f"\nprofiled step: {time.wall_s * 1e3:.1f} ms, idle {time.idle_share:.1%}, {time.num_kernels} kernels of ",
        end="",
    )
    print(f"{time.kernel_s / max(1, time.num_kernels) * 1e6:.1f} us, {num_waits} waits of the host")
    for group, spent_s in time.by_group.items():
        print(f"{spent_s * 1e3:10.1f} ms  {time.runs_of(group):7d} x  {group}")
    print("those that take most:")
    for name, spent_s in islice(time.by_name.items(), 20):
        print(f"{spent_s * 1e3:10.1f} ms  {time.runs[name]:7d} x  {name[:110]}")
    groups = {group: round(spent_s * 1e3, 2) for group, spent_s in time.by_group.items()}
    shares = {"idle_share": round(time.idle_share, 3), "nccl_share": round(time.nccl_share, 3)}
    return {"wall_ms": round(time.wall_s * 1e3, 1), **shares, "kernels_ms": groups}


def run_rank(rank: int, args: argparse.Namespace, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    cuda = args.device == "cuda"
    if cuda:
        args.device = f"cuda:{rank}"  # the engine begins with CUDA, as in a job: Megatron's sets a variable before
    started_s = perf_counter()
    engine = build(args, folder)
    built_s = perf_counter() - started_s
    config = read_config(ModelConfig(path=str(folder)))
    rows = rows_of(args, config.vocab_size, engine.dp_size)
    steps_s, losses, norm = [], [], 0.0

    def step() -> tuple[float, float]:
        loss, norm = engine.forward_backward(rows, nll)["loss"], engine.optim_step().grad_norm
        if cuda:
            torch.cuda.synchronize()
        return loss, norm

    for _ in range(args.steps + 2):
        dist.barrier()
        started_s = perf_counter()
        loss, norm = step()
        steps_s.append(perf_counter() - started_s)
        losses.append(loss)
    profile = kernels(step, rank, cuda) if args.profile else None
    lengths = [args.sequence] * len(rows) * engine.dp_size
    seconds = sorted(steps_s[2:])[args.steps // 2]
    forward = ModelFlops(config).forward(lengths, num_head_tokens=len(lengths) * (args.sequence - PROMPT))
    flops = 3 * forward / seconds
    device = torch.device(args.device)
    measured = measured_flops(device, size=8192) if cuda else measured_flops(device)
    sheet = data_sheet_flops(torch.cuda.get_device_name()) if cuda else None
    if rank == 0:
        result = {
            "case": f"{args.shape} {args.engine} tp{args.tp} pp{args.pp} dp{engine.dp_size}"
            + " fp8" * bool(args.fp8)
            + " unfused" * args.unfused
            + " compiled" * args.compile,
            "layers": config.num_hidden_layers,
            "sequence_tokens": args.sequence,
            "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            "build_s": round(built_s, 1),
            "step_s": round(seconds, 4),
            "tokens_per_s_per_gpu": round(sum(lengths) / seconds / args.ranks),
            "tflops_per_gpu": round(flops / args.ranks / 1e12, 1),
            "mfu_of_measured_matmul": round(flops / args.ranks / measured, 3),
            "measured_matmul_tflops": round(measured / 1e12, 1),
            "mfu_of_data_sheet": sheet and round(flops / args.ranks / sheet, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
            "loss": [round(loss, 4) for loss in losses],
            "grad_norm": round(norm, 4),
            "profile": profile,
        }
        print(json.dumps(result), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5B" if cuda else "tiny")
    parser.add_argument("--engine", choices=["megatron", "fsdp"], default="megatron")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if cuda else 1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096 if cuda else 128)
    parser.add_argument("--sequences", type=int, default=16, help="of one step, over all ranks")
    parser.add_argument("--micro", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--profile", action="store_true", help="one more step, with its kernels by kind")
    parser.add_argument("--compile", action="store_true", help="fsdp's use_torch_compile")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--fp8", choices=["e4m3", "hybrid"])
    parser.add_argument("--unfused", action="store_true", help="megatron's gradient_accumulation_fusion=false")
    parser.add_argument("--model", type=Path, help="where random weights are kept; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    room = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=room) as folder:
        model = args.model or Path(folder)
        if not (model / "model.safetensors.index.json").exists():
            model.mkdir(parents=True, exist_ok=True)
            write_checkpoint(args.shape, model, args.device, num_layers=args.layers)
        torch.multiprocessing.spawn(run_rank, (args, model, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
