"""Supervised fine-tuning: the mean negative log-likelihood of the response tokens."""

import math
from collections.abc import Mapping, Sequence

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.masked import masked_sum, to_loss_sum
from rlsys.engines.mesh import sum_over_ranks
from rlsys.interfaces import LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import RankSums, run_updates


def lm_loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
    """`-sum log p` over the tokens of response_mask, counted in tokens; metric train/loss."""
    mask = rows["response_mask"]
    total, count = -masked_sum(outputs["log_probs"], mask), mask.bool().sum()
    return to_loss_sum(total, count, {"train/loss": (total, count)})


def mean_over_ranks(parts: Sequence[RankSums]) -> dict[str, float]:
    """Exact means of metrics out of the sums and counts of several ranks or batches; NaN for a count of 0."""
    return {name: total / n if n else math.nan for name, (total, n) in sum_over_ranks(parts).items()}


class LMEngine:
    """A language model on an engine. Every method is collective over the engine's ranks and takes this rank's rows."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def train_lm(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows: train/loss, train/ppl, train/grad_norm, train/lr, train/skipped_steps."""
        metrics = run_updates(self.engine, [(batch, lm_loss)], outputs=("log_probs",), prefix="train")
        loss = metrics["train/loss"]
        return {**metrics, "train/ppl": math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan}

    train_batch = train_lm

    def evaluate_lm(self, batch: DataProto) -> RankSums:
        """val/loss of this rank's rows as (sum, count), in tokens; without gradient."""
        mask = batch.tensors["response_mask"].cpu()
        log_probs = self.engine.forward(batch, ("log_probs",))["log_probs"].cpu()
        return {"val/loss": (-masked_sum(log_probs.double(), mask).item(), float(mask.bool().sum()))}

    evaluate = evaluate_lm
