"""Micro-batches through Megatron's schedules: one stage, 1F1B, or interleaved chunks.

b rows of a micro-batch, T tokens of a pack.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core.pipeline_parallel import get_forward_backward_func

from rlsys.engines.micro_batches import Pack
from rlsys.models.megatron.build import packed_arguments
from rlsys.models.megatron.router_replay import RouterReplay


def run(
    chunks: Sequence[Any],
    packs: Sequence[Pack],
    on_hidden: Callable[[Pack, Tensor], Tensor | None],
    *,
    backward: bool,
    replay: RouterReplay | None = None,
) -> None:
    """Run every pack through all chunks, whose routers take the routes of `replay`.

    On the last stage `on_hidden` gets each pack's hidden states; with `backward` it returns the loss sum, whose
    gradients are added to those already accumulated.
    """
    if not packs:
        return

    def after(pack: Pack, hidden: Tensor, *, non_loss_data: bool = False) -> Any:
        loss = on_hidden(pack, hidden)
        return None if non_loss_data else (loss, torch.zeros((), dtype=torch.int, device=hidden.device), None)

    def forward(iterator: Iterator[Pack], chunk: Any) -> tuple[Tensor, Callable[..., object]]:
        pack = next(iterator)
        with nullcontext() if replay is None else replay.forward(chunk, pack.index, pack.tokens):
            return chunk(**packed_arguments(pack.tokens, pack.tokens.token_ids.device)), partial(after, pack)

    iterators = [iter(packs) for _ in chunks]
    tokens = packs[0].tokens.num_tokens
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packs),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )
