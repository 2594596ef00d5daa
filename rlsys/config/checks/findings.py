"""How problems and notes are worded."""

from collections.abc import Iterable

from rlsys.config.introspect import shown, value_at
from rlsys.config.schema.base import Section

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"


class Note(str):
    """A finding that does not stop the run."""

    __slots__ = ()


def wrong(cfg: Section, key: str, why: str, to: object = "", *, value: object = None) -> str:
    """A problem: the key, its value (of a list the wrong one), why it is wrong, and what to set instead."""
    fix = f"; set {key}={to if isinstance(to, str) else shown(to)}" if to != "" else ""
    return f"{key} = {shown(value_at(cfg, key) if value is None else value)}: {why}{fix}"


def note(cfg: Section, key: str, why: str) -> Note:
    """As `wrong`, for a finding that does not stop the run."""
    return Note(wrong(cfg, key, why))


def ignored(keys: Iterable[str], why: str) -> Note:
    """One line for all settings that are ignored for the same reason."""
    return Note(f"ignored: {', '.join(dict.fromkeys(keys))} ({why})")
