"""Settings of verl, AReaL and RLinf: other spellings of our keys, and keys that are refused or ignored.

They are data, in the YAML files of this folder. Each file holds blocks for some jobs (`jobs`), or for sections of some
jobs (`under`), of:

- `aliases`: another spelling of a key or section. It maps by prefix, the longest first, so that one line moves a whole
  section. Both spellings may be set if the values agree.
- `engines`: the two parts of trainer.allocation_mode.
- `splits`: the keys to whose value a part of a data set on the hub is appended.
- `groups`: choices of Hydra's config groups that change nothing here.
- `expansions`: settings that set several keys: for each key a table from the value set to the key's value, `otherwise`
  for values that are not in it, whose `{}` is replaced by the value, in a list also an element `"{}"`; without
  `otherwise` the value is passed on. A value may refer to keys, `${key}`, and compute: `${divide:a,b,...}` of whole
  numbers without rest, `${ratio:a,b}`, `${product:a,b}`, `${quotient:a,b}` without the rest,
  `${staleness:share,steps}`.
- `meanings`: words of other trainers, and the keys to suggest for them.
- `refused` and `ignored`: keys that do not exist here, with the reason and what to set instead. A key that would change
  results if it were ignored is refused, but for values in `noted`. Values listed in `unless`, and null, ask for what
  happens anyway; they are accepted silently.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rlsys.config.introspect import job_name
from rlsys.config.schema.base import Section

FILES = ("verl.yaml", "areal.yaml", "rlinf.yaml", "hf.yaml")
_MAX_ALIASES = 4
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
TEXT_WITH_KEYS = re.compile(rf"([^$\\]|{REFERENCE.pattern})+")


@dataclass(frozen=True)
class ForeignKey:
    """Why a key of another project is refused or ignored. Values in `unless` are accepted silently, those in `noted`
    are ignored although others are refused."""

    why: str
    refused: bool
    unless: Sequence[object] = ()
    noted: Sequence[object] = ()

    def accepts(self, value: object) -> bool:
        return value is None or any(type(value) is type(known) and value == known for known in self.unless)


@dataclass(frozen=True)
class CompatTable:
    """The settings of other projects that a job understands, by their names there."""

    aliases: dict[str, str] = field(default_factory=dict)
    engines: list[str] = field(default_factory=list)
    splits: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    expansions: dict[str, dict[str, dict[Any, object]]] = field(default_factory=dict)
    foreign: dict[str, ForeignKey] = field(default_factory=dict)

    def canonical(self, path: str) -> str:
        """The key that a spelling stands for; a path without another spelling is returned as it is."""
        for _ in range(_MAX_ALIASES):
            prefix = next((prefix for prefix in prefixes(path) if prefix in self.aliases), None)
            if prefix is None:
                return path
            path = self.aliases[prefix] + path[len(prefix) :]
        return path

    def names_of(self, key: str) -> list[str]:
        """The other names by which a key may be set."""
        names = [alias + key[len(path) :] for alias, path in self.aliases.items() if f"{key}.".startswith(f"{path}.")]
        return [name for name in names if self.canonical(name) == key]

    def canonical_references(self, text: str) -> str:
        """The text with other spellings inside its ${...} replaced by the keys, of several by the first."""

        def key(path: str) -> str:
            return next(iter(self.expansions.get(path, [path])))

        return REFERENCE.sub(lambda match: "${" + key(self.canonical(match[1])) + "}", text)

    def expand(self, path: str, value: object) -> dict[str, object]:
        """The keys, with their values, that the expansion `path` sets; null sets those that have a meaning for it."""
        keys = self.expansions[path].items()
        return {key: _translated(value, values) for key, values in keys if value is not None or None in values}

    def foreign_key(self, path: str) -> ForeignKey | None:
        """The entry of the longest prefix of `path`."""
        return next((self.foreign[prefix] for prefix in prefixes(path) if prefix in self.foreign), None)


@cache
def compat_table(schema: type[Section]) -> CompatTable:
    """The table of a job, from all files."""
    table, job = CompatTable(), job_name(schema)
    for block in (block for name in FILES for block in read_blocks(name)):
        sections = block["under"].get(job, []) if "under" in block else [""] if job in block["jobs"] else []
        for prefix in [f"{section}." if section else "" for section in sections]:
            table.engines.extend(block.get("engines", ()))
            for name, keys in block.get("expansions", {}).items():
                table.expansions[prefix + name] = {prefix + key: values for key, values in keys.items()}
            for kind in ("splits", "groups", "meanings"):
                getattr(table, kind).update(block.get(kind, {}))
            table.aliases.update({prefix + key: prefix + path for key, path in block.get("aliases", {}).items()})
            for kind in ("ignored", "refused"):
                for key, entry in block.get(kind, {}).items():
                    reason = {"why": entry} if isinstance(entry, str) else entry
                    table.foreign[prefix + key] = ForeignKey(refused=kind == "refused", **reason)
    return table


@cache
def read_blocks(name: str) -> list[dict[str, Any]]:
    """The blocks of one file."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((Path(__file__).parent / name).read_text(encoding="utf-8"), Loader=loader)["blocks"]


def absolute_names(text: str, path: str) -> str:
    """The text with each `${.name}` as the key of that name in the section of `path`."""
    return re.sub(r"\$\{\.(?=\w)", "${" + path[: path.rfind(".") + 1], text)


def _translated(value: object, values: dict[object, object]) -> object:
    for known, meaning in values.items():
        if known == value and isinstance(known, bool) == isinstance(value, bool):
            return meaning
    meaning = values.get("otherwise", value)
    if isinstance(meaning, list):
        return [value if part == "{}" else part for part in meaning]
    return meaning.replace("{}", str(value)) if isinstance(meaning, str) else meaning


def prefixes(path: str) -> Iterator[str]:
    """The path itself and the sections it is in, the longest first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
