"""Models and rows as local folders: those of the hub are downloaded, the model in a checkpoint or a run becomes one.

Where a job names none, they are those of rlsys.data.start_assets.
"""

from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlsys.config import PPOConfig
from rlsys.config.checks.all import check
from rlsys.config.introspect import replaced
from rlsys.config.schema.base import Section
from rlsys.config.schema.model import ModelConfig, ServedModelConfig
from rlsys.data.remote import is_remote, local_copy
from rlsys.data.start_assets import HELD_OUT_ROWS, START_MODEL, TRAIN_ROWS
from rlsys.model_merger.convert import merge
from rlsys.model_merger.formats import find_checkpoint
from rlsys.models.hf import read_config
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import ConfigError, raised_as
from rlsys.utils.hub import download_model, download_rows, is_hub_id, is_rows_id
from rlsys.utils.run_folders import HUGGINGFACE, config_folder

log = get_logger(__name__)
ConfigT = TypeVar("ConfigT", bound=Section)
SECTIONS = ("actor_rollout_ref.model", "actor_rollout_ref.ref.model", "critic.model", "model", "reward.reward_model")
WITH_WEIGHTS = ("path", "model_path")
NAMES = (*WITH_WEIGHTS, "tokenizer_path", "lora_adapter_path")


def with_start_assets(config: PPOConfig) -> PPOConfig:
    """The configuration with the start model where it names none, and with that model's rows where it names none."""
    settings, model, data = dict[str, object](), str(START_MODEL), config.data
    if config.actor_rollout_ref.model.path is None:
        settings = {"actor_rollout_ref.model.path": model, "critic.model.path": config.critic.model.path or model}
    if data.train_files is None:
        settings |= {"data.train_files": (str(TRAIN_ROWS),), "data.val_files": data.val_files or (str(HELD_OUT_ROWS),)}
    return replaced(config, settings)


def with_local_files(config: ConfigT) -> ConfigT:
    """The configuration with a folder of config.json, weights and tokenizer for every model that it names, and with
    files or folders for its rows."""
    tree = config.model_dump()
    is_streamed = tree["data"].get("streaming", False)
    for name in (name for name in ("train_files", "val_files") if tree["data"].get(name)):
        if is_streamed and (name == "train_files" or any(map(is_rows_id, tree["data"][name]))):
            continue
        files = (download_rows(file) if is_rows_id(file) else file for file in tree["data"][name])
        tree["data"][name] = tuple(local_copy(file) if is_remote(file) else file for file in files)
    teachers = tree.get("distillation", {}).get("teacher_models", {})
    for section in (*SECTIONS, *(f"distillation.teacher_models.{name}" for name in teachers)):
        settings: Any = tree
        for part in section.split("."):
            settings = settings.get(part, {})
        for name in (name for name in NAMES if settings.get(name)):
            settings[name] = local_model(settings[name], weights=name in WITH_WEIGHTS)
            if name in WITH_WEIGHTS:
                read_config(ModelConfig(path=settings[name], trust_remote_code=settings["trust_remote_code"]))
    resolved: Any = config.model_validate(tree)
    if resolved != config and (problems := check(resolved)[0]):
        raise ConfigError("\n".join(problems))
    return resolved


def local_model(path: str, *, weights: bool = True) -> str:
    """A model directory as it is, the folder of a hub id in the hub's cache, or the model of a checkpoint or a run.

    Their `weights` are merged into `huggingface/` first where they are not there. CheckpointError for a folder without
    any, ConfigError for a model that cannot be downloaded.
    """
    if is_hub_id(path):
        downloaded = download_model(path)
        log.info("%s is %s", path, downloaded)
        return downloaded
    folder = config_folder(Path(path))
    if folder == Path(path) and (not weights or (folder / "config.json").is_file()):
        return path
    if weights and not any(folder.glob("*.safetensors")):
        checkpoint = find_checkpoint(Path(path))
        folder = checkpoint / HUGGINGFACE
        log.info("merging the weights of %s into %s", checkpoint, folder)
        merge(checkpoint, folder, overwrite=True)
    return str(folder)


def load_tokenizer(model: ServedModelConfig, padding: int | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer with the configured template; it pads by `padding`, else its own, else the end token."""
    path = model.tokenizer_path or model.path
    assert path is not None
    with raised_as(ConfigError, f"the tokenizer in {path} is missing or cannot be read"):
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    if padding is not None:
        if padding >= len(tokenizer):
            why = f"the tokenizer in {path} has ids up to {len(tokenizer) - 1}"
            raise ConfigError(f"actor_rollout_ref.rollout.padding={padding}: {why}")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    elif tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer
