"""Engines copy straight out of memory that the trainer ranks export: `ipc` and `shm`.

`ipc` exports the trainer's own tensors, through CUDA IPC between the GPUs of one host or shared files between CPUs:
nothing is gathered or staged, and the tensors must not change until all engines have finished. `shm` exports a
snapshot in shared memory, in the engines' dtypes: it costs the host one copy of the model, and restores a restarted
engine whatever the trainer has done since.

`ipc` may span hosts that all have trainer ranks: what no trainer rank of an engine's host holds comes in rounds through
the staging memory of those ranks, see `relay.py`.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import prod
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.batched_copy import BatchedCopy
from rlsys.weights.executors.base import Executor, Layouts, RemainingTime
from rlsys.weights.executors.nccl import Message, form_group, messages_of, wait_for_peers
from rlsys.weights.executors.relay import RelayRank, plan_relays, synchronize
from rlsys.weights.layout import check_complete, device_of, element_bytes
from rlsys.weights.plan import Copy, make_plan
from rlsys.weights.rank_plan import Checksums, PlanReceiver, RankPlan, RankPlans, source_checksums, split_plan
from rlsys.weights.shared_memory import SharedMemory, TensorHandle, pack_tensors, unpack_tensors

# --- memory of another process


@dataclass(frozen=True)
class StorageHandle:
    """One exported storage: path and size on the host, or the eight plain values of a CUDA IPC handle.

    A process cannot open a CUDA handle of its own: `exporter` and `address` find the storage there.
    """

    num_bytes: int
    path: str = ""
    cuda_handle: tuple[int | bytes | bool, ...] = ()
    exporter: str = ""
    address: int = 0


@dataclass(frozen=True)
class IpcHandle:
    """What a process exports and keeps alive: its storages, and the tensors in them by name."""

    storages: tuple[StorageHandle, ...]
    tensors: Mapping[str, TensorHandle]


PROCESS = uuid4().hex
_exported_here: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()


def export_tensors(tensors: Mapping[str, Tensor]) -> IpcHandle:
    """Export live tensors; host tensors move into shared memory in place, device tensors stay where they are."""
    storages: dict[int, tuple[int, StorageHandle]] = {}
    handles = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = len(storages), _export_storage(storage)
        number, dtype = storages[storage._cdata][0], str(tensor.dtype).removeprefix("torch.")
        handles[name] = TensorHandle(number, dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return IpcHandle(tuple(handle for _, handle in storages.values()), handles)


def _export_storage(storage: torch.UntypedStorage) -> StorageHandle:
    if storage.device.type == "cuda":
        _exported_here[storage.data_ptr()] = storage
        handle, address = storage._share_cuda_(), storage.data_ptr()
        # PyTorch keeps the memory until one reader, no more and no fewer, has closed it; `release` says here when to.
        torch.UntypedStorage._release_ipc_counter_cuda(*handle[4:6])
        uncounted = (*handle[:4], b"/none", 0, b"", False)
        return StorageHandle(storage.nbytes(), cuda_handle=uncounted, exporter=PROCESS, address=address)
    if storage.device.type != "cpu" or not storage.nbytes():
        raise WeightTransferError(f"cannot export {storage.nbytes()} bytes of memory on {storage.device}")
    fd, num_bytes = storage._share_fd_cpu_()
    return StorageHandle(num_bytes, path=f"/proc/{os.getpid()}/fd/{fd}")


class ImportedTensors:
    """Tensors of another process, mapped here; `close` before the exporter goes away."""

    def __init__(self, handle: IpcHandle, names: Collection[str], *, device: torch.device) -> None:
        """Map what the named tensors need. Device memory of any GPU of this host appears on `device`."""
        self._memories = ExitStack()
        storages: dict[int, torch.UntypedStorage] = {}
        self.tensors: dict[str, Tensor] = {}
        for name in names:
            entry = handle.tensors.get(name)
            if entry is None:
                raise WeightTransferError(f"the trainer does not export tensor '{name}'")
            if entry.storage not in storages:
                storages[entry.storage] = self._open(handle.storages[entry.storage], device)
            if _end_bytes(entry) > storages[entry.storage].nbytes():
                raise WeightTransferError(f"the trainer's tensor '{name}' does not fit into its exported memory")
            self.tensors[name] = entry.of(storages[entry.storage])

    def _open(self, handle: StorageHandle, device: torch.device) -> torch.UntypedStorage:
        if handle.path:
            memory = self._memories.enter_context(closing(SharedMemory.open(handle.path, handle.num_bytes)))
            return memory.bytes.untyped_storage()
        if handle.exporter == PROCESS:
            return _exported_here[handle.address]
        if device.type != "cuda":
            raise WeightTransferError(f"an engine on {device} cannot read device memory")
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        # Mapped for this process's own GPU, even if it is on another one, so that kernels here may read it.
        return torch.UntypedStorage._new_shared_cuda(index, *handle.cuda_handle[1:])

    def close(self) -> None:
        self.tensors = {}
        self._memories.close()


def _end_bytes(entry: TensorHandle) -> int:
    """The end of a tensor in its storage."""
    last = entry.offset + sum((n - 1) * step for n, step in zip(entry.shape, entry.stride, strict=True))
    return element_bytes(entry.dtype) * (last + 1) if prod(entry.shape) else 0


# --- the trainer's side


@dataclass(frozen=True)
class IpcExportSpec:
    """A trainer rank's part; with `snapshot` it exports a copy of its boxes instead of its own tensors.

    `sends` and `receives` are its messages of each round between hosts.
    """

    plan: RankPlan
    snapshot: bool = False
    sends: tuple[tuple[Message, ...], ...] = ()
    receives: tuple[tuple[Message, ...], ...] = ()


@dataclass(frozen=True)
class ExportedVersion:
    """What a trainer rank exports at a version: its checksums, and a new handle where its memory has moved."""

    checksums: np.ndarray
    handle: IpcHandle | None = None


class Snapshot:
    """A trainer rank's boxes in shared memory, in the dtypes in which they are sent.

    Box n is the tensor `str(n)`; `plan` is the rank's part of the transfer with these tensors as its sources.
    """

    def __init__(self, plan: RankPlan) -> None:
        packed, num_bytes = pack_tensors((str(n), copy.shape, copy.dtype) for n, copy in enumerate(plan.copies))
        self._memory = SharedMemory.create(num_bytes)
        self.tensors = unpack_tensors(self._memory.bytes, packed)
        self.handle = IpcHandle((StorageHandle(num_bytes, path=self._memory.path),), packed)
        copies = zip(self.tensors, plan.copies, strict=True)
        self.plan = replace(plan, copies=tuple(_from_snapshot(copy, 0, name) for name, copy in copies))

    @torch.no_grad()
    def write(self, plan: RankPlan, tensors: Mapping[str, Tensor]) -> None:
        for box, copy in zip(self.tensors.values(), plan.copies, strict=True):
            box.copy_(copy.source_view(tensors))

    def close(self) -> None:
        self.tensors = {}
        self._memory.close()


class IpcExporter(RelayRank):
    """A trainer rank. An export stays valid until the next one: merged adapters are fresh tensors at each push."""

    def __init__(self, spec: IpcExportSpec, engine: TrainEngine) -> None:
        super().__init__(spec.sends, spec.receives)
        self.spec, self.engine = spec, engine
        self.snapshot = Snapshot(spec.plan) if spec.snapshot else None
        self._addresses: list[int] = []
        self._checksums: Checksums | None = None
        self.address = self.snapshot.handle if self.snapshot else self._export(engine.local_tensors())

    @torch.no_grad()
    def send(self, version: int) -> ExportedVersion:
        """Export the engine's weights; without a snapshot they must not change until all engines have the version."""
        plan, tensors, handle = self.spec.plan, self.engine.local_tensors(), None
        if self.snapshot:
            self.snapshot.write(plan, tensors)
            plan, tensors = self.snapshot.plan, self.snapshot.tensors
        elif self._addresses != self._addresses_of(tensors):
            handle = self._export(tensors)
        synchronize(self.device)
        if self._checksums is None:
            self._checksums = source_checksums(plan, tensors)
        return ExportedVersion(np.array(self._checksums(), np.uint64), handle)

    def release(self) -> None:
        """Forget what is exported, which may move; the next `send` exports again."""
        self._addresses, self.exported, self._checksums = [], {}, None

    def close(self) -> None:
        super().close()
        self.release()
        if self.snapshot:
            self.snapshot.close()

    def _export(self, tensors: Mapping[str, Tensor]) -> IpcHandle:
        own = {name: tensors[name] for name in self.spec.plan.local_names}
        handle = export_tensors({**own, **self.stage(device_of(tensors))})
        self._addresses, self.exported, self._checksums = self._addresses_of(tensors), tensors, None
        return handle

    def _addresses_of(self, tensors: Mapping[str, Tensor]) -> list[int]:
        return [tensors[name].data_ptr() for name in self.spec.plan.local_names]


# --- the engine's side


@dataclass(frozen=True)
class IpcImportSpec:
    """An engine rank's part, and what each trainer rank exports.

    `rounds` are the copies of each round between hosts, those inside the host first, where there are any.
    """

    plan: RankPlan
    handles: Mapping[int, IpcHandle]
    rounds: tuple[tuple[Copy, ...], ...] = ()


class IpcImporter(PlanReceiver):
    """A rollout rank."""

    def __init__(self, spec: IpcImportSpec, engine: RolloutEngine) -> None:
        super().__init__(spec.plan, engine)
        self.rounds = spec.rounds or (spec.plan.copies,)
        self.copies: list[BatchedCopy] = []
        """The copies of each round, compiled; made again where memory has moved on either side."""
        self._addresses: dict[str, int] = {}
        self._handles = dict(spec.handles)
        self._imported: dict[int, ImportedTensors] = {}

    def receive(
        self, version: int, new_handles: Mapping[int, IpcHandle] | None = None, sent: np.ndarray | None = None
    ) -> int:
        """Quarantine the engine and copy; with the checksums `sent` also `finish`, which ends the quarantine."""
        self.received = None
        self._compile(self.update.begin(), new_handles or {})
        self.received = version
        num_bytes = self.take(0)
        if sent is not None:
            self.finish(version, sent)
        return num_bytes

    def take(self, number: int) -> int:
        """Copy what a round has brought, in round 0 what this host has itself; returns the bytes written."""
        copy = self.copies[number]
        copy.run()
        synchronize(self.device)
        return copy.num_bytes

    def finish(self, version: int, sent: np.ndarray) -> None:
        super().finish(version, sent)
        if self.update.layout.loader:
            self._unmap(())  # copies hold the staging of what the loader takes

    def release(self) -> None:
        """Unmap the trainer's memory."""
        self._unmap(self._imported)

    close = release

    def _compile(self, tensors: Mapping[str, Tensor], new_handles: Mapping[int, IpcHandle]) -> None:
        """Map the trainer's memory and compile the copies, unless both are done and no memory has moved."""
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        moved = [rank for rank in new_handles if rank in self._handles]
        if self.copies and addresses == self._addresses and not moved:
            return
        self._unmap(moved)
        self._handles.update({rank: new_handles[rank] for rank in moved})
        self.device = device_of(tensors)
        for rank, handle in self._handles.items():
            if rank not in self._imported:
                names = {copy.source_local for copies in self.rounds for copy in copies if copy.source_rank == rank}
                self._imported[rank] = ImportedTensors(handle, names, device=self.device)
        given = {rank: memory.tensors for rank, memory in self._imported.items()}
        pairs = (
            [(copy.view(tensors), copy.source_view(given[copy.source_rank])) for copy in copies]
            for copies in self.rounds
        )
        self.copies, self._addresses = [*map(BatchedCopy, pairs)], addresses

    def _unmap(self, ranks: Collection[int]) -> None:
        """Drop what is compiled, and the memory of some ranks."""
        self.copies, self.checksums = [], None
        for rank in self._imported.keys() & ranks:
            self._imported.pop(rank).close()


# --- the controller's side


class IpcExecutor(Executor):
    """`ipc`: the trainer's own tensors, and between hosts rounds of messages into its staging memory."""

    snapshot = False
    plans: RankPlans
    pushed: tuple[int, np.ndarray] | None = None
    """The version that the trainer exports and its checksums, once all engines have it; None between hosts."""
    joined = False
    """Whether the trainer's ranks are in a process group."""
    last_push_failed = False
    """Whether engines may lack the handles that the trainer gave last."""

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        self.plans = split_plan(make_plan(sources, destinations), sources)
        self.unused = self.plans.plan.unused
        self.relays = plan_relays(self.plans.plan, sources, destinations, staging_bytes=self.options.bucket_bytes)
        self.hosts = [layout.host for layout in sources]
        messages = (messages_of(self.relays.rounds, side, range(len(sources))) for side in (0, 1))
        exports = [IpcExportSpec(plan, self.snapshot, *one) for plan, *one in zip(self.plans.sources, *messages)]
        self.handles: dict[int, IpcHandle] = dict(enumerate(self.open(self.source, exports, remaining_s)))
        imports = [self._import_spec(rank) for rank in range(self.destination.world_size)]
        self.open(self.destination, imports, remaining_s)
        self._release(remaining_s)

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        self.pushed = None
        if self.last_push_failed:
            self.step(self.source, remaining_s, "release")
        self.last_push_failed = True
        exported: list[ExportedVersion] = self.send(version, remaining_s)
        new_handles = {rank: part.handle for rank, part in enumerate(exported) if part.handle is not None}
        self.handles |= new_handles
        checksums = self.plans.merge([part.checksums for part in exported])
        if self.relays.rounds:
            num_bytes = self._relay(version, new_handles, remaining_s)
            self.step(self.destination, remaining_s, "finish", version, checksums)
        else:
            num_bytes = self.receive(version, remaining_s, new_handles, checksums)
            self.pushed = version, checksums
        self._release(remaining_s)
        self.last_push_failed = False
        return num_bytes, self.plans.digest(checksums)

    def _release(self, remaining_s: RemainingTime) -> None:
        """Have no rank hold or map the trainer's memory, where it is freed between two pushes."""
        if self.options.offloads and not self.snapshot:
            self.pushed = None
            self.step(self.destination, remaining_s, "release")
            self.step(self.source, remaining_s, "release")

    def _relay(self, version: int, new_handles: Mapping[int, IpcHandle], remaining_s: RemainingTime) -> int:
        """Bring each host what it has and then, round by round, what it lacks; the bytes that engines wrote."""
        if not self.joined:
            form_group([self.source], self.options.timeout_s, remaining_s)
        num_bytes, rounds = self.receive(version, remaining_s, new_handles), len(self.relays.rounds)
        self.network_bytes = dict.fromkeys(self.hosts, 0)
        self.joined = False
        for number in range(1, rounds + 1):
            try:
                sent = wait_for_peers(self.source.execute_all_async("weight_step", "relay", number), remaining_s)
                num_bytes += sum(self.step(self.destination, remaining_s, "take", number))
            except Exception as error:
                error.add_note(f"in round {number} of {rounds} between hosts")
                raise
            for host, received in zip(self.hosts, sent, strict=True):
                self.network_bytes[host] += received
        self.joined = True
        return num_bytes

    def restore(self, rank: int, version: int, remaining_s: RemainingTime) -> None:
        """From the snapshot, or from the trainer's memory as long as it holds the version, which checksums verify."""
        if self.pushed is None or self.pushed[0] != version:
            raise WeightTransferError(f"the trainer no longer exports weight version {version}: push again")
        self.reopen(rank, version, self._import_spec(rank), remaining_s)
        self.destination.execute_rank_async(rank, "weight_step", "finish", *self.pushed).get(remaining_s())

    def _import_spec(self, rank: int) -> IpcImportSpec:
        """An engine rank's part; of snapshots it copies the box with the checksum id of each of its copies."""
        plan = self.plans.destination(rank)
        if self.snapshot:
            boxes = {
                number: (source, str(box))
                for source, ids in enumerate(self.plans.checksum_ids)
                for box, number in enumerate(ids.tolist())
            }
            ids = plan.checksum_ids
            copies = tuple(_from_snapshot(copy, *boxes[n]) for copy, n in zip(plan.copies, ids, strict=True))
            plan = replace(plan, copies=copies)
        rounds = self.relays.copies_of(rank, plan.copies)
        ranks = {copy.source_rank for copies in rounds or [plan.copies] for copy in copies}
        return IpcImportSpec(plan, {number: self.handles[number] for number in ranks}, rounds)


class SharedMemoryExecutor(IpcExecutor):
    """`shm`: a snapshot of the trainer's boxes."""

    snapshot = True

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        if len(hosts := {layout.host for layout in (*sources, *destinations)}) > 1:
            raise WeightTransferError(f"memory is shared on one host only, trainer and rollout are on {sorted(hosts)}")
        check_complete(destinations)
        super().connect(sources, destinations, remaining_s)


def _from_snapshot(copy: Copy, rank: int, name: str) -> Copy:
    """The same copy out of the box of a snapshot."""
    return replace(copy, source_rank=rank, source_local=name, source_start=(0,) * len(copy.shape))
