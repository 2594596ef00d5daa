"""From files and dotted overrides to a validated, frozen configuration.

Layers, the later ones win: the schema's defaults, the preset (and those it names in `defaults`), the overrides. Then
references are resolved once, each value is checked by its type, and settings are checked against each other. All
problems of a stage are reported together.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from rlsys.config.arguments import Arguments, parse_arguments
from rlsys.config.checks.all import check
from rlsys.config.checks.rules import unknown_names, unused_settings
from rlsys.config.compat.reader import prefixes
from rlsys.config.derive import CHOICE, CHOSEN, DERIVED, derived_settings
from rlsys.config.introspect import allowed, choices, default_of, job_name, leaves, nest, shown
from rlsys.config.merge import Given, Layers
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import PPOConfig
from rlsys.utils.errors import ConfigError, raised_as

QUICKSTART_WHY = "no model was set, so the small start model learns arithmetic (to use yours set {key}=<folder>)"
_DAPO = {"dapo_trainer": "ppo_trainer", "dapo_megatron_trainer": "ppo_megatron_trainer"}
_DAPO |= {"fully_async_dapo_trainer": "fully_async_ppo_trainer"}
_OF_VERL = {"sft_trainer_engine": "sft_trainer", **_DAPO}
"""Files of verl's config folders, named with a --config-path that only exists there, and the presets like them."""
_MAX_LISTED = 15
_KEYS_OF = {
    "TRL": {"output_dir", "per_device_train_batch_size", "num_train_epochs", "bf16", "report_to", "num_generations"},
    "OpenRLHF": {"pretrain", "actor_num_gpus_per_node", "micro_train_batch_size", "zero_stage", "rollout_batch_size"},
    "AReaL": {"scheduler", "saver", "recover", "train_dataset", "gconfig", "allocation_mode", "stats_logger"},
}
"""First parts of keys by which a file of another trainer is recognized."""
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """A configuration, its settings (by key, with references), the headline that names its preset, and notes."""

    config: S
    settings: dict[str, Any]
    headline: str
    notes: tuple[str, ...]


def load_config(argv: Sequence[str] = (), schema: type[S] = PPOConfig) -> S:
    """The frozen configuration of a command line, `argv` without the program's name.

    Raises ConfigError with all problems. Notes (such as settings that are ignored) go to the log.
    """
    loaded = load(parse_arguments(argv), schema)
    for note in loaded.notes:
        logging.getLogger(__name__).warning("%s", note)
    return loaded.config


def load(arguments: Arguments, schema: type[S], *, chosen: Mapping[str, object] | None = None) -> Loaded[S]:
    """Like `load_config`, but also returns the notes and the headline; `chosen` are values of keys that are not set."""
    layers, typed = Layers(schema), Layers(schema)
    typed.add_overrides(arguments.overrides)
    model = typed.given.get(model_key(schema))
    preset = default_preset(arguments, schema, has_model=model is not None and model.value is not None)
    for name, tree in read_preset(preset):
        layers.add_tree(tree, name)
    layers.add_overrides(arguments.overrides)
    if schema is PPOConfig:
        is_auto = {key for key, one in layers.given.items() if one.value == "auto" and key.endswith(CHOSEN)}
        layers.given = {key: one for key, one in layers.given.items() if key not in is_auto}
    layers.given |= {key: Given(value, CHOICE, key) for key, value in (chosen or {}).items()}
    values = layers.resolve()
    derived, conflicts = derived_settings(values, layers.given, layers.engines.values())
    if derived:
        layers.adapt(derived)
        values = layers.resolve()
    config, wrong = _validated(values, layers, schema)
    problems = [*arguments.problems, *layers.refused.values(), *layers.problems, *conflicts, *wrong]
    names = unknown_names(values, schema)
    if config is None or problems:
        raise ConfigError(_listed([*problems, *names]))
    conflicts, notes = check(config)
    if names or conflicts:
        raise ConfigError(_listed([*names, *conflicts]))
    notes = [*layers.notes(), *notes, *unused_settings(config, typed.given)]
    settings = {key: given.value for key, given in layers.given.items() if not given.origin.startswith(DERIVED)}
    count = len(arguments.overrides)
    overrides = f" with {count} override{'s' if count > 1 else ''}" if count else ""
    headline = f"preset {preset.name}{overrides}{f': {preset.why}' if preset.why else ''}"
    return Loaded(config, settings, headline, tuple(notes))


def _validated(values: dict[str, object], layers: Layers, schema: type[S]) -> tuple[S | None, list[str]]:
    """The configuration, or the problems with values: with keys that were set, not with those that follow them."""
    try:
        return schema.model_validate(nest(values)), []
    except ValidationError as error:
        places = [".".join(map(str, item["loc"])) for item in error.errors(include_url=False)]
    keys = leaves(schema)
    wrong = dict.fromkeys(next((path for path in prefixes(place) if path in keys), place) for place in places)
    wrong = {path: None for path in wrong if path in layers.given} or wrong
    return None, [_value_problem(path, values, layers, schema) for path in wrong if path not in layers.unresolved]


def _value_problem(path: str, values: dict[str, object], layers: Layers, schema: type[Section]) -> str:
    field, value = leaves(schema)[path], values[path]
    given = layers.given.get(path)
    where = given.origin if given else f"it follows {default_of(field)}"
    spelled = f"{given.spelling} ({path})" if given and given.spelling != path else path
    near = get_close_matches(value, choices(field), n=1) if isinstance(value, str) else []
    hint = "; Ascend is not supported" if value == "npu" else f"; set {path}={near[0]}" if near else ""
    return f"{spelled} = {shown(value)} ({where}): must be {allowed(field, value)}{hint}"


def _listed(problems: Sequence[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    lines = [f"{len(unique)} settings are wrong:", *(f"  - {problem}" for problem in unique[:_MAX_LISTED])]
    if len(unique) > _MAX_LISTED:
        unknown = {re.split(r"[ .]", problem)[0] for problem in unique if "no such key" in problem}
        lines.append(f"  ... and {len(unique) - _MAX_LISTED} more")
        if len(unknown) > len(unique) / 4:
            likely = max(_KEYS_OF, key=lambda trainer: len(unknown & _KEYS_OF[trainer]))
            another = likely if len(unknown & _KEYS_OF[likely]) > 2 else "another job or trainer"
            lines.append(f"{len(unknown)} of the names are no keys of this job: it looks like a file of {another}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Preset:
    """A preset's name, the folders it and its parents are looked for in, and why it was chosen."""

    name: str
    folders: tuple[Path, ...]
    why: str = ""


def presets_folder() -> Path:
    """The folder of the presets shipped with rlsys, in the wheel or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "presets" if (package / "presets").is_dir() else package.parent / "config"


def preset_names(folder: Path | None = None) -> list[str]:
    """The names of the presets in a folder, by default those shipped with rlsys."""
    return sorted(path.stem for path in (folder or presets_folder()).glob("*.yaml"))


def model_key(schema: type[Section]) -> str:
    """The key that names the model of a job."""
    return "model.path" if "model" in schema.model_fields else "actor_rollout_ref.model.path"


def default_preset(arguments: Arguments, schema: type[Section], *, has_model: bool) -> Preset:
    """The preset of a command line. A PPO run without a preset and without a model is the quickstart."""
    folders = (presets_folder(),)
    asked = (arguments.config_name or "").removesuffix(".yaml")
    name = _OF_VERL.get(asked, arguments.config_name or "")
    if arguments.config_path is not None:
        folder = Path(arguments.config_path).expanduser()
        if folder.is_dir():
            folders = (folder, presets_folder())
        elif folder.name != "config" or name.removesuffix(".yaml") not in preset_names():
            raise ConfigError(f"--config-path={arguments.config_path}: folder not found")
    is_asked = arguments.config_name is not None or arguments.config_path is not None
    job = job_name(schema)
    if job == "ppo" and not is_asked and not has_model:
        return Preset("quickstart", folders, QUICKSTART_WHY.format(key=model_key(schema)))
    return Preset(name or ("eval" if job == "eval" else f"{job}_trainer"), folders)


def read_preset(preset: Preset, _seen: tuple[str, ...] = ()) -> list[tuple[str, dict[str, object]]]:
    """(file name, tree) of a preset and those it builds on, in the order they apply."""
    path = _find(preset)
    if path.stem in _seen:
        raise ConfigError(f"{path}: the presets {' -> '.join((*_seen, path.stem))} form a cycle")
    tree = read_yaml(path)
    parents = tree.pop("defaults", [])
    if not isinstance(parents, list):
        raise ConfigError(f"{path}: 'defaults' must be a list of presets to build on, e.g. [ppo_trainer, _self_]")
    layers: list[tuple[str, dict[str, object]]] = []
    for parent in parents if "_self_" in parents else [*parents, "_self_"]:
        if parent == "_self_":
            layers.append((str(path), tree))
        elif isinstance(parent, str):
            layers += read_preset(Preset(parent, (path.parent, *preset.folders)), (*_seen, path.stem))
        else:
            raise ConfigError(f"{path}: 'defaults' lists presets only, not {parent}; config groups are not supported")
    return layers


def _find(preset: Preset) -> Path:
    name = preset.name
    if "/" in name and Path(name).expanduser().is_file():
        return Path(name).expanduser()
    stem = name.removesuffix(".yaml").removeprefix("configs/")  # AReaL's folder
    for path in [folder / f"{stem}.yaml" for folder in preset.folders]:
        if path.is_file():
            return path
    known = sorted({name for folder in preset.folders for name in preset_names(folder)})
    near = get_close_matches(stem, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    where = " or ".join(str(folder) for folder in dict.fromkeys(preset.folders))
    raise ConfigError(f"--config-name={name}: no such preset in {where}; {hint}choose from {', '.join(known)}")


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping in a YAML file; ConfigError names the file and the line."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors = (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError, RecursionError)
    with raised_as(ConfigError, f"{path}: cannot be read as YAML", *errors):
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; it must hold keys and values")
    return {str(key): value for key, value in tree.items()}
