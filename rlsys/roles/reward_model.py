"""The reward model: a score of a whole response, learned from pairs of a chosen and a rejected response."""

from functools import partial

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsys.algorithms.masked import at_last_token
from rlsys.interfaces import TrainEngine
from rlsys.protocol import DataProto
from rlsys.protocol.rows import compute_response_mask
from rlsys.roles.update import RankSums, RowLoss, at_first, train_pairwise


class RWEngine:
    """A reward model on an engine. Every method is collective over the engine's ranks and takes this rank's rows.

    A response's score is the scalar head on its last token. Pairs are rows 2i (chosen) and 2i + 1 (rejected) of one
    rank; one with an empty response is padding and does not count.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def score(self, batch: DataProto) -> DataProto:
        """Column `rm_scores` (B, R): each row's score at the last token of its response, other columns 0."""
        mask = compute_response_mask(batch).cpu()
        return DataProto.from_dict(tensors={"rm_scores": _at_end(self._outputs(batch), mask)})

    def train_rw(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all pairs by Bradley-Terry: `-log sigmoid(s_chosen - s_rejected)` (arXiv:1706.03741).

        Metrics: train/loss, train/accuracy, train/margin, train/grad_norm, train/lr, train/skipped_steps.
        """
        return train_pairwise(self.engine, batch, "scores", partial(_pair_loss, batch))

    train_batch = train_rw

    def evaluate_rw(self, batch: DataProto) -> RankSums:
        """val/loss, val/accuracy and val/margin of this rank's pairs as (sum, count); without gradient."""
        return _pair_loss(batch, self._outputs(batch)).sums("val")

    evaluate = evaluate_rw

    def _outputs(self, batch: DataProto) -> Tensor:
        return self.engine.forward(batch, ("scores",))["scores"].cpu()


def _pair_loss(batch: DataProto, outputs: Tensor) -> RowLoss:
    if len(batch) % 2:
        raise ValueError(f"pairs need an even number of rows on a rank, got {len(batch)}")
    mask = compute_response_mask(batch).cpu()
    scores = _at_end(outputs, mask).sum(dim=1).view(-1, 2)
    margin = scores[:, 0] - scores[:, 1]
    real = mask.any(dim=1).view(-1, 2).all(dim=1).to(margin.dtype)
    count = at_first(real)
    metrics = {"accuracy": (at_first((margin > 0) * real), count), "margin": (at_first(margin * real), count)}
    return RowLoss(at_first(-logsigmoid(margin) * real), count, metrics)


def _at_end(outputs: Tensor, mask: Tensor) -> Tensor:
    """The outputs at the last response token of each row, other columns 0."""
    return outputs * at_last_token(outputs.new_ones(len(outputs)), mask)
