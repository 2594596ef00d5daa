"""Profiles of a process: what each tool does around the work, also where the work fails, and workers under nsys."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.config import SFTConfig
from rlsys.config.introspect import replaced
from rlsys.config.load import load_config
from rlsys.telemetry import profiler
from rlsys.utils.errors import ConfigError

FAKE_NSYS = """#!/bin/bash
printf '%s\\n' "$*" >> "$NSYS_CALLS"
while [[ $1 != */python* ]]; do shift; done
exec "$@"
"""
ASK_A_WORKER = """
import ray, sys
from rlsys.single_controller.ray.cluster import connect
with connect({"num_cpus": 1, "runtime_env": {"py_executable": sys.argv[1]}}):
    print(ray.get(ray.remote(lambda: sys.executable).remote()))
"""


class FakeCuda:
    """Stands for the parts of torch.cuda that profiles use; keeps what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self._named("synchronize"))
        monkeypatch.setattr(torch.cuda.profiler, "start", self._named("start"))
        monkeypatch.setattr(torch.cuda.profiler, "stop", self._named("stop"))
        monkeypatch.setattr(torch.cuda.nvtx, "range", self._range)
        monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda: self._range("operators"))
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: self.calls.append(f"dump {path}"))

    def _named(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self.calls.append(f"open {name}")
        yield
        self.calls.append(f"close {name}")

    def _record(self, enabled: str | None = "all") -> None:
        self.calls.append(f"record {enabled}")


@pytest.fixture(params=[False, True], ids=["works", "fails"])
def work(request: pytest.FixtureRequest) -> Callable[[AbstractContextManager[None], Callable[[], object]], None]:
    """Calls something inside a profile, and where it is to fail raises after it."""

    def run(profile: AbstractContextManager[None], call: Callable[[], object]) -> None:
        if not request.param:
            with profile:
                call()
            return

        def fail() -> None:
            with profile:
                call()
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fail()

    return run


def test_torch_leaves_a_trace_of_what_ran(tmp_path: Path, work: Any) -> None:
    work(profiler.profiled("torch", tmp_path / "new" / "step1"), lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    events = json.loads(gzip.decompress((tmp_path / "new" / "step1.json.gz").read_bytes()))["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_nsys_records_one_range_with_all_kernels(tmp_path: Path, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    work(profiler.profiled("nsys", tmp_path / "step1"), lambda: cuda.calls.append("work"))
    closed = ["synchronize", "stop"]
    if "close operators" in cuda.calls:
        closed = ["close operators", "close step1", *closed]
    assert cuda.calls == ["start", "open step1", "open operators", "work", *closed]


def test_memory_history_is_written_and_ends(tmp_path: Path, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    work(profiler.profiled("torch_memory", tmp_path / "step1"), lambda: cuda.calls.append("work"))
    assert cuda.calls == ["record all", "work", f"dump {tmp_path}/step1.pickle", "record None"]


@pytest.mark.parametrize("tool", ["nsys", "torch_memory"])
def test_a_tool_for_gpus_is_refused_without_one(tmp_path: Path, tool: str) -> None:
    with pytest.raises(ConfigError, match=f"global_profiler.tool={tool} needs a GPU"):
        profiler.start_profile(tool, str(tmp_path / "step1"))
    profiler.start_profile("torch", str(tmp_path / "after"))
    profiler.stop_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["after.json.gz"]


def test_a_process_with_several_roles_has_one_profile(tmp_path: Path) -> None:
    profiler.start_profile("torch", str(tmp_path / "actor"))
    profiler.start_profile("torch", str(tmp_path / "rollout"))
    profiler.stop_profile()
    profiler.stop_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["actor.json.gz"]


@pytest.fixture
def config(tmp_path: Path) -> SFTConfig:
    settings = {"global_profiler.tool": "nsys", "global_profiler.steps": (2,)}
    return replaced(load_config([], SFTConfig), {**settings, "global_profiler.save_path": str(tmp_path / "a b")})


@pytest.fixture
def fake_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nsys that only writes its arguments into the file returned and runs the program."""
    (tmp_path / "nsys").write_text(FAKE_NSYS)
    (tmp_path / "nsys").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NSYS_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def test_workers_of_a_run_that_nsys_profiles_start_under_it(config: SFTConfig, fake_nsys: Path) -> None:
    command = profiler.under_nsys(config).ray_init.runtime_env["py_executable"]
    done = subprocess.run(
        [sys.executable, "-c", ASK_A_WORKER, command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == sys.executable, done.stderr
    called = fake_nsys.read_text()
    assert called.startswith("profile ")
    assert "--capture-range=cudaProfilerApi --capture-range-end=repeat" in called
    assert f"-o {config.global_profiler.save_path}/%h_%p {sys.executable} " in called


@pytest.mark.parametrize(
    "settings",
    [
        {"global_profiler.tool": "torch"},
        {"global_profiler.steps": None},
        {"trainer.backend": "local"},
        {"ray_kwargs.ray_init.runtime_env": {"nsight": "default"}},
    ],
)
def test_other_runs_do_not(config: SFTConfig, fake_nsys: Path, settings: dict[str, object]) -> None:
    config = replaced(config, settings)
    assert profiler.under_nsys(config) is config.ray_kwargs


def test_a_run_that_nsys_profiles_as_a_whole_does_not(
    config: SFTConfig, fake_nsys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert profiler.under_nsys(config) is config.ray_kwargs


def test_nsys_that_is_not_there_is_named(config: SFTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"tool=nsys: there is no nsys"):
        profiler.under_nsys(config)
