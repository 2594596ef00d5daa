"""Learning from preferences without a reward model: DPO, IPO and KTO."""

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_sum
from rlsys.algorithms.preference_loss import dpo_loss, kto_loss
from rlsys.algorithms.stages import with_columns
from rlsys.config.schema.jobs import DPOLossConfig
from rlsys.engines.mesh import gather_json, sum_over_ranks
from rlsys.interfaces import TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import RankSums, RowLoss, at_first, train_pairwise


class DPOEngine:
    """A policy on an engine and its frozen `reference`: None is the policy without its adapters.

    Every method is collective over the ranks and takes this rank's rows: 2i is the chosen and 2i + 1 the rejected
    response of a pair; for KTO 2i is a row with its label in the column `is_desirable`, and 2i + 1 the same prompt with
    another row's response. A row with an empty response is padding and does not count.
    """

    def __init__(self, engine: TrainEngine, config: DPOLossConfig, reference: TrainEngine | None = None) -> None:
        self.engine, self.config, self.reference = engine, config, reference

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all pairs or rows.

        Metrics: train/loss, TRL's rewards and logps as train/*, train/grad_norm, train/lr, train/skipped_steps.
        """
        rows, kl = self._with_reference(batch)
        return train_pairwise(self.engine, rows, "log_probs", lambda log_probs: self._loss(rows, log_probs, kl))

    def evaluate(self, batch: DataProto) -> RankSums:
        """val/loss and the other metrics of this rank's rows as (sum, count); without gradient."""
        rows, kl = self._with_reference(batch)
        return self._loss(rows, self._log_probs(rows), kl).sums("val")

    def _log_probs(self, batch: DataProto) -> Tensor:
        return self.engine.forward(batch, ("log_probs",))["log_probs"].cpu()

    def _with_reference(self, batch: DataProto) -> tuple[DataProto, float]:
        """The rows with the column `ref_log_prob`; for KTO those with labels, and the KL estimated on the others."""
        if self.reference is not None:
            reference = self.reference.forward(batch, ("log_probs",))["log_probs"]
        else:
            with self.engine.adapters_disabled():
                reference = self._log_probs(batch)
        batch = with_columns(batch, ref_log_prob=reference)
        if self.config.loss_type != "kto":
            return batch, 0.0
        labelled, others = (batch.select_idxs(torch.arange(i, len(batch), 2)) for i in (0, 1))
        held = others.tensors
        difference = self._log_probs(others).double() - held["ref_log_prob"].cpu()
        total = masked_sum(difference, held["response_mask"].cpu()).item()
        count = held["response_mask"].cpu().any(dim=1).sum().item()
        total, count = sum_over_ranks(gather_json({"kl": (total, count)}))["kl"]
        return labelled, max(0.0, total / max(count, 1))

    def _loss(self, batch: DataProto, log_probs: Tensor, kl: float) -> RowLoss:
        rows, config = batch.tensors, self.config
        mask = rows["response_mask"].cpu()
        sums = masked_sum(log_probs.cpu().double(), mask, dim=1)
        ratio = sums - masked_sum(rows["ref_log_prob"].cpu().double(), mask, dim=1)
        if config.loss_type == "ipo":
            ratio = ratio / mask.bool().sum(dim=1).clamp(min=1)
        real = mask.any(dim=1)
        if config.loss_type == "kto":
            chosen = rows["is_desirable"].cpu().bool()
            count = real.double()
            loss = kto_loss(ratio, chosen, kl, config)
            extra = {"kl": (real * kl, count)}
        else:
            whole = real.view(-1, 2).all(dim=1)
            real = whole.repeat_interleave(2)
            chosen = torch.arange(len(batch)) % 2 == 0
            chosen_ratio, rejected_ratio = ratio.view(-1, 2).unbind(dim=1)
            margin = config.beta * (chosen_ratio - rejected_ratio) * whole
            count = at_first(whole.double())
            loss = at_first(dpo_loss(chosen_ratio, rejected_ratio, config))
            right = at_first((margin > 0).double())
            extra = {"rewards/accuracies": (right, count), "rewards/margins": (at_first(margin), count)}
        for name, which in {"chosen": chosen & real, "rejected": ~chosen & real}.items():
            extra[f"rewards/{name}"] = (config.beta * ratio * which, which.double())
            extra[f"logps/{name}"] = (sums * which, which.double())
        return RowLoss(loss * count, count, extra)
