"""What a checkpoint costs a training process: written at once, and beside the next steps (checkpoint.async_save).

    python scripts/bench/checkpoint.py                     # on a GPU Qwen2.5-0.5B's shape, 60 to 90 s on an H100
    python scripts/bench/checkpoint.py --shape 1.5B --saves 3 --folder /data

One process, random weights and AdamW's moments (12 bytes a parameter). It makes steps without a save, one save at
once, and saves beside steps, the first of which gets the host memory of the copies. Training stands still while a save
begins and ends, and where an optimizer step waits for the copies; beside the writing steps may be slower. The stall is
both. The first save beside steps is compared with the one at once, made of the same state: all files must be equal.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.checkpoint import MANIFEST, Saving
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum
from rlsys.protocol import DataProto
from rlsys.utils.atomic import read_checked_json
from scripts.model_shapes import SHAPES

INTERVAL = 100
"""Steps between two saves, for the last figure."""


def make_rows(rows: int, tokens: int, vocab: int) -> DataProto:
    """Random token ids, half prompt and half response."""
    ids = torch.randint(1, vocab, (rows, tokens), generator=torch.Generator().manual_seed(0))
    ones, half = torch.ones_like(ids), tokens // 2
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "prompts": ids[:, :half],
            "responses": ids[:, half:],
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "response_mask": ones[:, half:],
        }
    )


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call and of the kernels that it has started."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def step(engine: FSDPEngine, rows: DataProto, saving: Saving | None = None) -> tuple[float, float]:
    """Seconds of forward, backward and optimizer step, and of the waiting for the copies of a save before the last."""
    count = float(rows.tensors["response_mask"].sum())

    def forward_backward() -> None:
        engine.forward_backward(rows, lambda outputs, _: LossSum(-outputs["log_probs"].sum(), count))

    trained_s = seconds(forward_backward)
    waited_s = 0.0 if saving is None else seconds(saving.copied.wait)
    return trained_s + seconds(engine.optim_step), waited_s


def save_beside(engine: FSDPEngine, rows: DataProto, path: Path, plain_s: float) -> None:
    """Save beside as many steps as the writing takes; print what it costs."""
    start = time.perf_counter()
    saving = engine.begin_save(path)
    begin_s = time.perf_counter() - start
    steps = [step(engine, rows, saving)]
    while not saving.is_written:
        steps.append(step(engine, rows, saving))
    written_s = time.perf_counter() - start
    finish_s, waited_s = seconds(saving.finish), sum(waited for _, waited in steps)
    still_s, beside_s = begin_s + waited_s + finish_s, mean(took for took, _ in steps)
    stall_s = still_s + len(steps) * (beside_s - plain_s)
    print(
        f"save beside steps: training stands still {still_s:.3f} s (begin {begin_s:.3f}, before the optimizer step "
        f"{waited_s:.3f}, end {finish_s:.3f}), {still_s / plain_s:.1%} of a step\n"
        f"    written in {written_s:.1f} s beside {len(steps)} steps of {beside_s:.3f} s (first {steps[0][0]:.3f}), "
        f"{beside_s / plain_s - 1:+.1%} each\n    stall {stall_s:.3f} s: {stall_s / plain_s:.1%} of a step, "
        f"{stall_s / plain_s / INTERVAL:.2%} of {INTERVAL} steps",
        flush=True,
    )


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5B" if cuda else "135M")
    parser.add_argument("--saves", type=int, default=2, help="saves beside steps")
    parser.add_argument("--steps", type=int, default=10 if cuda else 3, help="steps without a save")
    parser.add_argument("--rows", type=int, default=64 if cuda else 4)
    parser.add_argument("--tokens", type=int, default=512 if cuda else 128)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; the system's temporary folder")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    model = ModelConfig(override_config=shape, enable_gradient_checkpointing=False)
    training, device = MicroBatches(max_tokens=16384 if cuda else 2048), "cuda" if cuda else "cpu"
    engine = FSDPEngine(model, TrainEngineOptions(device=device, optim=OptimConfig(lr=1e-5), training=training))
    rows = make_rows(args.rows, args.tokens, int(str(shape["vocab_size"])))
    for _ in range(3 if cuda else 1):
        step(engine, rows)

    def steps_without() -> list[float]:
        return [step(engine, rows)[0] for _ in range(args.steps)]

    steps_s = steps_without()
    plain_s = mean(steps_s)
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(
        f"{args.shape} on {where}: a step takes {plain_s:.3f} s ({min(steps_s):.3f} to {max(steps_s):.3f})", flush=True
    )
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        at_once, beside = Path(folder) / "at_once", Path(folder) / "beside"
        save_s = seconds(lambda: engine.save(at_once, "resume"))
        num_bytes = sum(file.stat().st_size for file in at_once.glob("*.safetensors"))
        print(f"save at once: {save_s:.2f} s, {num_bytes / 1e9:.2f} GB, {save_s / plain_s:.0%} of a step", flush=True)
        for number in range(args.saves):
            save_beside(engine, rows, beside, mean(steps_without()) if number else plain_s)
            if number == 0:
                first, second = (read_checked_json(path / MANIFEST)["files"] for path in (at_once, beside))
                assert first == second, "the files of the two saves differ"
                print("    its files are those of the save at once")
            for path in (at_once, beside):
                shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
