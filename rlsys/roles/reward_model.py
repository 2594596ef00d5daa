"""The reward model: a score of a whole response, learned from pairs of a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsys.algorithms.masked import at_last_token, to_loss_sum
from rlsys.algorithms.stages import with_columns
from rlsys.interfaces import LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.lm import RankSums
from rlsys.roles.update import mini_batches, run_updates


def pair_loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
    """The contribution of these rows to the pair loss, linear in their scores with the slopes of `RWEngine`."""
    total = (outputs["scores"] * rows["slope_at_end"]).sum()
    pairs = rows["half_pair"].sum()
    names = ("loss", "accuracy", "margin")
    return to_loss_sum(total, pairs, {f"train/{name}": (rows[name].sum(), pairs) for name in names})


class RWEngine:
    """A reward model on an engine. Every method is collective over the engine's ranks and takes this rank's rows.

    A response's score is the scalar head on its last token. Pairs are rows 2i (chosen) and 2i + 1 (rejected) of one
    rank; one with an empty response is padding and does not count.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def score(self, batch: DataProto) -> DataProto:
        """Column `rm_scores` (B, R): each row's score at the last token of its response, other columns 0."""
        return DataProto.from_dict(tensors={"rm_scores": at_last_token(self._scores(batch), _response_mask(batch))})

    def train_rw(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all pairs by Bradley-Terry: `-log sigmoid(s_chosen - s_rejected)` (arXiv:1706.03741).

        The loss couples two rows, which an engine may put into different micro-batches. So the scores are computed
        first, and the step uses the loss linearised at them, which has the same gradient however rows are split.
        Metrics: train/loss, train/accuracy, train/margin, train/grad_norm, train/lr, train/skipped_steps.
        """
        pairs = self._pairs(batch)
        slope = at_last_token(pairs.pop("slope"), _response_mask(batch))
        rows = with_columns(batch, **pairs, slope_at_end=slope)
        return run_updates(
            self.engine,
            mini_batches(rows),
            lambda part: (part.rows, pair_loss),
            outputs=("scores",),
            prefix="train",
        )

    train_batch = train_rw

    def evaluate_rw(self, batch: DataProto) -> RankSums:
        """val/loss, val/accuracy and val/margin of this rank's pairs as (sum, count); without gradient."""
        pairs = self._pairs(batch)
        count = float(pairs["half_pair"].sum())
        return {f"val/{name}": (float(pairs[name].sum()), count) for name in ("loss", "accuracy", "margin")}

    def _scores(self, batch: DataProto) -> Tensor:
        """Score of each row (B,) on the CPU; 0 for an empty response."""
        scores = self.engine.forward(batch, ("scores",))["scores"].cpu()
        return (scores * at_last_token(scores.new_ones(len(scores)), _response_mask(batch))).sum(dim=1)

    def _pairs(self, batch: DataProto) -> dict[str, Tensor]:
        """By row: half of its pair's count, loss, accuracy and margin, and the slope of the loss in its score."""
        if len(batch) % 2:
            raise ValueError(f"pairs need an even number of rows on a rank, got {len(batch)}")
        scores = self._scores(batch).view(-1, 2)
        margin = scores[:, 0] - scores[:, 1]
        real = _response_mask(batch).any(dim=1).view(-1, 2).all(dim=1).to(margin.dtype)
        slope = torch.sigmoid(-margin) * real
        halves = {
            "half_pair": real,
            "loss": -logsigmoid(margin) * real,
            "accuracy": (margin > 0).to(margin.dtype) * real,
            "margin": margin * real,
        }
        columns = {name: (values / 2).repeat_interleave(2) for name, values in halves.items()}
        return columns | {"slope": torch.stack([-slope, slope], dim=1).flatten()}


def _response_mask(batch: DataProto) -> Tensor:
    """Which response positions hold a token (B, R) bool, on the CPU."""
    assert batch.batch is not None, "a reward model reads tensors"
    return batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].bool().cpu()
