"""Router replay: the experts that routers chose for each token, recorded in one pass and taken again in a later one.

B rows of L columns, b rows of a pack, n of its tokens on this rank, k experts of a token; layers of the whole model.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter

from rlsys.models.context import own_tokens
from rlsys.models.packing import TokenRows

NO_ROUTE = -1
ComputeTopK = Callable[..., tuple[Tensor, Tensor]]


class LayerRoutes:
    """Stands in for Megatron's RouterReplay in one router: gives it the experts to take, and keeps what it took."""

    def __init__(self) -> None:
        self.given: Tensor | None = None
        """Routes (n, k) of the forward pass that runs; None in the backward pass, which may compute it again."""
        self.to_recompute: deque[Tensor] = deque()
        self.taken = torch.empty(0)
        self.counts = torch.zeros(2)
        """Given experts that the router would not have chosen, and all that were given."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: ComputeTopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers (n, k) of the experts that each token takes: its own where no k different are given."""
        given = self.to_recompute.popleft() if self.given is None else self.given
        _, own = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        known = (given != NO_ROUTE) & (given.sort(dim=1).values.diff(dim=1) != 0).all(dim=1, keepdim=True)
        self.taken = torch.where(known, given, own)
        if self.given is not None:
            other = (self.taken[:, :, None] != own[:, None, :]).all(dim=2)
            self.counts = self.counts.to(other.device) + torch.stack([other.sum(), known.sum()])
        return scores.gather(1, self.taken), self.taken


class RouterReplay:
    """The routes (B, L, layers, k) of one call of an engine, which its routers take but where they are -1; with
    `record` the ones that were taken are written over them."""

    def __init__(self, chunks: Sequence[nn.Module], routes: Tensor, *, record: bool = False) -> None:
        self.routes, self.record = routes, record
        self.routers = {id(chunk): [m for m in chunk.modules() if isinstance(m, TopKRouter)] for chunk in chunks}
        self.layers: list[Any] = [router for routers in self.routers.values() for router in routers]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The routers take the routes within the block."""
        try:
            for router in self.layers:
                router.router_replay = LayerRoutes()
            yield
        finally:
            for router in self.layers:
                router.router_replay = None

    @contextmanager
    def forward(self, chunk: nn.Module, rows: Tensor | None, tokens: TokenRows) -> Iterator[None]:
        """One forward pass of a chunk over a pack of these rows (b,), within the block."""
        routers: list[Any] = self.routers[id(chunk)]
        columns = _own_columns(tokens, sequence_parallel=bool(routers) and routers[0].config.sequence_parallel)
        is_real = columns >= 0
        here = columns[is_real].to(self.routes.device)
        width = self.routes.shape[1]
        places = (here if rows is None else rows.to(here.device)[here // width], here % width)
        for router in routers:
            given = torch.full((len(columns), self.routes.shape[3]), NO_ROUTE, device=columns.device)
            given[is_real] = self.routes[(*places, router.layer_number - 1)].to(given)
            router.router_replay.given = given
            router.router_replay.to_recompute.append(given)
        yield
        for router in routers:
            router.router_replay.given = None
            if self.record:
                self.routes[(*places, router.layer_number - 1)] = router.router_replay.taken[is_real].to(self.routes)

    def different(self, device: torch.device) -> tuple[float, float]:
        """How many of the given experts the routers would not have chosen, and all that were given; over the ranks
        that share the rows."""
        counts = sum((router.router_replay.counts.to(device) for router in self.layers), torch.zeros(2, device=device))
        for group in _sharing():
            dist.all_reduce(counts, group=group)
        return float(counts[0]), float(counts[1])

    def recorded(self) -> Tensor:
        """The routes that were taken, of all ranks that share the rows."""
        routes = self.routes.int()
        for group in _sharing():
            dist.all_reduce(routes, op=dist.ReduceOp.MAX, group=group)
        return routes.to(self.routes)


def _sharing() -> list[Any]:
    """Groups whose ranks hold different layers and tokens of the same rows."""
    return [mpu.get_model_parallel_group(), mpu.get_context_parallel_group()]


def _own_columns(tokens: TokenRows, *, sequence_parallel: bool) -> Tensor:
    """The `columns` (n,) of the tokens that this rank's routers see, in their order."""
    group: Any = mpu.get_context_parallel_group()
    columns = tokens.columns
    if group.size() > 1:
        columns = columns[own_tokens(tokens.lengths, group.rank(), group.size()).to(columns.device)]
    if sequence_parallel:
        tensors: Any = mpu.get_tensor_model_parallel_group()
        columns = columns.chunk(tensors.size())[tensors.rank()]
    return columns
