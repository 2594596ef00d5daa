"""Dispatch and collect of a PPO batch through Ray actors: rlsys against memcpy, plain numpy and verl's DataProto.

    python scripts/bench/data_plane.py [--rows 256] [--workers 2] [--repeats 20] [--without-verl]

The batch has 11 fields over prompts of 1024 and responses of 3072 tokens, 57 MB at 256 rows. Dispatch is chunk + call +
every worker has rebuilt its rows; collect is every worker returns its rows + concat. Each side runs alone, in its own
process with its own Ray; all in one run of this script. Rates are GB/s of batch bytes, medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import machine, measure, verl_python  # pyrefly: ignore

PROMPT, RESPONSE = 1024, 3072
# A page of the object store costs whoever touches it first some ten microseconds; here all are resident.
RESIDENT = {"RAY_preallocate_plasma_memory": "1"}
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


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call after three that warm up."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times[3:])


def memcpy_s(tensors: dict[str, Any], repeats: int) -> dict[str, float]:
    """Seconds to copy the batch into memory that is resident, and into memory that is new."""
    import torch

    targets = {key: torch.empty_like(tensor).fill_(0) for key, tensor in tensors.items()}
    return {
        "memcpy": median_s(lambda: [targets[key].copy_(tensor) for key, tensor in tensors.items()], repeats),
        "memcpy_new_pages": median_s(lambda: [tensor.clone() for tensor in tensors.values()], repeats),
    }


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
        self.rows = self.rows.writable() if hasattr(self.rows, "writable") else self.rows

    def read(self, rows: Any) -> float:
        """Receive rows and read every element once."""
        columns = rows if isinstance(rows, dict) else rows.batch
        return float(sum(column.sum().item() for column in columns.values()))


def measure_side(name: str, *, num_rows: int, num_workers: int, repeats: int) -> dict[str, float]:
    """Seconds of each operation of one side, with the memcpy of its own process."""
    import ray
    import torch

    torch.set_num_threads(1)
    tensors = make_tensors(num_rows)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    results = {"num_bytes": float(num_bytes), **memcpy_s(tensors, repeats)}
    ray.init(
        address="local",
        num_cpus=num_workers,
        include_dashboard=False,
        object_store_memory=max(8 * num_bytes, 256 << 20),
        configure_logging=False,
    )
    try:
        chunk, concat = side_of(name, tensors)
        workers: list[Any] = [ray.remote(num_cpus=1)(Holder).remote() for _ in range(num_workers)]

        def call(method: str) -> list[Any]:
            parts = chunk(num_workers)
            return ray.get(
                [getattr(w, method).remote(part) for w, part in zip(workers, parts, strict=True)], timeout=300
            )

        results["dispatch"] = median_s(lambda: call("receive"), repeats)
        results["dispatch_and_read"] = median_s(lambda: call("read"), repeats)
        ray.get([worker.own.remote() for worker in workers], timeout=300)
        results["return"] = median_s(lambda: ray.get([w.give.remote() for w in workers], timeout=300), repeats)
        cpu_s = time.process_time()
        results["collect"] = median_s(lambda: concat(ray.get([w.give.remote() for w in workers], timeout=300)), repeats)
        results["driver_cpu_collect"] = (time.process_time() - cpu_s) / (repeats + 3)
        results["empty_call"] = median_s(lambda: ray.get([w.own.remote() for w in workers], timeout=300), repeats)
    finally:
        ray.shutdown()
    return results


def report(results: dict[str, dict[str, float]], num_rows: int, num_workers: int) -> None:
    """Print rates and the ratios to memcpy and to each peer."""
    print(f"machine: {machine()}")
    size_mb = results["rlsys"]["num_bytes"] / 1e6
    print(f"batch: {num_rows} rows, 11 fields, {size_mb:.1f} MB, {num_workers} workers; GB/s (medians)\n")
    operations = ("memcpy", "memcpy_new_pages", "dispatch", "dispatch_and_read", "return", "collect")
    print(f"{'':18}" + "".join(f"{side:>17}" for side in results))
    for operation in operations:
        rates = [side["num_bytes"] / side[operation] / 1e9 for side in results.values()]
        print(f"{operation:18}" + "".join(f"{rate:17.2f}" for rate in rates))
    ours = results["rlsys"]
    print(f"\none call without data: {ours['empty_call'] * 1e3:.1f} ms")
    for way in ("dispatch", "return", "collect"):
        print(f"{way}: {ours['memcpy'] / ours[way]:.2f} x memcpy (goal 0.5 one way)")
        for name, peer in results.items():
            if name != "rlsys":
                print(f"  {peer[way] / ours[way]:.1f} x {name}")
    both = {name: side["dispatch"] + side["collect"] for name, side in results.items()}
    for name in both:
        if name != "rlsys":
            print(f"dispatch + collect: {both[name] / both['rlsys']:.1f} x {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--without-verl", action="store_true")
    parser.add_argument("--json", type=Path, help="write all medians here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == "verl-numpy-mode":
            os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
        seconds = measure_side(
            options.side, num_rows=options.rows, num_workers=options.workers, repeats=options.repeats
        )
        print(json.dumps(seconds))
        return
    results = {}
    for side in SIDES[:2] if options.without_verl else SIDES:
        python = verl_python() if side.startswith("verl") else Path(sys.executable)
        arguments = [f"--side={side}", f"--rows={options.rows}", f"--workers={options.workers}"]
        arguments += [f"--repeats={options.repeats}"]
        results[side] = measure(python, __file__, arguments, timeout_s=1800, extra=RESIDENT)
    report(results, options.rows, options.workers)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
