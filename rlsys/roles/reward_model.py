"""RWEngine: a reward model trained on pairs, and used as a grader."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsys.interfaces import LossSum, TrainEngine
from rlsys.protocol import DataProto


class RWEngine:
    """Bradley-Terry training on any TrainEngine with a scalar head; every method is collective over its ranks.

    Rows alternate: the chosen response of a pair, then the rejected one. Micro-batches must hold whole pairs.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def train_rw(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on `-log sigmoid(s_chosen - s_rejected)` (arXiv:2203.02155, eq. 1), mean over pairs."""
        metrics = self.engine.forward_backward(batch, bradley_terry, outputs=["values"])
        report = self.engine.optim_step()
        return {
            "train/loss": metrics["loss"],
            "train/accuracy": metrics["accuracy"],
            "train/margin": metrics["margin"],
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/skipped_steps": float(not report.applied),
        }

    train_batch = train_rw

    def evaluate_rw(self, batch: DataProto) -> dict[str, float]:
        """`val/loss`, `val/accuracy` and `val/margin` over this rank's pairs, and `val/pairs` their number."""
        values = self.engine.forward(batch, ["values"])
        loss = bradley_terry(values, batch.batch)
        pairs = max(loss.count, 1.0)
        means = {f"val/{name}": total / max(count, 1.0) for name, (total, count) in loss.metrics.items()}
        return {"val/loss": float(loss.total) / pairs, "val/pairs": loss.count, **means}

    eval_batch = evaluate_rw

    def score(self, batch: DataProto) -> DataProto:
        """`rm_scores` (B, R): the model's score on the last real token of each response, zero elsewhere."""
        values, mask = self.engine.forward(batch, ["values"])["values"], batch.batch["response_mask"]
        at = last_positions(mask)
        scores = torch.zeros_like(values).scatter(1, at, values.gather(1, at))
        return DataProto.from_dict({"rm_scores": scores * mask.bool()})


def last_positions(mask: Tensor) -> Tensor:
    """Index (B, 1) of the last counting token of each row; 0 for a row without one."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return (positions * mask.bool()).amax(dim=1, keepdim=True)


def bradley_terry(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
    """The pair loss as a sum over pairs, with accuracy and margin."""
    scores = outputs["values"].gather(1, last_positions(rows["response_mask"])).squeeze(1)
    margin = scores[0::2] - scores[1::2]
    pairs = float(len(margin))
    metrics = {
        "accuracy": (float((margin > 0).sum()), pairs),
        "margin": (float(margin.detach().sum()), pairs),
    }
    return LossSum(-logsigmoid(margin).sum(), pairs, metrics)
