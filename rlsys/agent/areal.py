"""AReaL's workflow classes: `arun_episode(engine, data)` with token ids in and tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlsys.agent.session import Session
from rlsys.agent.trace import TraceRow
from rlsys.types import ModelRequest, ModelResponse


async def run_areal_episode(
    workflow: Any, gconfig: Any, row: Mapping[str, Any], session: Session
) -> list[TraceRow] | None:
    """The rows of one `arun_episode`; None where it rejects the row. Its `data` also has `messages` and `answer`.

    Of the tensors `input_ids` (n, T), `rewards` (n,) and `attention_mask` are used; masks, log-probs and versions are
    those of the draws. ValueError for a row that the engine did not draw like this.
    """

    async def agenerate(req: ModelRequest) -> ModelResponse:
        """Complete a request; its sampling parameters take the place of the job's, but for the seed and for those
        that are still the job's `gconfig`."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k")
        own = {name: getattr(req.gconfig, name) for name in names}
        changed = {name: value for name, value in own.items() if gconfig is None or value != getattr(gconfig, name)}
        return await session.draw_ids(req.input_ids, **changed)

    truth = (row.get("reward_model") or {}).get("ground_truth")
    tensors = await workflow.arun_episode(
        SimpleNamespace(agenerate=agenerate), {"messages": row["prompt"], "answer": truth, **row}
    )
    if tensors is None:
        return None
    ids, rewards = tensors["input_ids"], tensors["rewards"].flatten().tolist()
    masks = tensors["attention_mask"].bool() if "attention_mask" in tensors else ids >= 0
    by_ids = {drawn.prompt_ids + drawn.response_ids: drawn for drawn in session.trace.rows()}
    rows = []
    for number, (tokens, mask, reward) in enumerate(zip(ids, masks, rewards, strict=True)):
        drawn = by_ids.get(tuple(tokens[mask].tolist()))
        if drawn is None:
            raise ValueError(
                f"row {number} of arun_episode has other tokens than a prompt and what was drawn behind it"
            )
        rows.append(replace(drawn, rewards=(*drawn.rewards[:-1], reward)))
    return rows
