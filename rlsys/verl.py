"""verl's names for what rlsys has under another: `from rlsys.verl import hf_tokenizer, need_critic, ...`.

docs/coming_from_verl.md says where the others are.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import fsspec
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlsys.batching.partition import balanced_partitions
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.vocabulary import ADV_ESTIMATORS
from rlsys.protocol.rows import compute_response_mask, position_ids
from rlsys.rewards.registry import compute_score

AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATORS})  # pyrefly: ignore
compute_position_id_with_mask, default_compute_score = position_ids, compute_score


@dataclass(frozen=True)
class ToolResponse:
    """What a tool returns: `text`; images and videos are not read."""

    text: str | None = None


def hf_tokenizer(name_or_path: str, **kwargs: object) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id, which pads by its end token if it has no other."""
    tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def need_critic(config: PPOConfig) -> bool:
    """Whether a critic is trained."""
    return config.use_critic


def need_reference_policy(config: PPOConfig) -> bool:
    """Whether a frozen reference is needed."""
    return config.use_reference


def need_reward_model(config: PPOConfig) -> bool:
    """Whether a reward model grades."""
    return config.reward.reward_model.enable


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices of `k_partitions` parts with sums as equal as possible."""
    return [part.tolist() for part in balanced_partitions(np.array(seqlen_list), k_partitions, equal_size=equal_size)]


def append_to_dict(data: dict[str, list[object]], new_data: Mapping[str, object]) -> None:
    """Append each value to the list of its key; lists extend it."""
    for key, value in new_data.items():
        data.setdefault(key, []).extend(value if isinstance(value, list) else [value])


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], **_: object) -> Generator[None]:
    """Add the seconds of the block to `timing_raw[name]`; other arguments colour verl's profiles."""
    start = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


def makedirs(name: str, exist_ok: bool = True) -> None:
    """Make a folder here or at an address that fsspec knows, such as hdfs:// or s3://."""
    files, path = fsspec.url_to_fs(name)
    files.makedirs(path, exist_ok=exist_ok)


def copy(src: str, dst: str) -> None:
    """Copy a local file or folder into a folder here or at an address."""
    files, path = fsspec.url_to_fs(dst)
    files.put(src, f"{path}/", recursive=True)
