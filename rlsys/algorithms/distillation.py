"""On-policy distillation: how far a policy is from its teacher on what the policy sampled.

b rows of a micro-batch, R response tokens, K of the teacher's most likely tokens.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from rlsys.algorithms.kl import kl_penalty
from rlsys.config.schema.algorithm import DistillationLossConfig


@dataclass(frozen=True)
class TeacherScores:
    """Log-probs of policy and teacher: of the sampled tokens (b, R), or of the teacher's K likeliest ones (b, R, K)."""

    config: DistillationLossConfig
    log_probs: Tensor
    teacher_log_probs: Tensor


def divergence(scores: TeacherScores) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence from the teacher (b, R), at most `loss_max_clamp` large, and what is reported of it, by name.

    `forward_kl_topk`: `sum_k q_k (log q_k - log p_k)` of teacher q and policy p over the K tokens, at least 0; both are
    raised to `log_prob_min_clamp` and not normalized over the K (arXiv:2306.13649). Else an estimate of the reverse KL
    from the sampled token, `kl_penalty` (thinkingmachines.ai/blog/on-policy-distillation).
    """
    config, policy, teacher = scores.config, scores.log_probs, scores.teacher_log_probs
    if config.is_topk:
        sizes = {"student_mass": policy.exp().sum(dim=-1), "teacher_mass": teacher.exp().sum(dim=-1)}
        low = -math.inf if config.log_prob_min_clamp is None else config.log_prob_min_clamp
        policy, teacher = policy.clamp(min=low), teacher.clamp(min=low)
        values = (teacher.exp() * (teacher - policy)).sum(dim=-1).clamp(min=0)
    else:
        values = kl_penalty(policy, teacher, config.loss_mode)
        sizes = {"abs_loss": values.abs()}
    if config.loss_max_clamp is not None:
        values = values.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    return values, sizes
