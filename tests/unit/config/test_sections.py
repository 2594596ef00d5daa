"""Sections built on their own, as library code does: with the defaults that the loader gives them."""

import pytest
from pydantic import ValidationError

from rlsys.config.introspect import RULES, absolute, leaves, nest, rules, sections, value_at
from rlsys.config.merge import Layers
from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.config.schema.base import Condition, Section
from rlsys.config.schema.jobs import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig

JOBS = (PPOConfig, SFTConfig, RMConfig, DPOConfig, EvalConfig)


def values_of(section: Section) -> dict[str, object]:
    """Every key but the paths, whose defaults are expanded and interpolated by the loader."""
    values: dict[str, object] = {}
    for path, field in leaves(type(section)).items():
        value: object = section
        for name in path.split("."):
            value = getattr(value, name)
        if "~" not in str(field.default) and "${" not in str(field.default):
            values[path] = value
    return values


@pytest.mark.parametrize("job", JOBS)
def test_a_section_on_its_own_has_the_loaders_defaults(job: type[Section]) -> None:
    loaded = values_of(job.model_validate(nest(Layers(job).resolve())))
    assert values_of(job()) == loaded
    for path, section in sections(job).items():
        prefix = f"{path}." if path else ""
        own = {f"{prefix}{name}": value for name, value in values_of(section()).items()}
        assert own.items() <= loaded.items()


def test_a_links_own_section_is_asked_first() -> None:
    actor = ActorConfig(clip_ratio=0.1, clip_ratio_high=0.3)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.1, 0.3)
    critic = CriticConfig(ppo_micro_batch_size_per_gpu=4)
    assert (critic.forward_micro_batch_size_per_gpu, critic.ppo_mini_batch_size) == (4, 256)


def test_a_section_on_its_own_is_checked_like_a_loaded_one() -> None:
    with pytest.raises(ValidationError, match="clip_ratio_c"):
        ActorConfig(clip_ratio_c=1.0)


def test_every_rule_is_of_a_declared_key_and_names_one() -> None:
    declared = set()
    for job in JOBS:
        for cls in (cls for section in sections(job).values() for cls in section.__mro__):
            declared |= {(cls.__name__, key) for key in vars(cls).get("__annotations__", ())}
        for _, parent, rule in rules(job):
            if isinstance(rule, Condition):
                value_at(job(), absolute(rule.key, parent))
    rows = [(section, names.split(", ")) for section, of_section in RULES.items() for names in of_section]
    assert {(section, key) for section, names in rows for key in names} <= declared
