"""An optimizer step as every training engine does it: the learning-rate schedule, clipping, refusal of NaN."""

import math
import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlsys.config.schema.model import OptimConfig
from rlsys.types import StepReport
from rlsys.utils.errors import ConfigError
from rlsys.utils.hosts import num_cores

MOMENTS = ("exp_avg", "exp_avg_sq")


def num_warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Steps of linear warm-up: `lr_warmup_steps`, or where that is -1 `lr_warmup_steps_ratio` of `total_steps`."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * max(total_steps, 0))


def lr_at(step: float, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of the step after `step` steps: a linear warm-up from zero, then constant, cosine or linear to
    `min_lr_ratio`; the same numbers as transformers' and verl's schedules."""
    warmup = num_warmup_steps(optim, total_steps)
    last_step = optim.lr_decay_steps or total_steps
    if step < warmup:
        return optim.lr * step / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / max(1, last_step - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if optim.lr_scheduler_type == "cosine" else 1 - progress
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape)


class BaseOptimizer(ABC):
    """An optimizer of gradients that are sums: one step divides them by a count. `grad_clip` 0 never clips.

    `kind` is written into checkpoints, which only an optimizer of the same kind loads. `num_steps` counts its steps,
    `lr_steps` the training steps that they were, which the schedule follows.
    """

    kind = "AdamW"

    def __init__(self, optim: OptimConfig, *, grad_clip: float, total_steps: int) -> None:
        kind, ratio = optim.lr_scheduler_type, optim.lr_warmup_steps_ratio
        if (kind != "constant" or (optim.lr_warmup_steps < 0 and ratio > 0)) and total_steps < 1:
            schedule = f"lr_scheduler_type={kind} with lr_warmup_steps_ratio={ratio}"
            raise ConfigError(f"{schedule} needs the total number of training steps")
        self.optim, self.grad_clip, self.total_steps = optim, grad_clip, total_steps
        self.num_steps, self.lr_steps = 0, 0.0

    @torch.no_grad()
    def step(self, count: float, share: float = 1.0) -> StepReport:
        """Divide the gradient sums by `count`, clip and step; `share` is the part of a schedule step that this is.

        Without a positive count, or with a norm that is not finite, the gradients are dropped and nothing else changes.
        A worker beside a GPU has one thread; what of the step runs on the CPU uses its rank's share of the cores.
        """
        num_threads = torch.get_num_threads()
        if torch.cuda.is_available() and num_threads == 1:
            torch.set_num_threads(max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        try:
            norm, lr = self._gradient_norm(count), lr_at(self.lr_steps, self.optim, self.total_steps)
            applied = count > 0 and math.isfinite(norm)
            if applied:
                self._update(count, min(1.0, self.grad_clip / (norm + 1e-6)) if self.grad_clip > 0 else 1.0, lr)
                self.num_steps += 1
                self.lr_steps += share
            self.zero_grad()
        finally:
            torch.set_num_threads(num_threads)
        return StepReport(norm, lr, applied=applied)

    @abstractmethod
    def _gradient_norm(self, count: float) -> float:
        """Norm over all ranks of the gradients divided by `count`; 0 without a positive count."""

    @abstractmethod
    def _update(self, count: float, clip: float, lr: float) -> None:
        """Step with the gradients divided by `count` and multiplied by `clip`."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop all gradients."""

    def header(self) -> dict[str, float | str]:
        """What a checkpoint records of it beside the moments."""
        return {"num_updates": self.num_steps, "lr_steps": self.lr_steps, "optimizer": self.kind}

    @abstractmethod
    def set_num_updates(self, count: int) -> None:
        """Set the optimizer's own step number (Adam's bias correction)."""


class HostAdamW(torch.optim.AdamW):
    """AdamW with its moments in host memory, where it steps: gradients and values are copied there, and values back."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                value, grad, state = on_host(parameter), on_host(parameter.grad), self.state[parameter]
                moments = [[state[name]] for name in MOMENTS]
                step = {"state_steps": [state["step"]], "max_exp_avg_sqs": [], "amsgrad": False, "maximize": False}
                adamw([value], [grad], *moments, **step, **options, beta1=beta1, beta2=beta2, fused=True)
                parameter.copy_(value)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where the tensor is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def make_moments(optimizer: torch.optim.AdamW) -> None:
    """Make the state of an AdamW before its first step."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        device = "cpu" if isinstance(optimizer, HostAdamW) else parameter.device
        moments = {name: torch.zeros_like(parameter, device=device) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), device=device), **moments}
