"""The summary of a run, from its files: printed when it ends, for whatever reason."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rlsys.config.schema.trainer import RunConfig
from rlsys.telemetry.jsonl import read_jsonl
from rlsys.telemetry.report import RUN_FILES
from rlsys.utils.run_folders import UNMERGED, merged_model, step_folder

VIEWERS = {"tensorboard": "tensorboard --logdir ", "mlflow.db": "mlflow ui --backend-store-uri sqlite:///"}
CURVES = {"reward": "critic/score/mean", "train loss": "train/loss", "val loss": "val/loss"}
VALIDATION, MEAN = "val-core/", "/mean@"


def summary_lines(run: RunConfig, *, finished: bool, resumes: bool = True) -> list[str]:
    """First and last values with the best step, the last checkpoint, the files of a run, and what to do next."""
    root = Path(run.default_local_dir).absolute()
    files = {"report": "index.html", "evaluation": "evaluation.json", **RUN_FILES}
    paths = {name: root / path for name, path in files.items()}
    if folder := getattr(run, "rollout_data_dir", None):
        paths["rollouts"] = Path(folder).absolute() / "index.html"
    checkpoint = None if (latest := step_folder(root)) == root else latest
    lines = list(_curves(root / "metrics.jsonl"))
    if checkpoint is not None:
        lines.append(("checkpoint", str(checkpoint)))
    lines += [(name, str(path)) for name, path in paths.items() if path.exists()]
    written = {root / name: command for name, command in VIEWERS.items() if (root / name).exists()}
    lines += [("next", f"{command}{shlex.quote(str(path))}") for path, command in written.items()]
    if not finished and resumes:
        kept = f"from step {checkpoint.name.rpartition('_')[2]}" if checkpoint else "at step 1: nothing was saved yet"
        lines.append(("next", f"the same command continues {kept}"))
    elif finished and checkpoint is not None:
        for model in filter(Path.is_dir, (checkpoint / "actor", checkpoint / "model")):
            merged = ["--local_dir", str(model), "--target_dir", str(root / f"merged_{checkpoint.name}")]
            command = shlex.join(["python", "-m", "rlsys.model_merger", "merge", *merged])
            if (tensors := model / "tensors.json").is_file() and ".lora_" in tensors.read_text():
                command = f"for a model that transformers loads, {UNMERGED.format('actor_rollout_ref.actor')}"
            lines.append(("next", command) if (whole := merged_model(model)) is None else ("model", str(whole)))
    return [f"  {name:<11} {text}" for name, text in lines]


def _curves(path: Path) -> Iterator[tuple[str, str]]:
    """First to last value of each; the best one where that is another."""
    try:
        records = list(read_jsonl(path))
    except OSError:
        return
    names = dict.fromkeys(name for record in records for name in record)
    means = [name for name in names if name.startswith(VALIDATION) and MEAN in name]
    for title, name in (CURVES | {f"validation of {name.removeprefix(VALIDATION)}": name for name in means}).items():
        points = [(int(record["step"]), float(record[name])) for record in records if record.get(name) is not None]
        if points:
            (first_step, first), (last_step, last) = points[0], points[-1]
            best_step, best = (min if "loss" in title else max)(points, key=lambda point: point[1])
            other = "" if best_step == last_step else f", best {best:.3f} at step {best_step}"
            span = f"{first:.3f} -> {last:.3f} in steps {first_step} to {last_step}"
            yield title, f"{span}{other}" if len(points) > 1 else f"{last:.3f} at step {last_step}"
