"""Optimizers of this rank's shards of FSDP parameters."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rlsys.config.schema.model import OptimConfig
from rlsys.engines.optimizer import MOMENTS, BaseOptimizer, HostAdamW, make_moments
from rlsys.protocol.gather import exchange_device

SAVED = (*MOMENTS, "momentum_buffer", "state1", "state2", "absmax1", "absmax2")
"""Names of AdamW, of Muon, and of bitsandbytes' codes and the scales of their blocks."""
ADAM = {"lr", "betas", "eps", "weight_decay"}
BLOCK_ELEMENTS = 256
MIN_8BIT_ELEMENTS = 4096
"""Elements from which a parameter's moments are kept in 8 bits."""


class ShardedOptimizer(BaseOptimizer):
    """The chosen optimizer over the local shards of FSDP parameters; what it does not apply to is stepped by AdamW.

    It sees plain tensors that share the parameters' storage, so that a step of AdamW is one fused kernel. `groups` are
    the ranks that hold the other rows, and those that split matrices besides; `matrices` names the parameters that Muon
    may step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optim: OptimConfig,
        groups: Sequence[dist.ProcessGroup],
        *,
        matrices: Collection[str] = (),
        grad_clip: float = 1.0,
        total_steps: int = -1,
    ) -> None:
        super().__init__(optim, grad_clip=grad_clip, total_steps=total_steps)
        self._groups = groups
        self._parameters = dict(parameters)
        self._local = {name: nn.Parameter(local_of(p)) for name, p in self._parameters.items()}
        self._grads: list[Tensor] = []
        self.kind = optim.optimizer
        large = {name for name, p in self._parameters.items() if p.numel() >= MIN_8BIT_ELEMENTS}
        chosen = {"AdamW": (), "AdamW8bit": large, "Muon": matrices}[optim.optimizer]
        own: dict[Any, Any] = {self._local[name]: self._parameters[name] for name in self._local if name in chosen}
        others = [local for local in self._local.values() if local not in own]
        self._optimizers: list[torch.optim.Optimizer] = [adamw(others, optim)] if others else []
        if own and optim.optimizer == "Muon":
            self._optimizers.append(ShardedMuon(own, optim))
        elif own:
            # no block crosses shards
            self.kind += " sharded over " + " x ".join(str(dist.get_world_size(group)) for group in groups)
            self._optimizers.append(adamw_8bit(list(own), optim))

    def _gradient_norm(self, count: float) -> float:
        for name, local in self._local.items():
            parameter = self._parameters[name]
            local.data = local_of(parameter)  # it may have been moved or loaded
            local.grad = None if parameter.grad is None else local_of(parameter.grad)
        self._grads = [local.grad for local in self._local.values() if local.grad is not None]
        norms = torch.stack(torch._foreach_norm(self._grads)) if self._grads else torch.zeros(1)
        size = math.prod(dist.get_world_size(group) for group in self._groups[1:])
        trained = [p for p in self._parameters.values() if p.grad is not None]
        copies = [1 if tensor_parallel_part(p)[0] is not None else size for p in trained]
        squares = (norms.double().square() / torch.tensor(copies or [1.0], device=norms.device)).sum()
        for group in self._groups:
            if dist.get_world_size(group) > 1:
                squares = squares.to(exchange_device(group))
                dist.all_reduce(squares, group=group)
        norm = math.sqrt(value) if (value := float(squares)) >= 0 else math.nan
        return norm / count if count > 0 else 0.0

    def _update(self, count: float, clip: float, lr: float) -> None:
        if self._grads:
            torch._foreach_mul_(self._grads, clip / count)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def zero_grad(self) -> None:
        self._grads = []
        for name, local in self._local.items():
            local.grad = self._parameters[name].grad = None

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        states = {local: state for optimizer in self._optimizers for local, state in optimizer.state.items()}
        return ((name, states[local]) for name, local in self._local.items())

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's local tensors as `<moment>.<parameter>`, live."""
        return {f"{kind}.{name}": state[kind] for name, state in self._states() for kind in SAVED if kind in state}

    def set_num_updates(self, count: int) -> None:
        self.num_steps = count
        for state in (state for _, state in self._states() if "step" in state):
            state["step"] = count if isinstance(state["step"], int) else state["step"].fill_(count)


def adamw(parameters: list[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """torch's fused AdamW with its state made, in host memory with `optimizer_cpu_offload`."""
    kind = HostAdamW if optim.override_optimizer_config.optimizer_cpu_offload else torch.optim.AdamW
    optimizer = kind(parameters, fused=True, **optim.model_dump(include=ADAM))
    make_moments(optimizer)
    return optimizer


def adamw_8bit(parameters: list[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, whose moments are 8-bit codes in blocks, with its state made.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
    """
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(parameters, min_8bit_size=0, **optim.model_dump(include=ADAM))
    for index, parameter in enumerate(parameters):
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    return optimizer


class ShardedMuon(torch.optim.Optimizer):
    """Muon with decoupled weight decay: momentum is kept in shards, each matrix is gathered to be orthogonalised.

    `matrices` maps this rank's rows, which are stepped, to the parameter they are of. A step is collective. Source:
    Jordan et al., Muon (2024); with match_rms_adamw scaled as in Liu et al., arXiv:2502.16982.
    """

    def __init__(self, matrices: Mapping[nn.Parameter, DTensor], optim: OptimConfig) -> None:
        super().__init__(list(matrices), {"lr": optim.lr})
        self._matrices, self._decay, self._options = dict(matrices), optim.weight_decay, optim.override_optimizer_config
        self.state.update((rows, {"momentum_buffer": torch.zeros_like(rows)}) for rows in matrices)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        lr = self.param_groups[0]["lr"]
        for rows, parameter in self._matrices.items():
            if rows.grad is not None:
                mean = self.state[rows]["momentum_buffer"].lerp_(rows.grad, 1 - self._options.momentum)
                direction = rows.grad.lerp(mean, self._options.momentum) if self._options.nesterov else mean
                rows.mul_(1 - lr * self._decay).add_(self._change(direction, parameter, lr))

    def _change(self, direction: Tensor, parameter: DTensor, lr: float) -> Tensor:
        """This rank's rows of the step that torch's Muon, without momentum of its own, makes from the whole matrix."""
        mesh, shape = parameter.device_mesh, {"shape": parameter.shape, "stride": parameter.stride()}
        rows = direction.to(mesh.device_type)
        whole = full_of(DTensor.from_local(rows, mesh, parameter.placements, run_check=False, **shape))
        change = nn.Parameter(torch.zeros_like(whole))
        change.grad = whole
        options = {"ns_steps": self._options.ns_steps, "adjust_lr_fn": self._options.adjust_lr_fn}
        torch.optim.Muon([change], lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0, **options).step()
        replicated = DTensor.from_local(change.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(mesh, parameter.placements).to_local().to(direction.device)


def tensor_parallel_part(parameter: Tensor) -> tuple[int | None, list[int]]:
    """The dimension that tensor parallelism splits, if any, and the shape that it leaves to this rank's FSDP group."""
    shape = list(parameter.shape)
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None, shape
    if isinstance(last := parameter.placements[-1], Shard):
        shape[last.dim] //= parameter.device_mesh.shape[-1]
    return getattr(last, "dim", None), shape


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; a plain tensor is its own part."""
    with torch.no_grad():  # detaching a DTensor takes ten times as long
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_of(parameter: Tensor) -> Tensor:
    """The whole tensor of a DTensor, gathered over its mesh."""
    detached = parameter.detach()
    if not isinstance(detached, DTensor):
        return detached
    *outer, last = detached.placements  # tensor parallelism cuts before FSDP2 does, and so is joined after it
    return detached.redistribute(placements=[*[Replicate()] * len(outer), last]).full_tensor()
