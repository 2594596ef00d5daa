"""Every key of every job is read by product code outside rlsys/config; a key that nobody reads would be ignored.

A read is an attribute access `.<key>` in a file that also speaks of the section the key lies in: by an access
`.<section>`, a parameter or variable of that name, or the section's class (as in an annotation). The section itself
must be reached in the same way from the one above it. Keys that rlsys.config turns into others are listed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlsys.config import EvalConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.config.introspect import leaves, sections
from rlsys.config.schema.base import Section

ROOT = Path(__file__).resolve().parents[3]
JOBS = [PPOConfig, SFTConfig, RMConfig, EvalConfig]
TURNED_INTO_OTHERS = {
    "actor_rollout_ref.actor.clip_ratio": "the default of clip_ratio_low and clip_ratio_high",
    "trainer.allocation_mode": "becomes trainer.n_gpus_per_node, trainer.rollout_workers and the sequence parallelism",
}
ONE_MEANING = {
    "actor_rollout_ref.actor.strategy": "fsdp and fsdp2 both mean FSDP2, and anything else is refused",
    "critic.strategy": "the same",
    "engine.strategy": "the same",
    "actor_rollout_ref.hybrid_engine": "follows from the pools, and a contradiction is refused",
}
"""Whatever they may hold means the same, so there is nothing to read."""
READ_BY_PLAN = {
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.rollout_workers",
    "reward.reward_model.n_gpus_per_node",
    "reward.reward_model.nnodes",
    "reward.reward_model.enable_resource_pool",
}
"""Read through resolve_pools and plan_batches, which product code calls."""


@dataclass(frozen=True)
class Reads:
    """What one file speaks of: attributes it accesses, names it uses, sections it takes whole (`.x.model_dump()`)."""

    attributes: frozenset[str]
    names: frozenset[str]
    dumped: frozenset[str]


def reads_of(path: Path) -> Reads:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    attributes, names, dumped = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            attributes.add(node.attr)
            if node.attr == "model_dump" and isinstance(node.value, ast.Attribute):
                dumped.add(node.value.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return Reads(frozenset(attributes), frozenset(names), frozenset(dumped))


def product_files() -> list[Path]:
    files = [path for top in ("rlsys", "workers", "trainer", "scripts") for path in sorted((ROOT / top).rglob("*.py"))]
    return [path for path in files if "config" not in path.relative_to(ROOT).parts[:2]]


def spoken_names(path: str, section: type[Section]) -> set[str]:
    classes = {cls.__name__ for cls in section.__mro__ if issubclass(cls, Section) and cls is not Section}
    return {path.rpartition(".")[2], *classes}


def is_read(path: str, schema: type[Section], files: list[Reads]) -> bool:
    """Whether some file accesses the key (or section) and speaks of the section above it, and so on upwards."""
    parent, _, name = path.rpartition(".")
    if not parent:
        return any(name in file.attributes for file in files)
    spoken = spoken_names(parent, sections(schema)[parent])
    here = any(
        (name in file.attributes and spoken & (file.attributes | file.names))
        or parent.rpartition(".")[2] in file.dumped
        for file in files
    )
    return here and is_read(parent, schema, files)


def dead_keys(schema: type[Section], files: list[Reads]) -> list[str]:
    excused = {*TURNED_INTO_OTHERS, *ONE_MEANING}
    return [key for key in leaves(schema) if key not in excused and not is_read(key, schema, files)]


@pytest.mark.parametrize("schema", JOBS)
def test_every_key_is_read_by_product_code(schema: type[Section]) -> None:
    files = [reads_of(path) for path in product_files()]
    called = {name for file in files for name in file.attributes | file.names}
    counted = READ_BY_PLAN if {"resolve_pools", "plan_batches"} & called else set()
    assert [key for key in dead_keys(schema, files) if key not in counted] == []


def test_a_dead_key_is_found_and_a_read_one_is_not(tmp_path: Path) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text(
        "def f(cfg):\n    actor = cfg.actor_rollout_ref.actor\n    return actor.ppo_epochs, cfg.data.seed\n"
    )
    dead = dead_keys(PPOConfig, [reads_of(reader)])
    assert "actor_rollout_ref.actor.ppo_epochs" not in dead
    assert "data.seed" not in dead
    assert "critic.ppo_epochs" in dead
    assert "actor_rollout_ref.rollout.seed" in dead
    assert "trainer.save_freq" in dead


def test_a_read_through_a_typed_parameter_counts(tmp_path: Path) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text("def f(cfg, section: CriticConfig):\n    return section.cliprange_value, cfg.critic\n")
    assert "critic.cliprange_value" not in dead_keys(PPOConfig, [reads_of(reader)])


def test_a_section_that_nobody_reaches_makes_its_keys_dead(tmp_path: Path) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text("def f(optim: OptimConfig, cfg):\n    return optim.lr, cfg.actor_rollout_ref.actor.optim\n")
    dead = dead_keys(PPOConfig, [reads_of(reader)])
    assert "actor_rollout_ref.actor.optim.lr" not in dead
    assert "critic.optim.lr" in dead


def test_a_section_that_is_taken_whole_is_read(tmp_path: Path) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text("def f(cfg):\n    return dict(cfg.ray_kwargs.ray_init.model_dump()), cfg.model_dump()\n")
    dead = dead_keys(PPOConfig, [reads_of(reader)])
    assert "ray_kwargs.ray_init.num_cpus" not in dead
    assert "data.seed" in dead


def test_what_is_turned_into_other_keys_exists() -> None:
    assert {*TURNED_INTO_OTHERS, *READ_BY_PLAN} <= set(leaves(PPOConfig))
    assert set(ONE_MEANING) <= {*leaves(PPOConfig), *leaves(SFTConfig)}
