"""Weights into two pipeline stages of the real SGLang, a rank each, or each on two ranks."""

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.ipc.rpc import Method
from rlsys.protocol import DataProto
from rlsys.rollout.base import SLEEP_TAGS
from rlsys.rollout.batch import from_responses
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.partial import PartialResponse
from rlsys.types import Finish, ModelRequest, SamplingParams
from tests.contracts.rollout_engine import prompt_batch, tiny_model
from tests.contracts.test_rollout_engine import EveryRank, sglang_rank
from tests.e2e.test_sglang_copies import RankReceiver, filled_methods, pushes, started
from tests.timing import scaled_s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang"),
]
CONFIG = GenerationConfig(seed=11, max_num_seqs=16, max_model_len=256, pipeline_model_parallel_size=2)
LAYERS = tuple(f"model.layers.{number}." for number in range(2))


def counting_methods(engine: Any) -> Mapping[str, Method]:
    return {**filled_methods(engine), "num_releases": lambda: engine.num_releases}


class StageReceiver(RankReceiver):
    """A rank that also scores, and that has its scheduler release its memory, which on a CPU does nothing."""

    def score(self, batch: DataProto, temperature: float) -> Tensor:
        return self.engine.compute_log_prob(batch, temperature=temperature)

    def sleep(self) -> int:
        """How often its scheduler has released its memory when it should sleep."""
        self.engine._move_memory(SLEEP_TAGS, asleep=True)
        self.engine._asleep |= set(SLEEP_TAGS)
        return self.engine.remote.call("num_releases", deadline_s=scaled_s(60))

    def wake(self) -> None:
        self.engine._move_memory(SLEEP_TAGS, asleep=False)
        self.engine._asleep -= set(SLEEP_TAGS)


def receiver(folder: Path, config: GenerationConfig) -> Any:
    engine: Any = sglang_rank(folder, config, methods=counting_methods, load_format="dummy")
    engine.remote.call("learn", False, deadline_s=scaled_s(60))
    return StageReceiver(engine)


@pytest.fixture(scope="module")
def stages() -> Iterator[EveryRank]:
    yield from started(CONFIG, receiver)


@pytest.fixture
def wide_stages() -> Iterator[EveryRank]:
    """Each on two ranks, and not beside `stages`."""
    yield from started(CONFIG.model_copy(update={"tensor_model_parallel_size": 2}), receiver)


def push_thrice(ranks: EveryRank) -> None:
    """Compare all ranks' weights after each of three pushes, and the responses with those of transformers."""
    for version, sampled in pushes(ranks):
        partials = {one.rid: PartialResponse(one) for one in sampled}
        new, end_s = sampled, time.monotonic() + scaled_s(60)
        while any(partial.finish is None for partial in partials.values()):
            assert time.monotonic() < end_s, partials
            for delta in ranks._call("exchange", new, 0.2):
                partials[delta.rid].add(delta)
                assert set(delta.versions) <= {version}
            new = []
        batch = from_responses(prompt_batch(sampled, response_length=12), [one.response() for one in partials.values()])
        scores = ranks._call("score", batch, 0.9)
        torch.testing.assert_close(scores, batch.batch["rollout_log_probs"], atol=1e-4, rtol=0)
        for one in HFRollout(tiny_model(version), GenerationConfig(seed=11)).generate(sampled):
            response = partials[one.rid].response()
            assert response.output_tokens == one.output_tokens
            assert response.output_logprobs == pytest.approx(one.output_logprobs, abs=1e-4)
            assert response.sampled_logprobs == pytest.approx(one.sampled_logprobs, abs=1e-4)


def test_each_stage_holds_its_own_layers(stages: EveryRank) -> None:
    held = [{shard.box.tensor for shard in stages.call_rank(rank, "weight_layout").shards} for rank in range(2)]
    for rank, names in enumerate(held):
        assert any(name.startswith(LAYERS[rank]) for name in names)
        assert not any(name.startswith(LAYERS[1 - rank]) for name in names)
        assert "model.embed_tokens.weight" in names, "the head is tied"
    assert "model.norm.weight" not in held[0]
    assert "model.norm.weight" in held[1]


def test_every_push_reaches_both_stages_and_they_answer_with_it(stages: EveryRank) -> None:
    push_thrice(stages)


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_stops_both_stages_in_the_middle_of_responses(on_update: str, stages: EveryRank) -> None:
    for version in (0, 1):
        stages._call("update", version, on_update)
    new = [ModelRequest((5, 6, 7), SamplingParams(240, ignore_eos=True, seed=seed), str(seed)) for seed in range(3)]
    wholes = {one.rid: PartialResponse(one) for one in new}
    for version in (1, 2, 3):
        if version > 1:
            stages._call("update", version, on_update)
        end_s = time.monotonic() + scaled_s(60)
        while any(whole.versions.count(version) < 20 for whole in wholes.values()):
            assert time.monotonic() < end_s, wholes
            first, second = stages.call_each("exchange", new, 0.1)
            assert not second
            new = []
            for delta in first:
                assert not delta.error
                wholes[delta.rid].add(delta)
                new += [wholes[delta.rid].rest(delta.rid)] * (delta.finish is Finish.ABORT)
    assert all(list(whole.versions) == sorted(whole.versions) for whole in wholes.values())
    stages._call("exchange", [], 0.1, list(wholes))


def test_both_stages_sleep_when_a_call_says_so_and_serve_after_that(stages: EveryRank) -> None:
    for turn in (1, 2):
        assert stages.call_each("sleep") == [turn, turn]
        stages._call("wake")
    push_thrice(stages)


def test_stages_of_two_ranks_each(wide_stages: EveryRank) -> None:
    push_thrice(wide_stages)
