"""Files and directories that are written completely or not at all, even after a power cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def fsync_file(path: Path) -> None:
    """Force a file's bytes to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Force a directory's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text_durable(path: Path, text: str) -> None:
    """Write a file and force it to disk; for files inside a directory that is committed later."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_text_atomic(path: Path, text: str) -> None:
    """Replace the content of a file: readers see the old text or the new one, never a mixture."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_text_durable(beside, text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    fsync_dir(path.parent)


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
        fsync_dir(directory)
    old = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    staging.rename(final)
    fsync_dir(final.parent)
    shutil.rmtree(old, ignore_errors=True)
