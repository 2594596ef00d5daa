"""AdamW on this rank's shards, the learning-rate schedule, and gradient clipping that refuses what is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsys.engines.mesh import exchange_device
from rlsys.types import StepReport
from rlsys.utils.errors import ConfigError

Schedule = Literal["constant", "cosine", "linear"]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimSettings:
    """AdamW and its schedule. `warmup_steps` < 0 means `warmup_ratio` of `total_steps`; `grad_clip` 0 never clips."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = -1
    warmup_ratio: float = 0.0
    total_steps: int = -1
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        needs_total = self.schedule != "constant" or (self.warmup_steps < 0 and self.warmup_ratio > 0)
        if needs_total and self.total_steps < 1:
            raise ConfigError(f"the {self.schedule} schedule needs the total number of optimizer steps")

    @property
    def num_warmup_steps(self) -> int:
        return self.warmup_steps if self.warmup_steps >= 0 else int(self.warmup_ratio * max(self.total_steps, 0))


def lr_at(step: int, settings: OptimSettings) -> float:
    """Learning rate of the step after `step` steps: a linear warm-up from zero, then constant, cosine or linear to
    `min_lr_ratio`; the same numbers as transformers' and verl's schedules."""
    warmup, floor = settings.num_warmup_steps, settings.min_lr_ratio
    if step < warmup:
        return settings.lr * step / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - warmup) / max(1, settings.total_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.lr * (floor + (1 - floor) * shape)


class ShardedAdamW:
    """AdamW over the local shards of FSDP parameters. The optimizer sees plain tensors that share their storage, so a
    step is one fused kernel; `group` is the ranks that hold the other shards."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: OptimSettings, group: dist.ProcessGroup
    ) -> None:
        self.settings, self.num_steps = settings, 0
        self._group = group
        self._parameters = dict(parameters)
        self._local = {name: nn.Parameter(local_of(p)) for name, p in self._parameters.items()}
        self._adamw = torch.optim.AdamW(
            list(self._local.values()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for local in self._local.values():
            moments = {name: torch.zeros_like(local) for name in MOMENTS}
            self._adamw.state[local] = {"step": torch.zeros((), device=local.device), **moments}

    @property
    def lr(self) -> float:
        return lr_at(self.num_steps, self.settings)

    @torch.no_grad()
    def step(self, count: float) -> StepReport:
        """Divide the gradient sums by `count`, clip and step. Without a positive count, or with a norm that is not
        finite, nothing changes but the gradients, which are dropped."""
        grads = self._take_gradients()
        norm = self._global_norm(grads) / count if count > 0 else 0.0
        lr = self.lr
        if not (count > 0 and math.isfinite(norm)):
            self.zero_grad()
            return StepReport(norm, lr, applied=False)
        clip = self.settings.grad_clip
        factor = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        if grads:
            torch._foreach_mul_(grads, factor / count)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.num_steps += 1
        self.zero_grad()
        return StepReport(norm, lr, applied=True)

    def zero_grad(self) -> None:
        for name, local in self._local.items():
            local.grad = self._parameters[name].grad = None

    def _take_gradients(self) -> list[Tensor]:
        """Hang the sharded gradients onto the plain tensors."""
        self.rebind()
        grads = []
        for name, local in self._local.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                local.grad = local_of(parameter.grad).to(local.dtype)
                grads.append(local.grad)
        return grads

    def _global_norm(self, grads: list[Tensor]) -> float:
        norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1)
        squares = norms.double().square().sum()
        if dist.get_world_size(self._group) > 1:
            squares = squares.to(exchange_device(self._group))
            dist.all_reduce(squares, group=self._group)
        return math.sqrt(value) if (value := float(squares)) >= 0 else math.nan

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's local tensors as `<moment>.<parameter>`, live."""
        return {f"{m}.{name}": self._adamw.state[p][m] for name, p in self._local.items() for m in MOMENTS}

    def set_num_updates(self, count: int) -> None:
        """Set AdamW's own step number (bias correction) and the schedule's."""
        self.num_steps = count
        for state in self._adamw.state.values():
            state["step"].fill_(count)

    def rebind(self) -> None:
        """Share storage with the parameters again, after they have moved."""
        for name, local in self._local.items():
            local.data = local_of(self._parameters[name])

    def move(self, device: str) -> None:
        """Take the moments to `device`."""
        for state in self._adamw.state.values():
            for name, value in state.items():
                state[name] = value.to(device, non_blocking=True)


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; a plain tensor is its own part."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached
