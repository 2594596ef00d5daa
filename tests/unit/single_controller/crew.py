"""Workers for the tests of worker groups; importing this file imports nothing heavy."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlsys.single_controller.base import Worker
from rlsys.single_controller.dispatch import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import ConfigError


class Rows:
    """The least that counts as a batch: a list of numbers."""

    def __init__(self, values: Sequence[int], padding_enabled: bool = False) -> None:
        self.values, self.padding_enabled = list(values), padding_enabled

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, item: slice) -> "Rows":
        return Rows(self.values[item])

    def is_padding_enabled(self) -> bool:
        return self.padding_enabled

    def chunk(self, chunks: int) -> "list[Rows]":
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    @staticmethod
    def concat(parts: "Sequence[Rows]") -> "Rows":
        return Rows([value for part in parts for value in part.values])


class Calculator(Worker):
    """Answers at once."""

    def __init__(self, offset: int = 0, *, refuses: int | None = None) -> None:
        if refuses == self.rank:
            raise KeyError("no such model")
        self.offset, self.num_calls = offset, 0

    def plain(self, value: int = 0) -> tuple[int, int]:
        return self.rank, value + self.offset

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self) -> dict[str, Any]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return {"pid": os.getpid(), **{name: os.environ.get(name) for name in names}}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_calls(self) -> int:
        self.num_calls += 1
        return self.num_calls

    @register()
    def echo(self, value: Any = None) -> tuple[int, Any]:
        return self.rank, value

    @register(execute_mode=Execute.RANK_ZERO)
    def first_only(self, values: list[int]) -> tuple[int, int]:
        return self.rank, len(values)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def per_rank(self, value: int) -> int:
        return value * 10 + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, rows: Rows, plus: int = 0) -> Rows:
        return Rows([value * 2 + plus for value in rows.values])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scribble(self, rows: Rows) -> Rows:
        """Writes into what it got, and later into what it gave."""
        if hasattr(self, "given"):
            self.given.values.clear()
        rows.values.append(rows.values.pop() + 1)
        self.given = rows
        return rows

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def grow(self, rows: Rows) -> Rows:
        """Every row as often as its value says: ranks return different numbers of rows."""
        return Rows([value for value in rows.values for _ in range(value)])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train_without_rows(self, rows: Rows) -> dict[str, int]:
        return {"rows": len(rows)}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metrics(self, rows: Rows) -> dict[str, int]:
        return {"rank": self.rank, "rows": len(rows)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def echo_later(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def waits(self, value: int) -> int:
        return value + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fails(self, ranks: Sequence[int]) -> int:
        print(f"rank {self.rank} looks into the abyss", file=sys.stderr, flush=True)
        get_logger("workers.crew").info("rank %d has password=rosebud77", self.rank)
        if self.rank in ranks:
            raise ValueError(f"rank {self.rank} cannot divide")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refuses(self) -> None:
        if self.rank == 0:
            raise ConfigError("actor.lr=-1 must be positive")


class MeshCalculator(Worker):
    """Ranks on a mesh of two data-parallel by two tensor-parallel ranks; dp ranks run against the rank order."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("actor", dp_rank=1 - self.rank // 2, is_collect=self.rank % 2 == 1)
        self._register_dispatch_collect_info("broken", dp_rank=self.rank // 2, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def seen(self, rows: Rows, factor: int = 1) -> Rows:
        return Rows([value * factor + self.rank * 1000 for value in rows.values])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def train(self, rows: Rows) -> dict[str, int]:
        return {"rank": self.rank, "rows": len(rows)}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("broken"))
    def on_broken_mesh(self, rows: Rows) -> Rows:
        return rows

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("unknown"))
    def on_unknown_mesh(self, rows: Rows) -> Rows:
        return rows


class Student(Worker):
    """A role for colocation; records its calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def call_me(self) -> tuple[str, int, int]:
        return self.name, self.rank, os.getpid()


class Teacher(Student):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def grade(self, rows: Rows) -> Rows:
        return Rows([value + 100 for value in rows.values])


class Sleeper(Calculator):
    """Takes its time, dies, stops, breeds."""

    def __init__(self, sleeps_at_birth_s: float = 0.0, dies_at_birth: int = -1) -> None:
        if self.rank == dies_at_birth:
            os.kill(os.getpid(), 9)
        time.sleep(sleeps_at_birth_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: Sequence[float]) -> int:
        print(f"rank {self.rank} goes to bed", flush=True)
        time.sleep(seconds[self.rank])
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def waits_for_file(self, path: str) -> int:
        while not os.path.exists(path):
            time.sleep(0.02)
        return self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first_sleeps(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        print(f"rank {self.rank} says farewell", file=sys.stderr, flush=True)
        if self.rank == rank:
            os.kill(os.getpid(), 9)
        time.sleep(1000)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def breed(self) -> int:
        return subprocess.Popen(["sleep", "300"]).pid


class Gloo(Worker):
    """Ranks of a torch process group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, spoiler: int, act: Callable[[], None] | None = None) -> float:
        """The sum of all ranks; the spoiler acts instead of joining in."""
        import torch
        import torch.distributed as dist

        if self.rank == spoiler and act is not None:
            act()
        value = torch.tensor([float(self.rank)])
        dist.all_reduce(value)
        return float(value)
