"""The reward model: a score for a whole response, learned from pairs of a chosen and a rejected one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsys.algorithms.masked import at_last_token
from rlsys.algorithms.sums import to_loss_sum
from rlsys.interfaces import LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.lm import RankSums
from rlsys.roles.update import UpdateSettings, mini_batches, run_updates


def response_lengths(batch: DataProto) -> Tensor:
    """Tokens of each response (B,), by the attention mask."""
    assert batch.batch is not None, "a reward model reads tensors"
    return batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(dim=1)


def with_closing_token(batch: DataProto) -> DataProto:
    """The rows with one more token after each response, at which alone response_mask is 1.

    The value at a response position is that of the state before it; the value at the closing token is therefore that of
    the whole response. Its id is that of the token before, which no causal model lets matter.
    """
    assert batch.batch is not None, "a reward model reads tensors"
    held = batch.batch
    width = held["responses"].shape[1]
    end = response_lengths(batch).unsqueeze(1)
    at = held["input_ids"].shape[1] - width + end

    def closed(values: Tensor, where: Tensor, value: Tensor) -> Tensor:
        longer = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
        return longer.scatter(1, where, value.to(values.dtype))

    last = held["input_ids"].gather(1, at - 1)
    position = held["position_ids"].gather(1, at - 1) + 1
    one = torch.ones_like(last)
    columns = {
        "prompts": held["prompts"],
        "responses": closed(held["responses"], end, last),
        "input_ids": closed(held["input_ids"], at, last),
        "attention_mask": closed(held["attention_mask"], at, one),
        "position_ids": closed(held["position_ids"], at, position),
        "response_mask": closed(torch.zeros_like(held["responses"]), end, one),
    }
    return DataProto.from_dict(tensors=columns, meta_info=batch.meta_info)


def pair_loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
    """The part of the pair loss that these rows contribute, linear in their scores with the slopes of `RWEngine`."""
    total = (outputs["values"] * rows["slope"].unsqueeze(1) * rows["response_mask"]).sum()
    pairs = rows["half_pair"].sum()
    names = ("loss", "accuracy", "margin")
    return to_loss_sum(total, pairs, {f"train/{name}": (rows[name].sum(), pairs) for name in names})


class RWEngine:
    """A reward model on an engine. Every method is collective over the engine's ranks and takes this rank's rows.

    Pairs are rows 2i (chosen) and 2i + 1 (rejected) of one rank. One with an empty response is padding.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def score(self, batch: DataProto) -> DataProto:
        """Column `rm_scores` (B, R): each row's score at the last token of its response, 0 elsewhere."""
        assert batch.batch is not None, "a reward model reads tensors"
        responses = batch.batch["responses"]
        length = response_lengths(batch).to("cpu").unsqueeze(1)
        written = torch.arange(responses.shape[1]) < length
        return DataProto.from_dict(tensors={"rm_scores": at_last_token(self._scores(batch), written)})

    def train_rw(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all pairs by Bradley-Terry: `-log sigmoid(s_chosen - s_rejected)` (arXiv:1706.03741).

        The loss couples two rows, which an engine may put into different micro-batches. So the scores are computed
        first, and the step is made on the loss linearised at them: same gradient, however the rows are split.
        Metrics: train/loss, train/accuracy, train/margin, train/grad_norm, train/lr, train/skipped_steps.
        """
        closed = with_closing_token(batch)
        assert closed.batch is not None
        for name, values in self._pairs(batch).items():
            closed.batch[name] = values

        return run_updates(
            self.engine,
            mini_batches(closed, UpdateSettings()),
            lambda part: (part.rows, pair_loss),
            outputs=("values",),
            prefix="train",
        )

    train_batch = train_rw

    def evaluate_rw(self, batch: DataProto) -> RankSums:
        """val/loss, val/accuracy and val/margin of this rank's pairs as (sum, count); without gradient."""
        pairs = self._pairs(batch)
        count = float(pairs["half_pair"].sum())
        return {f"val/{name}": (float(pairs[name].sum()), count) for name in ("loss", "accuracy", "margin")}

    def _scores(self, batch: DataProto) -> Tensor:
        closed = with_closing_token(batch)
        return self.engine.forward(closed, ("values",))["values"].sum(dim=1).cpu()

    def _pairs(self, batch: DataProto) -> dict[str, Tensor]:
        """By row: half of its pair's count, loss, accuracy and margin, and the slope of the loss in its score."""
        if len(batch) % 2:
            raise ValueError(f"pairs need an even number of rows on a rank, got {len(batch)}")
        scores = self._scores(batch).view(-1, 2)
        margin = scores[:, 0] - scores[:, 1]
        real = (response_lengths(batch).cpu().view(-1, 2) > 0).all(dim=1).to(margin.dtype)
        slope = torch.sigmoid(-margin) * real
        halves = {
            "half_pair": real,
            "loss": -logsigmoid(margin) * real,
            "accuracy": (margin > 0).to(margin.dtype) * real,
            "margin": margin * real,
        }
        columns = {name: (values / 2).repeat_interleave(2) for name, values in halves.items()}
        return columns | {"slope": torch.stack([-slope, slope], dim=1).flatten()}
