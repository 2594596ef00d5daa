"""The keys of a schema: paths, defaults, rules, allowed values, and the nearest keys to an unknown name."""

import difflib
import json
from collections.abc import Iterator
from copy import copy
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, get_origin

from pydantic import Field, TypeAdapter
from pydantic.fields import FieldInfo

from rlsys.config.overrides import format_value
from rlsys.config.schema.base import ActiveIf, Condition, Registered, Requires, Section
from rlsys.utils.data_files import read_table

_HUGE = 1e6
_WORDS = read_table(__file__, "json_schema_words.toml")
RULES, LISTS = read_table(__file__, "rules.toml"), {"values", "excluded", "given", "besides"}
_SHOWN_CHARS = 80


def job_name(schema: type[Section]) -> str:
    """ppo, sft, rm or eval, for the schema of a job."""
    return schema.__name__.removesuffix("Config").lower()


@cache
def sections(schema: type[Section]) -> dict[str, type[Section]]:
    """Every section by its path; the schema itself is the empty path."""
    paths: dict[str, type[Section]] = {"": schema}
    for name, field in schema.model_fields.items():
        if _is_section(field):
            below = sections(field.annotation)  # type: ignore[arg-type]
            paths |= {f"{name}.{path}" if path else name: section for path, section in below.items()}
    return paths


@cache
def leaves(schema: type[Section]) -> dict[str, FieldInfo]:
    """Every key that holds a value by its path, in the order of the schema."""
    keys: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        if not _is_section(field):
            keys[name] = field
            continue
        extra: Any = field.json_schema_extra
        for path, leaf in leaves(field.annotation).items():  # type: ignore[arg-type]
            if extra["follows"] and (not extra["only"] or path in extra["only"]):
                leaf = copy(leaf)
                leaf.json_schema_extra = {"link": f"{extra['follows']}.{path}"}
            keys[f"{name}.{path}"] = leaf
    return keys


@cache
def rules(schema: type[Section]) -> tuple[tuple[str, str, Condition | Registered], ...]:
    """(key or section, section it is in, rule) of every rule of a schema."""
    return tuple(
        (f"{path}.{name}" if path else name, path, rule)
        for path, section in sections(schema).items()
        for name, field in section.model_fields.items()
        for rule in (*_conditions(section, name), *(one for one in field.metadata if isinstance(one, Registered)))
    )


def _conditions(section: type[Section], name: str) -> list[Condition]:
    """The entries of rules.toml for a key, by the class that declares it; a row may be of several keys."""
    owner = next(cls for cls in section.__mro__ if name in vars(cls).get("__annotations__", ()))
    rows = [row for names, row in RULES.get(owner.__name__, {}).items() if name in names.split(", ")]
    return [_condition(**entry) for row in rows for entry in (row if isinstance(row, list) else [row])]


def _condition(*, active_if: str = "", requires: str = "", **more: Any) -> Condition:
    for name in more.keys() & LISTS:
        more[name] = tuple(None if one == "null" else one for one in more[name])
    return ActiveIf(active_if, **more) if active_if else Requires(requires, **more)


def absolute(path: str, section: str) -> str:
    """The key that a rule in `section` names: with a leading dot it is relative to the section."""
    return f"{section}{path}".removeprefix(".") if path.startswith(".") else path


def value_at(cfg: Section, path: str) -> object:
    """The value of a key of a configuration."""
    return attrgetter(path)(cfg)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def is_open(field: FieldInfo) -> bool:
    """Whether a key holds a dict of keys that the schema does not know."""
    return get_origin(field.annotation) is dict


def default_of(field: FieldInfo) -> object:
    """The default as in a YAML file; for a linked key the reference to the key it follows."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "link" in extra:
        return f"${{{extra['link']}}}"
    return plain(field.get_default(call_default_factory=True))


def plain(value: Any) -> Any:
    """A copy of the value with lists instead of tuples."""
    return json.loads(json.dumps(value))


def is_count(value: object) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def nest(values: dict[str, Any]) -> dict[str, object]:
    """The tree of sections with the values of `values`, which are by path."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def replaced(section: Any, settings: dict[str, Any]) -> Any:
    """A section with other values of some keys, given with their dots."""
    tree: dict[str, Any] = nest(settings)
    update = {
        name: replaced(old, value) if isinstance(old := getattr(section, name), Section) else value
        for name, value in tree.items()
    }
    return section.model_copy(update=update)


def shown(value: object) -> str:
    """The value as on a command line, shortened."""
    text = format_value(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 4] + " ..."


def allowed(field: FieldInfo, value: object = None) -> str:
    """The allowed values of a key in words; a very large bound is only named if `value` exceeds it."""
    for rule in field.metadata:
        if isinstance(rule, Registered):
            return f"one of {', '.join(rule.names)}, or a name registered by model.external_lib"
    return _words(_json_schema(field), value)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The names that a key, or each item of a list, chooses from; empty if it is not a choice."""
    schema = _json_schema(field)
    kinds = schema.get("anyOf", [schema])
    return tuple(name for kind in (*kinds, schema.get("items", {})) for name in kind.get("enum", ()))


def _json_schema(field: FieldInfo) -> dict[str, Any]:
    annotation: Any = field.annotation
    return TypeAdapter(Annotated[annotation, Field(), *field.metadata]).json_schema()


def _words(schema: dict[str, Any], value: object) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(kind, value) for kind in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    kind = schema["type"]
    if kind == "array" and "prefixItems" in schema:
        return f"{schema['minItems']} in a list, each {_words(schema['prefixItems'][0], None)}"
    if kind == "array":
        return f"{_words(schema['items'], None)}, or a list of such"
    if kind in ("integer", "number"):
        return ", ".join(filter(None, (_WORDS["types"][kind], " and ".join(_range(schema, value)))))
    return schema.get("format", _WORDS["types"][kind])


def _range(schema: dict[str, Any], value: object) -> Iterator[str]:
    for name, words in _WORDS["bounds"].items():
        bound = schema.get(name)
        is_exceeded = isinstance(value, int | float) and bound is not None and value > bound
        if bound is not None and (bound < _HUGE or is_exceeded):
            yield f"{words} {bound:g}" if bound < _HUGE else f"{words} {bound}"


def nearest(path: str, known: tuple[str, ...]) -> list[str]:
    """The known keys that an unknown one may mean: with its last name, similar ones beside it or in other sections."""
    section, _, last = path.rpartition(".")
    names = {key.rpartition(".")[2]: key for key in reversed(known)}
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    same = [key for key in known if key.rpartition(".")[2] == last]
    likely = [key for key in same if key.endswith(f".{path}")] + difflib.get_close_matches(path, same, n=2, cutoff=0.4)
    likely += [beside[name] for name in difflib.get_close_matches(last, beside, n=2, cutoff=0.6)]
    likely += [names[name] for name in difflib.get_close_matches(last, names, n=2, cutoff=0.8)]
    return list(dict.fromkeys(likely))[:3]
