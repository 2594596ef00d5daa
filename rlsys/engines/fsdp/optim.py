"""AdamW on this rank's shards of FSDP parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlsys.config.schema.model import OptimConfig
from rlsys.engines.adamw import MOMENTS, BaseAdamW
from rlsys.engines.mesh import exchange_device


class ShardedAdamW(BaseAdamW):
    """AdamW over the local shards of FSDP parameters. The optimizer sees plain tensors that share their storage, so a
    step is one fused kernel; `group` is the ranks that hold the other shards."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optim: OptimConfig,
        group: dist.ProcessGroup,
        *,
        grad_clip: float = 1.0,
        total_steps: int = -1,
    ) -> None:
        super().__init__(optim, grad_clip=grad_clip, total_steps=total_steps)
        self._group = group
        self._parameters = dict(parameters)
        self._local = {name: nn.Parameter(local_of(p)) for name, p in self._parameters.items()}
        self._grads: list[Tensor] = []
        self._adamw = torch.optim.AdamW(
            list(self._local.values()),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        for local in self._local.values():
            moments = {name: torch.zeros_like(local) for name in MOMENTS}
            self._adamw.state[local] = {"step": torch.zeros((), device=local.device), **moments}

    def _gradient_norm(self, count: float) -> float:
        self._grads = self._take_gradients()
        norms = torch.stack(torch._foreach_norm(self._grads)) if self._grads else torch.zeros(1)
        squares = norms.double().square().sum()
        if dist.get_world_size(self._group) > 1:
            squares = squares.to(exchange_device(self._group))
            dist.all_reduce(squares, group=self._group)
        norm = math.sqrt(value) if (value := float(squares)) >= 0 else math.nan
        return norm / count if count > 0 else 0.0

    def _update(self, count: float, clip: float, lr: float) -> None:
        if self._grads:
            torch._foreach_mul_(self._grads, clip / count)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def zero_grad(self) -> None:
        self._grads = []
        for name, local in self._local.items():
            local.grad = self._parameters[name].grad = None

    def _take_gradients(self) -> list[Tensor]:
        """Give the sharded gradients to the plain tensors."""
        self.rebind()
        grads = []
        for name, local in self._local.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                local.grad = local_of(parameter.grad).to(local.dtype)
                grads.append(local.grad)
        return grads

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's local tensors as `<moment>.<parameter>`, live."""
        return {f"{m}.{name}": self._adamw.state[p][m] for name, p in self._local.items() for m in MOMENTS}

    def set_num_updates(self, count: int) -> None:
        self.num_steps = count
        for state in self._adamw.state.values():
            state["step"].fill_(count)

    def rebind(self) -> None:
        """Share storage with the parameters again after they were moved."""
        for name, local in self._local.items():
            local.data = local_of(self._parameters[name])

    def move(self, device: str) -> None:
        """Take the moments to `device`."""
        for state in self._adamw.state.values():
            for name, value in state.items():
                state[name] = value.to(device, non_blocking=True)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; a plain tensor is its own part."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
