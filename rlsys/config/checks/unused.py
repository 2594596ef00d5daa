"""Command-line settings that the chosen algorithm or engine ignores.

Files may hold settings for several jobs; a setting on the command line is meant for this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlsys.config.checks.findings import Note, ignored
from rlsys.config.checks.rules import condition_holds
from rlsys.config.introspect import absolute, rules, value_at
from rlsys.config.schema.base import ActiveIf, Section


def unused_settings(cfg: Section, given: Collection[str]) -> Iterator[Note]:
    """A note for each reason why keys in `given` have no effect."""
    reasons: dict[str, list[str]] = {}
    for key, parent, rule in rules(type(cfg)):
        if isinstance(rule, ActiveIf) and not condition_holds(cfg, rule, parent):
            besides = {f"{key}.{name}" for name in rule.besides}
            unused = [path for path in given if f"{path}.".startswith(f"{key}.") and path not in besides]
            reasons.setdefault(rule.why or _reason(cfg, rule, absolute(rule.key, parent)), []).extend(unused)
    for why, keys in reasons.items():
        if keys:
            yield ignored(keys, why)


def _reason(cfg: Section, rule: ActiveIf, other: str) -> str:
    if rule.values:
        return f"only used with {other}={' or '.join(rule.values)}"
    return f"only used with {other}=true" if value_at(cfg, other) is False else f"only used if {other} is set"
