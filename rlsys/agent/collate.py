"""Episodes as a batch to train on: a row for each, in verl's columns, and then one for each of their branches.

B episodes, P prompt columns (padded left), R response columns (padded right).
"""

from collections.abc import Sequence
from functools import partial
from math import fsum

import torch
from torch import Tensor

from rlsys.agent.runner import EpisodeResult
from rlsys.agent.trace import TraceRow
from rlsys.algorithms.masked import at_last_token
from rlsys.algorithms.stages import branch_rewards, rows_per_episode, with_columns
from rlsys.data.collate import padded_prompts
from rlsys.protocol import IMAGES, DataProto, object_array
from rlsys.protocol.rows import pad_rows, row_tensors
from rlsys.types import Finish


def collate_episodes(
    results: Sequence[EpisodeResult], prompts: DataProto, *, pad_token_id: int, prompt_length: int, response_length: int
) -> DataProto:
    """The rows that `generate_sequences` and a reward manager give, and `turn_ids` (B, R), -1 on given tokens.

    Row i belongs to row i of `prompts`, whose columns it keeps. Of an episode with branches it is the one with most
    drawn tokens; the column `branches` has the others, for `with_branches`. An episode without rows gets one that
    counts nothing (mask 0) in a group of its own. Numbers that graders gave for other episodes are 0 for one without,
    but `acc` is None where the workflow scored the episode itself.
    """
    ranked = [sorted(result.rows, key=lambda row: -sum(row.mask)) or [_empty_row(pad_token_id)] for result in results]
    rows = [first for first, *_ in ranked]
    tensors = _tensors(rows, pad_token_id, prompt_length, response_length)
    uids = prompts.non_tensor_batch["uid"]
    columns: dict[str, object] = {
        **prompts.non_tensor_batch,
        "uid": object_array([uid if one.rows else f"{uid}/{n}" for n, (uid, one) in enumerate(zip(uids, results))]),
        "finish_reason": object_array([row.finish.value for row in rows]),
        "episode_end": object_array([result.end for result in results]),
        "__num_turns__": object_array([result.num_turns for result in results]),
        "branches": object_array([[dict(vars(row)) for row in others] for _, *others in ranked]),
        "branch_rewards": object_array([_branch_rewards(*of_episode) for of_episode in ranked]),
    }
    if IMAGES in columns:
        columns[IMAGES] = object_array([row.images for row in rows])
    extra: dict[str, object] = {}
    for name in dict.fromkeys(name for result in results for name in result.extra):
        values = [result.extra.get(name, None if name == "acc" and result.end == "stop" else 0.0) for result in results]
        if name == "acc" or all(isinstance(value, int | float | None) for value in values):
            extra[name] = object_array([float(value) if isinstance(value, int | float) else value for value in values])
    return DataProto.from_dict(tensors, columns | extra, {**prompts.meta_info, "reward_extra_keys": sorted(extra)})


def with_branches(batch: DataProto, *, max_rows: int) -> DataProto:
    """The batch with a row for every branch of its episodes, at most `max_rows` per episode.

    Every episode gets `meta_info["rows_per_episode"]` neighbouring rows, as many as the one with most branches: its row
    of `batch`, its branches, and empty rows (mask 0). Where that is one row, the batch itself is returned. The rewards
    of the rows that are kept of an episode with more than `max_rows` branches have the weight of all.
    """
    branches = batch.non_tensor_batch.get("branches", ())
    if not any(branches):
        return batch
    size = min(max_rows, 1 + max(map(len, branches)))
    dropped = {"agent/untrained_rows": float(sum(max(0, len(others) + 1 - size) for others in branches))}
    batch.meta_info["source_metrics"] = {**batch.meta_info.get("source_metrics", {}), **dropped}
    if size == 1:
        return batch
    whole, pad_token_id = batch.repeat(size), batch.meta_info["pad_token_id"]
    rows = list[TraceRow]()
    for others in branches:
        kept = [TraceRow(**row) for row in others[: size - 1]]
        rows += kept + [_empty_row(pad_token_id)] * (size - 1 - len(kept))
    widths = (batch.tensors["prompts"].shape[1], batch.tensors["responses"].shape[1])
    for name, values in _tensors(rows, pad_token_id, *widths).items():
        whole.tensors[name].unflatten(0, (-1, size))[:, 1:] = values.unflatten(0, (-1, size - 1))
    weights = whole.tensors["row_weights"].unflatten(0, (-1, size))
    weights /= weights.sum(dim=1, keepdim=True).clamp(1e-9, 1.0)  # shares of an episode whose other rows are left out
    if IMAGES in whole.non_tensor_batch:
        images = object_array([row.images for row in rows]).reshape(-1, size - 1)
        whole.non_tensor_batch[IMAGES].reshape(-1, size)[:, 1:] = images
    whole.meta_info["rows_per_episode"] = size
    return whole


def first_rows(batch: DataProto) -> DataProto:
    """The row of each episode that `with_branches` was given, with the rewards of all turns of the episode."""
    size = rows_per_episode(batch)
    rows = batch if size == 1 else batch.select_idxs(torch.arange(0, len(batch), size))
    if not (others := branch_rewards(rows)).any():
        return rows
    added = at_last_token(others, rows.tensors["response_mask"])
    names = {"token_level_scores", "token_level_rewards"} & set(rows.tensors.keys())
    return with_columns(rows, **{name: rows.tensors[name] + added for name in names})


def _branch_rewards(first: TraceRow, *others: TraceRow) -> float:
    """The reward of an episode beyond that of its first row.

    Rows of weight 1, which have rewards by turn, add theirs; others add how far the weighted mean is above the first.
    """
    own = sum(first.rewards)
    totals = [(row.weight, sum(row.rewards)) for row in others]
    return fsum(total if weight == 1.0 else weight * (total - own) for weight, total in totals)


def _tensors(rows: Sequence[TraceRow], pad_id: int, prompt_length: int, response_length: int) -> dict[str, Tensor]:
    prompts, prompt_mask = padded_prompts([row.prompt_ids for row in rows], pad_id, prompt_length)
    right = partial(pad_rows, length=response_length)
    responses = right([row.response_ids for row in rows], value=pad_id)
    return {
        **row_tensors(prompts, prompt_mask, responses, right([[1] * len(row.mask) for row in rows], value=0)),
        "response_mask": right([row.mask for row in rows], value=0),
        "weight_versions": right([row.versions for row in rows], value=-1),
        "turn_ids": right([row.turn_ids for row in rows], value=-1),
        "token_level_scores": right([row.rewards for row in rows], value=0.0),
        "rollout_log_probs": right([row.log_probs for row in rows], value=0.0),
        "rollout_sampled_log_probs": right([row.sampled_log_probs for row in rows], value=0.0),
        "row_weights": torch.tensor([row.weight for row in rows]),
    }


def _empty_row(pad_token_id: int) -> TraceRow:
    one = (0.0,)
    return TraceRow((pad_token_id,), (pad_token_id,), (0,), one, one, (-1,), (-1,), one, 0.0, Finish.ABORT)
