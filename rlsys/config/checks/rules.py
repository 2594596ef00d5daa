"""The rules that keys declare in the schema: required settings, registered names, settings that have no effect."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec

from rlsys.config.checks.findings import Note, ignored, note, wrong
from rlsys.config.introspect import absolute, leaves, rules, shown, value_at
from rlsys.config.schema.base import ActiveIf, Condition, Registered, Requires, Section


def check_rules(cfg: Section, *, is_here: bool = False) -> Iterator[str]:
    """Keys whose `Requires` rule is broken; the rules on installed packages only hold for a run that `is_here`."""
    for key, parent, rule in rules(type(cfg)):
        if isinstance(rule, Requires) and (is_here or not rule.installed):
            other, value = absolute(rule.key, parent), value_at(cfg, key)
            default = leaves(type(cfg))[key].get_default(call_default_factory=True)
            is_given = value in rule.given if rule.given else value != default
            if is_given and not _holds(cfg, rule, parent):
                fix = rule.fix or f"set {other}={shown(rule.values[0]) if rule.values else rule.to}"
                why = rule.why.format(value_at(cfg, other))
                yield note(cfg, key, why) if rule.is_note else wrong(cfg, key, f"{why}; {fix}")


def unknown_names(values: Mapping[str, object], schema: type[Section]) -> Iterator[str]:
    """Values, by key, that are not in the key's registry, unless a module named in external_lib may add them."""
    if any(value for key, value in values.items() if key.endswith("model.external_lib")):
        return
    own = "register your own in a module named in actor_rollout_ref.model.external_lib"
    for key, _, rule in rules(schema):
        if isinstance(rule, Registered) and isinstance(name := values[key], str) and name not in rule.names:
            near = get_close_matches(name.lower().replace("-", "_"), rule.names, n=1)
            hint = f"set {key}={near[0]}; " if near else ""
            yield f"{key} = {shown(name)}: unknown name; {hint}choose from {', '.join(rule.names)}, or {own}"


def unused_settings(cfg: Section, given: Collection[str]) -> Iterator[Note]:
    """A note for each reason why keys in `given`, those of the command line, have no effect in this job.

    Files may hold settings for several jobs; a setting on the command line is meant for this one.
    """
    reasons: dict[str, list[str]] = {}
    for key, parent, rule in rules(type(cfg)):
        if isinstance(rule, ActiveIf) and not _holds(cfg, rule, parent):
            besides = {f"{key}.{name}" for name in rule.besides}
            unused = [path for path in given if f"{path}.".startswith(f"{key}.") and path not in besides]
            reasons.setdefault(rule.why or _reason(cfg, rule, absolute(rule.key, parent)), []).extend(unused)
    yield from (ignored(keys, why) for why, keys in reasons.items() if keys)


def _holds(cfg: Section, rule: Condition, parent: str) -> bool:
    """Whether a condition declared in the section `parent` holds; it does for names that others registered."""
    if rule.installed:
        return find_spec(rule.installed) is not None
    key = absolute(rule.key, parent)
    value = value_at(cfg, key)
    registered = [known for path, _, known in rules(type(cfg)) if path == key and isinstance(known, Registered)]
    if rule.excluded:
        return value not in rule.excluded
    return (value in rule.values if rule.values else bool(value)) or any(value not in kind.names for kind in registered)


def _reason(cfg: Section, rule: ActiveIf, other: str) -> str:
    if rule.values:
        return f"only used with {other}={' or '.join(map(shown, rule.values))}"
    return f"only used with {other}=true" if value_at(cfg, other) is False else f"only used if {other} is set"
