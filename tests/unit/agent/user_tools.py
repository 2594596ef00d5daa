"""Tools as users write them; tool processes import this file."""

import asyncio
import os
import time
from pathlib import Path

import numpy as np

from rlsys.agent.interactions import BaseInteraction
from rlsys.agent.tools import BaseTool, function_tool


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def log_call(path: str, line: str) -> str:
    """Append a line to a file.

    Args:
        path: The file.
        line: The line.
    """
    with open(path, "a") as out:
        out.write(f"{line}\n")
    return line


def hang() -> str:
    """Never return."""
    while True:
        time.sleep(1)


def fork_and_hang(pid_file: str) -> str:
    """Leave a process of another session behind and hang.

    Args:
        pid_file: Where its process id is written.
    """
    if os.fork() == 0:
        os.setsid()
        Path(pid_file).write_text(str(os.getpid()))
        time.sleep(1000)
    return hang()


def fail() -> str:
    """Raise."""
    raise RuntimeError("no such thing")


def exit_process() -> str:
    """End the process."""
    os._exit(3)


def huge() -> str:
    """Return ten million characters."""
    return "x" * 10_000_000


def noisy() -> bytes:
    """Print binary and return bytes that are not text."""
    os.write(1, bytes(range(120, 140)))
    return b"\xff\xfe ok"


@function_tool(name="all_meet")
async def meet(file: str, count: int) -> tuple[str, float, dict]:
    """Return once there are so many calls.

    Args:
        file: What counts them.
        count: How many there must be.
    """
    with Path(file).open("a") as calls:
        calls.write("x")
    while Path(file).stat().st_size < count:
        await asyncio.sleep(0.01)
    return "ab", 0.5, {"count": count}


def untyped(x):
    return x


class Counter:
    """An environment in TRL's form: counts up to a goal."""

    def reset(self, goal: int = 3, **kwargs) -> str:
        self.goal, self.count = goal, 0
        return f" Count to {goal}."

    def step(self, by: int) -> str:
        """Count up.

        Args:
            by: How much.
        """
        if by == 13:
            time.sleep(1000)
        self.count += by
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _private(self) -> None: ...


class Judged(Counter):
    """A Counter whose reward is what its goal says."""

    def get_reward(self):
        return {5: np.float32(0.5), 6: "0.5"}[self.goal]


class NoNotes(BaseTool):
    """A tool that cannot be made."""

    def __init__(self, config, tool_schema):
        raise OSError("no notebook")


class Ends(Counter):
    """An environment whose step ends its process."""

    def step(self, by: int) -> str:
        """End.

        Args:
            by: How much.
        """
        os._exit(3)


class Notes(BaseTool):
    """verl's tool class: remembers notes through an episode and scores them."""

    async def create(self, instance_id=None, **kwargs):
        self.notes = [kwargs.get("first", "none")]
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.notes.append(parameters["text"])
        return " ".join(self.notes) + self.config["mark"], 0.25, {"count": len(self.notes)}

    async def calc_reward(self, instance_id, **kwargs):
        return float(len(self.notes))

    async def release(self, instance_id, **kwargs):
        Path(self.config["released"]).write_text(instance_id)


class TeacherInteraction(BaseInteraction):
    """verl's interaction class: says whether an answer is right, and ends when it is."""

    def __init__(self, config):
        super().__init__(config)
        self.truths = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.truths[instance_id]
        return right, self.config["mark"] * 300, float(right) + 0.25, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        Path(self.config["ended"]).write_text(f"{self.name} {self.truths.pop(instance_id)}")
