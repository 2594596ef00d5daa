"""Which versions of vLLM and SGLang rlsys speaks to: a table of specifiers, each with what its versions can do.

The installed version, or the one that a server tells, chooses a row; versions without one, and those whose row says why
they are refused, are refused with the table in the message. tests/wheels checks the rows against the source of wheels.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Generic, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from rlsys.utils.errors import ConfigError

A = TypeVar("A")
NAMES_ONLY = "names checked, not run"


@dataclass(frozen=True)
class Row(Generic[A]):
    """Versions by their specifier, their adapter (None: refused) and what is known of them."""

    versions: str
    adapter: A | None
    note: str = NAMES_ONLY

    def __contains__(self, version: str) -> bool:
        try:
            return SpecifierSet(self.versions).contains(version, prereleases=True)
        except InvalidVersion:
            return False


@dataclass(frozen=True)
class VersionTable(Generic[A]):
    """What is known of the versions of one thing, which a message calls `name`; rows do not overlap.

    It is installed under one of the names `distributions`. `without` says what to do where it is not.
    """

    name: str
    rows: tuple[Row[A], ...]
    distributions: tuple[str, ...] = ()
    without: str = ""

    def adapter(self, version: str) -> A:
        """The adapter of a version; ConfigError, with the table in it, where there is none."""
        row = self.row(version)
        if row is None or row.adapter is None:
            why = row.note if row else "not in the table"
            raise ConfigError(f"{self.name} {version}: {why}. Versions:\n{self.text()}")
        return row.adapter

    def row(self, version: str) -> Row[A] | None:
        return next((row for row in self.rows if version in row), None)

    def installed(self) -> str | None:
        """The version that is installed here."""
        for distribution in self.distributions:
            try:
                return version_of(distribution)
            except PackageNotFoundError:
                continue
        return None

    def chosen(self) -> A:
        """The adapter of what is installed here; ConfigError where that is nothing, or nothing that is served."""
        if (version := self.installed()) is None:
            raise ConfigError(f"{self.name} is not installed: {self.without}. Versions:\n{self.text()}")
        return self.adapter(version)

    def text(self) -> str:
        """The table, a line a row."""
        width = max(len(row.versions) for row in self.rows)
        return "\n".join(
            f"  {row.versions:<{width}}  {'' if row.adapter is not None else 'refused: '}{row.note}"
            for row in self.rows
        )
