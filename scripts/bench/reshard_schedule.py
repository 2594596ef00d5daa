"""Simulated milliseconds of the weight pushes of reshard.py, for machines that are not at hand; needs no GPU.

    python scripts/bench/reshard_schedule.py                          # the cases of docs/performance.md, 2 minutes
    python scripts/bench/reshard_schedule.py --gpus 4 --cases "7B:PP4->TP4" --local 1400 --peer 360

The plan, its tiles and their order are the executor's own (`make_plan`, `tile_tables`), of tensors without memory that
follow one another as layers do. Every engine's GPU copies TILES_IN_FLIGHT tiles at a time, in order and launch after
launch. Tiles in flight share fairly (max-min) what each GPU's memory reads and writes and what its links bring in and
take out, all at EFFICIENCY of the bandwidths of plain large copies; a push takes FIXED_S more. These two are fitted to
pushes measured on one and two GPUs, so that those on four are predictions. One order copies the parts of the engine's
memory one after another, as it was done once, the other in turns, as it is done. The limit is that of reshard.py.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from rlsys.types import WeightLayout  # noqa: E402
from rlsys.weights.batched_copy import PARTS, tile_tables  # noqa: E402
from rlsys.weights.layout import dtype_of  # noqa: E402
from rlsys.weights.plan import Plan, make_plan  # noqa: E402
from rlsys.weights.rank_plan import split_plan  # noqa: E402
from scripts.bench.reshard import CASES, layouts_of, limit_s  # noqa: E402
from scripts.weight_layouts import local_shapes  # noqa: E402

LOCAL, PEER = 2110e9, 374e9
"""Bytes per second of a plain large copy inside an H200, and from another one while all others do the same."""
EFFICIENCY, FIXED_S = 0.85, 0.29e-3
"""What a push reaches of these bandwidths, and the seconds that it takes besides: see `fit`."""
TILES_IN_FLIGHT = 132 * 8
"""Programs of 256 threads that the multiprocessors of an H200 hold at a time."""
TOGETHER_S = 2e-6
"""Tiles that end within such a time end together, half of it early or late."""
RANK_BYTES, ROOM_BYTES = 1 << 41, 1 << 21
"""Addresses of each rank, and what CUDA rounds large tensors up to."""

Transfer = tuple[int, int]
"""The GPU that a tile comes from, and its bytes."""
Launches = Sequence[Sequence[Transfer]]
"""What a GPU copies in each launch, in order."""


@dataclass(frozen=True)
class MeasuredPush:
    """Milliseconds on so many H200s by docs/performance.md, with parts of the memory one after another and in turns."""

    gpus: int
    case: str
    one_after_another_ms: float | None = None
    in_turns_ms: float | None = None


MEASURED = (
    MeasuredPush(1, "0.5B:TP1->TP1", None, 0.88),
    MeasuredPush(1, "7B:TP1->TP1", 8.8),
    MeasuredPush(1, "30B-A3B:TP1->TP1", 36.7),
    MeasuredPush(2, "7B:TP2->TP1xDP2", 24.0, 23.5),
    MeasuredPush(2, "7B:PP2->TP2", 14.4, 12.5),
    MeasuredPush(2, "30B-A3B:EP2->TP2", 46.9),
    MeasuredPush(2, "30B-A3B:PP2->TP2", 56.1),
    MeasuredPush(4, "7B:TP4->TP2xDP2", 26.1),
    MeasuredPush(4, "7B:TP2xPP2->TP2xDP2", 14.7),
    MeasuredPush(4, "7B:PP4->TP4", 18.0),
    MeasuredPush(4, "30B-A3B:TP4xEP4->TP2xDP2", 84.9),
    MeasuredPush(4, "30B-A3B:TP2xPP2xEP2->TP4", 61.8),
)
"""The eleven cases, and one with little to copy, whose time is mostly fixed."""


# --- what the executor copies


def tensors_of(layout: WeightLayout, memory: Tensor) -> dict[str, Tensor]:
    """A rank's local tensors, one after another from the rank's first address on."""
    tensors, at = {}, layout.rank * RANK_BYTES
    dtypes = {shard.local: dtype_of(layout.dtypes[shard.box.tensor]) for shard in layout.shards}
    for name, shape in local_shapes(layout).items():
        num_bytes = prod(shape) * dtypes[name].itemsize
        tensors[name] = memory[at : at + num_bytes].view(dtypes[name]).view(shape)
        at += -(-num_bytes // ROOM_BYTES) * ROOM_BYTES
    return tensors


def launches_of(
    plan: Plan, sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout], *, parts: Sequence[int]
) -> list[list[Launches]]:
    """For each number of parts of the memory that take turns: what every engine's GPU copies."""
    memory = torch.empty(2 * len(sources) * RANK_BYTES, dtype=torch.uint8, device="meta")
    given = {layout.rank: tensors_of(layout, memory) for layout in sources}
    plans, by_parts = split_plan(plan, sources), [list[Launches]() for _ in parts]
    for layout in destinations:
        own = tensors_of(layout, memory[len(sources) * RANK_BYTES :])
        copies = plans.destination(layout.rank).copies
        pairs = [(copy.view(own), copy.source_view(given[copy.source_rank])) for copy in copies]
        for number, launches in zip(parts, by_parts, strict=True):
            tables = tile_tables(pairs, parts=number).items()
            launches.append([[(t[0] // RANK_BYTES, t[2] * word) for t in tiles] for (word, _), tiles in tables])
    return by_parts


# --- how long it takes


def fair_rates(in_flight: np.ndarray, usage: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Bytes per second of one tile of each flow (F,), max-min fair among tiles.

    `in_flight` (F,) tiles; `usage` (R, F) is what a byte of a flow takes of each resource, `capacity` (R,) per second.
    """
    rates, is_open, left = np.zeros(len(in_flight)), in_flight > 0, capacity.copy()
    while is_open.any():
        demand = usage @ (in_flight * is_open)
        levels = np.divide(left, demand, out=np.full(len(left), np.inf), where=demand > 0)
        is_full = levels <= levels.min() * (1 + 1e-9)
        stopped = is_open & (usage[is_full] > 0).any(0)
        rates[stopped] = levels.min()
        left -= usage @ (in_flight * stopped) * levels.min()
        is_open &= ~stopped
    return rates


class PushSimulation:
    """GPUs that copy tiles out of one another; a flow is all that one GPU copies from one GPU."""

    def __init__(
        self, launches: Sequence[Launches], *, local: float, peer: float, tiles_in_flight: int = TILES_IN_FLIGHT
    ) -> None:
        """`local`, `peer`: bytes per second of a copy inside a GPU and from another one."""
        self.world, self.tiles_in_flight = len(launches), tiles_in_flight
        self.launches = [map(iter, of_gpu) for of_gpu in launches]
        self.launch = [iter(()) for _ in launches]
        flows = [(gpu, source) for gpu in range(self.world) for source in range(self.world)]
        self.in_flight, self.copied = np.zeros((2, len(flows)))
        """Of each flow: tiles, and the bytes that one in flight since the start would have copied."""
        self.ends: list[list[float]] = [[] for _ in flows]
        """Of each flow: what will be `copied` when its tiles in flight end, a heap."""
        memory, into, out = np.zeros((3, self.world, len(flows)))
        for flow, (gpu, source) in enumerate(flows):
            memory[gpu, flow] += 1
            memory[source, flow] += 1
            into[gpu, flow] = out[source, flow] = gpu != source
        self.usage = np.concatenate([memory, into, out])
        self.capacity = np.repeat([2 * local, peer, peer], self.world)

    def run(self) -> float:
        """Seconds until the last tile has arrived."""
        clock_s = 0.0
        while self._start_tiles():
            rates = fair_rates(self.in_flight, self.usage, self.capacity)
            waits = ((tiles[0] - self.copied[flow]) / rates[flow] for flow, tiles in enumerate(self.ends) if tiles)
            step_s = min(waits) + TOGETHER_S / 2
            clock_s += step_s
            self.copied += rates * step_s
            self._end_tiles(self.copied + rates * TOGETHER_S / 2)
        return clock_s

    def _start_tiles(self) -> bool:
        """Fill the GPUs; a launch starts once the one before has ended. Returns whether any tile is in flight."""
        for gpu in range(self.world):
            first = gpu * self.world
            room = self.tiles_in_flight - int(self.in_flight[first : first + self.world].sum())
            tiles = list(islice(self.launch[gpu], room))
            if not tiles and room == self.tiles_in_flight:
                self.launch[gpu] = next(self.launches[gpu], iter(()))
                tiles = list(islice(self.launch[gpu], room))
            for source, num_bytes in tiles:
                heappush(self.ends[first + source], self.copied[first + source] + num_bytes)
                self.in_flight[first + source] += 1
        return bool(self.in_flight.any())

    def _end_tiles(self, copied: np.ndarray) -> None:
        for flow, tiles in enumerate(self.ends):
            while tiles and tiles[0] <= copied[flow]:
                heappop(tiles)
                self.in_flight[flow] -= 1


def fit(simulated_s: Sequence[float], measured_s: Sequence[float]) -> tuple[float, float]:
    """(EFFICIENCY, FIXED_S) of the smallest squared relative errors, for seconds simulated without either."""
    simulated, measured = np.array(simulated_s), np.array(measured_s)
    terms = np.stack([1 / measured, simulated / measured], axis=1)
    (fixed_s, slowdown), *_ = np.linalg.lstsq(terms, np.ones(len(measured)), rcond=None)
    return 1 / slowdown, fixed_s


def ideal_seconds(push: MeasuredPush, *, local: float, peer: float) -> tuple[float, list[float]]:
    """The limit, and the seconds of both orders at the full bandwidths of large copies."""
    sources, destinations = layouts_of(push.case, push.gpus)
    plan = make_plan(sources, destinations)
    limit, _ = limit_s(plan, push.gpus, local, peer)
    orders = launches_of(plan, sources, destinations, parts=(1, PARTS))
    return limit, [PushSimulation(launches, local=local, peer=peer).run() for launches in orders]


def cells_of(ideal_s: float, limit: float, measured_ms: float | None) -> list[str]:
    """Milliseconds, over the limit, and measured over the limit with the simulation's error."""
    ms = (ideal_s / EFFICIENCY + FIXED_S) * 1e3
    measured = f"{measured_ms / limit / 1e3:.2f} ({ms / measured_ms - 1:+.0%})" if measured_ms else ""
    return [f"{ms:.1f} ms", f"{ms / limit / 1e3:.2f}", measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=CASES, help="the cases of reshard.py for as many GPUs")
    parser.add_argument("--cases", nargs="*", help="instead of them: SHAPE:TPnxPPnxEPn->TPnxEPnxDPn")
    parser.add_argument("--local", type=float, help="GB/s of a large copy inside a GPU, as reshard.py prints it")
    parser.add_argument("--peer", type=float, help="GB/s of a large copy from another one")
    args = parser.parse_args()
    if (args.cases or args.local or args.peer) and not args.gpus:
        parser.error("--cases, --local and --peer need --gpus, the number of GPUs")
    local, peer = (given * 1e9 if given else own for given, own in ((args.local, LOCAL), (args.peer, PEER)))
    pushes = [MeasuredPush(args.gpus, case) for case in args.cases or CASES.get(args.gpus, ())] or MEASURED
    calibration = list[tuple[float, float]]()
    print("| case | GPUs | limit | one after another | / limit | measured | in turns | / limit | measured |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for push in pushes:
        limit, orders = ideal_seconds(push, local=local, peer=peer)
        cells = [push.case.replace(":", " ").replace("->", " -> "), str(push.gpus), f"{limit * 1e3:.1f} ms"]
        for ideal_s, measured_ms in zip(orders, (push.one_after_another_ms, push.in_turns_ms), strict=True):
            cells += cells_of(ideal_s, limit, measured_ms)
            if measured_ms and push.gpus <= 2:
                calibration.append((ideal_s, measured_ms / 1e3))
        print(f"| {' | '.join(cells)} |", flush=True)
    if calibration:
        efficiency, fixed_s = fit(*zip(*calibration, strict=True))
        print(f"fit to one and two GPUs: {efficiency:.2f} of the bandwidths, {fixed_s * 1e3:.2f} ms fixed")


if __name__ == "__main__":
    main()
