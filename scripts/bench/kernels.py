"""Where the kernels of a torch.profiler trace belong: seconds by range and by kind, and the time in which none runs.

    python scripts/bench/kernels.py runs/job/profile/step5_actor_rank0.json.gz
    python scripts/bench/kernels.py trace.json --ranges gen update_actor --top 20

A kernel belongs to the innermost range in which it was launched, by any thread of the process, and time to the
innermost range around it; ranges of one name that follow one another count with the time between them. Idle is the
share of a range's time in which no stream of any device runs a kernel or a copy. A profile slows launches, so that a
step without one is idle for less.
"""

import argparse
import gzip
import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
GROUPS = {
    "nccl": r"nccl",
    "triton": r"^triton_",
    "attention": r"flash|mha|attention|attn|reshape_and_cache",
    "matrix product": r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|matmul",
    "optimizer": r"adam|multi_tensor",
    "copy": r"memcpy|memset|copy|chunk_cat|cat_?array",
    "elementwise, norm": r"elementwise|norm|reduce|softmax|act_and_mul|rotary|index|gather|scatter|embedding|fill|scan",
}
"""Kinds of kernels by what their names hold; the first that fits counts, and what fits none is "other"."""


class Kernel(NamedTuple):
    """One run of a kernel or a copy, in microseconds of the trace; `launched` where no launch is known is its start."""

    name: str
    start: float
    stop: float
    launched: float


class Range(NamedTuple):
    """A named stretch of time, in microseconds of the trace."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Trace:
    """Kernels, ranges of `record_function` by start, and how often the host waited for a device."""

    kernels: list[Kernel]
    ranges: list[Range]
    num_waits: int


@dataclass(frozen=True)
class KernelTime:
    """The kernels of one range: its seconds, theirs by name with the most first, their runs, and shares of its time.

    `idle_share` is that without any kernel, `nccl_share` that with kernels of NCCL only.
    """

    wall_s: float
    by_name: dict[str, float]
    runs: Counter[str]
    idle_share: float
    nccl_share: float

    @property
    def num_kernels(self) -> int:
        return self.runs.total()

    @property
    def kernel_s(self) -> float:
        """Seconds of all kernels; those that run at the same time all count."""
        return sum(self.by_name.values())

    @property
    def by_group(self) -> dict[str, float]:
        """Seconds by the kinds of GROUPS, with the most first."""
        return _summed((group_of(name), spent_s) for name, spent_s in self.by_name.items())

    def runs_of(self, group: str) -> int:
        """How often kernels of one kind ran."""
        return sum(runs for name, runs in self.runs.items() if group_of(name) == group)


@cache
def group_of(name: str) -> str:
    """The kind of a kernel."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def read_trace(path: Path, counted: Sequence[str] = ON_DEVICE) -> Trace:
    """The trace in a .json or .json.gz; categories of events other than `counted` are no kernels."""
    launched, kernels, ranges, num_waits = dict[int, float](), [], [], 0
    for event in _events(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()):
        category, args = event.get("cat"), event.get("args", {})
        if category in counted:
            kernels.append((event["name"], event["ts"], event["ts"] + event["dur"], args.get("correlation")))
        elif category in LAUNCHES:
            launched[args.get("correlation", -1)] = event["ts"]
            num_waits += "Synchronize" in event["name"]
        elif category == "user_annotation" and args.get("finished", True):
            ranges.append(Range(event["name"], event["ts"], event["ts"] + event["dur"]))
    known = [Kernel(name, start, stop, launched.get(by, start)) for name, start, stop, by in kernels]
    return Trace(known, sorted(ranges, key=lambda one: (one.start, -one.stop)), num_waits)


def _events(content: bytes) -> Iterator[dict[str, Any]]:
    """One by one: all of them at once take many times the memory of a trace."""
    text, decode = content.decode(errors="replace"), json.JSONDecoder(strict=False).raw_decode
    if (at := re.compile(r'"traceEvents"\s*:\s*\[\s*').search(text)) is None:
        raise ValueError("the file has no traceEvents: is it a trace of torch.profiler?")
    end = at.end()
    while text[end] != "]":
        event, end = decode(text, end)
        yield event
        while text[end] in ", \t\r\n":
            end += 1


def profile_call(work: Callable[[], object], *, cuda: bool) -> tuple[KernelTime, int]:
    """The kernels of a call and how often the host waited for them; without CUDA its operators, with those inside."""
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        started_s = perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        wall_s = perf_counter() - started_s
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        trace = read_trace(path, ON_DEVICE if cuda else ("cpu_op",))
    whole = Range("", min((one.start for one in trace.kernels), default=0.0), float("inf"))
    return _kernel_time(trace.kernels, _busy(trace.kernels), [whole], wall_s), trace.num_waits


def by_range(trace: Trace, names: Mapping[str, str] | None = None) -> dict[str, KernelTime]:
    """The kernels of each range, in the order in which they begin; those outside of all under "outside".

    `names` are the ranges that count, with what each counts as; by default those whose names are plain words, as the
    calls of a worker are and torch's own ("FSDP::pre_forward") are not.
    """
    if names is None:
        names = {one.name: one.name for one in trace.ranges if one.name.isidentifier()}
    pieces = _pieces([Range(names[one.name], one.start, one.stop) for one in trace.ranges if one.name in names])
    starts = [piece.start for piece in pieces]
    of: dict[str, list[Kernel]] = {piece.name: [] for piece in pieces}
    for kernel in trace.kernels:
        at = bisect_right(starts, kernel.launched) - 1
        inside = at >= 0 and kernel.launched < pieces[at].stop
        of.setdefault(pieces[at].name if inside else "outside", []).append(kernel)
    spans, times = _busy(trace.kernels), {}
    for name, kernels in of.items():
        own = [piece for piece in pieces if piece.name == name]
        times[name] = _kernel_time(kernels, spans, own, sum(piece.stop - piece.start for piece in own) / 1e6)
    return times


def table(times: Mapping[str, KernelTime], top: int) -> str:
    """A line for each range with its kinds of kernels, and the kernels of all that take most."""
    lines = []
    for name, time in times.items():
        groups = ", ".join(f"{group} {spent_s:.3f}" for group, spent_s in time.by_group.items())
        shares = f"idle {time.idle_share:.1%}, NCCL alone {time.nccl_share:.1%}"
        kernels = f"{time.num_kernels} kernels of {time.kernel_s:.3f} s, {shares}: {groups}"
        lines.append(f"{name}: {time.wall_s:.3f} s, {kernels if time.num_kernels else 'no kernels'}")
    seconds = _summed(item for time in times.values() for item in time.by_name.items())
    lines += [f"  {spent_s:8.4f} s  {name[:110]}" for name, spent_s in islice(seconds.items(), top)]
    return "\n".join(lines)


def _summed(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of each name, with the most first."""
    sums = defaultdict[str, float](float)
    for name, value in items:
        sums[name] += value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _busy(kernels: Iterable[Kernel]) -> tuple[list[Range], list[Range]]:
    """The stretches of time in which any kernel runs, and those in which one runs that is not of NCCL."""
    joined: tuple[list[Range], list[Range]] = ([], [])
    for name, start, stop, _ in sorted(kernels, key=lambda kernel: kernel.start):
        for spans in joined[: 1 if group_of(name) == "nccl" else 2]:
            if spans and start <= spans[-1].stop:
                spans[-1] = Range("", spans[-1].start, max(spans[-1].stop, stop))
            else:
                spans.append(Range("", start, stop))
    return joined


def _kernel_time(
    kernels: Sequence[Kernel], spans: tuple[list[Range], list[Range]], pieces: Sequence[Range], wall_s: float
) -> KernelTime:
    """Kernels that were launched in `pieces` of time, and the shares of these that `spans` leave out."""
    seconds = _summed((kernel.name, (kernel.stop - kernel.start) / 1e6) for kernel in kernels)
    runs = Counter(kernel.name for kernel in kernels)
    any_s, other_s = (_overlap_us(one, pieces) / 1e6 for one in spans)
    scale = 1 / wall_s if wall_s else 0.0
    return KernelTime(wall_s, seconds, runs, (wall_s - any_s) * scale, (any_s - other_s) * scale)


def _overlap_us(spans: Sequence[Range], pieces: Sequence[Range]) -> float:
    """How long one of the spans, which do not overlap and are in order, is there in pieces of time."""
    stops, sum_us = [span.stop for span in spans], 0.0
    for piece in pieces:
        for at in range(bisect_right(stops, piece.start), len(spans)):
            if spans[at].start >= piece.stop:
                break
            sum_us += min(spans[at].stop, piece.stop) - max(spans[at].start, piece.start)
    return sum_us


def _pieces(ranges: Sequence[Range]) -> list[Range]:
    """Time cut where the innermost range changes; a gap between two pieces of one name belongs to it."""
    pieces, within = list[Range](), list[Range]()

    def add(name: str, start: float, stop: float) -> None:
        if pieces and pieces[-1].name == name:
            pieces[-1] = Range(name, pieces[-1].start, max(pieces[-1].stop, stop))
        elif stop > start:
            pieces.append(Range(name, start, stop))

    at = 0.0
    for one in [*ranges, Range("", float("inf"), float("inf"))]:
        while within and within[-1].stop <= one.start:
            inner = within.pop()
            add(inner.name, at, inner.stop)
            at = max(at, inner.stop)
        if within:
            add(within[-1].name, at, one.start)
        at = one.start
        within.append(one)
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranges", nargs="*", help="those that count; by default all whose names are plain words")
    parser.add_argument("--top", type=int, default=14)
    args = parser.parse_args()
    if not args.trace.is_file():
        parser.error(f"{args.trace}: file not found; global_profiler.steps=[5] writes one (docs/debug.md)")
    names = {name: name for name in args.ranges} if args.ranges else None
    try:
        trace = read_trace(args.trace)
    except (ValueError, OSError, IndexError) as error:
        parser.error(f"{args.trace} cannot be read: {error}")
    print(table(by_range(trace, names), args.top))


if __name__ == "__main__":
    main()
