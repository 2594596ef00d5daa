"""Files and directories that are written completely or not at all, even after a power cut."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO


def fsync_file(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_checked_json(path: Path, record: Mapping[str, object]) -> None:
    """Write a JSON object, durably, with the checksum of all bytes that follow it as its first entry."""
    body = json.dumps(record, indent=1)[1:]
    write_whole(path, f'{{"checksum": "{digest_of(body.encode())}",{body}'.encode(), durable=True)


def read_checked_json(path: Path) -> dict[str, Any]:
    """What `write_checked_json` wrote; ValueError for any changed bit."""
    head, _, body = path.read_bytes().partition(b",")
    if head != f'{{"checksum": "{digest_of(body)}"'.encode():
        raise ValueError("its checksum does not match its contents")
    return json.loads(b"{" + body)


def digest_of(data: bytes) -> str:
    """32 hexadecimal digits that depend on all bytes."""
    return blake2b(data, digest_size=16).hexdigest()


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace the content of a file, see `written_whole`."""
    with written_whole(path, durable=durable) as file:
        file.write(content)


@contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file that replaces `path` on leaving: readers see the old content or the new one, never a mixture; what could
    not be finished is removed. `durable` forces it to disk.
    """
    beside = path.with_name(f"{path.name}.tmp")  # one name, so that what a killed process leaves is written over
    try:
        with beside.open("wb") as file:
            yield file
        if durable:
            fsync_file(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        fsync_file(path.parent)


@contextmanager
def written_dir(final: Path) -> Iterator[Path]:
    """A fresh directory that becomes `final` on leaving, see `commit_dir`; what could not be finished is removed."""
    staging = staging_dir(final)
    try:
        yield staging
        commit_dir(staging, final)
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def staging_dir(final: Path) -> Path:
    """A fresh empty directory beside `final` to fill before `commit_dir`; leftovers of a killed run are removed."""
    staging = final.with_name(final.name + ".tmp")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def commit_dir(staging: Path, final: Path) -> None:
    """Rename a filled directory, whose files are on disk already, to its name; an older `final` is replaced.

    A crash in between leaves the older directory as `<name>.old`, which the next commit removes.
    """
    for directory in [staging, *(p for p in staging.rglob("*") if p.is_dir())]:
        fsync_file(directory)
    old = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staging.rename(final)
    fsync_file(final.parent)
    shutil.rmtree(old, ignore_errors=True)
