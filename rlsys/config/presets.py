"""The presets: which one a command line starts from, and the YAML files that it builds on."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rlsys.config.arguments import Arguments
from rlsys.config.introspect import job_name
from rlsys.config.schema.base import Section
from rlsys.utils.errors import ConfigError, raised_as

QUICKSTART_WHY = "no model was set, so the small start model learns arithmetic (to use yours set {key}=<folder>)"
_PPO = ("ppo_trainer", "ppo_megatron_trainer", "fully_async_ppo_trainer")
_OF_VERL = {"sft_trainer_engine": "sft_trainer", **{name.replace("ppo", "dapo"): name for name in _PPO}}
"""Files of verl's config folders, named with a --config-path that only exists there, and the presets like them."""


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
    name = _OF_VERL.get((arguments.config_name or "").removesuffix(".yaml"), arguments.config_name or "")
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


def read_preset(preset: Preset, _seen: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, object]]]:
    """(file name, tree) of a preset and those it builds on, in the order they apply."""
    path = _find(preset)
    if path.stem in _seen:
        raise ConfigError(f"{path}: the presets {' -> '.join((*_seen, path.stem))} form a cycle")
    tree = read_yaml(path)
    parents = tree.pop("defaults", [])
    if not isinstance(parents, list):
        raise ConfigError(f"{path}: 'defaults' must be a list of presets to build on, e.g. [ppo_trainer, _self_]")
    for parent in parents if "_self_" in parents else [*parents, "_self_"]:
        if parent == "_self_":
            yield str(path), tree
        elif isinstance(parent, str):
            yield from read_preset(Preset(parent, (path.parent, *preset.folders)), (*_seen, path.stem))
        else:
            raise ConfigError(f"{path}: 'defaults' lists presets only, not {parent}; config groups are not supported")


def _find(preset: Preset) -> Path:
    name = preset.name
    if "/" in name and Path(name).expanduser().is_file():
        return Path(name).expanduser()
    stem = name.removesuffix(".yaml").removeprefix("configs/")  # AReaL's folder
    if paths := [path for folder in preset.folders if (path := folder / f"{stem}.yaml").is_file()]:
        return paths[0]
    known = sorted({name for folder in preset.folders for name in preset_names(folder)})
    hint = "".join(f"did you mean {near}? " for near in get_close_matches(stem, known, n=1))
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
