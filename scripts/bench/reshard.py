"""Milliseconds of a weight push from Megatron shards into engine-shaped parameters, beside the limit and two peers.

    python scripts/bench/reshard.py                      # the cases for as many GPUs as there are, < 4 minutes
    python scripts/bench/reshard.py --cases 7B:TP2xPP2->TP2xDP2 --json out.json
    python scripts/bench/reshard.py --fp8 --no-peers     # and then to engines that serve blocks of FP8
    python scripts/bench/reshard.py --device cpu         # the same code on tiny shapes over shared memory

Two processes a GPU: a trainer rank whose parameters are in one flat buffer as Megatron keeps them, and an engine rank
with fused qkv_proj, gate_up_proj, w13 and w2 of its own. A push is what the controller waits for: the trainer exports
the version, every engine copies what it holds into its parameters and is released. The limit is computed from this
plan's bytes and from the bandwidths of plain large copies that are measured first:
max over GPUs of (bytes in / peer, bytes out / peer, (2 local + in + out) / (2 local bandwidth)).

Peers, which load through the engine's own loader (narrow and copy, tensor by tensor): (a) every full tensor gathered on
every trainer rank and exported alone, acknowledged every 512 MB; (b) the same gathered into one flat buffer a bucket of
512 MB, one broadcast for each owner, one handle. Where a peer is cut short for time its figure is scaled by bytes (b)
or by tensors (a), and marked. Elements are checked one by one after every kind of push.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [p for p in (str(HERE), str(HERE.parents[1])) if p not in sys.path]

from reshard_ranks import Piece, serve  # noqa: E402  # pyrefly: ignore

from rlsys.models.megatron.family import family_of  # noqa: E402
from rlsys.models.megatron.parallel import ParallelSizes  # noqa: E402
from rlsys.models.quantized import BLOCK, FP8_NAME, SCALE, scale_shape  # noqa: E402
from rlsys.types import Box, Shard, WeightLayout  # noqa: E402
from rlsys.utils.errors import ConfigError  # noqa: E402
from rlsys.weights.executors.cuda_ipc import IpcExportSpec, IpcImportSpec  # noqa: E402
from rlsys.weights.fp8 import float8_shapes  # noqa: E402
from rlsys.weights.plan import Plan, make_plan  # noqa: E402
from rlsys.weights.rank_plan import RankPlans, split_plan  # noqa: E402
from scripts.model_shapes import SHAPES, sizes_of  # noqa: E402
from scripts.weight_layouts import EngineSizes, bytes_by_link, engine_layouts, megatron_layouts  # noqa: E402

Layouts = tuple[list[WeightLayout], list[WeightLayout]]
"""Of the trainer's ranks and of the engine's."""
BUCKET_BYTES = 512 << 20
CEILING_BYTES = 2 << 30
ANSWER_S = 150.0
CASES = {
    1: ["0.5B:TP1->TP1", "7B:TP1->TP1", "30B-A3B:TP1->TP1"],
    2: ["0.5B:TP2->TP1xDP2", "7B:TP2->TP1xDP2", "7B:PP2->TP2", "30B-A3B:EP2->TP2", "30B-A3B:PP2->TP2"],
    4: [
        "0.5B:TP2xPP2->TP2xDP2",
        "7B:TP2xPP2->TP2xDP2",
        "7B:TP4->TP2xDP2",
        "7B:PP4->TP4",
        "30B-A3B:TP2xPP2xEP2->TP4",
        "30B-A3B:TP4xEP4->TP2xDP2",
    ],
    8: ["7B:TP4xPP2->TP2xDP4", "7B:TP4->TP4xDP2", "30B-A3B:TP2xPP2xEP4->TP4xDP2", "30B-A3B:TP4xEP8->TP4xDP2"],
}
TINY = {
    1: ["tiny:TP1->TP1", "tiny-moe:TP1->TP1"],
    2: ["tiny:TP2->TP1xDP2", "tiny:PP2->TP2", "tiny-moe:EP2->TP2", "tiny-moe:PP2->EP2xTP2"],
    4: ["tiny:TP2xPP2->TP2xDP2", "tiny-moe:TP2xPP2xEP2->TP2xDP2"],
}


class Ranks:
    """All processes of the benchmark."""

    def __init__(self, world: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.place = tempfile.TemporaryDirectory()
        self.pipes: dict[str, list[Any]] = {"trainer": [], "engine": []}
        self.processes = []
        for rank in range(world):
            beside = dict(zip(self.pipes, context.Pipe(), strict=True))
            for role, pipes in self.pipes.items():
                ours, theirs = context.Pipe()
                arguments = (role, rank, world, device, theirs, beside[role], f"{self.place.name}/store")
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                self.processes.append(process)
                pipes.append(ours)
        for role in self.pipes:
            self.results(role)

    def start(self, role: str, name: str, arguments: Iterable[tuple] | None = None, **kwargs: Any) -> None:
        pipes = self.pipes[role]
        for pipe, args in zip(pipes, arguments or [()] * len(pipes), strict=True):
            pipe.send((name, args, kwargs))

    def results(self, role: str) -> list[Any]:
        results = []
        for rank, pipe in enumerate(self.pipes[role]):
            if not pipe.poll(ANSWER_S):
                self.end(f"{role} rank {rank} did not answer within {ANSWER_S:g} s")
            state, value = pipe.recv()
            if state != "ok":
                self.end(f"{role} rank {rank} failed:\n{value}")
            results.append(value)
        return results

    def all(self, role: str, name: str, arguments: Iterable[tuple] | None = None, **kwargs: Any) -> list[Any]:
        self.start(role, name, arguments, **kwargs)
        return self.results(role)

    def both(self, name: str, arguments: Iterable[tuple] | None = None, **kwargs: Any) -> list[list[Any]]:
        arguments = list(arguments) if arguments is not None else None
        for role in self.pipes:
            self.start(role, name, arguments, **kwargs)
        return [self.results(role) for role in self.pipes]

    def end(self, message: str = "") -> None:
        for process in self.processes:
            process.kill()
        self.place.cleanup()
        if message:
            raise SystemExit(message)


def layouts_of(case: str, world: int) -> Layouts:
    """Trainer's and engine's ranks; data-parallel sizes are what is left. ConfigError for what is no case."""
    shape, _, way = case.partition(":")
    if shape not in SHAPES or way.count("->") != 1:
        raise ConfigError(f"'{case}' is no case; write SHAPE:TRAINER->ENGINE, SHAPE one of {', '.join(SHAPES)}")
    trainer, engine = (sizes_of(side, ("tp", "pp", "ep", "dp")) for side in way.split("->"))
    for side in (trainer, engine):
        if world % prod(side.get(key, 1) for key in ("tp", "pp", "dp")):
            raise ConfigError(f"'{case}' does not divide {world} processes of a side; set --gpus")
    config = SHAPES[shape]
    tp, pp, ep = (trainer.get(key, 1) for key in ("tp", "pp", "ep"))
    megatron, dp_size = ParallelSizes(tp=tp, pp=pp, ep=ep, etp=1), world // tp // pp
    sources = megatron_layouts(config, megatron, dp_size=dp_size, te=True)
    tp, ep = engine.get("tp", 1), engine.get("ep", 1)
    target = EngineSizes(tp_size=tp, ep_size=ep, dp_size=world // tp)
    family = family_of(config)
    tied = bool(family.aliases(config))
    shapes = family.hf_shapes(config)
    destinations = engine_layouts(shapes, target, num_kv_heads=config["num_key_value_heads"], tied=tied)
    return sources, destinations


def limit_s(plan: Plan, world: int, local: float, peer: float) -> tuple[float, dict[str, int]]:
    """The time that the bytes of the busiest GPU take at the measured bandwidths, and that GPU's bytes."""
    worst, bytes_of_worst = 0.0, dict[str, int]()
    links = bytes_by_link(plan)
    for gpu in range(world):
        own = links.get((gpu, gpu), 0)
        into = sum(n for (a, b), n in links.items() if b == gpu != a)
        out = sum(n for (a, b), n in links.items() if a == gpu != b)
        seconds = max(into / peer, out / peer, (2 * own + into + out) / (2 * local))
        if seconds >= worst:
            worst, bytes_of_worst = seconds, {"local": own, "in": into, "out": out}
    return worst, bytes_of_worst


def measure_ceilings(ranks: Ranks, world: int, num_bytes: int) -> tuple[float, float]:
    """Bytes per second of one large copy: inside a GPU, and from the next GPU while all others do the same."""
    handles = ranks.all("trainer", "export_block", [(num_bytes,)] * world)
    local = min(ranks.all("engine", "copy_block", [(handle, 5) for handle in handles]))
    around = [handles[(rank + 1) % world] for rank in range(world)]
    peer = min(ranks.all("engine", "copy_block", [(handle, 5) for handle in around])) if world > 1 else local
    ranks.all("engine", "drop")
    ranks.all("trainer", "drop_block")
    return local, peer


def push_ours(ranks: Ranks, plans: RankPlans, version: int, *, verify: bool) -> tuple[float, float]:
    """(seconds the controller waited, seconds of the slowest engine)."""
    started_s = time.monotonic()
    exported = ranks.all("trainer", "send", [(version, verify)] * len(plans.sources))
    checksums = plans.merge([part.checksums for part in exported]) if verify else None
    slowest = max(ranks.all("engine", "receive", [(version, checksums)] * len(plans.sources)))
    return time.monotonic() - started_s, slowest


def buckets_of(
    sources: Sequence[WeightLayout], wanted: Sequence[str], limit_bytes: int, stop: int
) -> list[list[tuple[str, list[Piece]]]]:
    """Buckets of HF tensors with the boxes that make them up and who sends each; tensors until `stop` bytes."""
    pieces: dict[str, dict[Any, int]] = {}
    for layout in sources:
        for shard in layout.shards:
            pieces.setdefault(shard.box.tensor, {}).setdefault(shard.box, layout.rank)
    buckets: list[list[tuple[str, list[Piece]]]] = [[]]
    filled = total = 0
    for name in wanted:
        num_bytes = 2 * prod(sources[0].full_shapes[name])
        if filled and filled + num_bytes > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, list(pieces[name].items())))
        filled, total = filled + num_bytes, total + num_bytes
        if total >= stop:
            break
    return buckets


def push_as_peer(ranks: Ranks, buckets: list[Any], *, flat: bool) -> float:
    started_s = time.monotonic()
    world = len(ranks.pipes["engine"])
    ranks.start("engine", "peer_receive", [(len(buckets),)] * world)
    ranks.start("trainer", "peer_send", [(buckets, flat)] * world)
    ranks.results("trainer")
    ranks.results("engine")
    return time.monotonic() - started_s


def check(ranks: Ranks, world: int, seed: int, only: set[str] | None = None) -> None:
    """SystemExit where an element of an engine is not the trainer's."""
    for rank, wrong in enumerate(ranks.all("engine", "wrong", [(seed,)] * world)):
        if bad := [name for name in wrong if only is None or name in only]:
            ranks.end(f"engine rank {rank} holds wrong elements of {len(bad)} tensors: {bad[:4]}")


def measure_peer(
    ranks: Ranks, world: int, sources: list[WeightLayout], wanted: list[str], args: Any, *, flat: bool
) -> dict:
    """A peer's seconds for all tensors; the first push warms up on a few buckets."""
    total = sum(2 * prod(sources[0].full_shapes[name]) for name in wanted)
    bucket = min(BUCKET_BYTES, max(1 << 12, total // 4)) if args.device == "cpu" else BUCKET_BYTES
    names = wanted if flat else wanted[: args.peer_tensors]
    buckets = buckets_of(sources, names, bucket, args.peer_bytes)
    ranks.all("engine", "clear")
    push_as_peer(ranks, buckets[:2], flat=flat)
    before = ranks.both("memory", reset=True)
    seconds = push_as_peer(ranks, buckets, flat=flat)
    peaks = ranks.both("memory", reset=False)
    done = [name for bucket in buckets for name, _ in bucket]
    check(ranks, world, 1, set(done))
    moved = sum(2 * prod(sources[0].full_shapes[name]) for name in done)
    scale = total / moved if flat else max(len(wanted) / len(done), 1.0)
    extra = max(peak - was for (peak, _), (was, _) in zip(peaks[0], before[0], strict=True))
    return {"s": seconds * scale, "scaled": len(done) < len(wanted), "tensors": len(done), "extra_bytes": max(0, extra)}


def in_fp8(layout: WeightLayout) -> WeightLayout:
    """An engine rank whose projections are FP8, with the scales of fused matrices side by side as the matrices are."""
    names = {name for name, shape in layout.full_shapes.items() if len(shape) == 2 and name.endswith("proj.weight")}
    scales = []
    for shard in (shard for shard in layout.shards if shard.box.tensor in names):
        box, at = shard.box, shard.local_start
        if any(place % BLOCK for place in (*box.start, *at[-2:])):
            raise SystemExit(f"--fp8: {box} is not cut at multiples of {BLOCK}; take another case")
        first, start = tuple(place // BLOCK for place in box.start), tuple(place // BLOCK for place in at[-2:])
        own = Box(box.tensor + SCALE, first, scale_shape(box.shape))
        scales.append(Shard(own, shard.local + SCALE, (*at[:-2], *start)))
    return replace(
        layout,
        shards=(*layout.shards, *scales),
        full_shapes={**layout.full_shapes, **{name + SCALE: scale_shape(layout.full_shapes[name]) for name in names}},
        dtypes={**layout.dtypes, **dict.fromkeys(names, FP8_NAME), **{name + SCALE: "float32" for name in names}},
        digest="",
    )


def run_fp8(ranks: Ranks, destinations: Sequence[WeightLayout], args: Any) -> dict[str, Any]:
    """The push of the trainers that hold a case to engines that serve FP8; what arrived is checked by checksums."""
    world, targets = len(destinations), [in_fp8(layout) for layout in destinations]
    ranks.all("engine", "drop")
    sources = ranks.all("trainer", "as_fp8", [(float8_shapes(targets),)] * world)
    plan = make_plan(sources, targets)
    plans = split_plan(plan, sources)
    ranks.all("engine", "build", [(layout, 1) for layout in targets])
    exported = ranks.all("trainer", "export", [(IpcExportSpec(part),) for part in plans.sources])
    handles = dict(enumerate(exported))
    ranks.all("engine", "import_from", [(IpcImportSpec(plans.destination(rank), handles),) for rank in range(world)])
    times = [push_ours(ranks, plans, version, verify=False)[0] for version in range(2 + args.repeats)]
    verified_s = min(push_ours(ranks, plans, version, verify=True)[0] for version in (97, 98, 99))
    num_bytes = sum(bytes_by_link(plan).values())
    return {"s": statistics.median(times[2:]), "with_checksums_s": verified_s, "bytes": num_bytes}


def run_case(
    ranks: Ranks, case: str, layouts: Layouts, world: int, local: float, peer: float, args: Any
) -> dict[str, Any]:
    sources, destinations = layouts
    started_s = time.perf_counter()
    plan = make_plan(sources, destinations)
    plan_s = time.perf_counter() - started_s
    plans = split_plan(plan, sources)
    held = ranks.all("trainer", "build", [(layout, 1) for layout in sources])
    taken = ranks.all("engine", "build", [(layout, 1) for layout in destinations])
    before = ranks.both("memory", reset=True)
    exported = ranks.all("trainer", "export", [(IpcExportSpec(part),) for part in plans.sources])
    handles = dict(enumerate(exported))
    started_s = time.perf_counter()
    specs = [IpcImportSpec(plans.destination(rank), handles) for rank in range(world)]
    ranks.all("engine", "import_from", [(spec,) for spec in specs])
    connect_s = time.perf_counter() - started_s
    for version in range(2):
        push_ours(ranks, plans, version, verify=False)
    ranks.all("engine", "clear")
    times = [push_ours(ranks, plans, version, verify=False) for version in range(2, 2 + args.repeats)]
    after = ranks.both("memory", reset=False)
    check(ranks, world, 1)
    ranks.all("trainer", "write", [(2,)] * world)
    verify = len(plan.checksum_ids[1]) < args.checksums
    verified_s = min(push_ours(ranks, plans, version, verify=verify)[0] for version in (97, 98, 99))
    check(ranks, world, 2)
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32} if verify and args.device == "cuda" else {}
    sum_s = {name: max(ranks.all("trainer", "sum_s", [(given,)] * world)) for name, given in kinds.items()}
    ranks.all("trainer", "write", [(1,)] * world)
    limit, worst = limit_s(plan, world, local, peer)
    waited_s, engine_s = (statistics.median(column) for column in zip(*times, strict=True))
    extra = [
        max(0, peak - was)
        for side in zip(before, after, strict=True)
        for (was, _), (peak, _) in zip(*side, strict=True)
    ]
    result: dict[str, Any] = {
        "case": case,
        "gpus": world,
        "bytes": sum(bytes_by_link(plan).values()),
        "worst_gpu_bytes": worst,
        "held_bytes": max(held),
        "engine_bytes": max(taken),
        "copies": len(plan.moves),
        "method": ranks.all("engine", "method")[0],
        "plan_s": plan_s,
        "connect_s": connect_s,
        "t_s": waited_s,
        "t_best_s": min(t for t, _ in times),
        "engine_s": engine_s,
        "limit_s": limit,
        "with_checksums_s": verified_s if verify else None,
        "sum_s": sum_s,
        "read_s": max(held) / (2 * local),
        "extra_bytes": max(extra),
    }
    if not args.no_peers and time.monotonic() < args.end_s:
        names = sorted({s.box.tensor for layout in destinations for s in layout.shards})
        result["bucketed"] = measure_peer(ranks, world, sources, names, args, flat=True)
        if time.monotonic() < args.end_s:
            result["per_tensor"] = measure_peer(ranks, world, sources, names, args, flat=False)
    if args.fp8:
        result["fp8"] = run_fp8(ranks, destinations, args)
    ranks.all("engine", "drop")
    ranks.all("trainer", "drop")
    return result


def summary(result: dict[str, Any]) -> str:
    ms, limit = result["t_s"] * 1e3, result["limit_s"] * 1e3
    lines = [
        f"{result['case']}  on {result['gpus']}: {result['bytes'] / 1e9:.2f} GB in {result['copies']} copies "
        f"({result['method']}), plan {result['plan_s']:.2f} s, "
        f"connect {result['connect_s']:.2f} s",
        f"   push {ms:8.2f} ms (engines {result['engine_s'] * 1e3:.2f})   limit {limit:.2f} ms   "
        f"t/limit {ms / limit:.2f}   extra {result['extra_bytes'] / 2**20:.1f} MiB a process",
    ]
    if result["with_checksums_s"] is not None:
        lines.append(f"   with checksums {result['with_checksums_s'] * 1e3:.1f} ms")
    for given, seconds in result["sum_s"].items():
        ratio = seconds / result["read_s"] / (2 if given == "float32" else 1)
        lines.append(
            f"   sums of the trainer's {given}: {seconds * 1e3:.2f} ms = {ratio:.2f}x a plain copy's bandwidth"
        )
    if fp8 := result.get("fp8"):
        ratio = fp8["s"] / result["t_s"]
        verified = f"with checksums {fp8['with_checksums_s'] * 1e3:.1f} ms"
        lines.append(
            f"   in FP8 {fp8['s'] * 1e3:.2f} ms = {ratio:.2f}x bfloat16, {fp8['bytes'] / 1e9:.2f} GB, {verified}"
        )
    for name in ("bucketed", "per_tensor"):
        if peer := result.get(name):
            scaled = f" (scaled from {peer['tensors']} tensors)" if peer["scaled"] else ""
            ratio = peer["s"] / result["t_s"]
            extra = peer["extra_bytes"] / 2**20
            lines.append(f"   {name:11s} {peer['s'] * 1e3:9.1f} ms{scaled} = {ratio:.1f}x ours, extra {extra:.0f} MiB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=0, help="processes of each side; all GPUs, or 2 on a CPU")
    parser.add_argument("--cases", nargs="*", help="SHAPE:TPnxPPnxEPn->TPnxEPnxDPn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="each case again, to engines that serve blocks of FP8")
    parser.add_argument(
        "--peer-bytes", type=int, default=20 << 30, help="a peer moves at most this before it is scaled"
    )
    parser.add_argument("--peer-tensors", type=int, default=2000, help="per-tensor peer: at most so many, then scaled")
    parser.add_argument("--checksums", type=int, default=5000, help="push with checksums where there are fewer of them")
    parser.add_argument("--seconds", type=float, default=200.0, help="start nothing new after this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.end_s = time.monotonic() + args.seconds
    world = args.gpus or (torch.cuda.device_count() if args.device == "cuda" else 2)
    known = CASES if args.device == "cuda" else TINY
    if not args.cases and world not in known:
        parser.error(f"there are cases for {', '.join(map(str, known))} GPUs; give --cases for {world}")
    try:
        cases = {case: layouts_of(case, world) for case in args.cases or known[world]}
    except ConfigError as error:
        parser.error(str(error))
    ranks = Ranks(world, args.device)
    local, peer = measure_ceilings(ranks, world, CEILING_BYTES if args.device == "cuda" else 1 << 26)
    print(f"torch {torch.__version__}, {world} x {args.device}")
    print(f"one large copy: {local / 1e9:.0f} GB/s local, {peer / 1e9:.0f} GB/s from a peer", flush=True)
    results = []
    for case, layouts in cases.items():
        if time.monotonic() > args.end_s:
            print(f"{case}: skipped, no time is left")
            continue
        results.append(run_case(ranks, case, layouts, world, local, peer, args))
        print(summary(results[-1]), flush=True)
    ranks.end()
    if args.json:
        ceilings = {"local_bytes_per_s": local, "peer_bytes_per_s": peer, "torch": torch.__version__}
        args.json.write_text(json.dumps({**ceilings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
