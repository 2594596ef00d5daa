"""Options
  --config-name NAME    preset or YAML file to start from
  --config-path FOLDER  where to look for it first
  --print-config        print the settings as YAML, with derived values as comments
  --dry-run             check everything, print the plan and exit
  --dry-run --gpu=H100  plan for GPUs of this type, which need not be here: seconds of a step, layouts that fit
  --help                this text
  --help WORD ...       the keys of a section, one key with its type and other names, or the keys that hold a word
  --help all            every key
  --version             the version of rlsys

Settings, any number; the last one of a key wins
  key=value             set a key: text, numbers, true, null, [a,b], {a: 1}, ${other.key}
  +key=value            the same, as Hydra writes new keys of override_config, reward_kwargs, ...
  ~key                  reset to the default, or remove an added key
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rlsys.config.overrides import Override, parse_override
from rlsys.utils.errors import ConfigError
from rlsys.utils.gpus import GPUS

_PARSER = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
_PARSER.add_argument("--config-name", "-cn", "--config")
_PARSER.add_argument("--config-path", "-cp", "--config-dir", "-cd")
_PARSER.add_argument("--gpu")
_PARSER.add_argument("--help", "-h", nargs="*")
for _flag in ("--print-config", "--dry-run", "--version"):
    _PARSER.add_argument(_flag, action="store_true")
_OPTIONS = [name for action in _PARSER._actions for name in action.option_strings if name.startswith("--")]


@dataclass(frozen=True)
class Arguments:
    """A parsed command line; `problems` are overrides that cannot be parsed, `help` the words after --help, `gpu` the
    type that a dry run plans for."""

    overrides: tuple[Override, ...] = ()
    problems: tuple[str, ...] = ()
    config_name: str | None = None
    config_path: str | None = None
    help: tuple[str, ...] | None = None
    version: bool = False
    print_config: bool = False
    dry_run: bool = False
    gpu: str | None = None


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split options from overrides; ConfigError for an unknown option."""
    try:
        options, rest = _PARSER.parse_known_args(argv)
    except argparse.ArgumentError as error:
        example = "--gpu=H100" if error.argument_name == "--gpu" else "--config-name=ppo_trainer"
        raise ConfigError(f"{error.argument_name} needs a value, e.g. {example}") from None
    if "" in (options.config_name, options.config_path):
        raise ConfigError("--config-name and --config-path need a value, e.g. --config-name=ppo_trainer")
    if options.gpu is not None and (not options.dry_run or options.gpu not in GPUS):
        raise ConfigError(f"--gpu={options.gpu}: a dry run plans for {', '.join(GPUS)}, e.g. --dry-run --gpu=H100")
    overrides, problems = list[Override](), list[str]()
    for text in (text for text in rest if not text.isspace()):
        if text.startswith("-"):
            raise ConfigError(_unknown_option(text))
        try:
            overrides.append(parse_override(text))
        except ConfigError as error:
            problems.append(str(error))
    return Arguments(tuple(overrides), tuple(problems), **vars(options))


def _unknown_option(text: str) -> str:
    name, bare = text.partition("=")[0], text.lstrip("-")
    if near := get_close_matches(name, _OPTIONS, n=1):
        return f"unknown option {name}; did you mean {near[0]}?"
    if "." in bare.partition("=")[0]:
        return f"settings have no dashes: {bare if '=' in bare else f'{bare}=<value>'}"
    return f"unknown option {name}; options are {', '.join(_OPTIONS)}, and settings have the form key=value"
