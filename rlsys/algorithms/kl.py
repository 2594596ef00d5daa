"""KL divergence between policies: estimators per token, the penalty in the reward, and its controllers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_mean
from rlsys.config.schema.algorithm import KLControlConfig
from rlsys.config.vocabulary import KL_KINDS


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) per token, from the log-probabilities of the sampled tokens (B, R).

    `kl`/`k1`: log p - log q. `abs`: its magnitude. `mse`/`k2`: half its square. `low_var_kl`/`k3`: q/p - log(q/p) - 1,
    with the log-ratio clamped to 20 and the value to 10 (Schulman, joschu.net/blog/kl-approx.html). A trailing
    `+` keeps the value and takes the gradient of k2, whose expectation is the gradient of the KL; that of k1 and k3 is
    not (arXiv:2506.09477).
    """
    base = kind.removesuffix("+")
    value = _kl_value(log_prob, ref_log_prob, base)
    if base == kind or base in ("mse", "k2"):
        return value
    gradient = 0.5 * (log_prob - ref_log_prob).square()
    return gradient - gradient.detach() + value.detach()


def _kl_value(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    difference = log_prob - ref_log_prob
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    if kind in ("low_var_kl", "k3"):
        log_ratio = (-difference).clamp(min=-20.0, max=20.0)
        return (log_ratio.exp() - log_ratio - 1).clamp(min=-10.0, max=10.0)
    raise ValueError(f"unknown KL kind '{kind}', one of {', '.join(KL_KINDS)}, each with or without '+'")


@dataclass
class KLController:
    """The coefficient of the KL in the reward; part of a checkpoint.

    With a `target_kl` the KL is steered towards it (arXiv:1909.08593) over a `horizon` in rows; else it is constant.
    """

    value: float
    target_kl: float | None = None
    horizon: float = 1.0

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the KL of `n_steps` rows."""
        if self.target_kl is not None:
            error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
            self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """A constant coefficient is the configured one: a resumed run may change it."""
        if self.target_kl is not None:
            self.value = float(state["value"])


def get_kl_controller(config: KLControlConfig) -> KLController:
    """The controller of `config.type`."""
    if config.type == "fixed":
        return KLController(config.kl_coef)
    return KLController(config.kl_coef, config.target_kl, config.horizon)


@torch.no_grad()
def kl_in_reward(
    *, token_level_scores: Tensor, log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, beta: float, kind: str
) -> tuple[Tensor, float]:
    """Rewards `scores - beta * KL` (B, R) (arXiv:1909.08593) and the mean over rows of their mean KL."""
    kl = kl_penalty(log_prob, ref_log_prob, kind)
    kl = torch.where(response_mask.bool(), kl, torch.zeros_like(kl))
    return token_level_scores - beta * kl, masked_mean(kl, response_mask, dim=1).mean().item()
