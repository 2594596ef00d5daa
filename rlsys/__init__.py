"""rlsys: RLHF training with one controller and Ray worker groups."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rlsys.protocol import DataProto

__all__ = ["DataProto"]
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"rlsys: Python {sys.version.split()[0]} is too old; install Python 3.11 or later, see docs/install.md")


def __getattr__(name: str) -> object:
    """`rlsys.DataProto`, without torch for those who do not ask for it."""
    if name != "DataProto":
        raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
    from rlsys.protocol import DataProto

    return DataProto


def _report(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """What ends a command while its modules are imported, in one line."""
    if kind is KeyboardInterrupt:
        print("rlsys: interrupted (Ctrl-C)", file=sys.stderr)
    elif kind is ModuleNotFoundError:
        print(f"rlsys: {error} in {sys.executable}; activate the environment (. .venv/bin/activate)", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv and (sys.argv[0] == "-m" or sys.argv[0].endswith("/rlsys")):
    sys.excepthook = _report
