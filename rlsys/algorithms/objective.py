"""The whole objective of an actor: policy loss, entropy bonus, KL loss and distillation as one sum with one count."""

from functools import partial
from typing import Unpack

from torch import Tensor

from rlsys.algorithms.aggregate import agg_loss
from rlsys.algorithms.distillation import TeacherScores, divergence
from rlsys.algorithms.kl import kl_penalty
from rlsys.algorithms.masked import TensorSums, masked_sum, to_loss_sum
from rlsys.algorithms.policy_loss import PolicyInputs, PolicyLoss, call_policy_loss, over_tokens
from rlsys.config.schema.actor import ActorConfig
from rlsys.interfaces import LossSum


def actor_loss(
    config: ActorConfig,
    /,
    *,
    ref_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    batch_rows: int | None = None,
    teacher: TeacherScores | None = None,
    **inputs: Unpack[PolicyInputs],
) -> LossSum:
    """`policy + kl_loss_coef * KL(policy || reference) - entropy_coeff * entropy` over the rows of a micro-batch.

    With a `teacher` its loss is added, or takes the place of all other terms with `use_task_rewards=False`.
    All tensors are (b, R); `batch_rows` as in `agg_loss`. `entropy_coeff=0` and `use_kl_loss=False` leave those terms
    out. All terms are aggregated alike: by `loss_agg_mode`, or by the aggregation that the policy loss is defined for
    (sapo, geo_mean). With `rollout_correction.bypass_mode` the policy loss is `bypass_mode`.

    Metrics are verl's `actor/*`, each as its own sum and count. ValueError if a term's tensor is missing.
    """
    correction, log_prob, response_mask = inputs.get("rollout_correction"), inputs["log_prob"], inputs["response_mask"]
    bypass = correction is not None and correction.bypass_mode
    inputs["config"] = config
    policy = call_policy_loss("bypass_mode" if bypass else config.policy_loss.loss_mode, **inputs)
    mode, scale = policy.agg_mode or config.loss_agg_mode, config.loss_scale_factor
    aggregate = partial(
        agg_loss, loss_agg_mode=mode, loss_scale_factor=scale, batch_rows=batch_rows, count_mask=response_mask
    )
    total, count = aggregate(policy.per_token, policy.mask)
    if policy.mean is not None:
        total = policy.mean * count
    metrics = {"actor/pg_loss": (total, count), **policy.metrics}
    if entropy is not None:
        entropy_sum, _ = aggregate(entropy, response_mask)
        total = total - config.entropy_coeff * entropy_sum
        metrics["actor/entropy"] = over_tokens(entropy, response_mask)
    elif config.entropy_coeff:
        raise ValueError("entropy_coeff is not 0, but the engine returned no entropy")
    if config.use_kl_loss:
        if ref_log_prob is None:
            raise ValueError("use_kl_loss needs ref_log_prob in the batch")
        kl_sum, _ = aggregate(kl_penalty(log_prob, ref_log_prob, config.kl_loss_type), response_mask)
        total = total + config.kl_loss_coef * kl_sum
        metrics["actor/kl_loss"] = (kl_sum, count)
    if teacher is not None:
        taught, sizes = _teacher_loss(teacher, config, inputs)
        teacher_sum, _ = aggregate(taught.per_token, taught.mask)
        total = (total if teacher.config.use_task_rewards else 0.0 * total) + teacher.config.weight * teacher_sum
        metrics |= {"distillation/loss": (teacher_sum, count), **sizes}
    return to_loss_sum(total, count, metrics)


def _teacher_loss(teacher: TeacherScores, config: ActorConfig, inputs: PolicyInputs) -> tuple[PolicyLoss, TensorSums]:
    """The divergence itself, or PPO's loss with its negative as advantages; and its metrics."""
    values, sizes = divergence(teacher)
    response_mask = inputs["response_mask"]
    taught = PolicyLoss(values, response_mask)
    if teacher.config.use_policy_gradient:
        clips = teacher.config.model_dump(include={"clip_ratio", "clip_ratio_low", "clip_ratio_high"})
        given: PolicyInputs = {**inputs, "advantages": -values.detach(), "config": config.model_copy(update=clips)}
        taught = call_policy_loss(teacher.config.policy_loss_mode, **given)
    tokens = response_mask.bool().sum()
    metrics = {f"distillation/{name}": (masked_sum(size, response_mask), tokens) for name, size in sizes.items()}
    return taught, metrics | {name.replace("actor", "distillation"): pair for name, pair in taught.metrics.items()}
