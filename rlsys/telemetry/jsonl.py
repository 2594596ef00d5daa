"""One JSON object per line: valid JSON even for NaN, whole lines even after kill -9, and exact after a resume.

A record is flat: `{"step": 3, "actor/lr": 1e-06, ...}`. JSON has no NaN or infinity, so a non-finite number is written
as null and named under `_non_finite`: `{"step": 4, "actor/loss": null, "_non_finite": {"actor/loss": "nan"}}`;
`read_jsonl` puts the numbers back.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

from rlsys.utils.atomic import write_whole

NON_FINITE = "_non_finite"
JsonObject = Mapping[str, Any]


class JsonlWriter:
    """Appends records to a file, each in one write, so that readers and crashes see whole lines only.

    `resume_step=None` starts a new file: an existing one is renamed to the next free name `metrics.1.jsonl`. With
    a number N the lines of steps after N are dropped, and so is a line cut off by a crash: after resuming from
    the checkpoint of step N the file equals that of an uninterrupted run. Raises OSError when the disk refuses.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resume_step is None and path.stat().st_size:
                names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
                path.rename(next(name for name in names if not name.exists()))
            elif resume_step is not None:
                _truncate(path, resume_step)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: JsonObject) -> None:
        """Append a record; one that the disk does not take is removed again."""
        line, start = memoryview(encode_line(record)), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(start)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        self._file.close()


def encode_line(record: JsonObject) -> bytes:
    """One line of strict JSON; NumPy and torch numbers become plain ones, unknown objects their text."""
    held = {name: plain(value, is_strict=True) for name, value in record.items()}
    if non_finite := {k: str(v) for k, v in held.items() if isinstance(v, float) and not isfinite(v)}:
        held |= dict.fromkeys(non_finite) | {NON_FINITE: non_finite}
    return (json.dumps(held, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, non-finite numbers restored; an incomplete last line is left out."""
    for _, record in _whole_lines(Path(path)):
        yield record | {name: float(text) for name, text in record.pop(NON_FINITE, {}).items()}


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line that ends and holds a JSON object, as bytes and decoded."""
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith(b"\n") and isinstance(record := json.loads(line), dict):
                yield line, record


def _truncate(path: Path, step: int) -> None:
    kept = [line.decode() for line, record in _whole_lines(path) if record.get("step", 0) <= step]
    write_whole(path, "".join(kept).encode(), durable=True)


def plain(value: object, *, is_strict: bool = False) -> Any:
    """`value` as JSON can hold it: NumPy and torch values become numbers and lists, other types text.

    In strict JSON the non-finite numbers inside lists and dicts become text too.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    inner = plain_json if is_strict else plain
    if isinstance(value, Mapping):
        return {str(k): inner(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if type(v) in (int, str, bool) or (type(v) is float and isfinite(v)) else inner(v) for v in value]
    return plain(value.tolist(), is_strict=is_strict) if hasattr(value, "tolist") else str(value)


def plain_json(value: object) -> object:
    """The value as strict JSON: as `plain`, and non-finite numbers as text."""
    held = plain(value, is_strict=True)
    return str(held) if isinstance(held, float) and not isfinite(held) else held
