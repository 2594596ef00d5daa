"""The whole objective of an actor: policy loss, entropy bonus and KL loss as one sum with one count."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlsys.algorithms.aggregate import LOSS_AGG_MODES, agg_loss
from rlsys.algorithms.kl import KL_KINDS, kl_penalty
from rlsys.algorithms.policy_loss import PolicyLossParams, call_policy_loss, get_policy_loss_fn
from rlsys.algorithms.sums import to_loss_sum
from rlsys.interfaces import LossSum


@dataclass(frozen=True)
class ActorObjective:
    """What an actor minimises: `policy + kl_loss_coef * KL(policy || reference) - entropy_coeff * entropy`.

    `entropy_coeff=0` and `use_kl_loss=False` leave those terms out. All terms are aggregated alike: by `loss_agg_mode`,
    or by the aggregation that the policy loss is defined for (sapo, geo_mean).
    """

    loss_mode: str = "vanilla"
    params: PolicyLossParams = field(default_factory=PolicyLossParams)
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"

    def __post_init__(self) -> None:
        get_policy_loss_fn(self.loss_mode)
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode '{self.loss_agg_mode}', one of {', '.join(LOSS_AGG_MODES)}")
        if self.kl_loss_type.removesuffix("+") not in KL_KINDS:
            raise ValueError(f"kl_loss_type '{self.kl_loss_type}' is none of {', '.join(KL_KINDS)}")


def actor_loss(
    objective: ActorObjective,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
    selected: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    batch_rows: int | None = None,
) -> LossSum:
    """The objective over the rows of a micro-batch, all tensors (b, R); `batch_rows` as in `agg_loss`.

    Metrics are verl's `actor/*`, each as its own sum and count. ValueError if a term's tensor is missing.
    """
    policy = call_policy_loss(
        objective.loss_mode,
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        params=objective.params,
        rollout_is_weights=rollout_is_weights,
        selected=selected,
    )
    mode = policy.agg_mode or objective.loss_agg_mode

    def aggregate(per_token: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return agg_loss(
            per_token,
            mask,
            mode,
            loss_scale_factor=objective.loss_scale_factor,
            batch_rows=batch_rows,
            count_mask=response_mask,
        )

    total, count = aggregate(policy.per_token, policy.mask)
    metrics = {"actor/pg_loss": (total, count), **policy.metrics}
    if entropy is not None:
        entropy_sum, _ = aggregate(entropy, response_mask)
        total = total - objective.entropy_coeff * entropy_sum
        metrics["actor/entropy"] = (entropy_sum, count)
    elif objective.entropy_coeff:
        raise ValueError("entropy_coeff is not 0, but the engine gave no entropy")
    if objective.use_kl_loss:
        if ref_log_prob is None:
            raise ValueError("use_kl_loss needs ref_log_prob in the batch")
        kl_sum, _ = aggregate(kl_penalty(log_prob, ref_log_prob, objective.kl_loss_type), response_mask)
        total = total + objective.kl_loss_coef * kl_sum
        metrics["actor/kl_loss"] = (kl_sum, count)
    return to_loss_sum(total, count, metrics)
