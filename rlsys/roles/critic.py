"""The critic: values of states, and their regression on returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.value_loss import compute_value_loss
from rlsys.config.schema.actor import CriticConfig
from rlsys.interfaces import LossFn, LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import mini_batches, run_updates, with_scale


@dataclass(eq=False)
class PPOCritic:
    """A value model on an engine. Every method is collective over the engine's ranks and takes this rank's rows.

    `rollout_n` are the rows of a prompt, for the size of mini-batches.
    """

    engine: TrainEngine
    config: CriticConfig
    rollout_n: int = field(default=1, kw_only=True)

    def compute_values(self, batch: DataProto) -> DataProto:
        """Column `values` (B, R): of the state before each response token."""
        return DataProto.from_dict(tensors={"values": self.engine.forward(batch, ("values",))["values"]})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """Train on the rows in mini-batches (values, returns, response_mask); returns verl's `critic/*` metrics."""
        parts = mini_batches(batch, self.config, rollout_n=self.rollout_n, dp_size=self.engine.dp_size)
        return self._update(batch, parts)

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows."""
        return self._update(batch, [batch])

    def _update(self, batch: DataProto, parts: Iterable[DataProto]) -> dict[str, float]:
        config = with_scale(self.config, batch)

        def make_loss(part: DataProto, _: int) -> tuple[DataProto, LossFn]:
            def loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
                return compute_value_loss(
                    vpreds=outputs["values"],
                    returns=rows["returns"],
                    values=rows["values"],
                    response_mask=rows["response_mask"],
                    config=config,
                    batch_rows=len(part) * self.engine.dp_size,
                )

            return part, loss

        return run_updates(self.engine, parts, make_loss, outputs=("values",), prefix="critic")
