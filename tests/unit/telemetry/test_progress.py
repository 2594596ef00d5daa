"""The live display in a real pseudo-terminal, and the plain lines without one."""

import fcntl
import io
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from rich.console import Console

from rlsys.telemetry.metrics import StageTimer
from rlsys.telemetry.progress import SHOWN, Progress, duration, sparkline
from tests.timing import scaled_s, wait_until

ROOT = Path(__file__).resolve().parents[3]
OVER = "the script is over"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

SCRIPT = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from rlsys.telemetry.log import get_logger, setup_logging
from rlsys.telemetry.progress import Progress
setup_logging(role="driver")
with Progress(total_steps=4, title="GRPO") as progress:
    for step in (1, 2, 3):
        with progress.stage("gen"):
            time.sleep(0.4)
            print("printed in gen")
        with progress.stage("update_actor"):
            get_logger("trainer.ppo").info("logged in step %d", step)
            print("printed in step", step)
            time.sleep(0.4)
            if step == 3 and "raise" in sys.argv:
                raise RuntimeError("boom")
            if step == 3 and "wait" in sys.argv:
                time.sleep(600)
        progress.step_done(step, {{"critic/score/mean": step / 10, "perf/throughput": 1234.5, "training/staleness": 1}})
print("the end")
"""


DEBUGGED = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from rlsys.telemetry.progress import Progress
with Progress(total_steps=4, title="GRPO") as progress:
    with progress.stage("gen"):
        time.sleep(0.5)
        breakpoint()
        time.sleep(0.5)
    progress.step_done(1)
print("the end")
"""


def _own_terminal() -> None:
    """Ctrl-C reaches the process, also where a shell started the tests in the background and SIGINT is ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def in_pseudo_terminal(
    *args: str, script: str = SCRIPT, columns: int = 100, answers: dict[str, str] | None = None
) -> str:
    """Everything a terminal was sent by a script; each of `answers` is typed once, after the text that is its key.

    The terminal belongs to a shell, which outlives the script: what has not been read yet is lost when its owner ends.
    """
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30"}
    child = subprocess.Popen(
        ["sh", "-c", 'trap : INT; "$@"; echo "$0"; read _', OVER, sys.executable, "-c", script, *args],
        stdin=side,
        stdout=side,
        stderr=side,
        env=env,
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(side)
    shown, waiting = b"", dict(answers or {})
    while OVER.encode() not in shown:
        shown += os.read(main, 65536)
        for text in [text for text in waiting if text.encode() in shown]:
            os.write(main, waiting.pop(text).encode())
    os.close(main)
    child.wait(timeout=scaled_s(30))
    return shown.decode().partition(OVER)[0]


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_terminal_shows_stage_and_numbers_and_keeps_log_lines_whole() -> None:
    raw = in_pseudo_terminal()
    text = without_escapes(raw)
    for step in (1, 2, 3):
        assert re.search(rf"INFO +\[driver\] logged in step {step}", text)
        assert f"printed in step {step}" in text
    assert re.search(r"gen \d+\.\d s", text)
    assert re.search(r"update_actor \d+\.\d s", text)
    assert "3/4  75%" in text
    assert "reward 0.200 ▁█  1,234 tok/s  staleness 1" in text
    assert "eta" in text
    assert text.rstrip().endswith("the end")
    assert raw.rindex(SHOW_CURSOR) > raw.rindex(HIDE_CURSOR)


def test_exception_leaves_the_terminal_clean() -> None:
    raw = in_pseudo_terminal("raise")
    text = without_escapes(raw)
    assert text.rstrip().endswith("RuntimeError: boom")
    assert "2/4  50%" in text
    assert raw.rindex(SHOW_CURSOR) > raw.rindex(HIDE_CURSOR)


def test_a_breakpoint_ends_the_display() -> None:
    raw = in_pseudo_terminal(script=DEBUGGED, answers={"(Pdb)": "p 6 * 7\nc\n"})
    prompt = raw.index("(Pdb)")
    assert re.search(r"gen \d+\.\d s", without_escapes(raw[:prompt]))
    assert "\n42" in raw[prompt:]
    assert "gen " not in without_escapes(raw[prompt:])
    assert without_escapes(raw).rstrip().endswith("the end")


def test_ctrl_c_leaves_the_last_state_once() -> None:
    """The terminal echoes ^C in the middle of the display; what it shows afterwards is kept here line by line."""
    raw = in_pseudo_terminal("wait", columns=40, answers={"2/4": "\x03"})
    assert "^C" in raw
    screen = screen_lines(raw, 40)
    assert sum("2/4" in line for line in screen) == 1
    assert any("KeyboardInterrupt" in line for line in screen)


def test_the_time_left_is_never_cut() -> None:
    text = without_escapes(in_pseudo_terminal(columns=56))
    assert re.search(r"2/4 +50% \d+\.\d s/step  eta [\d.]+ s", text)
    lines = [line for piece in text.split("\n") for line in piece.split("\r") if "eta" in line]
    assert max(len(line.rstrip()) for line in lines) <= 56 - 3


def screen_lines(raw: str, columns: int) -> list[str]:
    """What is left on a terminal: the few escapes that the display uses, played on a grid."""
    lines, row, column = [""], 0, 0
    for escape, char in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|(.)", raw, re.DOTALL):
        if escape.endswith("A"):
            row = max(0, row - int(escape[:-1] or 1))
        elif escape == "2K":
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char == "\n" or (char and column == columns):
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        if char and char not in "\r\n\x1b":
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
    return lines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_progress(clock: Clock, out: io.StringIO, total_steps: int = 10, first_step: int = 0) -> Progress:
    console = Console(file=io.StringIO(), force_terminal=False)
    return Progress(
        total_steps=total_steps,
        first_step=first_step,
        title="PPO",
        console=console,
        out=out,
        plain_every_s=30,
        clock=clock,
    )


def test_plain_lines_come_now_and_then_and_at_the_end() -> None:
    clock, out = Clock(), io.StringIO()
    with plain_progress(clock, out) as progress:
        for step in range(1, 6):
            clock.now += 20
            progress.step_done(step, dict(zip(SHOWN, (float(step), 1000.0, 0.0))))
    assert out.getvalue().splitlines() == [
        "PPO 2/10  20 s/step  eta 2:40  reward 2.000 ▁█  1,000 tok/s",
        "PPO 4/10  20 s/step  eta 2:00  reward 4.000 ▁▃▆█  1,000 tok/s",
        "PPO 5/10  20 s/step  eta 1:40  reward 5.000 ▁▃▅▆█  1,000 tok/s",
    ]


def test_plain_lines_come_within_a_long_step() -> None:
    out = io.StringIO()
    console = Console(file=io.StringIO(), force_terminal=False)
    with (
        Progress(total_steps=3, title="PPO", console=console, out=out, plain_every_s=0.2) as progress,
        progress.stage("gen"),
    ):
        assert wait_until(lambda: out.getvalue().count("\n") >= 2)
    assert re.fullmatch(r"PPO 0/3  gen \d+\.\d s", out.getvalue().splitlines()[0])


def test_a_stage_shows_how_much_of_its_work_is_done() -> None:
    clock, done = Clock(), [100, 100]
    console = Console(file=io.StringIO(), force_terminal=False)
    progress = Progress(total_steps=3, console=console, counts={"gen": lambda: (done[0], done[1])}, clock=clock)
    with progress.stage("gen"):
        assert progress.line().endswith("gen 0.0 s")
        done[:] = 137, 228
        clock.now = 12
        assert progress.line().endswith("gen 37/128 12 s")


def test_resumed_run_starts_at_its_step() -> None:
    clock, out = Clock(), io.StringIO()
    with plain_progress(clock, out, first_step=8) as progress:
        clock.now = 40
        progress.step_done(9)
    assert out.getvalue() == "PPO 9/10  40 s/step  eta 40 s\n"


def test_several_steps_reported_at_once_share_their_time() -> None:
    clock, out = Clock(), io.StringIO()
    with plain_progress(clock, out) as progress:
        clock.now = 40
        progress.step_done(4)
    assert out.getvalue() == "PPO 4/10  10 s/step  eta 1:00\n"


def test_stages_of_two_threads_are_shown_together() -> None:
    clock = Clock()
    progress = plain_progress(clock, io.StringIO())
    inside, leave = threading.Event(), threading.Event()

    def generate() -> None:
        with progress.stage("gen"):
            inside.set()
            leave.wait(scaled_s(60))

    thread = threading.Thread(target=generate)
    thread.start()
    assert inside.wait(scaled_s(10))
    timer = StageTimer(progress.stage)
    with timer("step"), timer("update_actor"):
        clock.now = 75
        assert progress.line().endswith("gen 1:15 + update_actor 1:15")
    leave.set()
    thread.join(scaled_s(10))
    assert progress.line() == "PPO 0/10  "


def test_no_steps_at_all_divides_by_nothing() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with Progress(total_steps=0, console=console):
        pass
    assert "0/0" in without_escapes(out.getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7800, "2:10:00"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, math.nan, 1.0, math.inf]) == "▁ █ "
    assert sparkline([]) == ""
