"""Rollout on external servers: the driver asks them, and weights reach them through files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.config import PPOConfig
from rlsys.fleet.external import RemoteEngine, RemoteSettings, SGLangRemoteEngine, VLLMRemoteEngine, server_urls
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.replica import Answers, Work
from rlsys.protocol import DataProto
from rlsys.rollout.batch import from_responses, to_requests
from rlsys.types import TransferReport, WeightUpdateMeta
from rlsys.utils.errors import ConfigError, DeadlineError, WeightTransferError

KINDS = {"sglang_remote": ("sglang", SGLangRemoteEngine), "vllm_remote": ("vllm", VLLMRemoteEngine)}
CHUNK_ROWS = 32
ADAPTER_DIR = "lora_adapter"


def server_settings(cfg: PPOConfig) -> RemoteSettings:
    """What the configuration and the environment say of the servers; ConfigError where there is no address."""
    rollout, deadlines = cfg.actor_rollout_ref.rollout, cfg.trainer.deadlines
    servers = rollout.servers
    try:
        urls = server_urls(KINDS[rollout.name][0], servers.urls or ())
    except ConfigError as error:
        raise ConfigError(f"actor_rollout_ref.rollout.servers.urls: {error}") from error
    return RemoteSettings(
        urls,
        token=os.environ.get(servers.token_env, ""),
        model=servers.model or "",
        policy=servers.policy,
        max_concurrent=servers.max_concurrent,
        max_retries=servers.max_retries,
        idle_s=servers.timeout_s,
        start_s=deadlines.start_s,
        request_s=deadlines.generate_s,
        update_s=deadlines.weights_s,
        keep_adapters=cfg.trainer.max_staleness + 2,
    )


def served_rollout(cfg: PPOConfig, actor: Any) -> tuple[RolloutFleet, DiskTransfer]:
    """A fleet whose one replica is all servers, connected, and what brings the actor's weights to them."""
    rollout, deadlines = cfg.actor_rollout_ref.rollout, cfg.trainer.deadlines
    settings = server_settings(cfg)
    engine = KINDS[rollout.name][1](settings)
    engine.connect()
    rows = min(CHUNK_ROWS, settings.max_concurrent)
    fleet = ServedFleet(
        [ServedReplica(engine)],
        chunk_rows=rows,
        max_in_flight=max(1, settings.max_concurrent // rows),
        deadlines=FleetDeadlines(generate_s=deadlines.generate_s),
        max_restarts=0,
        max_staleness=cfg.trainer.max_staleness,
    )
    fleet.engine = engine
    folder = Path(rollout.servers.weights_dir).absolute()
    return fleet, DiskTransfer(actor, engine, folder, rollout.servers.lora_name or "", deadlines.weights_s)


class ServedFleet(RolloutFleet):
    """A fleet that also tells what its servers went through."""

    engine: RemoteEngine

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`rollout_log_probs` (B, R) as the servers score the responses; they do at temperature 1 only."""
        found = self.engine.compute_log_prob(data, temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"rollout_log_probs": found})

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.engine.metrics()


@dataclass(frozen=True)
class ServedReplica:
    """All servers as one replica: the engine shares out, retries and fails over among them."""

    engine: RemoteEngine
    name: str = "external servers"

    def generate(self, work: Work, deadline_s: float) -> Answers:
        if not isinstance(work, DataProto):
            return self.engine.complete(work)
        return from_responses(work, self.engine.complete(to_requests(work)))

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.engine.health()

    def restart(self, deadline_s: float) -> None:
        """Whoever runs the servers restarts them; the engine takes them back by itself."""


@dataclass
class DiskTransfer:
    """Exports the actor's weights into `folder`/v<version>, which the servers then load; keeps the last two.

    With `lora_name` the servers load the adapter in it only, under that name.
    """

    actor: Any
    engine: RemoteEngine
    folder: Path
    lora_name: str
    deadline_s: float
    version: int | None = None

    def push(self, version: int) -> TransferReport:
        """Bring all servers to the actor's weights; WeightTransferError where none took them."""
        started_s = time.monotonic()
        path = self.folder / f"v{version}"
        self.actor.export(str(path))
        source = path / ADAPTER_DIR if self.lora_name else path
        meta = WeightUpdateMeta(
            version, weights_path=str(source), metadata={"lora_name": self.lora_name} if self.lora_name else {}
        )
        try:
            self.engine.update_weights(meta).result(self.deadline_s)
        except DeadlineError:
            raise
        except TimeoutError as error:
            raise DeadlineError("the external servers", "update_weights", self.deadline_s) from error
        except WeightTransferError as error:
            error.add_note(f"the servers must be able to read {path}: actor_rollout_ref.rollout.servers.weights_dir")
            raise
        self._forget(path)
        self.version = version
        return TransferReport(
            version=version,
            num_bytes=sum(file.stat().st_size for file in source.glob("*.safetensors")),
            seconds=time.monotonic() - started_s,
            checksum="",
            executor="disk",
        )

    def validate(self) -> None:
        raise WeightTransferError("external servers hand out no tensors to compare")

    def _forget(self, newest: Path) -> None:
        """Delete all but the newest folders, which a server that comes back may still load from."""
        others = [path for path in self.folder.glob("v*") if path != newest and path.is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in others[:-1]:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Leave the servers as they are; the weights they were given last stay on disk."""
        self.engine.close()
