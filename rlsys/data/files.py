"""Rows of files: parquet, JSON, JSON lines, CSV and folders saved by `datasets`; unreadable rows are reported.

Lines of text files count from 1; rows of parquet, JSON arrays and `datasets` folders from 0. A UTF-8 byte-order mark,
Windows line ends and blank lines are accepted.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.config.checks.files import rows_problem
from rlsys.data.rows import type_name
from rlsys.utils.errors import ConfigError, raised_as

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROW_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
UNREADABLE = (ValueError, OverflowError, LookupError)
"""What Arrow raises for a value that Python cannot hold: text that is not UTF-8, a far date, an unknown time zone."""


@dataclass(frozen=True)
class Row:
    """One row and its origin, e.g. file "train.jsonl", place "line 3"."""

    file: str
    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row, or with place "whole file" a whole file, that cannot be used, and why."""

    file: str
    place: str
    reason: str
    fix: str = "; correct it, or skip such rows with data.bad_rows=skip"

    def __str__(self) -> str:
        return f"{self.file}, {self.place}: {self.reason}"


def read_rows(files: str | Sequence[str]) -> Iterator[Row | BadRow]:
    """All rows of all files in order. Raises ConfigError for a file that is missing or of an unknown format."""
    for file in [files] if isinstance(files, str) else files:
        path = Path(file).expanduser()
        if why := rows_problem(path):
            raise ConfigError(f"data file {path}: {why}")
        readers = {".parquet": _read_parquet, ".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv}
        reader = _read_saved_dataset if path.is_dir() else readers[path.suffix.lower()]
        try:
            row = None
            for row in reader(path):
                yield row
            if row is None:
                raise ValueError("it has no rows")
        except ValueError as error:
            yield BadRow(str(path), "whole file", str(error), "; correct it, or leave it out")


def count_rows(file: str) -> int:
    """How many rows a file has, at most: readable or not, without parsing JSON lines or reading parquet's columns."""
    path = Path(file).expanduser()
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    return sum(1 for _ in read_rows(file))


# --- JSON ---


def _read_json_lines(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = (line.removeprefix(BOM) if number == 1 else line).rstrip()  # else an error at its end is on "line 2"
            if not text:
                continue
            place = f"line {number}"
            try:
                yield Row(str(path), place, _object(_parse(text)))
            except ValueError as error:
                is_cut = isinstance(error.__cause__, json.JSONDecodeError) and not line.endswith(b"\n")
                yield BadRow(str(path), place, f"{error}{' (the file ends within this line)' if is_cut else ''}")


def _read_json(path: Path) -> Iterator[Row | BadRow]:
    """An array of objects; anything else is read as JSON lines, as `datasets` does."""
    data = path.read_bytes().removeprefix(BOM)
    if not data.lstrip().startswith(b"["):
        yield from _read_json_lines(path)
        return
    for number, item in enumerate(_parse(data, max_bytes=None)):
        try:
            yield Row(str(path), f"row {number}", _object(item))
        except ValueError as error:
            yield BadRow(str(path), f"row {number}", str(error))


def _parse(data: bytes, *, max_bytes: int | None = MAX_ROW_BYTES) -> Any:
    if max_bytes is not None and len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes are too long for one row, the limit is {max_bytes}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("the text is UTF-16, it must be UTF-8")
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {str(error).replace(': line 1 column', ' at column')}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return values


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        hint = "; a file that is one JSON array must end in .json" if isinstance(value, list) else ""
        raise ValueError(f"a row must be an object, this is {type_name(value)}{hint}")
    return value


# --- CSV ---


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        with raised_as(ValueError, "its first line is not CSV", csv.Error):
            names = next(reader, [])
        if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
            raise ValueError(f"its columns must be separated by commas: {names[0]!r}")
        _check_names(names)
        while True:
            place = f"line {reader.line_num + 1}"
            try:
                cells = next(reader)
                if cells:
                    yield Row(str(path), place, _csv_values(names, cells))
            except StopIteration:
                return
            except (csv.Error, ValueError) as error:
                yield BadRow(str(path), place, str(error))


def _csv_values(names: list[str], cells: list[str]) -> dict[str, object]:
    if len(cells) != len(names):
        raise ValueError(f"it has {len(cells)} cells, the first line has {len(names)}")
    if any("\udc80" <= c <= "\udcff" for cell in cells for c in cell):
        raise ValueError("the text is not UTF-8")
    return {name: _csv_value(cell) for name, cell in zip(names, cells)}


def _csv_value(cell: str) -> object:
    """An empty cell is null; one that is a JSON list or object is that; the rest is text."""
    if cell.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(cell)
    return cell or None


# --- Arrow ---


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with raised_as(ValueError, "not a readable parquet file", pa.ArrowException, OSError):
        file = pq.ParquetFile(path)
    first = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        try:
            table = file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            yield BadRow(str(path), f"rows {first} to {first + num_rows - 1}", f"the row group cannot be read: {error}")
        else:
            yield from _table_rows(path, table, first)
        first += num_rows


def _read_saved_dataset(path: Path) -> Iterator[Row | BadRow]:
    """The Arrow files that `datasets.Dataset.save_to_disk` wrote, without needing that package."""
    import pyarrow as pa

    with raised_as(ValueError, "its state.json is broken"):
        names = [Path(entry["filename"]).name for entry in json.loads((path / "state.json").read_text())["_data_files"]]
    first = 0
    for name in names:
        try:
            with pa.memory_map(str(path / name)) as source:
                table = pa.ipc.open_stream(source).read_all()
        except (pa.ArrowException, OSError) as error:
            yield BadRow(str(path / name), "whole file", f"not a readable Arrow file: {error}")
            continue
        yield from _table_rows(path, table, first)
        first += table.num_rows


def _table_rows(path: Path, table: "pa.Table", first: int) -> Iterator[Row | BadRow]:
    _check_names(table.column_names)
    for start in range(0, table.num_rows, 1024):
        part = table.slice(start, 1024)
        try:
            rows: Iterable[Any] = part.to_pylist()
        except UNREADABLE:
            rows = (_one_row(part, i) for i in range(part.num_rows))
        for number, values in enumerate(rows, first + start):
            place = str(path), f"row {number}"
            yield Row(*place, values) if isinstance(values, dict) else BadRow(*place, str(values))


def _check_names(names: list[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the column {repeated[0]!r} occurs twice")


def _one_row(table: "pa.Table", row: int) -> dict[str, object] | str:
    try:
        return table.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"the text is not UTF-8: {error.reason} at byte {error.start}"
    except UNREADABLE as error:
        return f"a value cannot be read: {error}"
