"""How findings are worded."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.config.introspect import shown


class Note(str):
    """A finding that does not stop the run."""

    __slots__ = ()


def wrong(key: str, value: object, why: str) -> str:
    """A problem: the key, its value, and why, which ends with what to write."""
    return f"{key} = {shown(value)}: {why}"


def without_effect(keys: Iterable[str], why: str) -> Note:
    """One line for all settings that a reason leaves without effect."""
    return Note(f"without effect here: {', '.join(dict.fromkeys(keys))}: {why}")


def note(key: str, value: object, why: str) -> Note:
    """As `wrong`, for a finding that does not stop the run."""
    return Note(wrong(key, value, why))
