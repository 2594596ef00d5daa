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
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from rlsys.config.arguments import Arguments, parse_arguments
from rlsys.config.checks.all import check
from rlsys.config.checks.rules import unknown_names, unused_settings
from rlsys.config.compat.reader import prefixes
from rlsys.config.derive import CHOICE, CHOSEN, DERIVED, ENGINE, RANKS, UNSET_RANKS, derived_settings
from rlsys.config.introspect import allowed, choices, default_of, leaves, nest, replaced, shown
from rlsys.config.merge import Given, Layers
from rlsys.config.presets import default_preset, model_key, read_preset
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import PPOConfig
from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError

_MAX_LISTED = 15
_KEYS_OF: dict[str, list[str]] = read_table(__file__, "other_trainers.toml")
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


def load(
    arguments: Arguments, schema: type[S], *, chosen: Mapping[str, object] | None = None, is_draft: bool = False
) -> Loaded[S]:
    """Like `load_config`, but also returns the notes and the headline; `chosen` are values of keys that are not set.

    Of a draft the rollout engine, where it is not set, is still to be chosen: what only the default lacks is not wrong.
    """
    layers, typed = Layers(schema), Layers(schema)
    typed.add_overrides(arguments.overrides)
    model = typed.given.get(model_key(schema))
    preset = default_preset(arguments, schema, has_model=model is not None and model.value is not None)
    for name, tree in read_preset(preset):
        layers.add_tree(tree, name)
    layers.add_overrides(arguments.overrides)
    if schema is PPOConfig:
        given = [(key, one) for key, one in layers.given.items() if (key, one.value) != (ENGINE, None)]
        layers.given = {key: one for key, one in given if one.value != "auto" or not key.endswith(CHOSEN)}
    layers.given |= {key: Given(value, CHOICE, key) for key, value in (chosen or {}).items()}
    values = layers.resolve()
    derived, conflicts = derived_settings(values, layers.given, layers.engines.values())
    if derived:
        layers.adapt(derived)
        values = layers.resolve()
    config, wrong = _validated(values, layers, schema)
    problems = [*arguments.problems, *layers.refused.values(), *layers.problems, *conflicts, *wrong]
    names = [*unknown_names(values, schema)]
    if config is None or problems:
        raise ConfigError(_listed([*problems, *names]))
    conflicts, notes = check(config, is_here=arguments.gpu is None)
    if conflicts and is_draft and ENGINE in leaves(schema) and ENGINE not in layers.given:
        others = check(replaced(config, {ENGINE: "vllm"}), is_here=arguments.gpu is None)[0]
        conflicts = [one for one in conflicts if one in others]
    if conflicts and RANKS in leaves(schema) and RANKS not in layers.given:
        fewer = check(replaced(config, {RANKS: 8}), is_here=arguments.gpu is None)[0]
        conflicts = [UNSET_RANKS, *conflicts] if len(fewer) < len(conflicts) else conflicts
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
    wrong = dict.fromkeys(next((path for path in prefixes(place) if path in leaves(schema)), place) for place in places)
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
        lines.append(f"  ... and {len(unique) - _MAX_LISTED} more")
    unknown = [re.split(r"[ .]", problem)[0] for problem in unique if "no such key" in problem]
    if len(unknown) > max(_MAX_LISTED / 2, len(unique) / 4, 2 * sum("did you mean" in one for one in unique)):
        likely = (trainer for trainer, keys in _KEYS_OF.items() if len({*unknown} & {*keys}) > 2)
        origin = next(likely, "another job or trainer")
        lines.append(f"{len(unknown)} of the names are no keys of this job: it looks like a file of {origin}")
    return "\n".join(lines)
