"""LMEngine: supervised fine-tuning on a training engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.interfaces import LossSum, TrainEngine
from rlsys.protocol import DataProto


class LMEngine:
    """Next-token training on any TrainEngine; every method is collective over its ranks."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def train_lm(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood of all counting tokens of all ranks."""
        metrics = self.engine.forward_backward(batch, nll)
        report = self.engine.optim_step()
        return {
            "train/loss": metrics["loss"],
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/skipped_steps": float(not report.applied),
        }

    train_batch = train_lm

    def evaluate_lm(self, batch: DataProto) -> dict[str, float]:
        """`val/loss` over this rank's rows, and `val/tokens` it is the mean of."""
        mask = batch.batch["response_mask"]
        found = self.engine.forward(batch, ["log_probs"])["log_probs"]
        tokens = float(mask.sum())
        return {"val/loss": float(-(found * mask).sum()) / max(tokens, 1.0), "val/tokens": tokens}

    eval_batch = evaluate_lm


def nll(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
    """Sum of -log p over the tokens in response_mask, and their number."""
    mask = rows["response_mask"].bool()
    total = -torch.where(mask, outputs["log_probs"], torch.zeros_like(outputs["log_probs"])).sum()
    return LossSum(total, float(mask.sum()))
