"""The critic: values of states, and their regression on returns."""

from collections.abc import Iterator, Mapping

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.value_loss import compute_value_loss
from rlsys.config.schema.actor import CriticConfig
from rlsys.interfaces import LossFn, LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import MiniBatch, mini_batches, ppo_mini_batches, run_updates


class PPOCritic:
    """A value model on an engine. Every method is collective over the engine's ranks and takes this rank's rows.

    `rollout_n` are the rows of a prompt, for the size of mini-batches.
    """

    def __init__(self, engine: TrainEngine, config: CriticConfig, *, rollout_n: int = 1) -> None:
        self.engine = engine
        self.config = config
        self.rollout_n = rollout_n

    def compute_values(self, batch: DataProto) -> DataProto:
        """Column `values` (B, R): of the state before each response token."""
        return DataProto.from_dict(tensors={"values": self.engine.forward(batch, ("values",))["values"]})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """Train on the rows in mini-batches (values, returns, response_mask); returns verl's `critic/*` metrics."""
        parts = ppo_mini_batches(batch, self.config, rollout_n=self.rollout_n, dp_size=self.engine.dp_size)
        return self._update(batch, parts)

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows."""
        return self._update(batch, mini_batches(batch))

    def _update(self, batch: DataProto, parts: Iterator[MiniBatch]) -> dict[str, float]:
        scale = self.config.loss_scale_factor or float(batch.tensors["response_mask"].shape[1])

        def make_loss(part: MiniBatch) -> tuple[DataProto, LossFn]:
            def loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
                return compute_value_loss(
                    vpreds=outputs["values"],
                    returns=rows["returns"],
                    values=rows["values"],
                    response_mask=rows["response_mask"],
                    cliprange_value=self.config.cliprange_value,
                    loss_agg_mode=self.config.loss_agg_mode,
                    loss_scale_factor=scale,
                    batch_rows=len(part.rows) * self.engine.dp_size,
                )

            return part.rows, loss

        return run_updates(self.engine, parts, make_loss, outputs=("values",), prefix="critic")
