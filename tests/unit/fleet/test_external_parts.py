"""What servers write, and addresses, without a network."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import load_config
from rlsys.fleet.external.backends import BadResponseError, SGLangBackend, VLLMBackend, check
from rlsys.fleet.external.settings import MAX_TOKEN_ID, server_urls
from rlsys.utils.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
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
                check(delta, room=8, vocab_size=MAX_TOKEN_ID)
            except BadResponseError:
                continue
            assert all(type(token) is int for token in delta.tokens)


def test_the_compose_file_starts_our_script_and_a_job_that_finds_the_server(tmp_path: Path) -> None:
    values = {"MODEL": str(tmp_path), "TRAIN": str(tmp_path / "train.jsonl")}
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}')
    text = (SCRIPTS.parent / "docker-compose.areal.yml").read_text()
    filled = re.sub(r"\$\{(\w+):[?-]([^}]*)\}", lambda match: values.get(match[1], match[2]), text)
    server, trainer = (yaml.safe_load(filled)["services"][name] for name in ("vllm", "trainer"))
    shell, script, model = server["entrypoint"]
    assert (shell, script, model) == ("bash", "/scripts/run_vllm_base.sh", values["MODEL"])
    assert "./scripts:/scripts:ro" in server["volumes"]
    subprocess.run([shell, "-n", SCRIPTS / Path(script).name], check=True)
    python, dash_m, module, *overrides = trainer["command"]
    assert (python, dash_m, module) == ("python", "-m", "trainer.main_ppo")
    rollout = load_config(overrides).actor_rollout_ref.rollout
    assert rollout.name == "vllm_remote"
    assert server_urls("vllm", (), trainer["environment"]) == ("http://127.0.0.1:8000",)
    assert server["healthcheck"]["test"][-1] == "http://127.0.0.1:8000/health"
    assert {v.partition(":")[2] for v in server["volumes"]} >= {rollout.servers.weights_dir}


def test_run_scripts_are_open_to_others_only_with_a_token(tmp_path: Path) -> None:
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE $*"\n')
    shown.chmod(0o755)

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "PYTHON": str(shown), **environment}
        return subprocess.run([SCRIPTS / script, "m"], env=env, capture_output=True, text=True)

    everywhere, token = {"HOST": "0.0.0.0"}, {"RLSYS_SERVER_TOKEN": "secret"}
    for script in ("run_sglang.sh", "run_vllm_base.sh", "run_vllm_training.sh"):
        assert "set RLSYS_SERVER_TOKEN" in run(script, **everywhere).stderr
        assert "secret" not in run(script, **everywhere, **token).stdout
    assert run("run_vllm_base.sh").stdout.startswith("1 ")
    assert not run("run_vllm_base.sh", **everywhere, **token).stdout.startswith("1")
    guarded = run("run_vllm_base.sh", **everywhere, **token, PROCESS_GROUP="1").stdout
    assert guarded.startswith("1 ")
    assert "--middleware rlsys.rollout.vllm.server.RequireToken" in guarded
