"""Whether the files and folders that settings name exist and hold what they should."""

import ast
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from rlsys.config.checks.findings import wrong
from rlsys.config.schema.algorithm import RewardKwargsConfig
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import EvalConfig, GradedJob, PPOConfig, SupervisedConfig
from rlsys.config.schema.model import ModelFolderConfig
from rlsys.config.vocabulary import REWARD_MANAGERS, ROW_FILES
from rlsys.utils.hub import is_hub_id, is_rows_id
from rlsys.utils.plugins import PACKAGE
from rlsys.utils.run_folders import config_folder

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
ANSWERED = "data.max_prompt_length + data.max_response_length"

MAX_NAME_BYTES = 255
"""Of a file or folder on Linux."""


def check_files(cfg: PPOConfig | SupervisedConfig | EvalConfig) -> Iterator[str]:
    """Data, models, rewards and output folders of a job."""
    if not isinstance(cfg, EvalConfig):
        yield from _rows(cfg, "data.train_files", cfg.data.train_files)
    yield from _rows(cfg, "data.val_files", cfg.data.val_files)
    custom = cfg.data.custom_cls
    if custom.path is not None and custom.name is not None:
        yield from _python(cfg, "data.custom_cls", custom.path, custom.name, "class")
    if isinstance(cfg, SupervisedConfig):
        yield from _model(cfg, "model", cfg.model, cfg.data.max_length, "data.max_length")
    else:
        policy, longest = cfg.actor_rollout_ref.model, cfg.data.max_prompt_length + cfg.data.max_response_length
        yield from _model(cfg, "actor_rollout_ref.model", policy, longest, ANSWERED)
        if isinstance(cfg, PPOConfig) and cfg.use_critic and cfg.critic.model.path != policy.path:
            yield from _model(cfg, "critic.model", cfg.critic.model, longest, ANSWERED)
        frozen = cfg.actor_rollout_ref.reference_model if isinstance(cfg, PPOConfig) and cfg.use_reference else policy
        if frozen.path != policy.path:
            yield from _model(cfg, "actor_rollout_ref.ref.model", frozen, longest, ANSWERED)
        teachers = cfg.distillation.teacher_models if isinstance(cfg, PPOConfig) and cfg.distillation.enabled else {}
        for name, teacher in teachers.items():
            if teacher.model_path and (why := _no_folder(teacher.model_path)):
                yield wrong(cfg, f"distillation.teacher_models.{name}.model_path", why, value=teacher.model_path)
        yield from _reward(cfg)
    yield from _output(cfg)


def _rows(cfg: Section, key: str, files: tuple[str, ...] | None) -> Iterator[str]:
    if files == ():
        yield wrong(cfg, key, f"empty list; set {key}=<file>, or null for the start assets")
    for name in files or ():
        if is_rows_id(name):
            continue
        local = "://" not in name
        kinds = "" if local or name.endswith(ROW_FILES) else f"rows are read from {', '.join(ROW_FILES)}"
        why = rows_problem(Path(name)) if local else kinds or _address_problem(name)
        if why or (local and not Path(name).stat().st_size):
            yield wrong(cfg, key, why or "the file is empty", value=name)
    if doubled := [name for name in files or () if (files or ()).count(name) > 1]:
        yield wrong(cfg, key, "the file is listed twice, so its rows would count twice; list it once", value=doubled[0])


def rows_problem(path: Path) -> str:
    """Why rows cannot be read from a path; empty if they can."""
    if path.is_dir():
        splits = ", ".join(sorted(str(state.parent) for state in path.glob("*/state.json")))
        if (path / "dataset_dict.json").is_file():
            return f"the folder has splits; set one of them: {splits}"
        if not (path / "state.json").is_file():
            inside = ",".join(sorted(str(file) for file in path.iterdir() if file.suffix in ROW_FILES)[:2])
            listed = f"a list of files, [{inside},...]" if inside else "a file"
            return f"not a folder written by datasets' save_to_disk (no state.json); set {listed}"
        return ""
    if ":/" in str(path):
        return "only local files are read here; copy it and set the copy"
    if not path.exists():
        make = f"to create example data run python scripts/prepare_data.py --out {path.parent}"
        return f"file not found{_nearby(path)}; set an existing file ({make})"
    if path.suffix.lower() not in ROW_FILES:
        return f"rows are read from {', '.join(ROW_FILES)}"
    return "" if os.access(path, os.R_OK) else "the file is not readable"


def _address_problem(url: str) -> str:
    """Why nothing can be at an address: an unknown file system, or one whose package is missing."""
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        return f"fsspec cannot read there: {error}; or copy the file and set the copy"
    return ""


def _nearby(path: Path) -> str:
    """A similar file where a missing file was expected."""
    if not path.parent.is_dir():
        return f" ({path.parent} does not exist)"
    names = sorted(item.name for item in path.parent.iterdir() if path.suffix in ("", item.suffix) and item.is_file())
    near = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f" ({path.parent.absolute()} has {near[0]})" if near else ""


def _model(cfg: Section, key: str, model: ModelFolderConfig, longest: int, lengths: str) -> Iterator[str]:
    for name in ("path", "tokenizer_path", "lora_adapter_path"):
        value = getattr(model, name, None)
        if value is not None and (why := _no_folder(value)):
            yield wrong(cfg, f"{key}.{name}", why, "<folder>")
    library = model.external_lib or ""
    if library.endswith(".py") and not Path(library).expanduser().is_file():
        yield wrong(cfg, f"{key}.external_lib", f"file not found{_nearby(Path(library))}; set a module or file")
    elif library and not library.endswith(".py") and importlib.util.find_spec(library.split(".")[0] or "?") is None:
        yield wrong(cfg, f"{key}.external_lib", "the module cannot be imported; put it on PYTHONPATH")
    if model.path is None or not Path(model.path).is_dir():
        return
    facts = model_facts(model.path)
    limit = (facts | getattr(model, "override_config", {})).get("max_position_embeddings")
    if not facts:
        yield wrong(cfg, f"{key}.path", "the folder has no readable config.json, so it is not a Hugging Face model")
    elif why := _wrong_facts(facts):
        yield wrong(cfg, f"{key}.path", f"config.json: {why}")
    elif isinstance(limit, int) and limit < longest:
        yield wrong(cfg, f"{key}.path", f"the model supports {limit} tokens, but {lengths} is {longest}; lower it")


def _wrong_facts(facts: Mapping[str, object]) -> str:
    """What no model can have of sizes and end tokens; empty if nothing is wrong."""
    for name in (name for name in SIZES if name in facts):
        size = facts[name]
        if not isinstance(size, int) or size < 1:
            return f"{name}={size!r} must be a whole number, at least 1"
    ends, vocabulary = facts.get("eos_token_id"), facts.get("vocab_size")
    for end in ends if isinstance(ends, list) else [ends]:
        if isinstance(end, int) and isinstance(vocabulary, int) and end >= vocabulary:
            return f"eos_token_id={end} is outside the vocabulary of {vocabulary} tokens"
    return ""


def _no_folder(name: str) -> str:
    """Why a name is neither the folder nor the hub id of a model, and how to get one; empty if it is."""
    if Path(name).is_dir() or is_hub_id(name):
        return ""
    if Path(name).is_file():
        return "it is a file, not a folder"
    if "smollm2" in name.lower():
        return "folder not found; python scripts/smollm2.py creates it"
    return "folder not found; set one that is there, or a model of the hub as org/name or org/name@revision"


def model_facts(folder: str | Path | None) -> dict[str, object]:
    """The config.json of a model, also of one in a checkpoint or a run; empty if there is none that can be read."""
    path = config_folder(Path(folder or "")) / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8")) if folder and path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _reward(cfg: GradedJob) -> Iterator[str]:
    custom, manager = cfg.reward.custom_reward_function, cfg.reward.reward_manager
    if custom.path is not None:
        yield from _python(cfg, "reward.custom_reward_function", custom.path, custom.name, "function")
    if manager.source == "importlib" and manager.module.path is not None:
        yield from _python(cfg, "reward.reward_manager.module", manager.module.path, manager.module.name, "class")
    elif manager.name in REWARD_MANAGERS:
        for name, value in (cfg.reward.reward_kwargs.model_extra or {}).items():
            why = f"reward.reward_manager.name={manager.name} has {' and '.join(RewardKwargsConfig.model_fields)} only"
            yield wrong(cfg, f"reward.reward_kwargs.{name}", why, value=value)
    if not isinstance(cfg, PPOConfig) or not cfg.reward.reward_model.enable:
        return
    model, is_judge = cfg.reward.reward_model.model_path, cfg.reward.has_judge
    if model and (why := _no_folder(model) or ("" if is_judge else no_score_head(Path(model)))):
        yield wrong(cfg, "reward.reward_model.model_path", why)


def no_score_head(folder: Path) -> str:
    """Why a model cannot be a reward model, by its config.json; empty if it can, or if that does not say."""
    kinds = model_facts(folder).get("architectures")
    if not isinstance(kinds, list) or not any(str(kind).endswith("ForCausalLM") for kind in kinds):
        return ""
    why = "a language model without a score head; train one with trainer.main_rm, or let a reward function ask it"
    return f"{why}: set reward.custom_reward_function.path and reward.reward_model.rollout.name"


def _python(cfg: Section, section: str, file: str, name: str, kind: str) -> Iterator[str]:
    """Whether a Python file can be parsed and defines a name; nothing in it is executed."""
    path, key = Path(file), f"{section}.path"
    if file.startswith(PACKAGE):
        return
    if not path.is_file():
        yield wrong(cfg, key, f"file not found{_nearby(path)}", "<file.py>")
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield wrong(cfg, key, f"not valid Python{line}: {getattr(error, 'msg', None) or error}")
        return
    if name not in {getattr(node, field, None) for node in ast.walk(tree) for field in ("name", "asname", "id")}:
        made = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        defined = ", ".join([n.name for n in made if not n.name.startswith("_")][:5]) or "nothing"
        yield wrong(cfg, f"{section}.name", f"{file} has no {kind} of that name; it defines {defined}")


def existing_parent(path: Path) -> Path:
    """An absolute path, or the nearest folder above it that exists."""
    return next((parent for parent in (path, *path.parents) if os.path.exists(parent)), Path("/"))


def _output(cfg: PPOConfig | SupervisedConfig | EvalConfig) -> Iterator[str]:
    """Whether the folders that a run writes exist or can be created."""
    trainer = cfg.trainer
    for key in ("default_hdfs_dir", "resume_from_path"):
        url = getattr(trainer, key, None) or ""
        if why := _address_problem(url) if "://" in url else "":
            yield wrong(cfg, f"trainer.{key}", why)
    if "://" not in (getattr(trainer, "default_hdfs_dir", None) or "://"):
        yield wrong(cfg, "trainer.default_hdfs_dir", "not an address", "s3://BUCKET/RUN")
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir", "output_path"):
        if "://" in (name := getattr(trainer, key, None) or ""):
            yield wrong(cfg, f"trainer.{key}", "set a local folder; to copy checkpoints set trainer.default_hdfs_dir")
        elif name:
            path, is_file = Path(name).absolute(), key == "output_path"
            standing = existing_parent(path.parent if is_file else path)
            if is_file and path.is_dir():
                yield wrong(cfg, f"trainer.{key}", "a folder, not a file", "<file>")
            elif any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
                yield wrong(cfg, f"trainer.{key}", f"a name of more than {MAX_NAME_BYTES} bytes", "<folder>")
            elif not standing.is_dir():
                yield wrong(cfg, f"trainer.{key}", f"{standing} is a file, not a folder", "<folder>")
            elif not os.access(standing, os.W_OK):
                yield wrong(cfg, f"trainer.{key}", f"{standing} is not writable", "<folder>")
            elif key == "validation_data_dir" and name == getattr(trainer, "rollout_data_dir", None):
                yield wrong(cfg, f"trainer.{key}", "rollouts are written there, under the same names", "<folder>")
