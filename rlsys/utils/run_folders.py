"""Where checkpoints and the models in them are inside a run's folder; the layout is verl's."""

from __future__ import annotations

from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
HUGGINGFACE = "huggingface"
MAX_DIGITS = 18
"""Of a step number."""


def step_folder(path: Path) -> Path:
    """The latest `global_step_N` of a run's folder; any other path as it is."""
    pointer = path / LATEST
    step = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    return path / f"global_step_{step}" if step.isdecimal() and len(step) <= MAX_DIGITS else path


def config_folder(path: Path) -> Path:
    """The folder with the config.json of a model directory, a checkpoint or a run; `path` where there is none."""
    step = step_folder(path)
    places = (step, step / HUGGINGFACE, step / "actor" / HUGGINGFACE)
    return next((place for place in places if (place / "config.json").is_file()), path)
