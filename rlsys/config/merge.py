"""Lays files and overrides over the defaults: spellings become keys, unknown names become problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlsys.config.checks.findings import without_effect
from rlsys.config.compat.aliases import (
    EXPANSIONS,
    GLOBAL_MICRO_BATCHES,
    canonical,
    canonical_references,
    table_for,
)
from rlsys.config.compat.unsupported import Elsewhere, known_elsewhere, look_up
from rlsys.config.introspect import default_of, is_open, leaves, nearest, nest, plain, sections, shown
from rlsys.config.overrides import Override
from rlsys.config.schema.base import Section

COMMAND_LINE = "command line"
_ABSENT = object()


@dataclass(frozen=True)
class Given:
    """What somebody set: the value, where (file or command line), and how the key was spelled there."""

    value: Any
    origin: str
    spelling: str


class Layers:
    """Collects what each layer gives; `resolve` returns the values of all keys.

    `given` holds what was set by key; `pending` micro-batch sizes over all ranks that are still to be divided;
    `problems` what cannot be accepted; `silent` the keys whose value could not even be resolved.
    """

    def __init__(self, schema: type[Section]) -> None:
        job = schema.__name__
        self._leaves, self._sections = leaves(schema), sections(schema)
        self._table, self._elsewhere = table_for(job), known_elsewhere(job)
        self._without_effect: dict[str, list[str]] = {}
        self._layer: dict[str, Given] = {}
        self.given: dict[str, Given] = {}
        self.pending: dict[str, Given] = {}
        self.problems: list[str] = []
        self.silent: set[str] = set()

    def add_tree(self, tree: dict[str, Any], origin: str) -> None:
        """Lay the keys of a file over what is there."""
        self._layer = {}
        for key, value in tree.items():
            self._place(str(key), value, origin)

    def add_overrides(self, overrides: tuple[Override, ...]) -> None:
        """Lay the command line over what is there, one after another; a repeated key takes its last value."""
        self._layer = {}
        for override in overrides:
            if override.op == "~":
                self._remove(override)
            elif self._may_add(override):
                self._place(override.key, override.value, COMMAND_LINE)

    def notes(self) -> tuple[str, ...]:
        """One line for each reason why settings have no effect here."""
        return tuple(without_effect(keys, why) for why, keys in self._without_effect.items())

    def resolve(self) -> dict[str, Any]:
        """The values of all keys with references resolved; what cannot be resolved becomes a problem."""
        values = {path: default_of(field) for path, field in self._leaves.items()}
        values |= {path: plain(given.value) for path, given in self.given.items()}
        referring = [path for path, value in values.items() if _refers(value)]
        missing = [path for path, value in values.items() if isinstance(value, str) and value == "???"]
        for path in missing:
            self.problems.append(f"{path} = ???: it must be set; write {path}=<value>")
            self.silent.add(path)
        self._resolve_references(values, [path for path in referring if path not in missing])
        return values

    def _resolve_references(self, values: dict[str, Any], paths: list[str]) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        for path in paths:
            values[path] = _canonical_inside(values[path], self._table)
            try:
                OmegaConf.create([values[path]])
            except OmegaConfBaseException as error:
                self._cannot_resolve(path, error)
        tree = OmegaConf.create(nest({path: value for path, value in values.items() if path not in self.silent}))
        for path in paths:
            if path in self.silent:
                continue
            try:
                found = OmegaConf.select(tree, path, throw_on_missing=True)
                values[path] = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
            except (OmegaConfBaseException, RecursionError) as error:
                self._cannot_resolve(path, error)

    def _cannot_resolve(self, path: str, error: Exception) -> None:
        self.silent.add(path)
        if path in self.given:
            given = self.given[path]
            self.problems.append(f"{path} = {shown(given.value)} ({given.origin}): {_reason(error)}")

    def _place(self, spelling: str, value: Any, origin: str) -> None:
        """Take one setting, or every setting of a section, under whatever name it is known."""
        if spelling.rpartition(".")[2] == "_target_":
            return
        path = canonical(spelling, self._table)
        if path != spelling and value is None:
            return
        given = Given(value, origin, spelling)
        if path in EXPANSIONS and not isinstance(value, dict):
            for key, part in EXPANSIONS[path](value).items():
                self._set(key, Given(part, origin, spelling))
        elif path in GLOBAL_MICRO_BATCHES:
            if value is not None:
                self.pending[GLOBAL_MICRO_BATCHES[path]] = given
        elif (self._open_key(path) or path in self._leaves) and not self._spelled_below(spelling, value):
            self._set_leaf(path, given)
        elif isinstance(value, dict) and value and not self._agreed(path, value):
            for key, below in value.items():
                self._place(f"{spelling}.{key}", below, origin)
        elif path in self._sections:
            if value != {}:
                self.problems.append(self._not_a_section(spelling, path, value))
        else:
            self._refuse_or_note(path, given)

    def _spelled_below(self, spelling: str, value: Any) -> bool:
        """Whether keys of this section have spellings of their own."""
        return isinstance(value, dict) and any(f"{spelling}.{key}" in self._table for key in value)

    def _set_leaf(self, path: str, given: Given) -> None:
        reason = _unsupported(given.value)
        key = self._open_key(path)
        if reason:
            self.problems.append(f"{given.spelling} ({given.origin}): {reason}")
        elif key is None:
            if isinstance(given.value, dict):
                self.problems.append(
                    f"{given.spelling} = {shown(given.value)} ({given.origin}): it is a single value, not a section"
                )
            else:
                self._set(path, given)
        elif path == key and not isinstance(given.value, dict):
            self._set(path, given)
        else:
            rest = path[len(key) + 1 :].split(".") if path != key else []
            self._set_open(key, rest, given)

    def _set(self, path: str, given: Given) -> None:
        before = self._layer.get(path)
        if before and before.spelling != given.spelling and before.value != given.value:
            one = "one setting" if path in (before.spelling, given.spelling) else path
            self.problems.append(
                f"{before.spelling} = {shown(before.value)} and {given.spelling} = {shown(given.value)} "
                f"({given.origin}): two names of {one}; give one of them"
            )
        self._layer[path] = self.given[path] = given

    def _set_open(self, key: str, rest: list[str], given: Given) -> None:
        """Merge a value into a key that holds keys of its own."""
        value = given.value
        for part in reversed(rest):
            value = {part: value}
        before = self.given[key].value if key in self.given else default_of(self._leaves[key])
        merged = _merge(before, value) if isinstance(before, dict) else value
        self.given[key] = Given(merged, given.origin, key)

    def _open_key(self, path: str) -> str | None:
        """The open key that `path` is, or lies in."""
        prefix = path
        while prefix:
            if prefix in self._leaves:
                return prefix if is_open(self._leaves[prefix]) else None
            prefix = prefix.rpartition(".")[0]
        return None

    def _present(self, path: str) -> Any:
        """What somebody set at `path`, _ABSENT where nobody did."""
        key = self._open_key(path)
        if key is None or path == key:
            return self.given[path].value if path in self.given else _ABSENT
        value: Any = self.given[key].value if key in self.given else {}
        for part in path[len(key) + 1 :].split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        return value

    def _may_add(self, override: Override) -> bool:
        """Whether `key` exists for key=value, and is new for +key=value."""
        path = canonical(override.key, self._table)
        present = self._present(path) is not _ABSENT
        if override.op == "+" and present:
            was = self._present(path)
            self.problems.append(
                f"{override.text}: + adds a new key, and {override.key} is {shown(was)} already; "
                f"write {override.text[1:]}"
            )
            return False
        new = not present and path not in self._leaves and self._open_key(path)
        if override.op == "" and new and path == override.key:
            self.problems.append(f"{override.text}: {override.key} is not there yet; write +{override.text}")
            return False
        return True

    def _remove(self, override: Override) -> None:
        path = canonical(override.key, self._table)
        if path in self._sections:
            for key in [key for key in self.given if key.startswith(f"{path}.")]:
                self.given.pop(key)
            return
        present, key = self._present(path), self._open_key(path)
        known = path in self._leaves
        if not known and present is _ABSENT:
            why = f"{override.key} is not there" if key else self._unknown(override.key, path)
            self.problems.append(f"{override.text}: {why}")
        elif override.has_value and present is not _ABSENT and present != override.value:
            self.problems.append(f"{override.text}: {override.key} is {shown(present)}; write ~{override.key}")
        elif known:
            self.given.pop(path, None)
        elif key:
            before = self.given[key]
            rest = path[len(key) + 1 :].split(".")
            self.given[key] = Given(_without(before.value, rest), before.origin, before.spelling)

    def _agreed(self, path: str, value: Any) -> bool:
        entry = look_up(path, self._elsewhere)
        return entry is not None and value in entry.agreed

    def _refuse_or_note(self, path: str, given: Given) -> None:
        entry: Elsewhere | None = look_up(path, self._elsewhere)
        if entry is None:
            self.problems.append(f"{given.spelling} ({given.origin}): {self._unknown(given.spelling, path)}")
        elif any(type(given.value) is type(agreed) and given.value == agreed for agreed in entry.agreed):
            return
        elif entry.refuse:
            self.problems.append(f"{given.spelling} = {shown(given.value)} ({given.origin}): {entry.why}")
        else:
            self._without_effect.setdefault(entry.why, []).append(given.spelling)

    def _unknown(self, spelling: str, path: str) -> str:
        parent = path.rpartition(".")[0]
        while parent:
            if parent in self._leaves:
                return f"no such key; {parent} is a single value, not a section"
            parent = parent.rpartition(".")[0]
        near = nearest(spelling, (*self._leaves, *self._table))
        return f"no such key; did you mean {' or '.join(near)}?" if near else "no such key; --help lists all keys"

    def _not_a_section(self, spelling: str, path: str, value: Any) -> str:
        example = next(key for key in self._leaves if key.startswith(f"{path}."))
        return f"{spelling} = {shown(value)}: it is a section of keys; write e.g. {example}=<value>"


def _refers(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    items: Iterator[Any] = iter(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return any(_refers(item) for item in items)


def _canonical_inside(value: Any, table: dict[str, str]) -> Any:
    if isinstance(value, str):
        return canonical_references(value, table)
    if isinstance(value, list):
        return [_canonical_inside(item, table) for item in value]
    return {key: _canonical_inside(item, table) for key, item in value.items()} if isinstance(value, dict) else value


def _reason(error: Exception) -> str:
    from omegaconf.errors import GrammarParseError

    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, RecursionError) or "Recursive" in text:
        return "it refers to itself"
    if isinstance(error, GrammarParseError):
        return "the ${...} in it cannot be read; write ${other.key}"
    return text


def _unsupported(value: Any) -> str:
    """Why a value from a file cannot be a setting, or nothing."""
    if isinstance(value, dict):
        return next((reason for item in value.values() if (reason := _unsupported(item))), "")
    if isinstance(value, list):
        return next((reason for item in value if (reason := _unsupported(item))), "")
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    return f"a {type(value).__name__} cannot be a setting; put quotes around it"


def _merge(base: dict[str, Any], over: Any) -> Any:
    if not isinstance(over, dict):
        return over
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) else value
    return merged


def _without(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    return {key: _without(value, rest) if key == first else value for key, value in tree.items()}
