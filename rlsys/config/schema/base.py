"""The parts of every section of the schema: the frozen base class, value types with ranges, links and rules.

A key whose default is another key's value is declared with `linked("other.key")`; the loader writes the reference into
the defaults, so a link, an interpolation in a file and an override all resolve in one place. A section built on its
own, `ActorConfig(clip_ratio=0.1)`, resolves links to its own keys; a link to another section takes the default there.

What a key needs of other keys, `ActiveIf` and `Requires`, is in rlsys/config/rules.toml, and rlsys/config/checks
evaluates it; only `Registered` is declared with its key. Rules name keys as links do.
"""

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Condition:
    """Holds if the value of `key` is one of `values`, or none of `excluded`; without both, if it is true or set.

    With `installed` it holds if the package of that name is installed, whatever the value.
    """

    key: str
    values: tuple[object, ...] = ()
    excluded: tuple[object, ...] = field(default=(), kw_only=True)
    installed: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class ActiveIf(Condition):
    """The key, or each key of the section except `besides`, only has an effect under the condition.

    `why` replaces the reason given to a user whose setting is ignored.
    """

    why: str = ""
    besides: tuple[str, ...] = ("enable",)


@dataclass(frozen=True)
class Requires(Condition):
    """The condition must hold if the key has a value of `given`, by default any value but its default.

    `why` says why it must, where {} is the other key's value; `to` is the value of the other key to suggest, or `fix`
    the whole suggestion. With `is_note` the run starts anyway.
    """

    why: str = field(default="", kw_only=True)
    given: tuple[object, ...] = field(default=(), kw_only=True)
    to: str = field(default="true", kw_only=True)
    fix: str = field(default="", kw_only=True)
    is_note: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Registered:
    """The key names an entry of a registry; the module model.external_lib may register more than `names`."""

    names: tuple[str, ...]


class Section(BaseModel):
    """A frozen group of keys; an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)


class RootConfig(Section):
    """All keys of a job, as absolute links name them."""


def linked(path: str) -> Any:
    """A key whose default is the value at `path`: absolute, or with a leading dot an earlier key of its own section."""

    def default(values: dict[str, Any]) -> Any:
        *parents, last = path.split(".")
        if not parents[0]:
            return values[last]
        section: Any = next(root for root in RootConfig.__subclasses__() if parents[0] in root.model_fields)
        for parent in parents:
            section = section.model_fields[parent].annotation
        return section.model_fields[last].get_default(call_default_factory=True, validated_data=values)

    return Field(default_factory=default, json_schema_extra={"link": path})


def section(cls: type[Section], *, follows: str = "", only: tuple[str, ...] = ()) -> Any:
    """A section of keys, by default those of the section that it `follows`: all, or `only` some of them."""
    return Field(default_factory=cls, json_schema_extra={"follows": follows, "only": list(only)})


def open_dict() -> Any:
    """A key that holds any keys of its own; empty by default."""
    return Field(default_factory=dict)
