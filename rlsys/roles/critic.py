"""The critic: values of states, and their regression on returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.value_loss import compute_value_loss
from rlsys.config.schema.actor import CriticConfig
from rlsys.interfaces import LossSum, TrainEngine
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
        config = with_scale(self.config, batch)

        def loss(part: DataProto, outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
            columns = {name: rows[name] for name in ("returns", "values", "response_mask")}
            num_rows = len(part) * self.engine.dp_size
            return compute_value_loss(vpreds=outputs["values"], **columns, config=config, batch_rows=num_rows)

        losses = ((part, partial(loss, part)) for part in parts)
        return run_updates(self.engine, losses, outputs=("values",), prefix="critic")
