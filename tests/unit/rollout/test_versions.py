"""Version tables: which row a version chooses, what a refusal says, and whether the rows are what wheels have."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import (
    FalconH1Config,
    Lfm2Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

import rlsys
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.external.capabilities import ALL, SERVERS
from rlsys.rollout.base import EngineContext
from rlsys.rollout.sampling.hook import UNUSED, SampleSpec
from rlsys.rollout.versions import SGLANG, VLLM, VersionRow, VersionTable
from rlsys.rollout.vllm import engine_args
from rlsys.rollout.vllm.engine import VLLMRollout
from rlsys.utils.errors import ConfigError
from tests.wheels.sources import Sources
from tests.wheels.uses import lacking, lacking_routes, read_record

RECORD = read_record()
TABLES = {"vllm": VLLM, "sglang": SGLANG, "vllm server": SERVERS["vllm"], "sglang server": SERVERS["sglang"]}
NEEDED = {
    "vllm": {
        "files": {"/collective_rpc": {"method", "kwargs"}},
        "adapters": {"/v1/load_lora_adapter": {"lora_name", "lora_path"}, "/v1/unload_lora_adapter": {"lora_name"}},
    },
    "sglang": {
        "files": {"/update_weights_from_disk": {"model_path"}},
        "adapters": {"/load_lora_adapter": {"lora_name", "lora_path"}, "/unload_lora_adapter": {"lora_name"}},
    },
}
MISSED = {
    "vllm": {"return_token_ids", "config_format", "mode"},
    "sglang": {
        "sampling_params.sampling_seed",
        "mode",
        "weight_version",
    },
}
"""Names that old servers do not read, each with a reason in `test_what_old_servers_do_not_read_is_known`."""


def of_record(package: str, table: VersionTable[object]) -> Iterator[tuple[str, VersionRow[object] | None]]:
    for version in RECORD[package]:
        yield version, table.row(version)


@pytest.mark.parametrize(
    ("version", "features"),
    [
        *((version, {"ahead"}) for version in ("0.26.0", "0.26.0+cu129", "0.30.1")),
        ("0.31.0", {"ahead", "routes_of_runner_2"}),
        ("0.33.0", {"routes_of_runner_2"}),
    ],
)
def test_the_version_chooses_the_features(version: str, features: set[str]) -> None:
    assert set(VLLM.features(version)) == features


def test_steps_begin_ahead_only_where_that_ran() -> None:
    ahead = [row.versions for row in VLLM.rows if row.features and "ahead" in row.features]
    assert ahead == [row.versions for row in VLLM.rows if "ran on" in row.note]


@pytest.mark.parametrize("version", ["0.8.4", "0.8.5.post1", "0.25.1", "0.34.0", "1.0", "nightly"])
def test_a_refusal_holds_the_table_and_the_way_out(version: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        VLLM.features(version)
    text = str(refusal.value)
    assert version in text
    assert all(f"{row.versions}: " in text and row.note in text for row in VLLM.rows)
    assert "rollout.name=vllm_remote" in text


@pytest.mark.parametrize(
    ("version", "why"),
    [("0.12.0", "vLLM in this process 0.12.0: older than rlsys drives"), ("0.34.0", "0.34.0: not in the table")],
)
def test_an_engine_that_cannot_be_served_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, version: str, why: str
) -> None:
    monkeypatch.setattr(VersionTable, "installed", lambda table: version)
    with pytest.raises(ConfigError, match=why):
        VLLMRollout("/nowhere", GenerationConfig(), EngineContext())


def test_what_is_installed_is_read() -> None:
    rows = (VersionRow(">=8,<99", "new"), VersionRow("<8", None, "too old"))
    assert VersionTable("pytest", rows, ("no-such-thing", "pytest")).installed_features() == "new"
    with pytest.raises(ConfigError, match="x is not installed: get it"):
        VersionTable("x", rows, ("no-such-thing",), "get it").installed_features()


@pytest.mark.parametrize("name", TABLES)
def test_rows_do_not_overlap_and_every_row_was_read(name: str) -> None:
    table = TABLES[name]
    versions = RECORD[name.split()[0]]
    for version in versions:
        assert sum(version in row for row in table.rows) <= 1, version
    for row in table.rows:
        assert "newer than any" in row.note or any(version in row for version in versions), row.versions


def test_every_version_that_an_adapter_serves_has_every_name_it_uses() -> None:
    for version, row in of_record("vllm", VLLM):
        if row is not None and row.features is not None:
            assert not lacking("vllm", RECORD["vllm"][version]["symbols"]), version
    for version, row in of_record("sglang", SGLANG):
        assert row is not None
        assert row.features is None or not lacking("sglang", RECORD["sglang"][version]["symbols"]), version


@pytest.mark.parametrize("kind", SERVERS)
def test_servers_can_what_their_row_says_and_no_more(kind: str) -> None:
    for version in RECORD[kind]:
        capabilities, routes = SERVERS[kind].features(version), RECORD[kind][version]["routes"]
        for ability, needed in NEEDED[kind].items():
            has = all(names <= set(routes.get(route, ())) for route, names in needed.items())
            if kind == "vllm" and ability == "files":
                runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights"
                has = has and "weights_path=" in RECORD[kind][version]["symbols"].get(runner, ())
            assert (ability in capabilities) == has, f"{kind} {version} {ability}"


@pytest.mark.parametrize("kind", SERVERS)
def test_what_old_servers_do_not_read_is_known(kind: str) -> None:
    """A name that a server ignores must be one that we can do without.

    Token ids are then read from `token_id:17`; the device stays unknown; pausing aborts without a mode, too; seeds are
    only wishes; weights are then not named. What weights need is in the capabilities.
    """
    for version, found in RECORD[kind].items():
        names = {text.partition("(")[2].rstrip(")") for text in lacking_routes(kind, found["routes"]) if "(" in text}
        assert names <= MISSED[kind], version
        generate = "/generate" if kind == "sglang" else "/v1/completions"
        assert {"/health", generate} <= set(found["routes"]), version


@pytest.mark.parametrize(
    ("model", "settings", "runs_ahead", "asked", "runner"),
    [
        (Qwen2Config(), {}, True, None, "1"),
        (Qwen2Config(), {"tensor_model_parallel_size": 2}, True, None, "1"),
        (Qwen2Config(), {}, False, None, "0"),
        (Qwen2Config(), {"full_determinism": True}, True, None, "0"),
        (Qwen2Config(), {"quantization": "fp8"}, True, None, "1"),
        (Qwen3MoeConfig(), {"quantization": "fp8"}, True, None, "0"),
        (Qwen2Config(), {"data_parallel_size": 2}, True, None, "0"),
        (Qwen3MoeConfig(), {}, True, None, "0"),
        (Qwen2VLConfig(), {}, True, None, "0"),
        *((model(), {}, True, None, "0") for model in (Qwen3_5TextConfig, FalconH1Config, Lfm2Config)),
        (Qwen2Config(), {}, True, "0", "0"),
        (Qwen3MoeConfig(), {}, True, "1", "1"),
    ],
)
def test_dense_models_take_the_runner_that_needs_no_processor_unless_the_environment_says(
    model: PretrainedConfig,
    settings: dict[str, Any],
    runs_ahead: bool,
    asked: str | None,
    runner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_args, "ASKED_RUNNER", asked)
    monkeypatch.setenv(engine_args.RUNNER, "9")
    arguments = engine_args.runner_arguments(model, GenerationConfig(**settings), runs_ahead=runs_ahead)
    assert os.environ[engine_args.RUNNER] == runner
    assert ("logits_processors" in arguments) == (runner == "0")


@pytest.mark.parametrize(("device", "stages", "ahead"), [("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)])
def test_vllm_schedules_ahead_on_a_gpu(
    device: str, stages: int, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VersionTable, "installed_features", lambda _: ["ahead"])
    monkeypatch.setenv(engine_args.RUNNER, "9")
    Qwen2Config().save_pretrained(tmp_path)
    config = GenerationConfig(pipeline_model_parallel_size=stages)
    assert engine_args.engine_arguments(tmp_path, config, EngineContext(device))["async_scheduling"] == ahead


@pytest.mark.parametrize(("features", "runner"), [(["ahead"], "0"), (["ahead", "routes_of_runner_2"], "1")])
def test_routes_of_experts_come_from_the_runner_that_has_them(
    features: list[str], runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VersionTable, "installed_features", lambda _: features)
    monkeypatch.setenv(engine_args.RUNNER, "9")
    Qwen3MoeConfig().save_pretrained(tmp_path)
    config = GenerationConfig(enable_rollout_routing_replay=True)
    arguments = engine_args.engine_arguments(tmp_path, config, EngineContext("cuda"))
    assert (os.environ[engine_args.RUNNER], arguments["enable_return_routed_experts"]) == (runner, True)
    assert ("logits_processors" in arguments) == (runner == "0")
    if runner == "1":
        with pytest.raises(ConfigError, match="on CPUs vLLM returns no routes of experts"):
            engine_args.engine_arguments(tmp_path, config, EngineContext("cpu"))


def test_vllm_makes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made, stub = list[SimpleNamespace](), SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", cast(Any, stub))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", cast(Any, kinds))
    core = SimpleNamespace(add_request=lambda number, prompt, params: made.append(params))
    engine = SimpleNamespace(engine=core, _salt="", hf_config=None)
    VLLMRollout._add(cast(Any, engine), [1, 2], SampleSpec(3, 2, UNUSED))
    assert (made[0].detokenize, made[0].output_kind, made[0].prompt_logprobs) == (False, "final", None)


def test_newer_servers_are_taken_as_the_newest_and_older_ones_refused() -> None:
    assert SERVERS["vllm"].features("0.40.1") == SERVERS["vllm"].features("0.33.0") == ALL
    assert SERVERS["sglang"].features("0.6.0") == SERVERS["sglang"].features("0.5.23") == ALL
    with pytest.raises(ConfigError, match=r"vLLM server of version 0.8.4: not in the table(?s:.*)>=0.8.5,<0.16"):
        SERVERS["vllm"].features("0.8.4")


def test_the_documented_versions_are_those_of_the_tables() -> None:
    text = (Path(rlsys.__file__).parents[1] / "docs" / "engine_versions.md").read_text()
    rows = [line.split("|")[1].strip().strip("`") for line in text.splitlines() if line.startswith(("| `>=", "| `<"))]
    assert sorted(rows) == sorted(row.versions for table in TABLES.values() for row in table.rows)


def test_source_is_read_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "__init__.py").write_text("from engine.core import *\nfrom .core import Args as Arguments\n1 / 0\n")
    (package / "core.py").write_text(
        "class Base:\n    kept: int = 1\n    def stop(self, ids, *, now=False): ...\n"
        "class Args(Base):\n    size: int\n    def begin(self):\n        self.state = 1\n"
        "class Plain:\n    def __init__(self, a, b=2, **rest): ...\n"
        "WORDS = ('one', 'two')\nOther = Plain\n"
        "@app.post('/go')\nasync def go(body: Args, raw):\n    return raw.query.get('tag'), body['more']\n"
    )
    sources = Sources(tmp_path)
    assert sources.signature("engine:Arguments") == ["size", "kept"]
    assert sources.signature("engine:Args.stop") == ["ids", "now="]
    assert sources.signature("engine:Args.state") == []
    assert sources.signature("engine:Plain") == ["a", "b=", "**rest"]
    assert sources.signature("engine:Other") == ["a", "b=", "**rest"]
    assert sources.signature("engine:WORDS") == ["one", "two"]
    assert sources.signature("engine:Args.missing") is None
    assert sources.signature("engine.nothing:Args") is None
    assert sources.routes("engine") == {"/go": ["body", "kept", "more", "raw", "size", "tag"]}
