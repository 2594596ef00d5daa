"""The two endpoints of a transfer, as mixins of the workers that hold the engines."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import Shapes, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.engine_update import with_staging
from rlsys.weights.executors.cuda_ipc import IpcExporter, IpcExportSpec, IpcImporter, IpcImportSpec
from rlsys.weights.executors.disk import DiskReader, DiskSpec, DiskWriter
from rlsys.weights.executors.external import Broadcaster, BroadcastSpec
from rlsys.weights.executors.gather import GatherLoader, GatherSender, GatherSpec
from rlsys.weights.executors.nccl import NcclReceiver, NcclSender, NcclSendSpec, NcclSpec
from rlsys.weights.fp8 import Fp8Weights
from rlsys.weights.layout import device_of
from rlsys.weights.verify import BoxChecksum, layout_checksums

Spec = IpcExportSpec | IpcImportSpec | NcclSpec | DiskSpec | GatherSpec | BroadcastSpec
SENDERS: dict[type, Callable[[Any, TrainEngine], Any]] = {
    IpcExportSpec: IpcExporter,
    NcclSendSpec: NcclSender,
    DiskSpec: DiskWriter,
    GatherSpec: GatherSender,
    BroadcastSpec: Broadcaster,
}
RECEIVERS: dict[type, Callable[[Any, Any], Any]] = {
    IpcImportSpec: IpcImporter,
    NcclSpec: NcclReceiver,
    NcclSendSpec: NcclSender,
    DiskSpec: DiskReader,
    GatherSpec: GatherLoader,
}
STEPS = ("listen", "join", "has_joined", "release", "relay", "take", "prepare", "commit", "bucket", "finish")


class WeightEndpoint:
    """One rank of a transfer by any executor; `engine` is the rank's engine."""

    engine: Any
    _sides: Mapping[type, Callable[[object, Any], object]]
    _side: Any = None
    _float8: Fp8Weights | None = None

    def __init__(self, engine: object) -> None:
        self.engine = engine

    @property
    def held(self) -> TrainEngine | RolloutEngine | Fp8Weights:
        """The engine, or what it holds as FP8."""
        return self._float8 or self.engine

    def weight_layout(self, float8: Shapes | None = None) -> WeightLayout:
        """The engine's layout with its device and digest, and staging for its loader's tensors.

        `float8` is what a WeightSender quantises; an engine gives what it holds, elements and scales as they are.
        """
        device = device_of(self.engine.local_tensors()).type
        layout = replace(with_staging(self.held.weight_layout()), device=device, digest="")
        text = repr(replace(layout, rank=0, host="")).encode()
        return replace(layout, digest=blake2b(text, digest_size=16).hexdigest())

    def open_weight_transfer(self, spec: Spec) -> object:
        """Join a transfer, leaving an earlier one; returns what peers need to reach this rank."""
        self.close_weight_transfer()
        self._side = self._sides[type(spec)](spec, self.held)
        return getattr(self._side, "address", None)

    def weight_step(self, step: str, *args: object) -> object:
        """Run one of the executor's own steps, see STEPS."""
        if step not in STEPS:
            raise ValueError(f"'{step}' is not a step of a weight transfer; choose from {', '.join(STEPS)}")
        return getattr(self._opened(), step)(*args)

    def send_weights(self, version: int) -> Any:
        """Give the engine's weights as a version; returns what the executor passes on to the other ranks."""
        return self._opened().send(version)

    def weight_checksum(self, dtypes: Mapping[str, str] | None = None) -> tuple[BoxChecksum, ...]:
        """Checksums of this rank's boxes, each cast first to the dtype named for its tensor."""
        return layout_checksums(self.held.weight_layout(), self.held.local_tensors(), dtypes)

    def close_weight_transfer(self) -> None:
        """Leave the transfer, if this rank joined one."""
        if self._side is not None:
            self._side.close()
            self._side = None

    def _opened(self) -> Any:
        if self._side is None:
            raise WeightTransferError("this rank has not joined a weight transfer: connect first")
        return self._side


class WeightSender(WeightEndpoint):
    """A trainer rank."""

    _sides = SENDERS

    def weight_layout(self, float8: Shapes | None = None) -> WeightLayout:
        """The same, from now on with the matrices of these shapes as FP8."""
        self._float8 = Fp8Weights(self.engine, float8) if float8 else None
        return super().weight_layout()


class WeightReceiver(WeightEndpoint):
    """A rollout rank, which also sends to one that joins."""

    _sides = RECEIVERS

    def receive_weights(self, version: int, *args: object) -> int:
        """Write a version into the engine; `args` are what the executor passes on from the senders. Returns bytes."""
        return self._opened().receive(version, *args)
