"""What servers write, and addresses, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.fleet.external.backends import BadResponseError, SGLangBackend, VLLMBackend, check
from rlsys.fleet.external.settings import server_urls
from rlsys.utils.errors import ConfigError

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
            try:
                delta = backend.read(event, seen)
                check(delta, room=8)
            except BadResponseError:
                continue
            assert all(type(token) is int for token in delta.tokens)
