"""The leg between hosts of `ipc`: trainer ranks send what another host lacks to trainer ranks there.

These stage it in memory that the engines of their host copy from. Every element crosses once to a host, however many
of its engines want it, in rounds that bound what a rank stages.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rlsys.utils.errors import WeightTransferError
from rlsys.utils.grouping import group_by
from rlsys.weights.executors.base import Layouts
from rlsys.weights.executors.nccl import GroupMember, Round, plan_rounds
from rlsys.weights.plan import RANK, SOURCE_RANK, Copy, Plan

STAGING_BYTES = 256 << 20


@dataclass(frozen=True)
class Relays:
    """The rounds between hosts, none on one host. Round n of a push is `rounds[n - 1]`.

    A message's copies are parts of pieces: `local` is the number of the piece, `local_start` the place in it.
    """

    rounds: Sequence[Round]
    pieces: Mapping[int, Sequence[int]]
    """For each engine rank the piece that each of its copies is made from; -1 where its host has the elements."""
    parts: Mapping[int, Sequence[tuple[int, Copy]]]
    """The parts of each piece, and the round that brings it."""

    def copies_of(self, rank: int, copies: Sequence[Copy]) -> tuple[tuple[Copy, ...], ...]:
        """The copies of an engine rank by round, at first those inside its host; nothing without rounds."""
        if not self.rounds:
            return ()
        by_round: list[list[Copy]] = [[] for _ in range(len(self.rounds) + 1)]
        for copy, piece in zip(copies, self.pieces[rank], strict=True):
            if piece < 0:
                by_round[0].append(copy)
            for number, part in self.parts.get(piece, ()):
                by_round[number].append(_from_staging(copy, part))
        return tuple(map(tuple, by_round))


def plan_relays(plan: Plan, sources: Layouts, destinations: Layouts, *, staging_bytes: int) -> Relays:
    """The rounds of what a plan copies between hosts, of which a rank stages at most `staging_bytes`, or STAGING_BYTES.

    A piece is staged by the trainer rank of the host that stages least. WeightTransferError where a host has engines
    but no trainer rank.
    """
    hosts = group_by(sources, lambda layout: layout.host)
    if alone := sorted({layout.host for layout in destinations} - {*hosts}):
        raise WeightTransferError(f"ipc needs a trainer rank on every rollout host; there is none on {alone}")
    numbers = {host: number for number, host in enumerate(hosts)}
    from_host, to_host = (np.array([numbers[layout.host] for layout in side]) for side in (sources, destinations))
    taking = plan.moves[:, RANK]
    given_at, taken_at = from_host[plan.moves[:, SOURCE_RANK]], to_host[taking]
    # a piece for each (elements, host that takes them from another): -1 stands for copies inside a host, and is put in
    # front so that it is there, and number 0, in any case
    keys = np.where(given_at != taken_at, plan.checksum_ids[0] * len(hosts) + taken_at, -1)
    _, first, piece = np.unique(np.append(-1, keys), return_index=True, return_inverse=True)
    piece = piece.reshape(-1)[1:] - 1
    staged, pieces = Counter[int](), list[Copy]()
    for number, copy in enumerate(plan.select(first[1:] - 1)):
        relay = min((layout.rank for layout in hosts[destinations[copy.rank].host]), key=staged.__getitem__)
        staged[relay] += copy.num_bytes
        pieces.append(replace(copy, rank=relay, local=str(number), local_start=(0,) * len(copy.shape)))
    rounds = plan_rounds(pieces, staging_bytes=min(staging_bytes, STAGING_BYTES))
    parts: dict[int, list[tuple[int, Copy]]] = defaultdict(list)
    for number, messages in enumerate(rounds, start=1):
        for part in chain.from_iterable(messages.values()):
            parts[int(part.local)].append((number, part))
    return Relays(rounds, {layout.rank: piece[taking == layout.rank].tolist() for layout in destinations}, parts)


def _from_staging(copy: Copy, part: Copy) -> Copy:
    """The elements of a part, from where it is staged to where a copy of its piece puts them."""
    own = len(copy.local_start) - len(part.shape)
    shifted = (a + b for a, b in zip(copy.local_start[own:], part.local_start, strict=True))
    return replace(
        copy,
        start=part.start,
        shape=part.shape,
        source_rank=part.rank,
        source_local=_staged_name(part),
        source_start=(0,) * len(part.shape),
        local_start=(*copy.local_start[:own], *shifted),
    )


def _staged_name(part: Copy) -> str:
    return f"staged:{part.local}:{','.join(map(str, part.local_start))}"


class RelayRank(GroupMember):
    """A trainer rank, which stages what other hosts send in memory that all rounds share."""

    exported: Mapping[str, Tensor]
    """The tensors that are sent."""

    def stage(self, device: torch.device) -> dict[str, Tensor]:
        """Allocate staging memory; returns what the rounds bring as tensors in it, by name."""
        self.allocate(device)
        rounds = map(self.received_in, range(len(self.receives)))
        return {_staged_name(part): values for parts in rounds for part, values in parts}

    @torch.no_grad()
    def relay(self, number: int) -> int:
        """Send and receive the messages of a round; returns the bytes received."""
        with self.group.guarded(f"round {number} between hosts"):
            self.exchange(number - 1, self.exported)
        synchronize(self.device)
        return sum(part.num_bytes for part, _ in self.received_in(number - 1))


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
