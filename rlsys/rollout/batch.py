"""Between DataProto rows and requests: prompts in, padded completions out.

Letters: B rows, P prompt width, R response width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.protocol import DataProto
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams

SEEDS = "rollout_seed"


def requests_of(batch: DataProto, params: SamplingParams) -> list[ModelRequest]:
    """One request a row from `prompts` (B, P) and the left part of `attention_mask`; `rollout_seed` (B,) seeds its draws."""
    prompts, mask = batch.batch["prompts"], batch.batch["attention_mask"][:, : batch.batch["prompts"].shape[1]]
    seeds = batch.batch[SEEDS].tolist()
    return [
        ModelRequest(
            input_ids=tuple(row[kept.bool()].tolist()),
            gconfig=SamplingParams(**{**vars(params), "seed": seed}),
            rid=f"{batch.non_tensor_batch['uid'][i]}/{seed:x}" if "uid" in batch.non_tensor_batch else f"{seed:x}",
        )
        for i, (row, kept, seed) in enumerate(zip(prompts, mask, seeds))
    ]


def completions_of(
    batch: DataProto, answers: Sequence[ModelResponse], *, response_width: int, pad_token_id: int
) -> DataProto:
    """The rows' completions in the batch layout, right-padded to `response_width`."""
    responses = _padded([a.output_tokens for a in answers], response_width, pad_token_id, torch.int64)
    lengths = torch.tensor([len(a.output_tokens) for a in answers])
    response_mask = (torch.arange(response_width) < lengths[:, None]).long()
    prompts = batch.batch["prompts"]
    attention_mask = torch.cat([batch.batch["attention_mask"][:, : prompts.shape[1]], response_mask], dim=1)
    reasons = np.empty(len(answers), dtype=object)
    reasons[:] = [Finish(a.stop_reason).value for a in answers]
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0) * attention_mask,
            "response_mask": response_mask,
            "rollout_log_probs": _padded([a.output_logprobs for a in answers], response_width, 0.0),
            "rollout_sampled_log_probs": _padded([a.sampled_logprobs for a in answers], response_width, 0.0),
            "weight_versions": _padded([a.output_versions for a in answers], response_width, -1, torch.int64),
        },
        non_tensors={"finish_reason": reasons},
    )


def generate_sequences(engine: Any, batch: DataProto, *, params: SamplingParams, pad_token_id: int) -> DataProto:
    """Complete all rows with one call of a RolloutEngine."""
    answers = engine.generate(requests_of(batch, params))
    return completions_of(batch, answers, response_width=params.max_new_tokens, pad_token_id=pad_token_id)


def _padded(
    rows: Sequence[Sequence[float]], width: int, fill: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
