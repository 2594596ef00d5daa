"""The contract of a RolloutEngine, run on every engine; a further backend joins by one factory in `FACTORIES`."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.external.engine import RemoteEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.interfaces import RolloutEngine
from rlsys.ipc.rpc import Method
from rlsys.protocol import DataProto
from rlsys.rollout.base import EngineContext, LoadFormat, check_tags
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import ModelRequest, ResponseDelta
from rlsys.utils.environment import environment
from rlsys.utils.errors import WeightTransferError
from tests.contracts.rollout_engine import Bench, RolloutEngineContract, tiny_model
from tests.servers import EngineBrain, SampledBrain, Server
from tests.timing import scaled_s
from tests.vllm_runner import SWITCHES, interpret_kernels
from workers.sglang import replica_of


def hf_bench() -> Bench:
    reference = tiny_model()
    return Bench(
        HFRollout(tiny_model(), GenerationConfig(seed=11)), lambda ids: reference(ids[None]).logits[0].detach()
    )


def serving_bench(kind: str, start: Callable[[Path], Any], *lacks: str) -> Bench:
    """What `start` makes of a folder with the tiny model, beside that model."""
    reference = tiny_model()
    folder = Path(tempfile.mkdtemp(prefix=f"rlsys-{kind}-"))
    reference.save_pretrained(folder)
    return Bench(start(folder), lambda ids: reference(ids[None]).logits[0].detach(), frozenset(lacks))


VLLM_CONFIG = GenerationConfig(seed=11, enforce_eager=True, max_num_seqs=32, max_num_batched_tokens=64)


@cache
def vllm_bench() -> Bench:
    """One engine for all tests; it takes seconds to start."""
    from rlsys.rollout.vllm.engine import VLLMRollout

    return serving_bench("vllm", lambda folder: VLLMRollout(folder, VLLM_CONFIG, EngineContext()))


def vllm_rank(folder: Path, config: GenerationConfig) -> RolloutEngine:
    """This rank of a vLLM in several processes."""
    from rlsys.rollout.vllm.engine import VLLMRollout

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid()), "LOCAL_RANK": "0"}
    return VLLMRollout(folder, config, EngineContext())


def fill_paddings(engine: object) -> dict[str, Method]:
    """Give SGLang's attention for CPUs the length of rows that only pad a batch, which it lacks."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # type: ignore[attr-defined]
    return {}


def sglang_rank(
    folder: Path,
    config: GenerationConfig,
    *,
    methods: Callable[[Any], Mapping[str, Method]] = fill_paddings,
    load_format: LoadFormat = "auto",
) -> RolloutEngine:
    """This rank of an SGLang in several processes."""
    from rlsys.rollout.sglang.engine import SGLangRollout

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it starts a process
    replica = replica_of(dist.get_rank(), config.replica_size, ranks_per_host=config.replica_size)
    context = EngineContext(load_format=load_format, rank=dist.get_rank(), host="here")
    return SGLangRollout(folder, config, context, replica=replica, methods=methods)


RankFactory = Callable[[Path, GenerationConfig], Any]


def answer_calls(rank: int, folder: Path, config: GenerationConfig, make: RankFactory, pipe: Connection) -> None:
    """One rank's engine, which does what a pipe says."""
    size = config.replica_size
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    engine, name = make(folder, config), ""
    while name != "close":
        name, args, kwargs = pipe.recv()
        try:
            pipe.send(getattr(engine, name)(*args, **kwargs))
        except Exception as error:
            pipe.send(error)


class EveryRank:
    """The engines of a replica's ranks behind the verbs of one: all get the same calls, and the first answers.

    With several copies of the attention the first rank of each answers an exchange.
    """

    def __init__(self, folder: Path, config: GenerationConfig, make: RankFactory) -> None:
        context, self._config, self._pipes = multiprocessing.get_context("spawn"), config, list[Connection]()
        for rank in range(config.replica_size):
            ours, theirs = context.Pipe()
            context.Process(target=answer_calls, args=(rank, folder, config, make, theirs), daemon=True).start()
            self._pipes.append(ours)
        for name in (name for name in vars(RolloutEngine) if not name.startswith("_")):
            setattr(self, name, partial(self._call, name))

    @property
    def config(self) -> GenerationConfig:
        return self._config

    @config.setter
    def config(self, config: GenerationConfig) -> None:
        self._config = config
        self._call("__setattr__", "config", config)

    def call_rank(self, rank: int, name: str, *args: object) -> Any:
        """One rank's answer alone."""
        return self._answers([rank], name, args, {})[0]

    def call_each(self, name: str, *args: object, **kwargs: object) -> list[Any]:
        """The answers of all ranks, called at once."""
        return self._answers(range(len(self._pipes)), name, args, kwargs)

    def _answers(self, ranks: Sequence[int], name: str, args: object, kwargs: object) -> list[Any]:
        for rank in ranks:
            self._pipes[rank].send((name, args, kwargs))
        for rank in ranks:
            assert self._pipes[rank].poll(scaled_s(120)), f"rank {rank} did not answer to {name}"
        answers = [self._pipes[rank].recv() for rank in ranks]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _call(self, name: str, *args: object, **kwargs: object) -> Any:
        answers = self.call_each(name, *args, **kwargs)[:: self._config.attention_size]
        return [delta for deltas in answers for delta in deltas] if name == "exchange" else answers[0]


@cache
def stages_bench() -> Bench:
    """One vLLM in two stages for all tests, each in a process."""
    config = GenerationConfig(seed=11, enforce_eager=True, max_num_seqs=32, pipeline_model_parallel_size=2)
    lacks = ("tensors", "on_update=recompute")
    return serving_bench("stages", lambda folder: EveryRank(folder, config, vllm_rank), *lacks)


def runner_2_rank(folder: Path, config: GenerationConfig) -> RolloutEngine:
    interpret_kernels()
    return vllm_rank(folder, config)


@cache
def runner_2_bench() -> Bench:
    """One vLLM for all tests as it runs on GPUs: with model runner 2, several steps a schedule, started ahead."""
    with environment(SWITCHES):
        return serving_bench("runner", lambda folder: EveryRank(folder, VLLM_CONFIG, runner_2_rank), "tensors")


@cache
def copies_bench() -> Bench:
    """One SGLang with two copies of the attention for all tests, each in a process."""
    config = GenerationConfig(seed=11, max_num_seqs=32, data_parallel_size=2)
    return serving_bench("copies", lambda folder: EveryRank(folder, config, sglang_rank), "tensors")


@cache
def sglang_stages_bench() -> Bench:
    """One SGLang in two stages for all tests, each in a process."""
    config = GenerationConfig(seed=11, max_num_seqs=32, pipeline_model_parallel_size=2)
    return serving_bench("stages", lambda folder: EveryRank(folder, config, sglang_rank), "tensors")


@cache
def sglang_bench() -> Bench:
    """One engine for all tests; its parameters are in another process."""
    from rlsys.rollout.sglang.engine import SGLangRollout

    config = GenerationConfig(seed=11, max_num_seqs=32)
    return serving_bench("sglang", lambda folder: SGLangRollout(folder, config, EngineContext()), "tensors")


class OneServer:
    """An external server behind the verbs of a RolloutEngine."""

    def __init__(self, fleet: RemoteEngine) -> None:
        self.fleet, self.server = fleet, fleet.servers[0]

    def exchange(
        self, new: Sequence[ModelRequest] = (), *, wait_s: float, cancel: Collection[str] = ()
    ) -> list[ResponseDelta]:
        if self.fleet.quarantined:
            raise WeightTransferError("the server is quarantined")
        return self.server.exchange(new, cancel=cancel, wait_s=wait_s, deadline_s=scaled_s(30))

    def compute_log_prob(self, batch: DataProto, *, temperature: float = 1.0) -> Tensor:
        batch.meta_info["temperature"] = temperature
        return self.fleet.compute_log_prob(batch).batch["rollout_log_probs"]

    def begin_update(self) -> None:
        self.fleet.quarantined = True
        self.fleet.do(self.fleet._stop())

    def finish_update(self, version: int) -> None:
        self.fleet.set_version(version)
        self.fleet.do(self.fleet._resume())
        self.fleet.quarantined = False

    def sleep(self, tags: Sequence[str]) -> None:
        check_tags(tags)

    def wake(self, tags: Sequence[str]) -> None:
        check_tags(tags)

    def health(self) -> dict[str, Any]:
        return {**self.server.about(), "version": self.fleet.version}

    def close(self) -> None:
        self.fleet.close()

    def weight_layout(self) -> None: ...
    def local_tensors(self) -> None: ...
    def load(self, bucket: object) -> None: ...


def remote_bench(kind: str) -> Bench:
    """The remote engine over a server of ours that has the reference engine inside."""
    behind, reference = HFRollout(tiny_model(), GenerationConfig(seed=11)), tiny_model()
    server = Server(kind, EngineBrain(behind) if kind == "sglang" else SampledBrain(behind)).start()
    make = SGLangRemoteEngine if kind == "sglang" else VLLMRemoteEngine
    engine = make(RemoteSettings((server.url,), send_seeds=True, request_s=scaled_s(60)))
    engine.connect()

    def close() -> None:
        engine.close()
        server.close()
        behind.close()

    other_kind = "log-probabilities of the truncated distribution" if kind == "sglang" else "full log-probabilities"
    lacks = frozenset({"tensors", "loading of tensors", "scores at a temperature", other_kind})
    return Bench(OneServer(engine), lambda ids: reference(ids[None]).logits[0].detach(), lacks, close)  # type: ignore[arg-type]


def reset(bench: Bench) -> None:
    """As if it were new."""
    bench.engine.begin_update()
    bench.engine.load(list(tiny_model().state_dict().items()))
    bench.engine.finish_update(0)


FACTORIES = {
    "hf": (hf_bench, lambda bench: bench.engine.close()),
    "vllm": (vllm_bench, reset),
    "vllm in stages": (stages_bench, reset),
    "vllm with runner 2": (runner_2_bench, reset),
    "sglang": (sglang_bench, reset),
    "sglang in copies": (copies_bench, reset),
    "sglang in stages": (sglang_stages_bench, reset),
    "sglang_remote": (partial(remote_bench, "sglang"), lambda bench: bench.close()),
    "vllm_remote": (partial(remote_bench, "vllm"), lambda bench: bench.close()),
}


VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
SGLANG = [pytest.mark.sglang, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]
MARKS = {
    "vllm": VLLM,
    "vllm in stages": [pytest.mark.slow, *VLLM],
    "vllm with runner 2": [pytest.mark.slow, *VLLM],
    "sglang": SGLANG,
    "sglang in copies": [pytest.mark.slow, *SGLANG],
    "sglang in stages": [pytest.mark.slow, *SGLANG],
}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in FACTORIES])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    make, end = FACTORIES[request.param]
    bench = make()
    yield bench
    end(bench)


@pytest.fixture(scope="module", autouse=True)
def shared_engines() -> Iterator[None]:
    """Engines that serve several tests end with the last of them."""
    yield
    for make in (vllm_bench, stages_bench, runner_2_bench, sglang_bench, copies_bench, sglang_stages_bench):
        if make.cache_info().currsize:
            make().engine.close()
            make.cache_clear()


class TestRolloutEngine(RolloutEngineContract):
    """Every test of the contract, once for each engine."""
