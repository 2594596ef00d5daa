"""PPOActor: the policy loss on a training engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms import ActorObjective, actor_loss, compute_advantage
from rlsys.interfaces import LossSum, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.minibatches import mean_metrics, mini_batches


@dataclass(frozen=True)
class ActorSettings:
    """What the actor minimises and how it goes through a step's rows; `mini_batch_rows` counts on one rank."""

    objective: ActorObjective = field(default_factory=ActorObjective)
    temperature: float = 1.0
    mini_batch_rows: int = 1
    ppo_epochs: int = 1
    shuffle: bool = False
    seed: int = 0


class PPOActor:
    """The actor of PPO, GRPO and their kin on any TrainEngine; every method is collective over its ranks."""

    def __init__(self, engine: TrainEngine, settings: ActorSettings) -> None:
        self.engine, self.settings = engine, settings

    def compute_logp(self, batch: DataProto, *, entropy: bool = False, sum_pi_squared: bool = False) -> DataProto:
        """`old_log_probs` (B, R) at the sampling temperature; `entropys` and `sum_pi_squared` (B, R) where asked for."""
        outputs: list[Output] = ["log_probs"]
        outputs += ["entropy"] if entropy else []
        outputs += ["sum_pi_squared"] if sum_pi_squared else []
        found = self.engine.forward(batch, outputs, temperature=self.settings.temperature)
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return DataProto.from_dict({names[name]: values for name, values in found.items()})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step a mini-batch; metrics are means over these steps, `actor/skipped_steps` their count.

        Needs old_log_probs, advantages and response_mask; ref_log_prob, rollout_log_probs, rollout_is_weights and
        selected_tokens as the objective asks for.
        """
        settings = self.settings
        parts = mini_batches(
            batch,
            rows=settings.mini_batch_rows,
            epochs=settings.ppo_epochs,
            shuffle=settings.shuffle,
            seed=settings.seed,
            step=int(batch.meta_info.get("global_steps", 0)),
        )
        return mean_metrics([self.train_batch(part) for part in parts])

    grpo_update = ppo_update

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows of all ranks."""
        objective = self.settings.objective
        outputs: list[Output] = ["log_probs", "entropy"] if objective.entropy_coeff else ["log_probs"]
        loss = partial(self._loss, batch_rows=len(batch) * self.engine.dp_size)
        metrics = self.engine.forward_backward(batch, loss, outputs=outputs, temperature=self.settings.temperature)
        report = self.engine.optim_step()
        metrics = {name: value for name, value in metrics.items() if name != "loss"} | {"actor/loss": metrics["loss"]}
        if objective.use_kl_loss:
            metrics["actor/kl_coef"] = objective.kl_loss_coef
        return {
            **metrics,
            "actor/grad_norm": report.grad_norm,
            "actor/lr": report.lr,
            "actor/skipped_steps": float(not report.applied),
        }

    def _loss(self, outputs: Mapping[str, Tensor], rows: TensorDict, *, batch_rows: int) -> LossSum:
        return actor_loss(
            self.settings.objective,
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

    compute_advantages = staticmethod(compute_advantage)
