"""Muon on this rank's rows of matrices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rlsys.config.schema.model import OptimConfig


class ShardedMuon(torch.optim.Optimizer):
    """Muon with decoupled weight decay: momentum is kept in shards, each matrix is gathered to be orthogonalised.

    `matrices` maps this rank's rows, which are stepped, to the parameter they are of. A step is collective. Source:
    Jordan et al., Muon (2024); with match_rms_adamw scaled as in Liu et al., arXiv:2502.16982.
    """

    def __init__(self, matrices: Mapping[nn.Parameter, DTensor], optim: OptimConfig) -> None:
        super().__init__(list(matrices), {"lr": optim.lr})
        self._matrices, self._decay, self._options = dict(matrices), optim.weight_decay, optim.override_optimizer_config
        for rows in matrices:
            self.state[rows] = {"momentum_buffer": torch.zeros_like(rows)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        lr, momentum = self.param_groups[0]["lr"], self._options.momentum
        for rows, parameter in self._matrices.items():
            if rows.grad is not None:
                mean = self.state[rows]["momentum_buffer"].lerp_(rows.grad, 1 - momentum)
                direction = rows.grad.lerp(mean, momentum) if self._options.nesterov else mean
                rows.mul_(1 - lr * self._decay).add_(self._change(direction, parameter, lr))

    def _change(self, direction: Tensor, parameter: DTensor, lr: float) -> Tensor:
        """This rank's rows of the step that torch's Muon, without momentum of its own, makes from the whole matrix."""
        mesh, shape = parameter.device_mesh, {"shape": parameter.shape, "stride": parameter.stride()}
        rows = direction.to(mesh.device_type)
        whole = DTensor.from_local(rows, mesh, parameter.placements, run_check=False, **shape).full_tensor()
        change = nn.Parameter(torch.zeros_like(whole))
        change.grad = whole
        options = {"ns_steps": self._options.ns_steps, "adjust_lr_fn": self._options.adjust_lr_fn}
        torch.optim.Muon([change], lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0, **options).step()
        replicated = DTensor.from_local(change.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(mesh, parameter.placements).to_local().to(direction.device)
