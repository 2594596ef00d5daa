"""Converts DataProto rows to requests and responses back to rows, around any rollout engine.

Letters: B rows, P prompt columns (padded left), R response columns (padded right).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine
from rlsys.protocol import DataProto, images_of, object_array
from rlsys.protocol.columns import tensors_of
from rlsys.protocol.rows import compute_response_mask, pad_rows, response_lengths, row_tensors
from rlsys.rollout.partial import complete
from rlsys.rollout.sampling.sample import combine_seeds
from rlsys.types import ModelRequest, ModelResponse, SamplingParams

SEEDS = "request_seeds"
ScoreFn = Callable[[list[list[int]], list[int]], Iterable[tuple[int, Sequence[float]]]]


def with_request_seeds(batch: DataProto) -> DataProto:
    """The batch with `request_seeds` (B,): hashes of meta_info's `seed` and `global_steps` and of the row's number.

    Call it before the batch is split, so that samples do not depend on the split. Rows that have seeds keep them.
    """
    if SEEDS in tensors_of(batch.batch):
        return batch
    meta, rows = batch.meta_info, torch.arange(len(batch))
    seeds = combine_seeds(int(meta.get("seed", 0)), int(meta.get("global_steps", 0)), rows) & (2**63 - 1)
    return DataProto.from_dict({**tensors_of(batch.batch), SEEDS: seeds}, batch.non_tensor_batch, meta)


def generate_sequences(engine: RolloutEngine, batch: DataProto) -> DataProto:
    """Complete every row's prompt.

    Needs `prompts` (B, P) or prompt-only `input_ids`, `attention_mask` whose first P columns are the prompt's, and in
    meta_info `response_length` and `pad_token_id`. Read from meta_info too: `temperature`, `top_p`, `top_k`,
    `do_sample`, `min_new_tokens`, `ignore_eos`, `eos_token_id` (one or several), `stop_token_ids`; and `seed` and
    `global_steps` unless the rows have `request_seeds`.

    Returns prompts, responses, input_ids, attention_mask, position_ids, response_mask, rollout_log_probs (of the full
    distribution), rollout_sampled_log_probs, weight_versions (-1 at pads) and, as objects, finish_reason; where the
    engine returns them, routed_experts.
    """
    return from_responses(batch, complete(engine, to_requests(batch)))


def to_requests(batch: DataProto) -> list[ModelRequest]:
    """One request per row: its prompt without pads, and its images."""
    batch = with_request_seeds(batch)
    prompts, attention = prompts_of(batch)
    lengths = attention.sum(1).tolist()
    params, seeds = _params_of(batch.meta_info), tensors_of(batch.batch)[SEEDS].tolist()
    images = images_of(batch)
    return [
        ModelRequest(tuple(row[len(row) - length :]), replace(params, seed=seed), f"{number}", images=images[number])
        for number, (row, length, seed) in enumerate(zip(prompts.tolist(), lengths, seeds, strict=True))
    ]


def from_responses(batch: DataProto, responses: Sequence[ModelResponse]) -> DataProto:
    """The rows of `generate_sequences` from the responses to `to_requests(batch)`."""
    prompts, prompt_mask = prompts_of(batch)
    width, pad = int(batch.meta_info["response_length"]), int(batch.meta_info["pad_token_id"])
    right = partial(pad_rows, length=width)
    response_mask = right([[1] * len(r.output_tokens) for r in responses], value=0)
    tokens = right([r.output_tokens for r in responses], value=pad)
    tensors = row_tensors(prompts, prompt_mask, tokens, response_mask) | {
        "response_mask": response_mask,
        "rollout_log_probs": right([r.output_logprobs for r in responses], value=0.0),
        "rollout_sampled_log_probs": right([r.sampled_logprobs for r in responses], value=0.0),
        "weight_versions": right([r.output_versions for r in responses], value=-1),
    }
    if any(response.routed_experts is not None for response in responses):
        tensors["routed_experts"] = _routes(prompt_mask, responses, width)
    reasons = {"finish_reason": object_array([response.stop_reason.value for response in responses])}
    return DataProto.from_dict(tensors, reasons, dict(batch.meta_info))


def _routes(prompt_mask: Tensor, responses: Sequence[ModelResponse], width: int) -> Tensor:
    """The experts (B, P + R, layers, k) of each token, -1 where none are known, as of a response's last token."""
    known = {row: r.routed_experts for row, r in enumerate(responses) if r.routed_experts is not None}
    (num_rows, prompt_width), (_, *layers_and_k) = prompt_mask.shape, next(iter(known.values())).shape
    routes = torch.full((num_rows, prompt_width + width, *layers_and_k), -1, dtype=torch.int16)
    num_pads = (prompt_mask == 0).sum(1).tolist()
    for row, taken in known.items():
        routes[row, num_pads[row] : num_pads[row] + len(taken)] = torch.from_numpy(np.asarray(taken, np.int16))
    return routes


def prompts_of(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Prompts and their attention mask (B, P)."""
    tensors = tensors_of(batch.batch)
    prompts = tensors["prompts"] if "prompts" in tensors else tensors["input_ids"]
    return prompts.cpu(), tensors["attention_mask"][:, : prompts.shape[1]].cpu().to(torch.int64)


def score_sequences(batch: DataProto, score_fn: ScoreFn) -> Tensor:
    """Log-probabilities (B, R) of `responses`, zero where `response_mask` (or else the attention mask) is 0.

    `score_fn` gets each row's tokens without pads and its number of response tokens, and yields row numbers with the
    log-probabilities of these last tokens.
    """
    rows, lengths = tensors_of(batch.batch), response_lengths(batch).tolist()
    padded = zip(rows["input_ids"].cpu(), rows["attention_mask"].cpu(), strict=True)
    sequences = [ids[mask.bool()].tolist() for ids, mask in padded]
    scores = torch.zeros(rows["responses"].shape)
    for row, log_probs in score_fn(sequences, lengths):
        scores[row, : lengths[row]] = torch.tensor(log_probs)
    return torch.where(rows.get("response_mask", compute_response_mask(batch)).cpu() > 0, scores, 0.0)


def _params_of(meta: dict[str, Any]) -> SamplingParams:
    """How the batch is sampled but for the rows' seeds."""
    eos = meta.get("eos_token_id")
    eos_ids = () if eos is None or meta.get("ignore_eos") else (eos,) if isinstance(eos, int) else tuple(eos)
    return SamplingParams(
        max_new_tokens=int(meta["response_length"]),
        temperature=float(meta.get("temperature", 1.0)) if meta.get("do_sample", True) else 0.0,
        top_p=float(meta.get("top_p", 1.0)),
        top_k=int(meta.get("top_k", -1)),
        min_new_tokens=int(meta.get("min_new_tokens", 0)),
        stop_token_ids=(*meta.get("stop_token_ids", ()), *eos_ids),
        ignore_eos=bool(meta.get("ignore_eos", False)),
    )
