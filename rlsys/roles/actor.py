"""The actor: log-probabilities of responses, and policy updates by any registered loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms import ActorObjective, actor_loss, add_selected_tokens, compute_advantage
from rlsys.algorithms.covariance_loss import with_seed
from rlsys.interfaces import LossFn, LossSum, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import MiniBatch, UpdateSettings, mini_batches, run_updates


@dataclass(frozen=True)
class ActorSettings:
    """What the actor minimises and in which steps.

    meta_info["temperature"] of a batch takes precedence over `temperature`. With `calculate_entropy` updates report
    actor/entropy even where entropy_coeff is 0.
    """

    objective: ActorObjective = field(default_factory=ActorObjective)
    updates: UpdateSettings = field(default_factory=UpdateSettings)
    temperature: float = 1.0
    calculate_entropy: bool = False


class PPOActor:
    """A policy on an engine. Every method is collective over the engine's ranks and takes this rank's rows."""

    compute_advantages = staticmethod(compute_advantage)
    """AReaL's name of `rlsys.algorithms.compute_advantage`; pure."""

    def __init__(self, engine: TrainEngine, settings: ActorSettings) -> None:
        self.engine = engine
        self.settings = settings

    def compute_logp(
        self,
        batch: DataProto,
        *,
        name: str = "old_log_probs",
        entropy: bool = False,
        sum_pi_squared: bool = False,
    ) -> DataProto:
        """Log-probabilities (B, R) of the responses as column `name`, on request `entropys` and `sum_pi_squared`."""
        outputs: list[Output] = ["log_probs"]
        columns: dict[Output, str] = {"log_probs": name}
        if entropy:
            outputs.append("entropy")
            columns["entropy"] = "entropys"
        if sum_pi_squared:
            outputs.append("sum_pi_squared")
            columns["sum_pi_squared"] = "sum_pi_squared"
        found = self.engine.forward(batch, outputs, temperature=self._temperature(batch))
        return DataProto.from_dict(tensors={columns[output]: found[output] for output in outputs})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """Train on the rows in mini-batches; returns verl's `actor/*` metrics, means over the optimizer steps.

        Needs old_log_probs, advantages, response_mask; ref_log_prob with use_kl_loss; takes rollout_is_weights and
        selected_tokens where they are there.
        """
        return self._update(batch, self.settings.updates)

    grpo_update = ppo_update

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows."""
        return self._update(batch, UpdateSettings())

    def _update(self, batch: DataProto, updates: UpdateSettings) -> dict[str, float]:
        objective = self._objective_for(batch)
        step = int(batch.meta_info.get("global_steps", 0))

        def make_loss(part: MiniBatch) -> tuple[DataProto, LossFn]:
            ours = replace(objective, params=with_seed(objective.params, step * 1009 + part.index))
            rows = part.rows
            if "selected_tokens" not in _columns(rows):
                rows = add_selected_tokens(rows, loss_mode=ours.loss_mode, params=ours.params)
            return rows, self._loss_fn(ours, len(rows) * self.engine.dp_size)

        metrics = run_updates(
            self.engine,
            mini_batches(batch, updates, step=step),
            make_loss,
            outputs=self._outputs(),
            prefix="actor",
            temperature=self._temperature(batch),
        )
        if objective.use_kl_loss:
            metrics["actor/kl_coef"] = objective.kl_loss_coef
        return metrics

    def _loss_fn(self, objective: ActorObjective, batch_rows: int) -> LossFn:
        def loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
            return actor_loss(
                objective,
                log_prob=outputs["log_probs"],
                old_log_prob=rows["old_log_probs"],
                advantages=rows["advantages"],
                response_mask=rows["response_mask"],
                rollout_is_weights=rows.get("rollout_is_weights", None),
                selected=rows.get("selected_tokens", None),
                ref_log_prob=rows.get("ref_log_prob", None),
                entropy=outputs.get("entropy"),
                batch_rows=batch_rows,
            )

        return loss

    def _objective_for(self, batch: DataProto) -> ActorObjective:
        """The constant of seq-mean-token-sum-norm is the width of the whole batch, not of a trimmed micro-batch."""
        objective = self.settings.objective
        if objective.loss_scale_factor is not None or batch.batch is None:
            return objective
        return replace(objective, loss_scale_factor=float(batch.batch["response_mask"].shape[1]))

    def _outputs(self) -> tuple[Output, ...]:
        wanted = self.settings.calculate_entropy or self.settings.objective.entropy_coeff != 0
        return ("log_probs", "entropy") if wanted else ("log_probs",)

    def _temperature(self, batch: DataProto) -> float:
        return float(batch.meta_info.get("temperature", self.settings.temperature))


def _columns(batch: DataProto) -> set[str]:
    return set() if batch.batch is None else {str(key) for key in batch.batch.keys()}  # noqa: SIM118
