"""Weights into two copies of the attention of the real SGLang, which share one MLP, a rank each."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.ipc.rpc import Method
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.partial import PartialResponse
from rlsys.types import Finish, ModelRequest, ResponseDelta, SamplingParams
from rlsys.weights.endpoints import WeightSender
from rlsys.weights.sharding_manager import FSDPSGLangShardingManager
from tests.contracts.rollout_engine import tiny_model
from tests.contracts.test_rollout_engine import EveryRank, fill_paddings, sglang_rank
from tests.contracts.test_weight_transfer import ShardedTrainer
from tests.e2e.test_sglang_weights import Ranks
from tests.timing import scaled_s
from workers.sglang import RemoteReceiver, weight_methods

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang"),
]
CONFIG = GenerationConfig(seed=11, max_num_seqs=16, max_model_len=256, data_parallel_size=2)


def filled_methods(engine: Any) -> Mapping[str, Method]:
    return {**fill_paddings(engine), **weight_methods(engine)}


class RankReceiver(RemoteReceiver):
    """The receiver of a rank, which passes requests on to its engine."""

    def exchange(self, new: list[ModelRequest], wait_s: float, cancel: Sequence[str] = ()) -> list[ResponseDelta]:
        return self.engine.exchange(new, wait_s=wait_s, cancel=cancel)

    def update(self, version: int, on_update: str) -> None:
        """All weights by the engine's own loader."""
        self.engine.config = self.engine.config.model_copy(update={"on_update": on_update})
        self.engine.begin_update()
        self.engine.load(list(tiny_model(version).state_dict().items()))
        self.engine.finish_update(version)

    def close(self) -> None:
        self.engine.close()


def receiver(folder: Path, config: GenerationConfig) -> Any:
    engine: Any = sglang_rank(folder, config, methods=filled_methods, load_format="dummy")
    engine.remote.call("learn", False, deadline_s=scaled_s(60))
    return RankReceiver(engine)


class Trainer(ShardedTrainer):
    """A trainer's rank with another model, whose attention SGLang has in several copies."""

    def train(self, seed: int) -> None:
        self.full = {name: value.detach() for name, value in tiny_model(seed).named_parameters()}
        self.tensors = {n: t[slice(*self._rows(t.shape[0]))].clone() for n, t in self.full.items()}


def started(config: GenerationConfig, receiver: Callable[[Path, GenerationConfig], Any]) -> Iterator[EveryRank]:
    """All ranks of a replica of a tiny model."""
    folder = Path(tempfile.mkdtemp(prefix="rlsys-sglang-"))
    tiny_model().save_pretrained(folder)
    ranks = EveryRank(folder, config, receiver)
    yield ranks
    ranks._call("close")


@pytest.fixture(scope="module")
def copies() -> Iterator[EveryRank]:
    yield from started(CONFIG, receiver)


class OneRank:
    """One rank of them behind the methods of its receiver."""

    def __init__(self, copies: EveryRank, rank: int) -> None:
        self.copies, self.rank = copies, rank

    def __getattr__(self, name: str) -> Any:
        return partial(self.copies.call_rank, self.rank, name)


def pushes(ranks: EveryRank) -> Iterator[tuple[int, list[ModelRequest]]]:
    """Push three times and compare all ranks' weights; after each push its version, and requests to answer with it."""
    trainers = [Trainer(rank, 2) for rank in range(2)]
    manager = FSDPSGLangShardingManager(
        Ranks([WeightSender(trainer) for trainer in trainers]),  # pyrefly: ignore
        Ranks([OneRank(ranks, rank) for rank in range(ranks.config.replica_size)]),
        executor="shm",
        deadline_s=scaled_s(60),
    )
    manager.connect()
    for version in (1, 2, 3):
        for trainer in trainers:
            trainer.train(version)
        manager.push(version)
        assert all(check.equal for check in manager.validate())
        params = [SamplingParams(12, temperature=0.9, top_p=0.9, seed=i) for i in range(5)]
        yield version, [ModelRequest((5, 6, 7 + i), one, f"{version} {i}") for i, one in enumerate(params)]
    manager.close()


def test_both_ranks_hold_the_attention_and_half_of_the_mlp(copies: EveryRank) -> None:
    layouts = [copies.call_rank(rank, "weight_layout") for rank in range(2)]
    shapes = [{shard.box.tensor: shard.box.shape for shard in layout.shards} for layout in layouts]
    layer = "model.layers.0."
    for held in shapes:
        assert held[f"{layer}self_attn.q_proj.weight"] == (128, 128)
        assert held[f"{layer}mlp.gate_proj.weight"] == (64, 128)
        assert held["model.embed_tokens.weight"] == (96, 128)
    starts = [
        shard.box.start
        for layout in layouts
        for shard in layout.shards
        if shard.box.tensor.endswith("0.mlp.up_proj.weight")
    ]
    assert starts == [(0, 0), (64, 0)]


def test_every_push_reaches_both_and_they_answer_with_it(copies: EveryRank) -> None:
    for version, sampled in pushes(copies):
        reference = HFRollout(tiny_model(version), GenerationConfig(seed=11)).generate(sampled)
        expected = {one.rid: list(answer.output_tokens) for one, answer in zip(sampled, reference, strict=True)}
        tokens: dict[str, list[int]] = {}
        new = sampled
        while {rid: len(ids) for rid, ids in tokens.items()} != {rid: len(ids) for rid, ids in expected.items()}:
            deltas = copies._call("exchange", new, 0.2)
            new = []
            for delta in deltas:
                tokens.setdefault(delta.rid, []).extend(delta.tokens)
                assert set(delta.versions) <= {version}
        assert tokens == expected


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_stops_both_where_only_the_second_has_a_request(copies: EveryRank, on_update: str) -> None:
    rid = next(rid for rid in map(str, range(99)) if crc32(rid.encode()) % 2)
    for version in (0, 1):
        copies._call("update", version, on_update)
    request = ModelRequest((5, 6, 7), SamplingParams(240, ignore_eos=True), rid)
    whole = PartialResponse(request)
    driver = [request]
    for version in (1, 2, 3):
        if version > 1:
            copies._call("update", version, on_update)
        end_s = time.monotonic() + scaled_s(60)
        while whole.versions.count(version) < 20:
            assert time.monotonic() < end_s, whole
            first, second = copies.call_each("exchange", driver, 0.1)
            assert not first
            driver = []
            for delta in second:
                assert not delta.error
                whole.add(delta)
                driver += [whole.rest(rid)] * (delta.finish is Finish.ABORT)
    assert list(whole.versions) == sorted(whole.versions)
    copies._call("exchange", [], 0.1, [rid])
