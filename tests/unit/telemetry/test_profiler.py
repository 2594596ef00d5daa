"""Profiles of a process: what each tool does around the work, also where the work fails, and workers under nsys."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.telemetry import profiler
from rlsys.utils.errors import ConfigError


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
