"""Log-probabilities of given responses under the served weights, in passes of bounded size.

Letters: B rows, P prompt columns, R response columns, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlsys.protocol.columns import tensors_of
from rlsys.rollout.hf.kv_cache import ColumnCache, causal_mask

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

MAX_LOGITS = 1 << 26


@torch.inference_mode()
def score_responses(model: Any, batch: DataProto, *, temperature: float, max_tokens: int) -> Tensor:
    """Log-probabilities (B, R) of `responses` at `temperature` (> 0), float32 on CPU, zero where response_mask is 0.

    Needs `responses`, `input_ids` (B, P + R), `attention_mask`, `response_mask` or else counts the attended tokens.
    """
    rows = tensors_of(batch.batch)
    ids, attention, responses = rows["input_ids"], rows["attention_mask"], rows["responses"]
    num_rows, length = responses.shape
    counted = rows.get("response_mask", attention[:, -length:])
    budget = max(1, min(max_tokens, MAX_LOGITS // model.config.get_text_config().vocab_size))
    step = max(1, budget // ids.shape[1])
    parts = [
        _score_rows(model, ids[at : at + step], attention[at : at + step], length, temperature, budget)
        for at in range(0, num_rows, step)
    ]
    return torch.where(counted.cpu() > 0, torch.cat(parts), 0.0)


def _score_rows(model: Any, ids: Tensor, attention: Tensor, length: int, temperature: float, budget: int) -> Tensor:
    """One pass over some rows, their columns in chunks of at most `budget` tokens; returns (b, length)."""
    ids, attention = ids.to(model.device), attention.to(model.device)
    num_rows, width = ids.shape
    starts = attention.argmax(1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    first = width - length - 1
    cache = ColumnCache(model.config.get_text_config().num_hidden_layers, num_rows=num_rows, num_columns=width)
    every, step = slice(0, num_rows), max(1, budget // num_rows)
    scores = torch.zeros(num_rows, length)
    for at in range(0, width - 1, step):
        end = min(at + step, width - 1)
        skip = min(max(first - at, 0), end - at)
        logits = model(
            input_ids=ids[:, at:end],
            position_ids=positions[:, at:end],
            attention_mask=causal_mask(starts, slice(at, end), slice(0, end), model.dtype),
            past_key_values=cache.look(every, slice(0, end), slice(at, end)),
            use_cache=True,
            logits_to_keep=torch.arange(skip, end - at, device=ids.device),
        ).logits
        if skip < end - at:
            scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
            chosen = scaled.gather(2, ids[:, at + skip + 1 : end + 1, None]).squeeze(2)
            scores[:, at + skip - first : end - first] = chosen.cpu()
    return scores
