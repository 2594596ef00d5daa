"""Which versions of vLLM and SGLang are supported, and what differs between them: a table of specifiers per engine.

The installed version, or the one that a server reports, chooses a row of versions.toml. Versions without a row, and
those whose row says why they are refused, raise an error that prints the table. tests/wheels checks the rows against
the source of wheels.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Generic, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError

F = TypeVar("F")


@dataclass(frozen=True)
class VersionRow(Generic[F]):
    """Versions by their specifier, their features (None: refused) and what is known of them."""

    versions: str
    features: F | None = None
    note: str = "names checked, not run"

    def __contains__(self, version: str) -> bool:
        with suppress(InvalidVersion):
            return SpecifierSet(self.versions).contains(version, prereleases=True)
        return False


@dataclass(frozen=True)
class VersionTable(Generic[F]):
    """What is known of the versions of one engine, which messages call `name`; rows do not overlap.

    It is installed as one of `distributions`; `install_hint` says what to do if none is.
    """

    name: str
    rows: tuple[VersionRow[F], ...]
    distributions: tuple[str, ...] = ()
    install_hint: str = ""

    def features(self, version: str) -> F:
        """The features of a version; ConfigError with the table if it is unknown or refused."""
        row = self.row(version)
        if row is None or row.features is None:
            why = row.note if row else "not in the table"
            raise ConfigError(f"{self.name} {version}: {why}. Versions:\n{self.text()}")
        return row.features

    def row(self, version: str) -> VersionRow[F] | None:
        return next((row for row in self.rows if version in row), None)

    def installed(self) -> str | None:
        """The version that is installed here."""
        for distribution in self.distributions:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(distribution)
        return None

    def installed_features(self) -> F:
        """The features of the installed version; ConfigError if none is installed, or one that is not supported."""
        if (version := self.installed()) is None:
            raise ConfigError(f"{self.name} is not installed: {self.install_hint}. Versions:\n{self.text()}")
        return self.features(version)

    def text(self) -> str:
        """The table, one line per row, which may be read in one line too."""
        return ".\n".join(
            f"  {row.versions}: {'' if row.features is not None else 'refused: '}{row.note}" for row in self.rows
        )


def version_table(key: str) -> VersionTable[F]:
    """A table of versions.toml."""
    table = read_table(__file__, "versions.toml")[key]
    return VersionTable(rows=tuple(VersionRow(**row) for row in table.pop("rows")), **table)


VLLM: VersionTable[list[str]] = version_table("vllm")
SGLANG: VersionTable[bool] = version_table("sglang")
