"""KL divergence between policies: estimators per token, the penalty in the reward, and its controllers."""

from collections.abc import Mapping

from torch import Tensor

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


class KLController:
    """The coefficient of the KL in the reward; part of a checkpoint.

    An adaptive one steers the KL towards `target_kl` (arXiv:1909.08593) over a `horizon` in rows; else it is constant.
    """

    def __init__(self, config: KLControlConfig) -> None:
        self.config, self.value = config, config.kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the KL of `n_steps` rows."""
        if self.config.type == "adaptive":
            error = min(max(current_kl / self.config.target_kl - 1, -0.2), 0.2)
            self.value *= 1 + error * n_steps / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """A constant coefficient is the configured one: a resumed run may change it."""
        if self.config.type == "adaptive":
            self.value = float(state["value"])
