"""Megatron's distributed optimizer over gradients that are sums, and its state as boxes.

Every data-parallel rank holds a range of each parameter's elements: their float32 masters and both moments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from rlsys.config.schema.model import OptimConfig
from rlsys.engines.optimizer import MOMENTS, BaseOptimizer, HostAdamW, make_moments
from rlsys.models.megatron.adapters import sum_shared_gradients
from rlsys.models.megatron.build import TokenGPT


@dataclass(frozen=True)
class OptimizerRange:
    """A range of a parameter's elements on this rank: elements `start` to `stop` of the flattened local tensor, whose
    masters and moments (float32, one-dimensional) are `tensors` by "master", "exp_avg" and "exp_avg_sq"."""

    local: str
    start: int
    stop: int
    tensors: Mapping[str, Tensor]


class MegatronAdamW(BaseOptimizer):
    """AdamW on this rank's range of the parameters of `chunks`, which it wraps for data parallelism.

    Gradients are sums in float32; weight decay is on every trained parameter, as in torch's AdamW. With
    `optimizer_cpu_offload` the moments are in host memory; the masters stay on the device.
    """

    def __init__(
        self, chunks: Sequence[TokenGPT], optim: OptimConfig, *, grad_clip: float = 1.0, total_steps: int = -1
    ) -> None:
        super().__init__(optim, grad_clip=grad_clip, total_steps=total_steps)
        self.config = chunks[0].config
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrap = partial(DistributedDataParallel, self.config, ddp, disable_bucketing=True)
        self.chunks: list[Any] = [wrap(chunk) for chunk in chunks]
        adam = OptimizerConfig(
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=True,
        )
        chained: Any = get_megatron_optimizer(adam, self.chunks, config_overrides={}, use_gloo_process_groups=False)
        self._megatron = chained
        self._parts = [part for part in chained.chained_optimizers if not part.is_stub_optimizer]
        for part in self._parts:
            if optim.override_optimizer_config.optimizer_cpu_offload:
                groups, part.optimizer = part.optimizer.param_groups, HostAdamW([torch.zeros(())])
                part.optimizer.param_groups = groups  # parts of float32 parameters are no leaves, which torch refuses
                make_moments(part.optimizer)
            part.init_state_fn(part.optimizer)
            for state in part.optimizer.state.values() if isinstance(part.optimizer, torch.optim.AdamW) else ():
                state["step"] = torch.zeros(())

    def _gradient_norm(self, count: float) -> float:
        self._finalize()
        if count > 0:
            for chunk in self.chunks:
                chunk.scale_gradients(1.0 / count)
        self._megatron.prepare_grads()
        return float(self._megatron.get_grad_norm()) if count > 0 else 0.0

    def _update(self, count: float, clip: float, lr: float) -> None:
        grads = [p.grad for part in self._parts for p in part.get_parameters() if p.grad is not None]
        if clip < 1 and grads:
            torch._foreach_mul_(grads, clip)
        for group in self._megatron.param_groups:
            group["lr"] = lr
        self._megatron.step_with_ready_grads()

    def _finalize(self) -> None:
        """Sum gradients over the ranks that have parts of them."""
        sum_shared_gradients(self.chunks)
        finalize_model_grads(self.chunks)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._megatron.zero_grad()

    def grad_buffers(self) -> list[Any]:
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def ranges(self, names: Mapping[nn.Parameter, str]) -> list[OptimizerRange]:
        """Everything this rank holds of the optimizer, live; `names` are the parameters' local names."""
        ranges = []
        for part in self._parts:
            # Megatron lists float32 parameters separately.
            parameters = chain(*part.model_float16_groups, *part.model_fp32_groups)
            masters = chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
            for parameter, master in zip(parameters, masters, strict=True):
                span = part._get_model_param_range_map(parameter)["param"]
                tensors = {"master": master.detach(), **{name: part.optimizer.state[master][name] for name in MOMENTS}}
                ranges.append(OptimizerRange(names[parameter], span.start, span.end, tensors))
        return ranges

    def set_num_updates(self, count: int) -> None:
        self.num_steps = count
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["step"] = count
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(count)
