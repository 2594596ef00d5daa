"""Logging for people: rich colours on a terminal, plain lines in files and pipes, and never a secret in either.

Library modules only call `get_logger`; entry points and worker processes call `setup_logging` once.
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.utils.data_files import read_table

if TYPE_CHECKING:
    from rich.console import Console

FILE_ONLY = "rlsys_file"
"""A logger whose lines only go to the file of `log_to_file`: people have seen them in another form."""
_HANDLER_NAME = "rlsys"
_SHORTEST_SECRET = 8
_PATTERNS = read_table(__file__, "redaction.toml")
_SECRET_NAME, _TEXT_TOKEN_NAME = re.compile(_PATTERNS["secret_name"]), re.compile(_PATTERNS["text_token_name"])
_ASSIGNED_SECRET = re.compile(_PATTERNS["assigned_secret"])
_SECRET_FORMATS = [re.compile(pattern) for pattern in _PATTERNS["formats"]]
_MASK = "[redacted]"
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 27), *range(28, 32), 127), "\ufffd")
"""What makes a log a binary file, as in the output of a program: control characters but tabs, line ends and colours."""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup_logging(*, role: str = "", rank: int | None = None, console: "Console | None" = None) -> None:
    """Send the log of this process to stderr; calling it again replaces the earlier set-up.

    Our loggers write from INFO, other libraries from WARNING. `role` and `rank` become a prefix `[actor 0]`.
    `console` receives the lines when it is a terminal (default: `shared_console()`).
    """
    console = console or shared_console()
    if console.is_terminal:
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
    else:
        for library in ("HUB", "DATASETS"):  # and transformers; they read it when they are imported
            os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
        handler = logging.StreamHandler(sys.stderr if console.stderr else console.file)
    handler.setFormatter(_RedactingFormatter(_pattern(role, rank, timestamps=not console.is_terminal)))
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    handler.set_name(_HANDLER_NAME)
    root.addHandler(handler)
    for name in ("rlsys", "workers", "trainer"):
        logging.getLogger(name).setLevel(logging.INFO)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the log of this process, set up if it was not, to a file too, and what is logged to `FILE_ONLY`."""
    if not logging.getLogger().handlers:
        setup_logging()
    handler = _QuietFileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_RedactingFormatter(_pattern("", None, timestamps=True)))
    targets = [logging.getLogger(), logging.getLogger(FILE_ONLY)]
    targets[1].propagate = False
    targets[1].setLevel(logging.INFO)
    for logger in targets:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in targets:
            logger.removeHandler(handler)
        with suppress(OSError):
            handler.close()


class _QuietFileHandler(logging.FileHandler):
    """A log file whose loss, e.g. on a full disk, is reported once and never ends the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        for logger in (logging.getLogger(), logging.getLogger(FILE_ONLY)):
            logger.removeHandler(self)
        get_logger(__name__).warning("%s cannot be written: %s", self.baseFilename, sys.exception())


@cache
def shared_console() -> "Console":
    """The one terminal of this process (stderr); progress and log lines share it so that they never overwrite."""
    from rich.console import Console

    return Console(stderr=True)


def redact(text: str) -> str:
    """`text` without passwords, keys and tokens: known formats, `name=value` pairs and values of secret variables."""
    values = {v for k, v in os.environ.items() if len(v) >= _SHORTEST_SECRET and _is_secret_name(k)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, _MASK)
    text = _ASSIGNED_SECRET.sub(rf"\g<1>{_MASK}", text)
    for secret in _SECRET_FORMATS:
        text = secret.sub(_MASK, text)
    return text


def redact_tree(value: object, name: str = "") -> Any:
    """A copy of a nested config with every string under a secret-looking name masked and every other one redacted."""
    if isinstance(value, Mapping):
        return {key: redact_tree(item, str(key)) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [redact_tree(item, name) for item in value]
    if isinstance(value, str):
        return _MASK if value and _is_secret_name(name) else redact(value)
    return value


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _TEXT_TOKEN_NAME.search(name)


def _pattern(role: str, rank: int | None, *, timestamps: bool) -> str:
    who = f"[{role}{'' if rank is None else f' {rank}'}] ".replace("%", "%%") if role else ""
    if not timestamps:
        return f"{who}%(message)s"
    host = f"{socket.gethostname()} ".replace("%", "%%") if role else ""
    return f"%(asctime)s %(levelname)-7s {host}{who}%(name)s: %(message)s"


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record)).translate(_CONTROLS)
