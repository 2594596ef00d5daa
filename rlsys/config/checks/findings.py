"""How problems and notes are worded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

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


def unknown_name(key: str, name: str, known: Sequence[str], *, what: str = "name") -> str:
    """A problem: `name` is not registered; a module named in external_lib may register more than the `known`."""
    near = get_close_matches(name.replace("-", "_"), known, n=1)
    hint = f"set {key}={near[0]}; " if near else ""
    own = "register your own in a module named in actor_rollout_ref.model.external_lib"
    return wrong(key, name, f"unknown {what}; {hint}choose from {', '.join(known)}, or {own}")
