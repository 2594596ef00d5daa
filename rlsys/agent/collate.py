"""Episodes as a batch to train on: one row for each, in verl's columns.

B episodes, P prompt columns (padded left), R response columns (padded right).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rlsys.agent.runner import EpisodeResult
from rlsys.agent.trace import TraceRow
from rlsys.data.collate import pad_rows, position_ids
from rlsys.protocol import DataProto, object_array
from rlsys.types import Finish


def collate_episodes(
    results: Sequence[EpisodeResult], prompts: DataProto, *, pad_token_id: int, prompt_length: int, response_length: int
) -> DataProto:
    """The rows that `generate_sequences` and a reward manager give, and `turn_ids` (B, R), -1 on given tokens.

    Row i belongs to row i of `prompts`, whose columns it keeps. Of an episode with branches the row with most drawn
    tokens, the first of several, is trained. An episode without rows gets one that counts nothing (mask 0) in a group
    of its own.
    """
    rows = [max(result.rows, key=lambda row: sum(row.mask), default=_empty_row(pad_token_id)) for result in results]
    left = partial(pad_rows, length=prompt_length, side="left")
    prompt_ids = left([row.prompt_ids for row in rows], value=pad_token_id)
    prompt_mask = left([[1] * len(row.prompt_ids) for row in rows], value=0)
    right = partial(pad_rows, length=response_length)
    responses = right([row.response_ids for row in rows], value=pad_token_id)
    attention = torch.cat([prompt_mask, right([[1] * len(row.mask) for row in rows], value=0)], -1)
    tensors = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], -1),
        "attention_mask": attention,
        "position_ids": position_ids(attention),
        "response_mask": right([row.mask for row in rows], value=0),
        "weight_versions": right([row.versions for row in rows], value=-1),
        "turn_ids": right([row.turn_ids for row in rows], value=-1),
        "token_level_scores": right([row.rewards for row in rows], value=0.0),
        "rollout_log_probs": right([row.log_probs for row in rows], value=0.0),
        "rollout_sampled_log_probs": right([row.sampled_log_probs for row in rows], value=0.0),
    }
    uids = prompts.non_tensor_batch["uid"]
    columns: dict[str, Any] = {
        **prompts.non_tensor_batch,
        "uid": object_array(
            [uid if result.rows else f"{uid}/{n}" for n, (uid, result) in enumerate(zip(uids, results))]
        ),
        "finish_reason": object_array([row.finish.value for row in rows]),
        "episode_end": object_array([result.end for result in results]),
        "__num_turns__": object_array([result.num_turns for result in results]),
    }
    names = dict.fromkeys(name for result in results for name in result.extra)
    values = {name: [result.extra.get(name, 0.0) for result in results] for name in names}
    numbers = {name: column for name, column in values.items() if all(isinstance(v, int | float) for v in column)}
    extra = {name: object_array([*map(float, column)]) for name, column in numbers.items()}
    return DataProto.from_dict(tensors, columns | extra, {**prompts.meta_info, "reward_extra_keys": sorted(extra)})


def _empty_row(pad_token_id: int) -> TraceRow:
    one = (0.0,)
    return TraceRow((pad_token_id,), (pad_token_id,), (0,), one, one, (-1,), (-1,), one, 0.0, Finish.ABORT)
