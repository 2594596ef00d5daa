"""Dispatch and collect of a PPO batch through Ray actors: rlsys against memcpy, plain numpy and verl's DataProto.

    python scripts/bench/data_plane.py [--rows 256] [--workers 2] [--repeats 20] [--without-verl]

The batch has 11 fields over prompts of 1024 and responses of 3072 tokens, 57 MB at 256 rows. Dispatch is chunk + call +
every worker has rebuilt its rows; collect is every worker returns its rows + concat. Each side has its own process and
its own Ray; they take turns call by call, so that whatever else the machine does meets all alike. Rates are GB/s of
batch bytes; ratios are medians of the ratios of one turn. Goals: 0.5 x memcpy one way, 20 x verl.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import machine, start_side, verl_python  # pyrefly: ignore

PROMPT, RESPONSE = 1024, 3072
# The first access to a page of the object store takes some ten microseconds; here all pages are resident.
RESIDENT = {"RAY_preallocate_plasma_memory": "1"}
OPERATIONS = ("memcpy", "memcpy_new_pages", "empty_call", "dispatch_and_read", "dispatch", "own", "return", "collect")
ANSWER = "seconds:"
# After an operation its workers still free what they held; the next side does not pay for that.
PAUSE_S = 0.2
SIDES = ("rlsys", "numpy", "verl", "verl-numpy-mode")


def make_tensors(num_rows: int) -> dict[str, Any]:
    """The fields that travel to a policy update, filled with seeded noise."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def tokens(width: int) -> Any:
        return torch.randint(0, 150_000, (num_rows, width), generator=generator)

    def floats() -> Any:
        return torch.rand(num_rows, RESPONSE, generator=generator)

    whole = PROMPT + RESPONSE
    return {
        "prompts": tokens(PROMPT),
        "responses": tokens(RESPONSE),
        "input_ids": tokens(whole),
        "attention_mask": tokens(whole),
        "position_ids": tokens(whole),
        "response_mask": tokens(RESPONSE),
        **{name: floats() for name in ("old_log_probs", "ref_log_prob", "values", "advantages", "returns")},
    }


def copy_resident(tensors: dict[str, Any]) -> Callable[[], None]:
    """A copy of the batch into memory that is resident."""
    import torch

    targets = {key: torch.empty_like(tensor).fill_(0) for key, tensor in tensors.items()}

    def copy() -> None:
        for key, tensor in tensors.items():
            targets[key].copy_(tensor)

    return copy


def copy_new(tensors: dict[str, Any]) -> None:
    """A copy of the batch into memory that has never been touched."""
    import numpy as np

    for tensor in tensors.values():
        array = tensor.numpy().ravel()
        np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype)[:] = array


class NumpyBatch:
    """What the tensors are to Ray without any DataProto: a dict of numpy arrays."""

    @staticmethod
    def chunk(tensors: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        size = len(arrays["prompts"]) // chunks
        return [{key: array[i * size : (i + 1) * size] for key, array in arrays.items()} for i in range(chunks)]

    @staticmethod
    def concat(parts: list[dict[str, Any]]) -> dict[str, Any]:
        import numpy as np

        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def side_of(name: str, tensors: dict[str, Any]) -> tuple[Callable[[int], list[Any]], Callable[[list[Any]], Any]]:
    """(chunk, concat) of one side over its own form of the batch."""
    if name == "numpy":
        return lambda chunks: NumpyBatch.chunk(tensors, chunks), NumpyBatch.concat
    if name == "rlsys":
        from rlsys.protocol import DataProto
    else:
        from verl.protocol import DataProto  # pyrefly: ignore
    uids = [f"row-{i}" for i in range(len(tensors["prompts"]))]
    data = DataProto.from_dict(tensors, {"uid": uids, "data_source": uids}, {"temperature": 1.0})
    return data.chunk, DataProto.concat


class Holder:
    """A worker that receives rows and gives them back."""

    def __init__(self) -> None:
        self.rows: Any = None

    def receive(self, rows: Any) -> int:
        self.rows = rows
        return os.getpid()

    def give(self) -> Any:
        return self.rows

    def own(self) -> None:
        """Keep the rows in memory of this process, as a worker's own results are."""
        if isinstance(self.rows, dict):
            self.rows = {key: array.copy() for key, array in self.rows.items()}
        else:
            _ = self.rows.batch  # at first use, rlsys copies what lay in the object store

    def nothing(self) -> None:
        """An empty call."""

    def read(self, rows: Any) -> float:
        """Receive rows and read every element once."""
        columns = rows if isinstance(rows, dict) else rows.batch
        return float(sum(column.sum().item() for column in columns.values()))


def operations_of(side: str, num_rows: int, num_workers: int) -> dict[str, Callable[[], Any]]:
    """The calls to time, by name, on a Ray cluster of this process."""
    import ray
    import torch

    torch.set_num_threads(1)
    tensors = make_tensors(num_rows)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    ray.init(
        address="local",
        num_cpus=num_workers,
        include_dashboard=False,
        object_store_memory=max(6 * num_bytes, 256 << 20),
        configure_logging=False,
        log_to_driver=False,
    )
    chunk, concat = side_of(side, tensors)
    workers: list[Any] = [ray.remote(num_cpus=1)(Holder).remote() for _ in range(num_workers)]

    def call(method: str) -> list[Any]:
        return ray.get([getattr(worker, method).remote() for worker in workers], timeout=300)

    def send(method: str) -> list[Any]:
        parts = chunk(num_workers)
        calls = [getattr(worker, method).remote(part) for worker, part in zip(workers, parts, strict=True)]
        return ray.get(calls, timeout=300)

    return {
        "memcpy": copy_resident(tensors),
        "memcpy_new_pages": lambda: copy_new(tensors),
        "empty_call": lambda: call("nothing"),
        "dispatch": lambda: send("receive"),
        "dispatch_and_read": lambda: send("read"),
        "own": lambda: call("own"),
        "return": lambda: call("give"),
        "collect": lambda: concat(call("give")),
        "num_bytes": lambda: num_bytes,
    }


def serve(side: str, num_rows: int, num_workers: int) -> None:
    """Answer every operation named on standard input with its seconds (or its bytes), until the input ends."""
    operations = operations_of(side, num_rows, num_workers)
    for line in sys.stdin:
        start = time.perf_counter()
        result = operations[line.strip()]()
        taken_s = time.perf_counter() - start
        print(ANSWER, result if line.strip() == "num_bytes" else taken_s, flush=True)
        del result


def ask(process: subprocess.Popen[str], operation: str) -> float:
    """One answer of a serving side."""
    assert process.stdin
    assert process.stdout
    print(operation, file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith(ANSWER):
            return float(line.removeprefix(ANSWER))
    raise SystemExit(f"a side ended with status {process.wait()} at '{operation}'")


def take_turns(
    sides: Sequence[str], num_rows: int, num_workers: int, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every operation of every side in every turn, three turns of warm-up left out."""
    processes: dict[str, subprocess.Popen[str]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    try:
        for side in sides:
            python = verl_python() if side.startswith("verl") else Path(sys.executable)
            command = [str(python), __file__, f"--side={side}", f"--rows={num_rows}", f"--workers={num_workers}"]
            processes[side] = start_side(command, RESIDENT)
            times[side] = {"num_bytes": [ask(processes[side], "num_bytes")]}
        for turn in range(-3, repeats):
            for operation in OPERATIONS:
                for side in (*sides[turn % len(sides) :], *sides[: turn % len(sides)]):
                    time.sleep(PAUSE_S)
                    taken_s = ask(processes[side], operation)
                    if turn >= 0:
                        times[side].setdefault(operation, []).append(taken_s)
    finally:
        for process in processes.values():
            process.communicate(timeout=60)
    return times


def report(times: dict[str, dict[str, list[float]]], num_workers: int, num_rows: int) -> None:
    """Print rates and the ratios to memcpy and to each peer."""
    num_bytes = times["rlsys"]["num_bytes"][0]
    print(f"machine: {machine()}, load {os.getloadavg()[0]:.1f}")
    print(f"batch: {num_rows} rows, 11 fields, {num_bytes / 1e6:.1f} MB, {num_workers} workers\n")
    print(f"{'GB/s (median)':18}" + "".join(f"{side:>17}" for side in times))
    for operation in OPERATIONS:
        if operation not in ("own", "empty_call"):
            rates = [num_bytes / statistics.median(side[operation]) / 1e9 for side in times.values()]
            print(f"{operation:18}" + "".join(f"{rate:17.2f}" for rate in rates))
    ours = times["rlsys"]
    print(f"\na call of every worker without data: {statistics.median(ours['empty_call']) * 1e3:.1f} ms")
    for way in (("dispatch",), ("return",), ("collect",), ("dispatch", "collect")):
        peers = {f"x {name}": _sum(side, way) for name, side in times.items() if name != "rlsys"}
        limits = {"x memcpy": [len(way) * s for s in ours["memcpy"]]}
        mine = _sum(ours, way)
        ratios = [
            f"{statistics.median(p / m for p, m in zip(peer, mine, strict=True)):.2f} {name}"
            for name, peer in {**limits, **peers}.items()
        ]
        print(f"{' + '.join(way)}: {', '.join(ratios)}")


def _sum(side: dict[str, list[float]], operations: Sequence[str]) -> list[float]:
    return [sum(turn) for turn in zip(*(side[operation] for operation in operations), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--without-verl", action="store_true")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == "verl-numpy-mode":
            os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
        serve(options.side, options.rows, options.workers)
        return
    sides = SIDES[:2] if options.without_verl else SIDES
    times = take_turns(sides, options.rows, options.workers, options.repeats)
    report(times, options.workers, options.rows)
    if options.json:
        options.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
