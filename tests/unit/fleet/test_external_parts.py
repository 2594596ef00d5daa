"""Routing and addresses, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.fleet.external.backends import SGLangBackend, VLLMBackend
from rlsys.fleet.external.partial import BadResponseError, Delta, ServedResponse
from rlsys.fleet.external.router import Router
from rlsys.fleet.external.settings import RemoteSettings, server_urls
from rlsys.types import Finish, ModelRequest, SamplingParams
from rlsys.utils.errors import ConfigError

URLS = ["a", "b", "c", "d"]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "end", "fail", "tick", "readmit"]),
        st.integers(0, 3),
        st.sampled_from(["", "s1", "s2"]),
        st.sets(st.sampled_from(URLS), max_size=3),
    ),
    max_size=60,
)


@given(steps, st.sampled_from(["least_loaded", "round_robin"]))
def test_only_admitted_servers_are_chosen_and_sessions_stay(history: list, policy: str) -> None:
    clock = Clock()
    router = Router(
        RemoteSettings(tuple(URLS), policy=policy, breaker_failures=2, cooldown_s=1, max_cooldown_s=8), clock=clock
    )
    owners: dict[str, str] = {}
    for what, number, session, avoid in history:
        server = router.servers[number]
        if what == "ask":
            admitted = [s for s in router.servers if s.admitted]
            wanted = [s for s in admitted if s.url not in avoid] or admitted
            chosen = router.choose(session, avoid)
            assert chosen in wanted if wanted else chosen is None
            if chosen is None:
                continue
            if session in owners and owners[session] in {s.url for s in wanted}:
                assert chosen.url == owners[session]
            elif policy == "least_loaded":
                assert chosen.load == min(s.load for s in wanted)
            if session:
                owners[session] = chosen.url
            chosen.load += 1
        elif what == "end" and server.load:
            server.load -= 1
            router.succeeded(server)
            assert server.failures == 0
        elif what == "fail":
            router.failed(server, "why")
            assert server.admitted == (server.failures < 2) or not server.admitted
        elif what == "tick":
            clock.now_s += 1
        elif what == "readmit" and server in router.to_probe():
            router.readmit(server)


@given(st.integers(1, 60), st.integers(1, 4), st.sampled_from(["least_loaded", "round_robin"]))
def test_load_is_spread_evenly(num: int, num_servers: int, policy: str) -> None:
    router = Router(RemoteSettings(tuple(URLS[:num_servers]), policy=policy))
    for _ in range(num):
        server = router.choose()
        assert server is not None
        server.load += 1
    loads = [server.load for server in router.servers]
    assert sum(loads) == num
    assert max(loads) - min(loads) <= 1


def test_the_cool_down_grows_and_is_forgotten_by_a_steady_server() -> None:
    clock = Clock()
    router = Router(RemoteSettings(("a",), breaker_failures=2, cooldown_s=1, max_cooldown_s=3), clock=clock)
    (server,) = router.servers
    assert not router.failed(server, "x")
    waits = []
    for _ in range(4):
        router.trip(server, "x")
        waits.append(server.probe_at_s - clock.now_s)
        assert not router.to_probe()
        clock.now_s = server.probe_at_s
        assert router.to_probe() == [server]
        router.readmit(server)
    assert waits == [1, 2, 3, 3]
    assert not router.failed(server, "x")
    assert router.failed(server, "x")
    router.readmit(server)
    for _ in range(20):
        router.succeeded(server)
    router.trip(server, "x")
    assert server.probe_at_s - clock.now_s == 1


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=8))
def test_a_draft_is_what_its_parts_are(total: int, parts: list[tuple[int, int, bool]]) -> None:
    partial = ServedResponse(ModelRequest((1, 2), SamplingParams(total, min_new_tokens=5)))
    tokens: list[int] = []
    for size, version, aborted in [*parts, (total, 3, False)]:
        if partial.finish is not None:
            break
        assert partial.rest().input_ids == (1, 2, *tokens)
        assert partial.rest().gconfig.max_new_tokens == total - len(tokens) == partial.room
        assert partial.rest().gconfig.min_new_tokens == max(0, 5 - len(tokens))
        part = list(range(len(tokens), len(tokens) + min(size, partial.room)))
        partial.add(Delta(part, [-0.5] * len(part), [], Finish.ABORT if aborted else None), [version] * len(part))
        tokens += part
    response = partial.response()
    assert response.output_tokens == tuple(range(total))
    assert response.stop_reason is Finish.LENGTH
    with pytest.raises(BadResponseError):
        partial.add(Delta([1], [-1.0]), [0])


ADDRESSES = {
    "http://h:8000/v1": ("http://h:8000",),
    "h:1, https://g:2/": ("http://h:1", "https://g:2"),
    "http://[::1]:30000": ("http://[::1]:30000",),
    "h:1,h:1/v1": ("http://h:1",),
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses_are_read(text: str) -> None:
    assert server_urls("vllm", [text], {}) == ADDRESSES[text]
    assert server_urls("vllm", [], {"VLLM_API_BASE": text}) == ADDRESSES[text]
    assert server_urls("sglang", [], {"AREAL_LLM_SERVER_ADDRS": text}) == ADDRESSES[text]
    assert server_urls("vllm", ["x:1"], {"VLLM_API_BASE": text}) == ("http://x:1",)


@pytest.mark.parametrize(
    "text", ["ftp://h:1", "http://u:pass@h:1", "http://h:1/api", "http://:1", "h:99999", "http://h?x"]
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_urls("vllm", [text], {})
    assert "pass@" not in str(caught.value)


def test_no_address_names_the_variables() -> None:
    with pytest.raises(ConfigError, match="VLLM_API_BASE or AREAL_LLM_SERVER_ADDRS"):
        server_urls("vllm", [], {})


def test_spans_of_versions_are_read_token_by_token() -> None:
    about = {
        "completion_tokens": 5,
        "output_token_logprobs": [[-1.0, token, None] for token in range(5)],
        "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 5}],
        "finish_reason": None,
    }
    delta = SGLangBackend().read({"meta_info": about}, 2)
    assert (delta.tokens, delta.stamps) == ([2, 3, 4], ["1", "2", "2"])


def test_older_vllm_servers_write_ids_as_text() -> None:
    choice = {"text": "", "logprobs": {"tokens": ["token_id:7", "token_id:11"], "token_logprobs": [-0.1, -0.2]}}
    delta = VLLMBackend().read({"model": "m", "choices": [choice]}, 0)
    assert (delta.tokens, delta.logprobs) == ([7, 11], [-0.1, -0.2])
    choice["logprobs"]["tokens"] = [" a", " b"]
    with pytest.raises(BadResponseError, match="return_token_ids"):
        VLLMBackend().read({"model": "m", "choices": [choice]}, 0)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "meta_info",
                        "choices",
                        "logprobs",
                        "token_ids",
                        "token_logprobs",
                        "finish_reason",
                        "type",
                        "completion_tokens",
                        "output_token_logprobs",
                        "weight_versions",
                        "start",
                        "end",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    st.integers(0, 3),
)
def test_any_json_is_a_delta_or_a_bad_answer(event: object, seen: int) -> None:
    for backend in (SGLangBackend(), VLLMBackend()):
        if isinstance(event, dict):
            partial = ServedResponse(ModelRequest((1,), SamplingParams(8)))
            try:
                delta = backend.read(event, seen)
                partial.add(delta, [0] * len(delta.stamps))
            except BadResponseError:
                continue
            assert all(type(token) is int for token in partial.tokens)
