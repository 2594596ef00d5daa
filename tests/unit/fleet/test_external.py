"""Remote engines against real HTTP servers on 127.0.0.1 that misbehave."""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rlsys.config.schema.rollout import ServersConfig
from rlsys.fleet.external.capabilities import SERVERS
from rlsys.fleet.external.engine import RemoteEngine, SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.types import Finish, LLMRequest, LLMResponse, ModelRequest, ModelResponse, SamplingParams, WeightUpdateMeta
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.servers import RuleBrain, Server
from tests.timing import scaled_s, wait_until

ENGINES = {"sglang": SGLangRemoteEngine, "vllm": VLLMRemoteEngine}
FAST = RemoteSettings(
    ("http://x",),
    ServersConfig(timeout_s=2.0),
    health_s=0.1,
    cooldown_s=0.1,
    max_cooldown_s=0.2,
    max_backoff_s=0.05,
    health_deadline_s=2,
    start_s=5,
    request_s=20,
    stop_grace_s=1,
)


class Fleet:
    """Some servers and an engine over them, closed together."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.servers: list[Server] = []
        self.engines: list[RemoteEngine] = []

    def serve(self, num: int = 1, *, delay_s: float = 0.0, **options: Any) -> list[Server]:
        made = [Server(self.kind, RuleBrain(delay_s=delay_s), **options).start() for _ in range(num)]
        self.servers += made
        return made

    def hold(self, most_tokens: int | None) -> None:
        """Have answers wait after so many tokens, or continue."""
        for server in self.servers:
            server.brain.most_tokens = most_tokens

    def engine(self, *servers: Server, **changes: Any) -> RemoteEngine:
        urls = tuple(server.url for server in servers)
        times = ("health_deadline_s", "start_s", "request_s")
        limits: dict[str, Any] = {name: scaled_s(getattr(FAST, name)) for name in times}
        section = {name: changes.pop(name) for name in [*changes] if name in ServersConfig.model_fields}
        limits["servers"] = ServersConfig(**{"timeout_s": scaled_s(2.0), **section})
        self.engines.append(ENGINES[self.kind](replace(FAST, **{**limits, "urls": urls, **changes})))
        return self.engines[-1]


@pytest.fixture(params=ENGINES)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(request.param)
    yield fleet
    for closing in (*fleet.engines, *fleet.servers):
        closing.close()


@pytest.fixture
def sglang() -> Iterator[Fleet]:
    fleet = Fleet("sglang")
    yield fleet
    for closing in (*fleet.engines, *fleet.servers):
        closing.close()


def requests_of(num: int, num_tokens: int = 12) -> list[ModelRequest]:
    params = SamplingParams(num_tokens)
    return [ModelRequest((7, 8, number), params, rid=f"r{number}") for number in range(num)]


def ruled(request: ModelRequest, weights: str = "") -> list[tuple[int, float]]:
    """The tokens and log-probabilities that a server with these weights gives."""
    brain, ids, drawn = RuleBrain(), list(request.input_ids), []
    brain.weights = weights
    for _ in range(request.gconfig.max_new_tokens):
        token = brain.follow(ids)
        ids.append(token.id)
        drawn.append((token.id, token.logprob))
    return drawn


def assert_whole(responses: list[ModelResponse], requests: list[ModelRequest]) -> None:
    """Every answer is complete and as one uninterrupted server would have given it."""
    assert [response.rid for response in responses] == [request.rid for request in requests]
    for response, request in zip(responses, requests, strict=True):
        assert list(zip(response.output_tokens, response.output_logprobs, strict=True)) == ruled(request)
        assert response.stop_reason is Finish.LENGTH
        assert len(response.output_versions) == len(response.sampled_logprobs) == len(response.output_tokens)


def num_tokens(engine: RemoteEngine) -> int:
    return sum(len(partial.tokens) for partial in engine.unfinished())


def wait_for(happened: Callable[[], object]) -> None:
    assert wait_until(happened), "it did not happen"


FAULTS = [
    *("500", "502", "429", "503", "307", "401", "404", "text"),
    *("cut:1", "cut:5", "hang:4", "garbage", "huge", "length", "missing", "nan", "unfinished:6", "abort:3"),
]


def test_tokens_that_the_trained_model_does_not_have_are_an_error(fleet: Fleet) -> None:
    config = LlamaConfig(vocab_size=500)
    engine = fleet.engine(*fleet.serve(), hf_config=config, request_s=scaled_s(1.0), max_retries=1)
    with pytest.raises(RolloutError, match=r"is not a token id of the trained model, below 500"):
        engine.generate(requests_of(2, 40))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_is_whole_whatever_one_server_does(fleet: Fleet, fault: str) -> None:
    bad, good = fleet.serve(2)
    hangs = fault.startswith("hang")
    engine = fleet.engine(bad, good, timeout_s=scaled_s(0.5 if hangs else 20.0))
    engine.connect()
    bad.faults.extend([fault] * 2)
    bad.redirect_url = good.url
    requests = requests_of(6)
    assert_whole(engine.generate(requests), requests)
    counts = engine.metrics()
    assert (counts["rollout/answered"], counts["rollout/pending"], counts["rollout/dropped"]) == (6, 0, 0)
    assert not bad.faults
    retries = counts["rollout/retries"]
    assert retries == (0 if fault.startswith("abort") else 2) or (hangs and retries > 2)
    assert counts["rollout/continued"] == (2 if fault.startswith("abort") else 0)


def test_tokens_before_a_cut_are_not_asked_for_again(fleet: Fleet) -> None:
    first, second = fleet.serve(2)
    engine = fleet.engine(first, second)
    engine.connect()
    first.faults.append("cut:5")
    second.faults.append("cut:4")
    (request,) = requests_of(1)
    assert_whole(engine.generate([request]), [request])
    asked = [body.get("input_ids") or body["prompt"] for server in (first, second) for body in server.requests]
    assert sorted(map(len, asked)) == [3, 8, 12]
    limits = [body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in first.requests]
    assert limits == [12, 3]


def test_a_server_that_only_fails_is_named_with_every_cause(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    engine = fleet.engine(server, max_retries=2, breaker_failures=9)
    engine.connect()
    server.faults.extend(["500", "nan", "500"])
    with pytest.raises(RolloutError, match="r0 failed 3 times") as caught:
        engine.generate(requests_of(1))
    text = str(caught.value)
    assert text.count(server.url) >= 3
    assert "HTTP 500: fault requested by the test" in text
    assert "not a log-probability" in text


def test_a_request_the_server_refuses_is_not_retried(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    engine = fleet.engine(server)
    server.faults.append("400")
    with pytest.raises(ValueError, match=r"r0.*HTTP 400: fault requested by the test"):
        engine.generate(requests_of(1))
    assert len(server.requests) == 1
    for ids, params in [((), SamplingParams(4)), ((-1,), SamplingParams(4)), ((3,), SamplingParams(0))]:
        with pytest.raises(ValueError, match="culprit"):
            engine.generate([ModelRequest(ids, params, rid="culprit")])


def test_deadlines_name_the_server_and_the_stage(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    engine = fleet.engine(server, request_s=scaled_s(0.5), timeout_s=30.0, max_retries=0)
    engine.connect()
    server.faults.append("hang:2")
    with pytest.raises(RolloutError, match=f"(?s)r0 failed 1 times.*{server.url}.*'generate'.*got no token"):
        engine.generate(requests_of(1))
    server.stop()
    unreachable = fleet.engine(server, start_s=scaled_s(0.3))
    with pytest.raises(DeadlineError, match=f"{server.url}.*'start'.*Connect"):
        unreachable.connect()


def test_a_server_that_dies_is_one_warning_for_all_its_open_requests(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = fleet.serve(2)
    engine = fleet.engine(bad, good)
    engine.connect()
    bad.faults.append("die:6")
    requests = requests_of(12)
    assert_whole(engine.generate(requests), requests)
    warnings = [record for record in caplog.records if record.funcName == "_answer" and record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert bad.url in warnings[0].getMessage()


def test_the_breaker_opens_and_a_server_that_comes_back_is_readmitted(fleet: Fleet) -> None:
    bad, good = fleet.serve(2)
    engine = fleet.engine(bad, good, breaker_failures=2)
    engine.connect()
    bad.faults.append("die:2")
    requests = requests_of(12)
    assert_whole(engine.generate(requests), requests)
    assert_whole(engine.generate(requests), requests)
    wait_for(lambda: engine.metrics()["rollout/replicas_ready"] == 1)
    before = len(bad.requests)
    engine.generate(requests)
    assert len(bad.requests) == before
    bad.restart()
    wait_for(lambda: engine.metrics()["rollout/replicas_ready"] == 2)
    engine.generate(requests)
    assert len(bad.requests) > before
    assert engine.metrics()["rollout/restarts"] >= 1


def test_a_restarted_server_gets_the_weights_before_it_serves(fleet: Fleet) -> None:
    one, other = fleet.serve(2)
    engine = fleet.engine(one, other, breaker_failures=1)
    engine.update_weights(WeightUpdateMeta(4, weights_path="/weights/4")).result(scaled_s(10))
    one.stop()
    requests = requests_of(8)
    engine.generate(requests)
    one.restart()
    wait_for(lambda: engine.metrics()["rollout/replicas_ready"] == 2 and one.version == "4")
    before = len(one.requests)
    for response, request in zip(engine.generate(requests), requests, strict=True):
        assert list(response.output_tokens) == [token for token, _ in ruled(request, "/weights/4")]
        assert set(response.output_versions) == {4}
    assert len(one.requests) > before


def test_tokens_of_wrong_weights_are_refused(sglang: Fleet) -> None:
    """A server that was restarted between two health checks gives itself away by the version it stamps."""
    one, other = sglang.serve(2)
    engine = sglang.engine(one, other, health_s=30)
    engine.update_weights(WeightUpdateMeta(4, weights_path="/weights/4")).result(scaled_s(10))
    one.stop()
    one.restart()
    requests = requests_of(6)
    for response, request in zip(engine.generate(requests), requests, strict=True):
        assert list(response.output_tokens) == [token for token, _ in ruled(request, "/weights/4")]
    wait_for(lambda: one.version == "4")


def test_no_request_is_lost_when_weights_change_in_flight(fleet: Fleet) -> None:
    engine = fleet.engine(*fleet.serve(3), timeout_s=scaled_s(20))
    requests = requests_of(24, num_tokens=60)
    fleet.hold(15)
    answers: list[ModelResponse] = []
    thread = threading.Thread(target=lambda: answers.extend(engine.generate(requests)))
    thread.start()
    for version in (1, 2):
        wait_for(lambda: num_tokens(engine) == version * 24 * 15)  # noqa: B023
        engine.update_weights(WeightUpdateMeta(version, weights_path=f"/weights/{version}")).result(scaled_s(10))
        assert engine.get_version() == version
    fleet.hold(None)
    thread.join(scaled_s(20))
    assert [answer.rid for answer in answers] == [request.rid for request in requests]
    paths = {0: "", 1: "/weights/1", 2: "/weights/2"}
    for answer in answers:
        assert answer.stop_reason is Finish.LENGTH
        assert set(answer.output_versions) == {0, 1, 2}
        assert list(answer.output_versions) == sorted(answer.output_versions)
        brain, ids = RuleBrain(), list(answer.input_tokens)
        for token, version in zip(answer.output_tokens, answer.output_versions, strict=True):
            brain.weights = paths[version]
            assert token == brain.follow(ids).id
            ids.append(token)


def test_requests_that_come_while_weights_are_loaded_wait_for_them(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    engine = fleet.engine(server)
    engine.connect()
    is_loading, may_load, load = threading.Event(), threading.Event(), server.brain.reload
    server.brain.reload = lambda path: (is_loading.set(), may_load.wait(scaled_s(10)), load(path))
    updated = engine.update_weights(WeightUpdateMeta(1, weights_path="/weights/1"))
    assert is_loading.wait(scaled_s(10))
    answers = engine.submit(requests_of(2))
    may_load.set()
    updated.result(scaled_s(10))
    assert {version for answer in answers for version in answer.result(scaled_s(10)).output_versions} == {1}


def test_a_server_without_a_pause_route_is_interrupted_by_hanging_up(fleet: Fleet) -> None:
    (server,) = fleet.serve(dev=False)
    engine = fleet.engine(server, stop_grace_s=scaled_s(60), timeout_s=scaled_s(20))
    requests = requests_of(4, num_tokens=100)
    fleet.hold(10)
    answers = engine.submit(requests)
    wait_for(lambda: num_tokens(engine) > 20)
    started_s = time.monotonic()
    engine.pause()
    assert time.monotonic() - started_s < scaled_s(20)
    wait_for(lambda: server.open == 0)
    fleet.hold(None)
    assert not any(answer.done() for answer in answers)
    assert num_tokens(engine) <= 40
    engine.resume()
    assert_whole([answer.result(scaled_s(20)) for answer in answers], requests)
    assert engine.metrics()["rollout/continued"] == 4


def test_an_update_that_no_server_takes_is_an_error_and_quarantines(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    engine = fleet.engine(server)
    engine.connect()
    server.update_status = 400
    with pytest.raises(WeightTransferError, match=f"(?s)no server took version 2.*{server.url}.*HTTP 400.*weights_dir"):
        engine.update_weights(WeightUpdateMeta(2, weights_path="/nowhere")).result(scaled_s(10))
    with pytest.raises(WeightTransferError, match="quarantine"):
        engine.generate(requests_of(1))
    assert engine.get_version() == 0
    server.update_status = 200
    engine.update_weights(WeightUpdateMeta(3, weights_path="/weights/3")).result(scaled_s(10))
    assert engine.generate(requests_of(1))[0].version == 3


def test_one_server_that_cannot_take_an_update_serves_again_once_it_has(fleet: Fleet) -> None:
    bad, good = fleet.serve(2)
    engine = fleet.engine(bad, good)
    engine.connect()
    bad.update_status = 500
    engine.update_weights(WeightUpdateMeta(2, weights_path="/weights/2")).result(scaled_s(10))
    assert not engine.health()["servers"][bad.url]["is_admitted"]
    assert {v for r in engine.generate(requests_of(4)) for v in r.output_versions} == {2}
    bad.update_status = 200
    wait_for(lambda: engine.health()["servers"][bad.url]["is_admitted"])
    assert bad.brain.weights == "/weights/2"


def test_adapters_change_without_interrupting_anything() -> None:
    fleet = Fleet("vllm")
    (server,) = fleet.serve(dev=False)
    engine = fleet.engine(server, keep_adapters=2, timeout_s=scaled_s(20))

    def push_adapter(version: int) -> None:
        meta = WeightUpdateMeta(version, weights_path=f"/a/{version}", metadata={"lora_name": "actor"})
        engine.update_weights(meta).result(scaled_s(10))

    try:
        push_adapter(1)
        answers: list[ModelResponse] = []
        fleet.hold(20)
        thread = threading.Thread(target=lambda: answers.extend(engine.generate(requests_of(3, num_tokens=50))))
        thread.start()
        wait_for(lambda: num_tokens(engine) == 3 * 20)
        push_adapter(2)
        assert {v for r in engine.generate(requests_of(2)) for v in r.output_versions} == {2}
        fleet.hold(None)
        thread.join(scaled_s(10))
        assert {v for r in answers for v in r.output_versions} == {1}
        assert {body["model"] for body in server.requests} == {"actor-v1", "actor-v2"}
        assert len(server.requests) == 5
        push_adapter(3)
        assert server.adapters == {"actor-v2": "/a/2", "actor-v3": "/a/3"}
        server.stop()
        server.restart()
        engine.generate(requests_of(2))
        assert server.adapters == {"actor-v3": "/a/3"}
    finally:
        for closing in (engine, server):
            closing.close()


def test_an_adapter_that_a_server_lost_is_loaded_again(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    engine = fleet.engine(server)
    meta = WeightUpdateMeta(1, weights_path="/a/1", metadata={"lora_name": "actor"})
    engine.update_weights(meta).result(scaled_s(10))
    server.stop()
    server.restart()
    assert {v for r in engine.generate(requests_of(2)) for v in r.output_versions} == {1}
    assert server.adapters == {"actor-v1": "/a/1"}


def test_log_probs_before_the_temperature_are_refused() -> None:
    fleet = Fleet("vllm")
    (server,) = fleet.serve()
    server.mode = "raw"
    engine = fleet.engine(server)
    try:
        assert engine.generate(requests_of(1))[0].output_logprobs
        hot = [replace(request, gconfig=SamplingParams(4, temperature=0.7)) for request in requests_of(1)]
        with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
            engine.generate(hot)
        greedy = [replace(request, gconfig=SamplingParams(4, temperature=0.0)) for request in requests_of(1)]
        assert engine.generate(greedy)[0].sampled_logprobs == (0.0,) * 4
    finally:
        for closing in (engine, server):
            closing.close()


@pytest.mark.parametrize(
    ("kind", "release", "taken", "refused"),
    [
        ("vllm", "0.32.0", [{}, {"lora_name": "a"}], []),
        ("vllm", "0.13.0", [{"lora_name": "a"}], [{}]),
        ("vllm", "", [{}, {"lora_name": "a"}], []),
        ("sglang", "0.5.23", [{}], []),
        ("sglang", "0.4.6.post5", [{}], [{"lora_name": "a"}]),
    ],
)
def test_a_server_is_given_only_what_its_version_takes(
    kind: str, release: str, taken: list[dict[str, Any]], refused: list[dict[str, Any]]
) -> None:
    fleet = Fleet(kind)
    (server,) = fleet.serve()
    server.release = release
    engine = fleet.engine(server)
    try:
        for number, about in enumerate(refused):
            with pytest.raises(
                WeightTransferError, match=rf"{kind} {re.escape(release)}: servers of this version cannot load"
            ):
                engine.update_weights(WeightUpdateMeta(number, weights_path="/w", metadata=about)).result(scaled_s(20))
        assert not server.adapters
        for number, about in enumerate(taken, 10):
            engine.update_weights(WeightUpdateMeta(number, weights_path="/w", metadata=about)).result(scaled_s(20))
            assert engine.get_version() == number
        assert engine.health()["servers"][server.url]["version"] == release
    finally:
        for closing in (*fleet.engines, *fleet.servers):
            closing.close()


def test_a_server_that_is_too_old_is_refused_with_the_table(fleet: Fleet) -> None:
    (server,) = fleet.serve()
    server.release = "0.4.2"
    with pytest.raises(DeadlineError, match=r"0\.4\.2: not in the table") as refusal:
        fleet.engine(server, start_s=scaled_s(0.5)).connect()
    assert all(row.versions in str(refusal.value) for row in SERVERS[fleet.kind].rows)
    assert not server.requests


def test_a_head_that_vllm_would_keep_is_refused(tmp_path: Path) -> None:
    """vLLM on CPU reloads everything but the packed head of a tied model."""
    fleet = Fleet("vllm")
    (server,) = fleet.serve()
    server.device = "cpu"
    engine = fleet.engine(server)
    try:
        for tied in (False, True):
            (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
            update = engine.update_weights(WeightUpdateMeta(1, weights_path=str(tmp_path)))
            if not tied:
                update.result(scaled_s(10))
                continue
            with pytest.raises(WeightTransferError, match="keeps the old head"):
                update.result(scaled_s(10))
    finally:
        for closing in (engine, server):
            closing.close()


def test_no_more_than_the_limit_is_out_at_once(fleet: Fleet) -> None:
    servers = fleet.serve(2, delay_s=0.005)
    engine = fleet.engine(*servers, max_concurrent=6)
    requests = requests_of(40)
    assert_whole(engine.generate(requests), requests)
    assert 2 <= max(server.most_open for server in servers) <= 4


def test_incremental_streams_read_the_same(sglang: Fleet) -> None:
    whole, parts = sglang.serve(1)[0], sglang.serve(1, incremental=True)[0]
    requests = requests_of(3)
    assert_whole(sglang.engine(whole).generate(requests), requests)
    assert_whole(sglang.engine(parts).generate(requests), requests)


async def test_a_session_stays_on_its_server(fleet: Fleet) -> None:
    servers = fleet.serve(3)
    engine = fleet.engine(*servers)
    for turn in range(4):
        await asyncio.gather(
            *(
                engine.sample(ModelRequest((3, turn, episode), SamplingParams(2), session=f"e{episode}"))
                for episode in range(6)
            )
        )
    for server in servers:
        prompts = [body.get("input_ids") or body["prompt"] for body in server.requests]
        episodes = [ids[2] for ids in prompts]
        assert all(episodes.count(episode) == 4 for episode in episodes)


def test_equal_prompts_meet_under_affinity(fleet: Fleet) -> None:
    servers = fleet.serve(3)
    engine = fleet.engine(*servers, policy="affinity")
    engine.generate([request for request in requests_of(9) for _ in range(4)])
    for server in servers:
        prompts = [tuple(body.get("input_ids") or body["prompt"]) for body in server.requests]
        assert prompts
        assert all(prompts.count(prompt) == 4 for prompt in prompts)


def test_a_vllm_server_out_of_development_mode_is_named_with_what_it_lacks() -> None:
    fleet = Fleet("vllm")
    (server,) = fleet.serve(dev=False)
    engine = fleet.engine(server)
    try:
        with pytest.raises(WeightTransferError, match=r"(?s)HTTP 404.*/collective_rpc.*VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(WeightUpdateMeta(2, weights_path="/weights/2")).result(scaled_s(10))
    finally:
        for closing in (engine, server):
            closing.close()


def test_the_token_is_sent_and_never_shown(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cret-t0ken"
    (server,) = fleet.serve(token=secret)
    caplog.set_level(logging.DEBUG)
    engine = fleet.engine(server, token=secret)
    requests = requests_of(2)
    assert_whole(engine.generate(requests), requests)
    server.faults.append("500")
    engine.generate(requests)
    shown = [repr(engine.settings), str(engine.health()), caplog.text]
    unauthorized = fleet.engine(server, token="wrong", start_s=scaled_s(0.3))
    with pytest.raises(DeadlineError, match=r"the token is missing or wrong.*rollout\.servers\.token_env") as caught:
        unauthorized.connect()
    assert secret not in "".join([*shown, str(caught.value)])


def test_scores_are_those_of_the_server(fleet: Fleet) -> None:
    from rlsys.protocol import DataProto

    (server,) = fleet.serve()
    engine = fleet.engine(server)
    (request,) = requests_of(1, num_tokens=4)
    expected = ruled(request)
    ids = [0, *request.input_ids, *(token for token, _ in expected), 0]
    rows = {
        "responses": torch.tensor([[*ids[4:8], 0]]),
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0]]),
    }
    scores = engine.compute_log_prob(DataProto.from_dict(rows)).batch["rollout_log_probs"]
    torch.testing.assert_close(scores, torch.tensor([[value for _, value in expected] + [0.0]]))
    with pytest.raises(ValueError, match="temperature 1 only"):
        engine.compute_log_prob(DataProto.from_dict(rows, meta_info={"temperature": 0.5}))


class Doubling:
    """An AReaL workflow: two answers a row, one after the other; rows that say so are rejected."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        if data.get("reject"):
            return None
        if data.get("fail"):
            raise KeyError("no such answer")
        params = SamplingParams(data["length"])
        first = await engine.agenerate(ModelRequest(tuple(data["ids"]), params))
        second = await engine.agenerate(ModelRequest(first.input_tokens + first.output_tokens, params))
        ids = second.input_tokens + second.output_tokens
        versions = (-1,) * len(data["ids"]) + first.output_versions + second.output_versions
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
            "versions": torch.tensor([versions]),
            "rewards": torch.tensor([float(len(ids))]),
        }


class Letters:
    """A tokenizer: the letters of the alphabet, from 1 on."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + token) for token in ids)


def test_requests_in_text_are_answered_in_text(fleet: Fleet) -> None:
    engine = fleet.engine(*fleet.serve(1))
    request = LLMRequest(text="ab", generation_config={"max_new_tokens": 3, "temperature": 1.0}, request_id="7")
    with pytest.raises(ValueError, match=r"engine\.tokenizer"):
        asyncio.run(engine.agenerate(request))
    engine.tokenizer = Letters()
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.2: .* set 1 or leave it out"):
        asyncio.run(engine.agenerate(LLMRequest(text="ab", generation_config={"repetition_penalty": 1.2})))
    assert not engine.session.closed
    answer = asyncio.run(engine.agenerate(request))
    expected = ruled(ModelRequest((1, 2), SamplingParams(3)))
    assert isinstance(answer, LLMResponse)
    assert answer.text == Letters().decode([token for token, _ in expected], skip_special_tokens=True)
    assert answer.logprobs == pytest.approx([value for _, value in expected])
    assert (answer.finish_reason, answer.usage) == ("length", {"prompt_tokens": 2, "completion_tokens": 3})
    engine.close()
    assert engine.session.closed


def test_rollout_batch_pads_what_the_workflow_accepts(fleet: Fleet) -> None:
    engine = fleet.engine(*fleet.serve(2))
    rows = [{"ids": [5, 6], "length": 3}, {"reject": True}, {"ids": [9], "length": 5}]
    batch = engine.rollout_batch(rows, Doubling())
    assert batch.meta_info == {"accepted": 2, "rejected": 1}
    assert batch.batch["input_ids"].shape == (2, 11)
    assert batch.batch["rewards"].tolist() == [8.0, 11.0]
    assert batch.batch["attention_mask"].sum(1).tolist() == [8, 11]
    assert batch.batch["versions"][0].tolist() == [-1, -1, *[0] * 6, *[-1] * 3]
    expected = ruled(ModelRequest((9,), SamplingParams(10)))
    assert batch.batch["input_ids"][1].tolist() == [9, *(token for token, _ in expected)]
    with pytest.raises(KeyError) as caught:
        engine.rollout_batch([*rows, {"fail": True}], Doubling())
    assert caught.value.__notes__ == ["rollout_batch: row 3"]
    with pytest.raises(ValueError, match="rejected all 1"):
        engine.rollout_batch([{"reject": True}], Doubling())


def test_a_closed_engine_says_so(fleet: Fleet) -> None:
    (server,) = fleet.serve(delay_s=0.01)
    engine = fleet.engine(server)
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate(requests_of(1, num_tokens=1000))
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: num_tokens(engine) > 3)
    engine.close()
    thread.join(scaled_s(5))
    assert problems
    wait_for(lambda: server.open == 0)
    with pytest.raises(RolloutError, match="closed"):
        engine.generate(requests_of(1))


def test_the_engine_needs_no_pickle(fleet: Fleet) -> None:
    """What goes over the wire is JSON that another program could have written."""
    (server,) = fleet.serve()
    fleet.engine(server).generate(requests_of(1))
    assert json.loads(json.dumps(server.requests[0])) == server.requests[0]
