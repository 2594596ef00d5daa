"""The memory planner against the ledger of a real run: predicted, measured and their ratio for every stage.

    python scripts/bench/memory_check.py --config-name smollm2 data.train_batch_size=32 ...
    python scripts/bench/memory_check.py --config-name run.yaml --shape 7B ...     # random weights and rows

Runs a short job with these settings (3 steps unless trainer.total_training_steps says otherwise; answers of full length
unless rollout.ignore_eos does) and compares the highest CUDA memory that each stage allocated on any worker with the
plan for the lengths that were seen. On a CPU nothing counts what is allocated: there the bytes of all tensors that live
when a stage ends are compared with what the plan says stays, for workers in this process (trainer.backend=local).
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from rlsys.config import PPOConfig, load_config, plan_batches  # noqa: E402
from rlsys.planning.advice import facts_of  # noqa: E402
from rlsys.planning.memory import ROLLOUT_WEIGHTS, Lengths, MemoryPlan, plan_memory  # noqa: E402
from rlsys.planning.roles import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS  # noqa: E402
from rlsys.telemetry import memory  # noqa: E402
from scripts.model_shapes import SHAPES  # noqa: E402
from trainer.backend import running_backend  # noqa: E402
from trainer.build import build_trainer  # noqa: E402
from trainer.local_files import with_start_assets  # noqa: E402

GIB = 1 << 30
CALLS = {
    "start": ("init_model",),
    "rollout": ("exchange",),
    "old_log_prob": ("compute_log_prob",),
    "ref": ("compute_ref_log_prob",),
    "reward_model": ("compute_rm_score",),
    "values": ("compute_values",),
    "update_critic": ("update_critic",),
    "update_actor": ("update_actor",),
    "update_weights": ("reshard_weights", "send_weights", "receive_weights"),
    "save_checkpoint": ("save_checkpoint",),
}
"""The calls of workers that make up a stage."""


class TensorBytes:
    """Stands in for torch.cuda in the ledger of a CPU run: bytes of the tensors that Python can reach."""

    def memory_stats(self) -> dict[str, int]:
        gc.unfreeze()  # the engines of the job freeze what lives when they start
        gc.collect()
        storages = {}
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
        return dict.fromkeys(names, sum(storages.values()))

    def reset_peak_memory_stats(self) -> None:
        """There are no peaks to reset."""


def with_model(shape: str, folder: Path, *, prompt: int) -> list[str]:
    """Random weights of a known shape, the start model's tokenizer, and rows with prompts of about `prompt` tokens."""
    from scripts.bench.train_step import write_checkpoint
    from scripts.start_model import build_tokenizer

    write_checkpoint(shape, folder, "cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    build_tokenizer().save_pretrained(str(folder))
    text = "1+" * max(1, prompt // 2 - 2)
    row = {"data_source": "rlsys/arithmetic", "reward_model": {"style": "rule", "ground_truth": "0"}}
    lines = [json.dumps({**row, "prompt": f"{text}{number % 10}"}) for number in range(4096)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return [f"actor_rollout_ref.model.path={folder}", f"data.train_files={folder}/rows.jsonl", "data.val_files=null"]


def lengths_seen(root: Path, cfg: PPOConfig) -> Lengths:
    """Of the rows of all steps, from the metrics."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "prompt_length/max" in line]
    if not steps:
        return Lengths.longest(cfg)

    def most(name: str) -> int:
        return round(max(line[name] for line in steps))

    names = ("prompt_length/max", "response_length/max", "prompt_length/mean", "response_length/mean")
    return Lengths(*(most(name) for name in names))


def rows_of(
    plan: MemoryPlan, ledger: Sequence[memory.MemoryRecord], *, rollout_apart: bool, kept: Sequence[str] | None
) -> Iterator[tuple[str, int, int]]:
    """(stage, predicted, measured) of the stages that both know; bytes at the highest, or of the owners `kept`."""
    for where, stages in (("", plan.train), ("rollout ", plan.rollout)):
        for stage in stages:
            records = [
                r
                for r in ledger
                if r.stage in CALLS[stage.name] and _belongs(r, stage.name, where, rollout_apart=rollout_apart)
            ]
            if records:
                measured = max(r.after.cuda_peak_bytes if kept is None else r.after.cuda_bytes for r in records)
                yield (
                    where + stage.name,
                    stage.total if kept is None else sum(stage.bytes.get(owner, 0) for owner in kept),
                    measured,
                )


def _belongs(record: memory.MemoryRecord, stage: str, where: str, *, rollout_apart: bool) -> bool:
    """Whether a worker's record is of this kind of device; the actor and the rollout both score."""
    generates = record.worker.startswith("rollout")
    if where:
        return generates
    return not generates or (not rollout_apart and stage not in ("old_log_prob",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="train random weights of this shape")
    parser.add_argument("--limit", type=float, default=0.1, help="largest deviation that passes, on GPUs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    room = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=room) as scratch:
        folder = Path(scratch)
        (folder / "model").mkdir()
        cuda, job = torch.cuda.is_available(), ["--config-name", args.config_name]
        settings = [
            "trainer.total_training_steps=3",
            "trainer.val_before_train=false",
            "trainer.resume_mode=disable",
            "actor_rollout_ref.rollout.ignore_eos=true",
            f"trainer.default_local_dir={folder}/run",
            "trainer.rollout_data_dir=null",
            *([] if cuda else ["trainer.backend=local"]),
            *args.settings,
        ]
        if args.shape:
            none = ("actor_rollout_ref.model.path", "data.train_files", "data.val_files")
            prompt = load_config([*job, *settings, *(f"{key}=null" for key in none)]).data.max_prompt_length
            settings += with_model(args.shape, folder / "model", prompt=prompt)
        if not cuda:
            memory._cuda = TensorBytes  # type: ignore[assignment]  # the ledger asks it for torch.cuda
        cfg = with_start_assets(load_config([*job, *settings]))
        stages = checked(cfg, peaks=cuda)
    print(f"{'stage':<24}{'predicted':>12}{'measured':>12}{'ratio':>8}   MiB {'at the highest' if cuda else 'kept'}")
    for name, predicted, measured in stages:
        ratio = predicted / measured if measured else float("nan")
        print(f"{name:<24}{predicted / 2**20:12.1f}{measured / 2**20:12.1f}{ratio:8.3f}")
    if args.json:
        args.json.write_text(json.dumps([{"stage": s, "predicted": p, "measured": m} for s, p, m in stages]))
    return int(cuda and any(abs(p / m - 1) > args.limit for _, p, m in stages if m))


def checked(cfg: PPOConfig, *, peaks: bool) -> list[tuple[str, int, int]]:
    """Run the job and set its ledger beside its plan."""
    num_ranks = plan_batches(cfg).pools.total_ranks
    with running_backend(cfg.trainer, cfg.ray_kwargs, num_ranks=num_ranks) as backend:
        trainer = build_trainer(cfg, backend)
        try:
            trainer.fit()
        finally:
            trainer.close()
    device_bytes = torch.cuda.get_device_properties(0).total_memory if peaks else 0
    machine = facts_of(cfg, "cuda" if peaks else "cpu", device_bytes)
    plan = plan_memory(cfg, machine, lengths=lengths_seen(Path(cfg.trainer.default_local_dir), cfg))
    megatron = cfg.actor_rollout_ref.actor.strategy == "megatron"  # whose gradients stay
    residents = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER, ROLLOUT_WEIGHTS)
    kept = None if peaks else [owner for owner in residents if megatron or owner != GRADIENTS]
    return list(rows_of(plan, trainer.reporter.ledger, rollout_apart=bool(plan.rollout), kept=kept))


if __name__ == "__main__":
    raise SystemExit(main())
