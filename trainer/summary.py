"""What a run has reached, from the files that it left: shown when it ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rlsys.config.schema.trainer import RunConfig
from rlsys.telemetry.jsonl import read_jsonl

OUTPUTS = {
    "report": "index.html",
    "metrics": "metrics.jsonl",
    "evaluation": "evaluation.json",
    "rollouts": "rollouts/index.html",
    "timeline": "timeline.json",
    "memory": "memory.txt",
    "log": "train.log",
    "settings": "config.yaml",
}
"""Files of a run by the names that the summary gives them."""
CURVES = {"reward": "critic/score/mean", "train loss": "train/loss", "val loss": "val/loss"}
VALIDATION, MEAN = "val-core/", "/mean@"


def summary_lines(run: RunConfig, *, finished: bool) -> list[str]:
    """First and last values with the best step, the last checkpoint, the files of a run, and what to do next."""
    root = Path(run.default_local_dir).absolute()
    paths = {name: root / path for name, path in OUTPUTS.items()}
    if folder := getattr(run, "rollout_data_dir", None):
        paths["rollouts"] = Path(folder).absolute() / "index.html"
    checkpoint = _last_checkpoint(root)
    lines = list(_curves(root / "metrics.jsonl"))
    if checkpoint is not None:
        lines.append(("checkpoint", str(checkpoint)))
    lines += [(name, str(path)) for name, path in paths.items() if path.exists()]
    if not finished:
        kept = f"from step {checkpoint.name.rpartition('_')[2]}" if checkpoint else "at step 1: nothing was saved yet"
        lines.append(("next", f"the same command continues {kept}"))
    elif checkpoint is not None and (model := next((p for p in _models(checkpoint) if p.is_dir()), None)):
        merged = f"--local_dir {model} --target_dir {root / 'merged'}"
        lines.append(("next", f"python -m rlsys.model_merger merge {merged}"))
    return [f"  {name:<11} {text}" for name, text in lines]


def _last_checkpoint(root: Path) -> Path | None:
    try:
        step = int((root / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return None
    return root / f"global_step_{step}"


def _models(checkpoint: Path) -> tuple[Path, ...]:
    return checkpoint / "actor", checkpoint / "model"


def _curves(path: Path) -> Iterator[tuple[str, str]]:
    try:
        records = list(read_jsonl(path))
    except OSError:
        return
    sources = {name: name[len(VALIDATION) :] for record in records for name in record if _is_validation(name)}
    named = CURVES | {f"validation of {source}": name for name, source in sources.items()}
    for title, name in named.items():
        points = [(int(record["step"]), float(record[name])) for record in records if record.get(name) is not None]
        if points:
            yield title, _curve(points, min if "loss" in title else max)


def _is_validation(name: str) -> bool:
    return name.startswith(VALIDATION) and MEAN in name


def _curve(points: list[tuple[int, float]], best_of: Callable[..., tuple[int, float]]) -> str:
    """First to last value; the best one where that is another."""
    (first_step, first), (last_step, last) = points[0], points[-1]
    best_step, best = best_of(points, key=lambda point: point[1])
    text = f"{first:.3f} -> {last:.3f} in steps {first_step} to {last_step}"
    return text if best_step == last_step else f"{text}, best {best:.3f} at step {best_step}"
