"""Weights into the real SGLang: every executor by the receiver inside its scheduler process, and what goes wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.config.schema.rollout import EngineKwargsConfig, GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import ModelRequest, SamplingParams
from rlsys.utils.errors import ConfigError, RolloutError, WeightTransferError
from rlsys.weights.endpoints import WeightSender
from rlsys.weights.sharding_manager import ExecutorName, FSDPSGLangShardingManager
from tests.contracts.test_weight_transfer import ShardedTrainer, tiny_model

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]
SAMPLED = [ModelRequest((5, 6, 7 + i), SamplingParams(12, temperature=0.9, top_p=0.9, seed=i)) for i in range(5)]


class Ranks:
    """Ranks in threads of this process, called as a WorkerGroup is."""

    def __init__(self, ends: list[Any]) -> None:
        self.ends, self.threads = ends, [ThreadPoolExecutor(1) for _ in ends]

    @property
    def world_size(self) -> int:
        return len(self.ends)

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Any:
        future = self.threads[rank].submit(getattr(self.ends[rank], method), *args)
        return type("Answer", (), {"get": staticmethod(future.result)})

    def execute_all_async(self, method: str, *args: Any) -> list[Any]:
        return [self.execute_rank_async(rank, method, *args) for rank in range(self.world_size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    """An engine of dummy weights whose layout was learned from SGLang's loader."""
    from rlsys.rollout.sglang.engine import SGLangRollout
    from workers.sglang import weight_methods

    engine = SGLangRollout(
        folder,
        GenerationConfig(
            seed=11,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=256,
            enable_prefix_caching=False,
            engine_kwargs=EngineKwargsConfig(sglang={"stream_interval": 3, "max_total_tokens": 65536}),
        ),
        EngineContext(load_format="dummy", host="here"),
        methods=weight_methods,
    )
    engine.remote.call("learn", False, deadline_s=60)
    yield engine
    engine.close()


@pytest.mark.parametrize("executor", ["shm", "ipc", "nccl", "disk", "gather"])
def test_every_executor_writes_what_the_trainer_holds(engine: Any, executor: ExecutorName, tmp_path: Path) -> None:
    from workers.sglang import RemoteReceiver

    trainers = [ShardedTrainer(rank, 2) for rank in range(2)]
    manager = FSDPSGLangShardingManager(
        Ranks([WeightSender(trainer) for trainer in trainers]),  # pyrefly: ignore
        Ranks([RemoteReceiver(engine)]),
        executor=executor,
        deadline_s=60.0,
        bucket_bytes=1000,
        disk_root=tmp_path if executor == "disk" else None,
    )
    manager.connect()
    checksums = []
    for version, seed in ((1, 0), (2, 1), (3, 0)):
        for trainer in trainers:
            trainer.train(seed)
        checksums.append(manager.push(version).checksum)
        assert all(check.equal for check in manager.validate())
        responses = engine.generate(SAMPLED)
        assert [r.output_tokens for r in responses] == [
            r.output_tokens for r in HFRollout(tiny_model(seed), GenerationConfig(seed=11)).generate(SAMPLED)
        ]
        assert {v for r in responses for v in r.output_versions} == {version}
    assert checksums[0] == checksums[2] != checksums[1]
    manager.close()


def test_a_push_to_sleeping_weights_is_refused(engine: Any) -> None:
    from workers.sglang import RemoteReceiver

    engine._asleep.add("weights")
    try:
        for refused in (engine.begin_update, RemoteReceiver(engine).weight_checksum):
            with pytest.raises(WeightTransferError, match=r"asleep; call wake\(\['weights'\]\) first"):
                refused()
    finally:
        engine._asleep.clear()


def test_settings_reach_the_real_arguments(engine: Any) -> None:
    server_args = engine._engine_thread.engine.server_args
    expected = {
        "random_seed": 11,
        "max_running_requests": 16,
        "chunked_prefill_size": 512,
        "max_prefill_tokens": 512,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "dtype": "float32",
        "stream_interval": 3,
        "tp_size": 1,
    }
    assert {name: getattr(server_args, name) for name in expected} == expected


def test_a_cache_too_small_for_the_longest_request_is_refused(folder: Path) -> None:
    from rlsys.rollout.sglang.engine import SGLangRollout

    def config(**sglang: int) -> GenerationConfig:
        return GenerationConfig(max_model_len=4096, engine_kwargs=EngineKwargsConfig(sglang=sglang))

    with pytest.raises(ConfigError, match="kv_cache_gib"):
        SGLangRollout(folder, config(max_total_tokens=64), EngineContext())
    with pytest.raises(ConfigError, match="no_such_argument"):
        SGLangRollout(folder, config(no_such_argument=1), EngineContext())


ORPHANS = """
import sys, time
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.sglang.engine import SGLangRollout
if __name__ == "__main__":
    engine = SGLangRollout(sys.argv[1], GenerationConfig(max_model_len=128), EngineContext())
    print("up", flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_of_a_worker_that_was_killed(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(ORPHANS)
    with subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        while worker.stdout.readline().strip() != "up":
            assert worker.poll() is None
        children = psutil.Process(worker.pid).children(recursive=True)
        assert any("scheduler" in " ".join(child.cmdline()) for child in children)
        os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_dead_scheduler_is_an_error_not_a_hang(engine: Any) -> None:
    engine.begin_update()
    engine.load(list(tiny_model(0).named_parameters()))
    engine.finish_update(1)
    long = ModelRequest((5, 6), SamplingParams(200, temperature=1.0, ignore_eos=True))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(engine.generate, [long] * 8)
        time.sleep(0.3)
        assert not answer.done()
        for pid in engine._engine_thread.engine.get_all_child_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match=r"scheduler of rollout rank 0 exited"):
            answer.result(30)
