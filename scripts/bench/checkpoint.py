"""What a checkpoint costs a step: written before the next step starts, and beside it (checkpoint.async_save).

    python scripts/bench/checkpoint.py --repeats 3

One process, CPU, a model of SmolLM2-135M's shape with random weights and AdamW's moments (1.6 GB of files). Each round
makes a step without a checkpoint, one after a checkpoint, and one beside the writing of a checkpoint, in rotated order;
the stall is what `save` takes of the training process plus what the next step is longer.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.interfaces import LossSum
from rlsys.protocol import DataProto

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
WAYS = ("none", "before the step", "beside the step")


def make_rows(rows: int, tokens: int) -> DataProto:
    """Random token ids, half prompt and half response."""
    ids = torch.randint(1, 40_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
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


def step(engine: FSDPEngine, rows: DataProto) -> float:
    """Seconds of a forward pass, a backward pass and an optimizer step."""
    start = time.perf_counter()
    count = float(rows.tensors["response_mask"].sum())
    engine.forward_backward(rows, lambda outputs, _: LossSum(-outputs["log_probs"].sum(), count))
    engine.optim_step()
    return time.perf_counter() - start


def measured(engine: FSDPEngine, rows: DataProto, way: str, folder: Path) -> tuple[float, float]:
    """Seconds that a save keeps the training process, and seconds of the step after its begin."""
    start = time.perf_counter()
    saving = None
    if way == "before the step":
        engine.save(folder / "step", "resume")
    elif way == "beside the step":
        saving = engine.begin_save(folder / "step")
    called_s = time.perf_counter() - start
    step_s = step(engine, rows)
    if saving is not None:
        while not saving.is_written:
            time.sleep(0.1)
        start = time.perf_counter()
        saving.finish()
        called_s += time.perf_counter() - start
    shutil.rmtree(folder / "step", ignore_errors=True)
    return called_s, step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    model = ModelConfig(override_config=SMOLLM2, enable_gradient_checkpointing=False)
    engine = FSDPEngine(model, optim=OptimConfig(lr=1e-5), training=MicroBatches(max_tokens=2048))
    rows = make_rows(args.rows, args.tokens)
    step(engine, rows)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for way in WAYS[repeat % 3 :] + WAYS[: repeat % 3]:
                times[way].append(measured(engine, rows, way, Path(folder)))
    plain_s = median(step_s for _, step_s in times["none"])
    print(f"step without a checkpoint: {plain_s:.2f} s (min/median/max of all below, {args.repeats} rounds)")
    print(
        "| checkpoint | save keeps the process, s | the step, s | stall, share of a step |\n| --- | --- | --- | --- |"
    )
    for way, both in times.items():
        called, steps = (sorted(values) for values in zip(*both))
        stall = median(called) + median(steps) - plain_s
        cells = [f"{v[0]:.3f} / {median(v):.3f} / {v[-1]:.3f}" for v in (called, steps)]
        print(
            f"| {way} | {cells[0]} | {cells[1]} | {stall / plain_s:.1%}, of it waiting {median(called) / plain_s:.1%} |"
        )


if __name__ == "__main__":
    main()
