"""The processes of scripts/bench/reshard.py: one trainer rank and one engine rank on every GPU, and what peers do.

A rank answers commands of the controller over a pipe. Elements are a hash of (tensor, position), so that every rank can
check alone whether it holds the right ones.
"""

import gc
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from rlsys.types import Box, Shard, WeightLayout  # noqa: E402
from rlsys.weights.batched_copy import BatchedCopy, bits_of  # noqa: E402
from rlsys.weights.checksum import PreparedCudaChecksums  # noqa: E402
from rlsys.weights.executors.cuda_ipc import (  # noqa: E402
    ImportedTensors,
    IpcExporter,
    IpcExportSpec,
    IpcHandle,
    IpcImporter,
    IpcImportSpec,
    TensorHandle,
    export_tensors,
)
from rlsys.weights.fp8 import Fp8Weights  # noqa: E402
from rlsys.weights.layout import dtype_of, shard_view, view_of  # noqa: E402
from scripts.weight_layouts import local_shapes  # noqa: E402

CHUNK = 1 << 22
Piece = tuple[Box, int]
"""A box of an HF tensor and the trainer rank that sends it."""


class Holder:
    """Tensors of a layout; stands for a trainer engine or a rollout engine."""

    def __init__(self, layout: WeightLayout, device: torch.device, *, flat: bool) -> None:
        """`flat`: all tensors are views of one buffer, as Megatron has them; else each has memory of its own."""
        self.layout, self.version, self.quarantined = layout, -1, True
        shapes = local_shapes(layout)
        dtypes = {shard.local: dtype_of(layout.dtypes[shard.box.tensor]) for shard in layout.shards}
        dtype = next(iter(dtypes.values()))
        if flat:
            buffer = torch.zeros(sum(map(_room, shapes.values())), dtype=dtype, device=device)
            self.tensors, at = {}, 0
            for name, shape in shapes.items():
                self.tensors[name] = buffer[at : at + prod(shape)].view(shape)
                at += _room(shape)
        else:
            self.tensors = {n: torch.zeros(shape, dtype=dtypes[n], device=device) for n, shape in shapes.items()}

    def weight_layout(self) -> WeightLayout:
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def begin_update(self) -> None:
        self.quarantined = True

    def finish_update(self, version: int) -> None:
        self.version, self.quarantined = version, False

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """The engine's own loader: narrow each full tensor to what this rank holds and copy it."""
        for name, full in bucket:
            for shard in self.by_tensor.get(name, ()):
                shard_view(self.tensors, shard).copy_(view_of(full, shard.box.start, shard.box.shape))

    @property
    def by_tensor(self) -> dict[str, list[Shard]]:
        if not hasattr(self, "_by_tensor"):
            self._by_tensor: dict[str, list[Shard]] = defaultdict(list)
            for shard in self.layout.shards:
                self._by_tensor[shard.box.tensor].append(shard)
        return self._by_tensor


def _room(shape: Sequence[int]) -> int:
    """Elements of a tensor in a flat buffer, rounded up to Megatron's alignment."""
    return -(-prod(shape) // 64) * 64


def blocks_of(shard: Shard) -> Iterator[Shard]:
    """A shard in parts of whole rows of at most CHUNK elements."""
    rows = shard.box.shape[0]
    step = max(1, CHUNK // max(1, prod(shard.box.shape[1:])))
    extra = len(shard.local_start) - len(shard.box.start)
    for at in range(0, rows, step):
        start = (shard.box.start[0] + at, *shard.box.start[1:])
        local = list(shard.local_start)
        local[extra] += at
        yield Shard(
            Box(shard.box.tensor, start, (min(step, rows - at), *shard.box.shape[1:])), shard.local, tuple(local)
        )


def hash_of(box: Box, full: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """The int16 bits of a box: a hash of the tensor's name, the seed and the element's number."""
    number = torch.zeros(box.shape, dtype=torch.int32, device=device)
    for dim, (at, n) in enumerate(zip(box.start, box.shape, strict=True)):
        axes = [1] * len(box.shape)
        axes[dim] = n
        number = number * full[dim] + torch.arange(at, at + n, dtype=torch.int32, device=device).view(axes)
    mixed = (number + (crc32(box.tensor.encode()) + seed * 7919) % 2**31) * -1640531527
    return ((mixed ^ (mixed >> 15)) * -2048144789 >> 16).to(torch.int16)


class Rank:
    """One process; methods are the controller's commands."""

    def __init__(self, role: str, rank: int, world: int, device: str, beside: Connection, store: str) -> None:
        self.role, self.rank, self.world, self.beside = role, rank, world, beside
        self.device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            os.environ["NCCL_NVLS_ENABLE"] = "0"
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        if role == "trainer" and world > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            wait = timedelta(seconds=120)
            dist.init_process_group(
                backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=wait
            )

    # --- both sides
    def build(self, layout: WeightLayout, seed: int) -> int:
        self.holder = Holder(layout, self.device, flat=self.role == "trainer")
        if self.role == "trainer":
            self.write(seed)
        self.wait()
        return sum(t.nbytes for t in self.holder.tensors.values())

    def write(self, seed: int) -> None:
        for shard in self.holder.layout.shards:
            for block in blocks_of(shard):
                bits = hash_of(block.box, self.holder.layout.full_shapes[block.box.tensor], seed, self.device)
                shard_view(self.holder.tensors, block).view(torch.int16).copy_(bits)
        self.wait()

    def wrong(self, seed: int) -> list[str]:
        """Tensors of which any element is not what it ought to be."""
        bad = torch.zeros(len(self.holder.layout.shards), dtype=torch.bool, device=self.device)
        for number, shard in enumerate(self.holder.layout.shards):
            for block in blocks_of(shard):
                bits = hash_of(block.box, self.holder.layout.full_shapes[block.box.tensor], seed, self.device)
                bad[number] |= (shard_view(self.holder.tensors, block).view(torch.int16) != bits).any()
        return [s.box.tensor for s, is_bad in zip(self.holder.layout.shards, bad.tolist(), strict=True) if is_bad]

    def clear(self) -> None:
        for tensor in self.holder.tensors.values():
            tensor.zero_()
        self.wait()

    def memory(self, *, reset: bool) -> tuple[int, int]:
        """(peak bytes of this process's allocator, free bytes of the device)."""
        if self.device.type != "cuda":
            return 0, 0
        peak = torch.cuda.max_memory_allocated()
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            peak = torch.cuda.memory_allocated()
        return peak, torch.cuda.mem_get_info()[0]

    def drop(self) -> None:
        for end in ("exporter", "importer", "holder", "fp8"):
            if hasattr(self, end):
                if end.endswith("porter"):
                    getattr(self, end).close()
                delattr(self, end)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # --- ours
    def as_fp8(self, shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        """What this trainer rank holds from now on for engines with these matrices in FP8."""
        self.exporter.close()
        self.fp8 = Fp8Weights(self.holder, shapes)  # pyrefly: ignore
        return self.fp8.weight_layout()

    def export(self, spec: IpcExportSpec) -> IpcHandle:
        self.exporter = IpcExporter(spec, getattr(self, "fp8", self.holder))  # pyrefly: ignore
        return self.exporter.address

    def import_from(self, spec: IpcImportSpec) -> float:
        started_s = time.monotonic()
        self.importer = IpcImporter(spec, self.holder)  # pyrefly: ignore
        self.importer.receive(-1)
        return time.monotonic() - started_s

    def send(self, version: int, verify: bool) -> Any:
        if verify == (self.exporter._checksums is list):
            self.exporter._checksums = None if verify else list
        return self.exporter.send(version)

    def receive(self, version: int, sums: Any) -> float:
        started_s = time.monotonic()
        self.importer.receive(version)
        seconds = time.monotonic() - started_s
        if sums is None:
            self.importer.update.finish(version)
        else:
            self.importer.finish(version, sums)
        return seconds

    def method(self) -> str:
        """How the copies are carried out."""
        return "kernel" if any(copy.uses_kernel for copy in self.importer.copies) else "foreach"

    def sum_s(self, given: torch.dtype) -> float:
        """Seconds of the kernels that sum all that this rank holds, kept as `given` and cast to its own dtype."""
        shards, shapes = self.holder.layout.shards, self.holder.layout.full_shapes
        kept = {name: tensor.to(given) for name, tensor in self.holder.tensors.items()}
        boxes = [(shard_view(kept, shard), shard.box.start, shapes[shard.box.tensor]) for shard in shards]
        sums = PreparedCudaChecksums(boxes, [self.holder.tensors[shard.local].dtype for shard in shards])
        best_s = 9e9
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            sums.launch()
            end.record()
            self.wait()
            best_s = min(best_s, begin.elapsed_time(end) / 1e3)
        return best_s

    # --- ceilings
    def export_block(self, num_bytes: int) -> IpcHandle:
        self.block = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        return export_tensors({"block": self.block})

    def copy_block(self, handle: IpcHandle, repeats: int) -> float:
        """Bytes per second of the better of a plain copy and the batched one, from exported memory."""
        imported = ImportedTensors(handle, ["block"], device=self.device)
        source = imported.tensors["block"]
        target = torch.empty_like(source)
        best = 9e9
        batched = BatchedCopy([(target, source)])
        for run in (partial(target.copy_, source, non_blocking=True), batched.run):
            for _ in range(repeats):
                self.wait()
                started_s = time.perf_counter()
                run()
                self.wait()
                best = min(best, time.perf_counter() - started_s)
        num_bytes = source.numel()
        del source, batched, run
        imported.close()
        return num_bytes / best

    def drop_block(self) -> None:
        self.block = None
        self.drop()

    # --- peers: gather full tensors on every trainer rank, export them to the engine beside, which loads its part
    def peer_send(self, buckets: Sequence[Sequence[tuple[str, list[Piece]]]], flat: bool) -> None:
        for bucket in buckets:
            handle = self._gather_flat(bucket) if flat else self._gather_each(bucket)
            self.wait()
            self.beside.send(handle)
            assert self.beside.recv() == "loaded"
            self.kept = []
            if self.device.type == "cuda":
                torch.cuda.ipc_collect()

    def peer_receive(self, num_buckets: int) -> None:
        self.holder.begin_update()
        for _ in range(num_buckets):
            handle = self.beside.recv()
            imported = ImportedTensors(handle, list(handle.tensors), device=self.device)
            self.holder.load(list(imported.tensors.items()))
            self.wait()
            imported.close()
            del imported
            self.beside.send("loaded")
        self.holder.finish_update(0)

    def _full_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.holder.layout.full_shapes[name])

    def _mine(self, box: Box) -> Tensor:
        if not hasattr(self.holder, "_places"):
            self.holder._places = {s.box: s for s in self.holder.layout.shards}  # pyrefly: ignore
        return shard_view(self.holder.tensors, self.holder._places[box])  # pyrefly: ignore

    def _gather_each(self, bucket: Sequence[tuple[str, list[Piece]]]) -> IpcHandle:
        """Every tensor gathered and exported alone."""
        dtype = dtype_of(next(iter(self.holder.layout.dtypes.values())))
        fulls = {}
        for name, pieces in bucket:
            full = torch.empty(self._full_shape(name), dtype=dtype, device=self.device)
            waits = []
            for box, owner in pieces:
                part = self._mine(box).contiguous() if owner == self.rank else None
                if part is None:
                    part = full if box.shape == full.shape else torch.empty(box.shape, dtype=dtype, device=self.device)
                work = dist.broadcast(part, owner, async_op=True) if self.world > 1 else None
                waits.append((work, part, box))
            for work, part, box in waits:
                if work is not None:
                    work.wait()
                if part is not full:
                    view_of(full, box.start, box.shape).copy_(part)
            fulls[name] = full
        self.kept = list(fulls.values())
        return export_tensors(fulls)

    def _gather_flat(self, bucket: Sequence[tuple[str, list[Piece]]]) -> IpcHandle:
        """One buffer for the bucket: every owner packs its parts and broadcasts once."""
        torch_dtype = dtype_of(next(iter(self.holder.layout.dtypes.values())))
        places, at = {}, 0
        for name, _ in bucket:
            places[name] = at
            at += prod(self._full_shape(name))
        flat = torch.empty(at, dtype=torch_dtype, device=self.device)
        fulls = {
            name: flat[p : p + prod(self._full_shape(name))].view(self._full_shape(name)) for name, p in places.items()
        }
        by_owner: dict[int, list[tuple[str, Box]]] = defaultdict(list)
        for name, pieces in bucket:
            for box, owner in pieces:
                by_owner[owner].append((name, box))
        packs = {}
        for owner, boxes in by_owner.items():
            packs[owner] = torch.empty(sum(prod(box.shape) for _, box in boxes), dtype=torch_dtype, device=self.device)
            if owner == self.rank:
                _copy_all(list(_views(packs[owner], boxes)), [self._mine(box) for _, box in boxes])
        works = [dist.broadcast(p, o, async_op=True) for o, p in sorted(packs.items())] if self.world > 1 else []
        for work in filter(None, works):
            work.wait()
        for owner, boxes in by_owner.items():
            targets = [view_of(fulls[name], box.start, box.shape) for name, box in boxes]
            _copy_all(targets, list(_views(packs[owner], boxes)))
        self.kept = [flat]
        whole = export_tensors({"flat": flat})
        dtype, offset = whole.tensors["flat"].dtype, whole.tensors["flat"].offset
        tensors = {
            name: TensorHandle(0, dtype, tuple(full.shape), tuple(full.stride()), offset + places[name])
            for name, full in fulls.items()
        }
        return IpcHandle(whole.storages, tensors)


def _views(pack: Tensor, boxes: Sequence[tuple[str, Box]]) -> Iterator[Tensor]:
    at = 0
    for _, box in boxes:
        yield pack[at : at + prod(box.shape)].view(box.shape)
        at += prod(box.shape)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One foreach copy, of bits: random bits are not all numbers."""
    torch._foreach_copy_([bits_of(t) for t in targets], [bits_of(s) for s in sources])


def serve(role: str, rank: int, world: int, device: str, pipe: Connection, beside: Connection, store: str) -> None:
    """Answer commands until the command to stop."""
    try:
        worker = Rank(role, rank, world, device, beside, store)
        pipe.send(("ok", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)
    while True:
        name, args, kwargs = pipe.recv()
        if name == "stop":
            os._exit(0)
        try:
            pipe.send(("ok", getattr(worker, name)(*args, **kwargs)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
