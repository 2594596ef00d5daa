"""How problems and notes are worded."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.config.introspect import shown


class Note(str):
    """A finding that does not stop the run."""

    __slots__ = ()


def wrong(key: str, value: object, why: str) -> str:
    """A problem: the key, its value, and why it is wrong, ending with what to set instead."""
    return f"{key} = {shown(value)}: {why}"


def ignored(keys: Iterable[str], why: str) -> Note:
    """One line for all settings that are ignored for the same reason."""
    return Note(f"ignored: {', '.join(dict.fromkeys(keys))} ({why})")


def note(key: str, value: object, why: str) -> Note:
    """As `wrong`, for a finding that does not stop the run."""
    return Note(wrong(key, value, why))
