"""The rules that keys declare in the schema: required settings and registered names."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.checks.findings import unknown_name, wrong
from rlsys.config.introspect import absolute, leaves, rules, value_at
from rlsys.config.schema.base import Condition, Registered, Requires, Section


def check_rules(cfg: Section) -> Iterator[str]:
    """Keys whose `Requires` or `Registered` rule is broken."""
    for key, parent, rule in rules(type(cfg)):
        if isinstance(rule, Requires):
            other, value = absolute(rule.key, parent), value_at(cfg, key)
            default = leaves(type(cfg))[key].get_default(call_default_factory=True)
            is_given = value in rule.given if rule.given else value != default
            if is_given and not condition_holds(cfg, rule, parent):
                fix = rule.fix or f"set {other}={rule.values[0] if rule.values else rule.to}"
                yield wrong(key, value, f"{rule.why}; {fix}")
        elif isinstance(rule, Registered):
            yield from _registered(cfg, key, rule.names)


def condition_holds(cfg: Section, rule: Condition, parent: str) -> bool:
    """Whether a condition declared in the section `parent` holds; it does for names that others registered."""
    key = absolute(rule.key, parent)
    value = value_at(cfg, key)
    registered = [known for path, _, known in rules(type(cfg)) if path == key and isinstance(known, Registered)]
    return rule.holds(value) or any(value not in known.names for known in registered)


def _registered(cfg: Section, key: str, names: tuple[str, ...]) -> Iterator[str]:
    """A name must be known, unless a user-defined module may register more."""
    name, libraries = value_at(cfg, key), [path for path in leaves(type(cfg)) if path.endswith("model.external_lib")]
    if name in names or any(value_at(cfg, path) for path in libraries):
        return
    yield unknown_name(key, name, names)
