"""Micro-batches through Megatron's schedules: one stage, 1F1B, or interleaved chunks.

b rows of a micro-batch, B rows of this rank, R response tokens, T tokens of a pack.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlsys.models.megatron import shim  # noqa: F401

# isort: split

from megatron.core.pipeline_parallel import get_forward_backward_func

from rlsys.engines.megatron.groups import MegatronRanks
from rlsys.engines.mesh import max_over_ranks
from rlsys.engines.micro_batches import MicroBatches, Pack, packs_of, split_rows
from rlsys.models.context import pack_multiple
from rlsys.models.megatron.build import packed_arguments
from rlsys.models.megatron.image_tower import ImageTower
from rlsys.models.megatron.router_replay import RouterReplay
from rlsys.models.packing import padded_each, padded_to
from rlsys.protocol import DataProto


def make_packs(
    batch: DataProto,
    size: MicroBatches,
    ranks: MegatronRanks,
    *,
    multiple: int,
    equal: bool,
    tower: ImageTower | None = None,
) -> list[Pack]:
    """As many packs on every rank, of which each has a multiple of `multiple` tokens; all of one length where `equal`.

    The ranks of one context-parallel group make the same packs. Interleaved stages take them in groups of as many as
    there are stages. `tower` takes their images.
    """
    lengths, cp = batch.tensors["attention_mask"].sum(dim=1).tolist(), ranks.sizes.cp
    parts = split_rows(lengths, size, agree=max_over_ranks, num_sharing=cp)
    group = ranks.sizes.pp if ranks.sizes.vp > 1 else 1
    parts += [[]] * (-len(parts) % group)
    packs = list(packs_of(batch, parts, None if tower is None else tower.model))
    if cp > 1:
        packs = [replace(pack, tokens=padded_each(pack.tokens, 2 * cp)) for pack in packs]
        multiple = pack_multiple(multiple, cp)
    own = [pack.tokens.num_tokens for pack in packs]
    whole = [max_over_ranks(max(own, default=0))] * len(packs) if equal else own
    return [
        Pack(pack.index, padded_to(pack.tokens, -(-tokens // multiple) * multiple).to(ranks.device))
        for pack, tokens in zip(packs, whole, strict=True)
    ]


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
