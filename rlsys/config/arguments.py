"""The command line: a few options, and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rlsys.config.overrides import Override, parse_override
from rlsys.utils.errors import ConfigError

_WITH_VALUE = {
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-dir": "config_path",
    "-cd": "config_path",
}
_FLAGS = {
    "--help": "help",
    "-h": "help",
    "--print-config": "print_config",
    "--dry-run": "dry_run",
}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line; `problems` are overrides that cannot be parsed."""

    overrides: tuple[Override, ...] = ()
    problems: tuple[str, ...] = ()
    config_name: str | None = None
    config_path: str | None = None
    help: bool = False
    print_config: bool = False
    dry_run: bool = False


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split options from overrides; ConfigError for an unknown option."""
    options: dict[str, str | bool] = {}
    overrides: list[Override] = []
    problems: list[str] = []
    waiting = iter(argv)
    for text in waiting:
        name, equals, value = text.partition("=")
        if name in _WITH_VALUE:
            value = value if equals else next(waiting, "")
            if not value:
                raise ConfigError(f"{name} needs a value, e.g. {name}=ppo_trainer")
            options[_WITH_VALUE[name]] = value
        elif text in _FLAGS:
            options[_FLAGS[text]] = True
        elif text.startswith("-"):
            raise ConfigError(_unknown_option(text, name))
        else:
            try:
                overrides.append(parse_override(text))
            except ConfigError as error:
                problems.append(str(error))
    return Arguments(tuple(overrides), tuple(problems), **options)  # type: ignore[arg-type]


def _unknown_option(text: str, name: str) -> str:
    known = [option for option in (*_WITH_VALUE, *_FLAGS) if option.startswith("--")]
    near = get_close_matches(name, known, n=1)
    if near:
        return f"unknown option {name}; did you mean {near[0]}?"
    bare = text.lstrip("-")
    if "." in bare.partition("=")[0]:
        return f"settings have no dashes: {bare if '=' in bare else f'{bare}=<value>'}"
    return f"unknown option {name}; options are {', '.join(known)}, and settings have the form key=value"
