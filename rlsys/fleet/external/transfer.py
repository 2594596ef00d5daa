"""Weights for external servers: the actor exports them into a folder, and the servers load them from there."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlsys.fleet.external.engine import RemoteEngine
from rlsys.types import TransferReport, WeightUpdateMeta
from rlsys.utils.errors import WeightTransferError

ADAPTER_DIR = "lora_adapter"


class ExportsModel(Protocol):
    """The actor's worker group, as much of it as a transfer needs."""

    def export(self, path: str) -> object: ...


@dataclass
class ExternalTransfer:
    """Exports the actor's weights into `folder`/v<version> and has the servers load them; keeps the last two versions.

    With `lora_name` the servers load only the adapter, under that name.
    """

    actor: ExportsModel
    engine: RemoteEngine
    folder: Path
    lora_name: str
    deadline_s: float
    version: int | None = None

    def push(self, version: int) -> TransferReport:
        """Bring all servers to the actor's weights; WeightTransferError when none of them loaded them."""
        started_s = time.monotonic()
        path = self.folder / f"v{version}"
        self.actor.export(str(path))
        source = path / ADAPTER_DIR if self.lora_name else path
        meta = WeightUpdateMeta(
            version, weights_path=str(source), metadata={"lora_name": self.lora_name} if self.lora_name else {}
        )
        try:
            self.engine.load_weights(meta, self.deadline_s)
        except WeightTransferError as error:
            error.add_note(f"the servers must be able to read {path}: actor_rollout_ref.rollout.servers.weights_dir")
            raise
        self._delete_old(path)
        self.version = version
        return TransferReport(
            version=version,
            num_bytes=sum(file.stat().st_size for file in source.glob("*.safetensors")),
            seconds=time.monotonic() - started_s,
            checksum="",
            executor="disk",
        )

    def validate(self) -> None:
        raise WeightTransferError("external servers expose no tensors to compare; set rollout.validate_weight=false")

    def _delete_old(self, newest: Path) -> None:
        """Delete all versions but the last two, from which a server that comes back may still load."""
        others = [path for path in self.folder.glob("v*") if path != newest and path.is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in others[:-1]:
            shutil.rmtree(path, ignore_errors=True)
