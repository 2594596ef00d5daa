"""How weights reach the rollout: what a push includes, and the wiring of external servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlsys.config import PPOConfig, load_config
from rlsys.fleet.external.engine import SGLangRemoteEngine
from rlsys.fleet.external.transfer import BroadcastTransfer, ExternalTransfer
from rlsys.fleet.fleet import RolloutFleet
from rlsys.types import TransferReport
from rlsys.utils.errors import ConfigError, FailedWorker, WeightTransferError, WorkerError
from rlsys.weights.sharding_manager import ShardingManager
from trainer.weight_push import WeightPush, connect_servers

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"


class Recorder:
    """A transfer and a fleet that write down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version: int | None = None
        self.max_restarts = 0

    def push(self, version: int) -> TransferReport:
        self.calls.append(f"push {version}")
        self.version = version
        return TransferReport(version, 1, 0.0, "", "test")

    @contextmanager
    def pushing(self, version: int) -> Iterator[None]:
        self.calls.append(f"held for {version}")
        yield
        self.calls.append("released")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(" ".join([name, *map(str, args)]))


def pushing(*, validate: bool = False) -> tuple[WeightPush, Recorder]:
    recorder = Recorder()
    return WeightPush(recorder, cast(RolloutFleet, recorder), validate), recorder


def test_a_push_runs_while_the_fleet_is_held() -> None:
    weights, recorder = pushing(validate=True)
    assert weights.push(4).version == 4
    assert recorder.calls == ["held for 4", "push 4", "validate", "released"]


def test_weights_are_pushed_again_only_if_there_were_any() -> None:
    weights, recorder = pushing()
    weights.push_again()
    assert recorder.calls == []
    weights.push(3)
    weights.push_again()
    assert recorder.calls.count("push 3") == 2


LOST, DEAD = (
    WeightTransferError("a rank is lost"),
    WorkerError(FailedWorker("rollout", 0, "vm", "push", "a rank is lost")),
)


@pytest.mark.parametrize(
    ("max_restarts", "failures", "pushes"),
    [(0, [LOST], 1), (3, [LOST], 2), (3, [LOST] * 2, 2), (3, [DEAD] * 3, 4), (3, [DEAD] * 4, 4), (3, [DEAD, LOST], 3)],
)
def test_a_push_that_lost_replicas_is_repeated_where_they_can_be_restarted(
    max_restarts: int, failures: list[Exception], pushes: int
) -> None:
    """Once for any reason; as often as a replica is restarted where processes died."""

    class Manager(ShardingManager):
        def __init__(self) -> None:
            self.left, self.calls = list(failures), list[str]()

        def connect(self, destination: object = None) -> None:
            self.calls.append("connect")

        def push(self, version: int) -> TransferReport:
            self.calls.append(f"push {version}")
            if self.left:
                raise self.left.pop(0)
            return TransferReport(version, 1, 0.0, "", "test")

    fleet, manager = Recorder(), Manager()
    fleet.max_restarts = max_restarts
    weights = WeightPush(manager, cast(RolloutFleet, fleet), validate=False)
    if pushes > len(failures):
        assert weights.push(2).version == 2
    else:
        with pytest.raises(type(failures[-1]), match="a rank is lost"):
            weights.push(2)
    assert manager.calls == ["push 2", *["connect", "push 2"] * (pushes - 1)]


def external(tmp_path: Path, name: str, *more: str) -> PPOConfig:
    servers = [f"{ROLLOUT}.servers.urls=[http://one:1]", f"{ROLLOUT}.servers.weights_dir={tmp_path}"]
    return load_config(["--config-name=quickstart", f"{ROLLOUT}.name={name}", *servers, *more])


@pytest.mark.parametrize(
    ("name", "engine"), [("sglang_remote", "SGLangRemoteEngine"), ("vllm_remote", "VLLMRemoteEngine")]
)
def test_external_servers_get_a_connected_engine_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine: str
) -> None:
    connected: list[Any] = []

    class Engine:
        def __init__(self, settings: Any) -> None:
            self.settings = settings

        def connect(self) -> None:
            connected.append(self)

    monkeypatch.setattr(f"rlsys.fleet.external.engine.{engine}", Engine)
    fleet, transfer = connect_servers(external(tmp_path, name), cast(Any, SimpleNamespace()))
    assert [fleet, transfer.engine] == [connected[0]] * 2
    assert connected[0].settings.urls == ("http://one:1",)
    assert isinstance(transfer, ExternalTransfer)
    assert transfer.folder == tmp_path


def test_the_process_group_of_external_servers_is_chosen_by_the_checkpoint_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SGLangRemoteEngine, "connect", lambda engine: None)
    cfg = external(tmp_path, "sglang_remote", f"{ENGINE}.backend=nccl", f"{ENGINE}.update_weights_bucket_megabytes=2")
    fleet, transfer = connect_servers(cfg, cast(Any, SimpleNamespace()))
    fleet.close()
    assert isinstance(transfer, BroadcastTransfer)
    assert (transfer.engine, transfer.bucket_bytes) == (fleet, 2 << 20)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (f"{ENGINE}.backend=shm", "over a process group"),
        (f"{ENGINE}.backend=nccl {ROLLOUT}.servers.lora_name=a actor_rollout_ref.model.lora_rank=2", "from files"),
    ],
)
def test_what_servers_cannot_take_is_refused(tmp_path: Path, setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        external(tmp_path, "vllm_remote", *setting.split())
