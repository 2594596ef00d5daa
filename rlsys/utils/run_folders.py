"""Where checkpoints and the models in them are inside a run's folder; the layout is verl's."""

from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
HUGGINGFACE = "huggingface"
UNMERGED = "train a step more with {}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
"""How a run of adapters gets the model directory that only training writes, for the section of a role."""
MAX_DIGITS = 18
"""Of a step number."""


def pointer_text(root: Path) -> str:
    """The text of the pointer to the latest checkpoint of a run's folder; empty where it is not a file."""
    pointer = root / LATEST
    return pointer.read_text(errors="replace").strip() if pointer.is_file() else ""


def step_of(text: str) -> int | None:
    """The step that the text of a pointer names, if it does."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


def latest_step(root: Path) -> int | None:
    """The step of the latest checkpoint of a run's folder, if its pointer holds one."""
    return step_of(pointer_text(root))


def step_folder(path: Path) -> Path:
    """The latest `global_step_N` of a run's folder; any other path as it is."""
    step = latest_step(path)
    return path if step is None else path / f"global_step_{step}"


def config_folder(path: Path) -> Path:
    """The folder with the config.json of a model directory, a checkpoint or a run; `path` where there is none."""
    step = step_folder(path)
    places = (step, step / HUGGINGFACE, step / "actor" / HUGGINGFACE)
    return next((place for place in places if (place / "config.json").is_file()), path)


def merged_model(directory: Path) -> Path | None:
    """The model directory that training wrote beside the shards of a role, with adapters merged, if it did."""
    places = (directory / HUGGINGFACE, directory.parent / HUGGINGFACE)
    return next((place for place in places if any(place.glob("*.safetensors"))), None)
