"""Models as folders that workers load: the model in a checkpoint or a run becomes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from rlsys.config.schema.base import Section
from rlsys.model_merger.convert import merge
from rlsys.model_merger.formats import find_checkpoint
from rlsys.telemetry.log import get_logger
from rlsys.utils.run_folders import HUGGINGFACE, config_folder

log = get_logger(__name__)
ConfigT = TypeVar("ConfigT", bound=Section)
SECTIONS = ("actor_rollout_ref.model", "critic.model", "model", "reward.reward_model")
NAMES = ("path", "tokenizer_path", "model_path")


def with_local_models(config: ConfigT) -> ConfigT:
    """The configuration with a folder of config.json, weights and tokenizer for every model that it names."""
    tree, is_changed = config.model_dump(), False
    for section in SECTIONS:
        settings: Any = tree
        for part in section.split("."):
            settings = settings.get(part, {})
        for name in (name for name in NAMES if settings.get(name)):
            folder = local_model(settings[name])
            is_changed |= folder != settings[name]
            settings[name] = folder
    return config.model_validate(tree) if is_changed else config


def local_model(path: str) -> str:
    """A model directory as it is; of a checkpoint or a run the model in it, whose weights are merged into its
    `huggingface/` first where they are not there. CheckpointError for a folder without any."""
    folder = config_folder(Path(path))
    if folder == Path(path) and (folder / "config.json").is_file():
        return path
    if not any(folder.glob("*.safetensors")):
        checkpoint = find_checkpoint(Path(path))
        folder = checkpoint / HUGGINGFACE
        log.info("merging the weights of %s into %s", checkpoint, folder)
        merge(checkpoint, folder, overwrite=True)
    return str(folder)
