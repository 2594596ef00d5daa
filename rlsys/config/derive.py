"""Keys derived from others in ways that a reference cannot express, from resolved values before they are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlsys.config.compat.allocation import allocation_settings
from rlsys.config.introspect import is_count, shown
from rlsys.config.merge import Given
from rlsys.config.pools import is_external
from rlsys.utils.errors import ConfigError

MODE = "trainer.allocation_mode"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def derived_counts(
    values: Mapping[str, Any], given: Mapping[str, Given], global_sizes: Mapping[str, Given]
) -> tuple[dict[str, Given], list[str]]:
    """The counts set by trainer.allocation_mode and by verl's old micro-batch sizes, and problems with them."""
    counts, problems = _from_allocation(values, given)
    mini, prompts = values.get(MINI_BATCH, 1), values.get("data.train_batch_size", 1)
    if MINI_BATCH not in given and is_count(mini) and is_count(prompts) and prompts % mini:
        counts[MINI_BATCH] = Given(prompts, "follows data.train_batch_size", MINI_BATCH)
    nnodes, per_node = values["trainer.nnodes"], values["trainer.n_gpus_per_node"]
    if "trainer.n_gpus_per_node" in counts:
        per_node = counts["trainer.n_gpus_per_node"].value
    if is_count(nnodes) and is_count(per_node):
        sizes, more = _from_global_sizes(nnodes * per_node, given, global_sizes)
        return counts | sizes, problems + more
    return counts, problems


def derived_fractions(values: Mapping[str, Any], fractions: Mapping[str, tuple[Given, str]]) -> dict[str, Given]:
    """Settings that are fractions of another key's value here, such as the lowest learning rate of lr."""
    return {
        key: replace(given, value=given.value / whole if _is_number(given.value) and _is_number(whole) else given.value)
        for key, (given, other) in fractions.items()
        if (whole := values[other])
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fill_auto(values: dict[str, Any]) -> None:
    """Replace null by the value that follows from other keys."""
    if values.get("critic.enable", False) is None:
        values["critic.enable"] = values["algorithm.adv_estimator"] == "gae"
    key = "actor_rollout_ref.hybrid_engine"
    if key in values and values[key] is None:
        external = is_external(values["actor_rollout_ref.rollout.name"])
        values[key] = values["trainer.rollout_workers"] == 0 and not external


def _from_allocation(values: Mapping[str, Any], given: Mapping[str, Given]) -> tuple[dict[str, Given], list[str]]:
    """The counts of an allocation; counts that are also set must agree with it."""
    text, nnodes = values.get(MODE), values["trainer.nnodes"]
    if not isinstance(text, str) or not is_count(nnodes):
        return {}, []
    try:
        counts = allocation_settings(text, nnodes)
    except ConfigError as error:
        return {}, [f"{MODE}: {error}"]
    problems = [
        f"{key} = {shown(values[key])}: conflicts with {MODE}={text}; set {key}={count} or remove it"
        for key, count in counts.items()
        if key in given and values[key] != count
    ]
    return {key: Given(count, f"from {MODE}", key) for key, count in counts.items()}, problems


def _from_global_sizes(
    ranks: int, given: Mapping[str, Given], global_sizes: Mapping[str, Given]
) -> tuple[dict[str, Given], list[str]]:
    """Micro-batch sizes over all ranks, divided by them."""
    sizes: dict[str, Given] = {}
    problems = []
    for key, old in global_sizes.items():
        if not is_count(old.value) or old.value % ranks:
            problems.append(
                f"{old.spelling} = {shown(old.value)} ({old.origin}): it is divided by {ranks} ranks, so it must be a "
                f"multiple of {ranks}; or set {key}"
            )
            continue
        size = old.value // ranks
        if key in given and given[key].value not in (None, size):
            problems.append(
                f"{old.spelling} = {old.value} and {key} = {shown(given[key].value)}: on {ranks} ranks the first is "
                f"{size} per rank; set one of them"
            )
        sizes[key] = Given(size, old.origin, old.spelling)
    return sizes, problems
