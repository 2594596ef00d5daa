"""The start of a job: load its settings, or print --help, --print-config, --dry-run or an error and exit."""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

from rlsys.config.arguments import Arguments, parse_arguments
from rlsys.config.derive import MODE, RANKS, UNSET_RANKS
from rlsys.config.introspect import default_of, leaves, nest, shown, value_at
from rlsys.config.load import Loaded, load
from rlsys.config.plan import plan_text
from rlsys.config.schema.base import Section
from rlsys.utils.errors import ConfigError, DataError

S = TypeVar("S", bound=Section)


def main_config(
    argv: Sequence[str],
    schema: type[S],
    *,
    check: Callable[[S, Arguments], tuple[Sequence[str], Mapping[str, str]]] | None = None,
    choose: Callable[[S, Collection[str], Arguments], tuple[Mapping[str, object], str]] | None = None,
) -> S:
    """The configuration of a job, after printing its headline, notes and plan.

    `check`, called with the configuration and the arguments, returns notes on what settings name and facts for
    `plan_text`, and raises ConfigError or DataError. `choose`, called with the configuration, the keys that are set and
    the arguments, returns values of others and what the plan says about them. Exits with 2 and a message on stderr if a
    setting is wrong, and with 0 after --help, --version, --print-config and --dry-run.
    """
    try:
        arguments = parse_arguments(argv)
        if arguments.version:
            _print_and_exit(f"rlsys {version('rlsys')}")
        if arguments.help is not None:
            from rlsys.config.help import help_text

            _print_and_exit(help_text(schema, *arguments.help))
        is_draft, sizes = choose is not None and not arguments.print_config, ""
        loaded = load(arguments, schema, is_draft=is_draft)
        if choose is not None and is_draft:
            chosen, sizes = choose(loaded.config, loaded.settings.keys(), arguments)
            loaded = replace(load(arguments, schema, chosen=chosen), settings=loaded.settings)
        notes, facts = check(loaded.config, arguments) if check and not arguments.print_config else ((), {})
    except (ConfigError, DataError) as error:
        print(f"rlsys: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for note in (*loaded.notes, *notes):
        print(f"rlsys: note: {note}", file=sys.stderr, flush=True)
    if arguments.print_config:
        _print_and_exit(as_yaml(loaded))
    is_default = {MODE, RANKS}.isdisjoint(loaded.settings) and value_at(loaded.config, RANKS) == 1
    facts = {**facts, "sizes": sizes, "processes": UNSET_RANKS if is_default else ""}
    text = "\n".join(filter(None, (f"rlsys: {loaded.headline}", plan_text(loaded.config, facts))))
    if arguments.dry_run:
        _print_and_exit(f"{text}\nrlsys: --dry-run: nothing was started")
    print(text, flush=True)
    return loaded.config


def as_yaml(loaded: Loaded[S]) -> str:
    """The settings as YAML that loads as the same configuration, and in comments the keys that follow others."""
    import yaml

    fields = {key: field for key, field in leaves(type(loaded.config)).items() if key not in loaded.settings}
    follow = [key for key, field in fields.items() if "${" in str(default_of(field))]
    lines = [f"# {key}: {shown(value_at(loaded.config, key))}" for key in follow]
    return "\n".join([yaml.safe_dump(nest(loaded.settings), sort_keys=False, allow_unicode=True), *lines])


def _print_and_exit(text: str) -> None:
    """Print and exit with 0, also if the reader of a pipe (head, less) has exited."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
