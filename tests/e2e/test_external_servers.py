"""Whole runs that generate on servers outside: small ones of ours here, real vLLM and SGLang in the slow suite."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.hf.engine import HFRollout
from tests.e2e.conftest import Toy
from tests.servers import EngineBrain, SampledBrain, Server
from trainer.main_ppo import main


@pytest.fixture
def servers(request: pytest.FixtureRequest, toy: Toy) -> Iterator[list[Server]]:
    """Two servers of one kind with the toy model."""
    kind = request.param
    brain = EngineBrain if kind == "sglang" else SampledBrain
    engines = [HFRollout.from_path(toy.model, GenerationConfig(seed=number)) for number in range(2)]
    started = [Server(kind, brain(engine)).start() for engine in engines]
    yield started
    for server in started:
        server.close()
    for engine in engines:
        engine.close()


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("servers", ["sglang", "vllm"], indirect=True)
def test_a_run_trains_on_what_external_servers_write(
    toy: Toy, servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers follow the trainer: what they say of their tokens is what the trainer computes, step by step."""
    kind, out = servers[0].kind, tmp_path / "out"
    variable = "AREAL_LLM_SERVER_ADDRS" if kind == "sglang" else "VLLM_API_BASE"
    monkeypatch.setenv(variable, ",".join(f"{server.url}/v1" for server in servers))
    arguments = toy.overrides(
        out,
        "trainer.backend=local",
        f"inference.backend={kind}",
        "trainer.test_freq=3",
        f"reward.custom_reward_function.path={toy.grader}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    assert main(arguments) == 0
    lines = lines_of(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["training/rollout_probs_diff_max"] < 1e-4
        assert line["actor/grad_norm"] > 0
        assert line["rollout/pending"] == 0
        assert line["rollout/replicas_ready"] == 2
        assert line["weights/version"] == line["step"]
    assert all(server.version == "3" for server in servers)
    assert all(len(server.requests) > 20 for server in servers)
    assert sorted(path.name for path in (out / "served_weights").iterdir()) == ["v2", "v3"]


@pytest.mark.parametrize("servers", ["vllm"], indirect=True)
def test_adapters_are_pushed_by_version_while_the_base_stays(toy: Toy, servers: list[Server], tmp_path: Path) -> None:
    out = tmp_path / "out"
    urls = ",".join(server.url for server in servers)
    arguments = toy.overrides(
        out,
        "trainer.backend=local",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.name=vllm_remote",
        f"actor_rollout_ref.rollout.servers.urls=[{urls}]",
        "actor_rollout_ref.rollout.servers.lora_name=actor",
        "actor_rollout_ref.model.lora_rank=4",
    )
    assert main(arguments) == 0
    for server in servers:
        assert list(server.adapters) == ["actor-v1", "actor-v2"]
        assert server.seen["/collective_rpc"] == 0
        assert {body["model"] for body in server.requests} == {"actor-v0", "actor-v1"}
    folder = Path(servers[0].adapters["actor-v2"])
    assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}


def test_a_missing_address_is_reported_before_anything_starts(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VLLM_API_BASE", raising=False)
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    assert main(toy.overrides(tmp_path / "out", "trainer.backend=local", "inference.backend=vllm")) == 2
    assert "actor_rollout_ref.rollout.servers.urls: no address of a vllm server" in capsys.readouterr().err
