"""Merges files and overrides over the defaults: other spellings become keys, unknown names become problems."""

import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from typing import Any
from warnings import catch_warnings

from pydantic.fields import FieldInfo

from rlsys.config.checks.findings import ignored
from rlsys.config.compat.reader import REFERENCE, TEXT_WITH_KEYS, absolute_names, compat_table, prefixes
from rlsys.config.introspect import default_of, is_count, is_open, leaves, nearest, nest, plain, sections, shown
from rlsys.config.overrides import Override
from rlsys.config.schema.base import Section
from rlsys.utils.errors import ConfigError

_EPOCHS = (("saver.freq_epochs", 1), ("evaluator.freq_epochs", 1))
_YIELDS = (
    *(("data.train_batch_size", 0), ("async_training", True), *_EPOCHS),
    *(("actor.use_lora", True), ("actor.use_lora", "${rollout.use_lora}")),
    *((f"actor_rollout_ref.{role}.use_torch_compile", True) for role in ("actor", "ref")),
)
"""Names and values in verl's and AReaL's files that give way to another name of the same key."""
_ALWAYS_SET = ("reward_model.", *dict(_YIELDS))
"""Names that count even with our default: verl's files have null there, or a pair of _YIELDS, unless they are set."""
_FOLLOWS = "${oc.select:"
"""How the values of verl's files begin that follow another key."""
_ADDED = FieldInfo(annotation=dict[str, object], default=None)
"""A key that the schema does not know, of a section that takes any."""


@dataclass(frozen=True)
class Given:
    """A setting from a file or the command line: its value and origin, and how key and value were written there."""

    value: Any
    origin: str
    spelling: str
    written: object = None

    @property
    def pair(self) -> tuple[str, object]:
        """Key and value as they were written."""
        return self.spelling, self.value if self.written is None else self.written

    def __str__(self) -> str:
        return f"{self.spelling} = {shown(self.pair[1])}"


class Layers:
    """Collects the settings of each layer; `resolve` returns the values of all keys.

    `given` holds the settings by key; `engines` the parts of an allocation that were set one by one; `refused` problems
    with other projects' keys, by key; `problems` what else cannot be accepted; `unresolved` the keys whose value could
    not be resolved.
    """

    def __init__(self, schema: type[Section]) -> None:
        self._leaves, self._sections = leaves(schema), sections(schema)
        self._takes_any = {path for path, cls in self._sections.items() if cls.model_config.get("extra") == "allow"}
        self._compat = compat_table(schema)
        self._ignored: dict[str, list[str]] = {}
        self._splits: dict[str, object] = {}
        self._layer: dict[str, Given] = {}
        self.given: dict[str, Given] = {}
        self.engines: dict[str, str] = {}
        self.problems: list[str] = []
        self.refused: dict[str, str] = {}
        self.unresolved: set[str] = set()

    def add_tree(self, tree: dict[str, object], origin: str) -> None:
        """Merge the keys of a file over the layers so far."""
        self._layer = {}
        for key, value in tree.items():
            self._place(str(key), value, origin)

    def add_overrides(self, overrides: tuple[Override, ...]) -> None:
        """Merge the command line over the layers so far; a repeated key takes its last value."""
        self._layer = {}
        for override in overrides:
            if override.removes:
                self._remove(override)
            else:
                self._place(override.key, override.value, "command line")

    def adapt(self, settings: dict[str, Given]) -> None:
        """Take derived settings; a note for each that takes the place of another value."""
        for key, rule in settings.items():
            before = self.given.get(key, rule)
            if before.value != rule.value:
                self._ignored.setdefault(f"{key}={shown(rule.value)} {rule.origin}", []).append(before.spelling)
        self.given |= settings

    def notes(self) -> tuple[str, ...]:
        """One line for each reason why settings of other projects are ignored."""
        return tuple(ignored(keys, why) for why, keys in self._ignored.items())

    def resolve(self) -> dict[str, object]:
        """The values of all keys with references resolved; a reference that cannot be resolved becomes a problem."""
        for path, split in self._splits.items():
            if split is not None and path in self.given:
                self.given[path] = replace(self.given[path], value=f"{self.given[path].value}:{split}")
        self._splits.clear()
        values = {path: default_of(field) for path, field in self._leaves.items()}
        values |= {path: plain(given.value) for path, given in self.given.items()}
        for path in [path for path, value in values.items() if isinstance(value, str) and value == "???"]:
            if any(values.get(f"{section}.enable") is False for section in prefixes(path)):
                values[path] = default_of(self._leaves[path])
                continue
            self.problems.append(f"{path} = ???: it must be set; set {path}=<value>")
            self.unresolved.add(path)
        paths = [path for path, value in values.items() if "${" in json.dumps(value)]
        values |= {path: json.loads(self._compat.canonical_references(json.dumps(values[path]))) for path in paths}
        if paths := self._insert_keys(values, paths):
            self._resolve_references(values, paths)
        return values

    def _insert_keys(self, values: dict[str, Any], paths: list[str]) -> list[str]:
        """Resolve text whose only references are keys, without omegaconf's slow tree; returns the other paths."""
        texts = {path: absolute_names(values[path], path) for path in paths if isinstance(values[path], str)}
        names = {path: {*REFERENCE.findall(text)} for path, text in texts.items() if TEXT_WITH_KEYS.fullmatch(text)}
        rest = {*paths, *self.unresolved}
        while done := [path for path in names if path in rest and names[path] <= values.keys() - rest]:
            values |= {path: _inserted(texts[path], values) for path in done}
            rest.difference_update(done)
        return [path for path in paths if path in rest]

    def _resolve_references(self, values: dict[str, object], paths: list[str]) -> None:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        with catch_warnings(action="ignore"):  # omegaconf 2.4 has another name for it
            for name, compute in _COMPUTED.items():
                OmegaConf.register_new_resolver(name, compute, replace=True)
        for path in paths:
            try:
                OmegaConf.create([values[path]])
            except OmegaConfBaseException as error:
                self._cannot_resolve(path, error)
        tree = OmegaConf.create(nest({path: value for path, value in values.items() if path not in self.unresolved}))
        for path in [path for path in paths if path not in self.unresolved]:
            try:
                value = OmegaConf.select(tree, path, throw_on_missing=True)
                values[path] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except (OmegaConfBaseException, RecursionError) as error:
                self._cannot_resolve(path, error)

    def _cannot_resolve(self, path: str, error: Exception) -> None:
        self.unresolved.add(path)
        if given := self.given.get(path):
            self.problems.append(f"{given} ({given.origin}): {_reason(error, path)}")

    def _place(self, spelling: str, value: object, origin: str) -> None:
        """Take one setting, or every setting of a section, under any of its spellings."""
        compat = self._compat
        path = compat.canonical(spelling)
        if path.rpartition(".")[2] == "_target_" and (self._key_of(path) is None or str(value).startswith("verl.")):
            return
        self.refused.pop(path, None)
        if (path != spelling and value is None) or value in compat.groups.get(path, ()):
            if path in self.given and self.given[path].spelling == spelling:
                self._remove(Override(path, removes=True))
            return
        text = str(value)
        follows = text.startswith(_FOLLOWS) and path in compat.expansions and origin != "command line"
        if follows or text.startswith(f"{_FOLLOWS}{path},") or compat.canonical_references(text) == f"${{{path}}}":
            return
        if path.endswith("model.lora") and isinstance(value, dict) and value.get("rank") == 0:
            value = {"rank": 0}  # the rest is of no adapters, or of those of lora_rank
        given = Given(value, origin, spelling)
        key, reason, foreign = self._key_of(path), compat.foreign.get(path), compat.foreign_key(path)
        if path in compat.expansions and not isinstance(value, dict) and (reason is None or reason.accepts(value)):
            for key, part in compat.expand(path, value).items():
                self._set(key, Given(part, origin, spelling, value))
        elif path in compat.splits:
            self._splits[compat.splits[path]] = value
        elif path in compat.engines:
            self.engines[path] = str(value)
        elif key not in (None, path) and reason is not None:
            self._refuse_or_ignore(path, given)
        elif key and not self._spelled_below(spelling, value):
            self._set_leaf(key, path, given)
        elif isinstance(value, dict) and value and not (foreign and foreign.accepts(value)):
            for name, below in value.items():
                self._place(f"{spelling}.{name}", below, origin)
        elif path not in self._sections:
            self._refuse_or_ignore(path, given)
        elif value != {}:
            example = next(key for key in self._leaves if key.startswith(f"{path}."))
            self.problems.append(f"{given}: it is a section of keys; set e.g. {example}=<value>")

    def _spelled_below(self, spelling: str, value: object) -> bool:
        """Whether keys of this section have spellings or reasons of their own."""
        aliases, foreign, path = self._compat.aliases, self._compat.foreign, self._compat.canonical(spelling)
        names = value if isinstance(value, dict) else ()
        return any(f"{spelling}.{name}" in aliases or f"{path}.{name}" in foreign for name in names)

    def _key_of(self, path: str) -> str | None:
        """The key that `path` is, or an open key that it is in, or the key that it adds to a section that takes any."""
        inside = (
            prefix
            for prefix in prefixes(path)
            if (prefix in self._leaves and is_open(self._leaves[prefix]))
            or (prefix not in self._sections and prefix.rpartition(".")[0] in self._takes_any)
        )
        return path if path in self._leaves else next(inside, None)

    def _set_leaf(self, key: str, path: str, given: Given) -> None:
        field = self._leaves.get(key, _ADDED)
        try:
            json.dumps(given.value)
        except TypeError:
            self.problems.append(f"{given.spelling} ({given.origin}): put quotes around a date or binary value")
            return
        if isinstance(given.value, dict) and not is_open(field):
            self.problems.append(f"{given} ({given.origin}): it is a single value, not a section")
        elif path == key and not isinstance(given.value, dict):
            self._set(path, given)
        else:
            value = nest({path[len(key) + 1 :]: given.value}) if path != key else given.value
            before = self.given[key].value if key in self.given else default_of(field)
            self.given[key] = Given(_merge(before, value), given.origin, key)

    def _set(self, path: str, given: Given) -> None:
        before, earlier = self._layer.get(path), self.given.get(path)
        names = [given, earlier] if earlier and earlier.spelling != given.spelling else []
        if epochs := [one.spelling for one in names if one.pair in _EPOCHS]:
            self._ignored.setdefault("saving and validation have one frequency each, here in steps", []).extend(epochs)
        if names and given.pair in _YIELDS:
            return
        if before and before.spelling != given.spelling and before.value != given.value:
            if self._yields(path, given):
                return
            if not self._yields(path, before):
                one = "one setting" if path in (before.spelling, given.spelling) else path
                self.problems.append(f"{before} and {given} ({given.origin}): two names of {one}; set one of them")
        self._layer[path] = self.given[path] = given

    def _yields(self, path: str, given: Given) -> bool:
        """Whether another name of the key counts where a layer has both: verl's files contain all defaults."""
        is_unset = given.value == default_of(self._leaves.get(path, _ADDED)) or str(given.value).startswith(_FOLLOWS)
        is_verls = given.origin != "command line" and not given.spelling.startswith(_ALWAYS_SET)
        return given.pair in _YIELDS or (is_verls and is_unset)

    def _remove(self, override: Override) -> None:
        """Reset a key or a section to its defaults, or remove an added key."""
        path = self._compat.canonical(override.key)
        key = self._key_of(path)
        if path == key or path in self._sections:
            self.given = {name: given for name, given in self.given.items() if not f"{name}.".startswith(f"{path}.")}
        elif key is None:
            self.problems.append(f"{override.text}: {self._unknown(override.key, path)}")
        elif key in self.given and (rest := _without(self.given[key].value, path[len(key) + 1 :].split("."))):
            self.given[key] = replace(self.given[key], value=rest)
        else:
            self.problems.append(f"{override.text}: {override.key} does not exist")

    def _refuse_or_ignore(self, path: str, given: Given) -> None:
        if (foreign := self._compat.foreign_key(path)) is None:
            self.problems.append(f"{given.spelling} ({given.origin}): {self._unknown(given.spelling, path)}")
        elif foreign.accepts(given.value):
            return
        elif foreign.refused and given.value not in foreign.noted:
            self.refused[path] = f"{given} ({given.origin}): {foreign.why}"
        else:
            self._ignored.setdefault(foreign.why, []).append(given.spelling)

    def _unknown(self, spelling: str, path: str) -> str:
        for parent in prefixes(path):
            if parent in self._leaves:
                return f"no such key; {parent} is a single value, not a section"
        meant = self._compat.meanings.get(spelling) or self._compat.meanings.get(spelling.rpartition(".")[2])
        near = [meant] if meant else nearest(path, (*self._leaves, *self._compat.aliases))
        section = path.rpartition(".")[0] or "all"
        listed = f"--help {section if section in self._sections else 'all'} lists keys"
        return f"no such key; did you mean {' or '.join(near)}?" if near else f"no such key; {listed}"


def _inserted(text: str, values: dict[str, object]) -> object:
    """The value that the text refers to, or the text with the values in it."""
    whole = REFERENCE.fullmatch(text)
    return values[whole[1]] if whole else REFERENCE.sub(lambda match: str(values[match[1]]), text)


def _divide(whole: object, *parts: object) -> int:
    """`whole` divided by all `parts`; ConfigError unless they are counts that divide it evenly."""
    counts = [part for part in (whole, *parts) if isinstance(part, int) and is_count(part)]
    if len(counts) <= len(parts) or counts[0] % prod(counts[1:]):
        raise ConfigError(f"{whole} does not divide evenly by {' x '.join(map(str, parts))}")
    return counts[0] // prod(counts[1:])


def _of_numbers(formula: Callable[[float, float], float], value: object, of: object) -> Any:
    if isinstance(value, int | float) and isinstance(of, int | float) and of:
        return formula(value, of)
    raise ConfigError(f"{value} with {of}: both must be numbers, the second not 0")


_COMPUTED: dict[str, Callable[..., float]] = {
    "divide": _divide,
    "ratio": partial(_of_numbers, operator.truediv),
    "product": partial(_of_numbers, operator.mul),
    "quotient": partial(_of_numbers, operator.floordiv),
    "staleness": partial(_of_numbers, lambda share, steps: ceil(steps * (1 + share)) - 1),
}
"""`staleness`: the age of the oldest samples if a push serves its `steps` steps and a share of samples beyond them."""


def _reason(error: Exception, path: str) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    if why := text.partition(f"{ConfigError.__name__} raised while resolving interpolation: ")[2]:
        return f"{why}; set {path}"
    is_loop = isinstance(error, RecursionError) or "Recursive" in text
    return "it refers to itself" if is_loop else f"its reference cannot be resolved: {text}"


def _merge(base: object, over: object) -> object:
    """`over` where it has a value, of dicts in each of their keys but a `_target_` of verl's; else `base`."""
    if not isinstance(over, dict):
        return over
    known = base if isinstance(base, dict) else {}
    own = {key: value for key, value in over.items() if key != "_target_" or not str(value).startswith("verl.")}
    return known | {key: _merge(known.get(key), value) for key, value in own.items()}


def _without(tree: object, path: list[str]) -> object:
    """The tree without the value at a path; None if there is none."""
    first, *rest = path
    if not isinstance(tree, dict) or first not in tree:
        return None
    below = _without(tree[first], rest) if rest else None
    if rest and below is None:
        return None
    return {key: value for key, value in tree.items() if key != first} | ({first: below} if rest else {})
