"""Live progress of a run: what is running now and for how long, speed, reward, staleness and time left.

On a terminal two lines stay at the bottom while log lines scroll above them; otherwise a plain line is printed every
30 s. Several stages may run at once (generation beside training).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rlsys.telemetry.log import shared_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_PER_S = 4
_RECENT_STEPS = 20
_WHOLE_STEP = "step"
_STAGE_WIDTH = 24


@dataclass
class _State:
    """What is shown; `running` maps a stage to the clock at its start."""

    step: int
    total: int
    running: dict[str, float]
    step_seconds: deque[float]
    rewards: deque[float]
    tokens_per_s: float | None = None
    staleness: float | None = None


class Progress:
    """Shows a run of `total_steps`; a context manager that restores the terminal, also on errors.

    `first_step` is the last step already done (resume). Without a terminal a line is printed to `out` (stdout) at most
    every `plain_every_s` seconds, and at the end.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        title: str = "",
        console: Console | None = None,
        out: TextIO | None = None,
        plain_every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = _State(first_step, total_steps, {}, deque(maxlen=_RECENT_STEPS), deque(maxlen=_RECENT_STEPS))
        self._title = title
        self._console = console or shared_console()
        self._out = out
        self._plain_every_s = plain_every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._last_step_at = self._last_print_at = clock()
        self._printed_step = -1

    def __enter__(self) -> Progress:
        self._last_step_at = self._last_print_at = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=_REFRESH_PER_S, transient=True
            )
            self._live.start(refresh=True)
            # Live hides the cursor; a process killed with -9 could never show it again.
            self._console.show_cursor(True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._console.print(self._render(over=True))
            self._live = None
        elif self._printed_step != self._state.step:
            self._print_plain()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Show that a stage is running; usable from any thread, and as a listener of StageTimer."""
        with self._lock:
            self._state.running[name] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._state.running.pop(name, None)

    def step_done(
        self,
        step: int,
        *,
        reward: float | None = None,
        tokens_per_s: float | None = None,
        staleness: float | None = None,
    ) -> None:
        """Record that `step` steps are done; arguments that are None keep their last value."""
        now = self._clock()
        with self._lock:
            state = self._state
            state.step_seconds.append((now - self._last_step_at) / max(step - state.step, 1))
            self._last_step_at, state.step = now, step
            if reward is not None:
                state.rewards.append(reward)
            state.tokens_per_s = state.tokens_per_s if tokens_per_s is None else tokens_per_s
            state.staleness = state.staleness if staleness is None else staleness
        if self._live is None and now - self._last_print_at >= self._plain_every_s:
            self._print_plain()

    def _print_plain(self) -> None:
        self._last_print_at, self._printed_step = self._clock(), self._state.step
        print(self.line(), file=self._out or sys.stdout, flush=True)

    def line(self) -> str:
        """The whole state in one line of plain text."""
        with self._lock:
            head = f"{self._title} " if self._title else ""
            return f"{head}{self._state.step}/{self._state.total}  " + "  ".join(self._facts() + self._running())

    def _render(self, over: bool = False) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            state = self._state
            grid = Table.grid(padding=(0, 1))
            done = state.step / state.total if state.total else 0.0
            bar = ProgressBar(total=max(state.total, 1), completed=state.step, width=32)
            counts = Text(f"{state.step}/{state.total} {done:4.0%}", style="bold")
            pace = Text(self._pace(eta=not over), style="dim", no_wrap=True, overflow="ellipsis")
            grid.add_row(Text(self._title or "steps", style="bold"), bar, counts, pace)
            below = Text(no_wrap=True, overflow="ellipsis")
            if not over:
                below.append(f"{''.join(self._running()):<{_STAGE_WIDTH}}  ", style="bold cyan")
            below.append("  ".join(self._facts()))
        return Group(grid, below) if below.plain.strip() else grid

    def _pace(self, *, eta: bool = True) -> str:
        seconds = self._state.step_seconds
        if not seconds:
            return ""
        mean = sum(seconds) / len(seconds)
        left = self._state.total - self._state.step
        return f"{duration(mean)}/step" + (f"  eta {duration(mean * left)}" if eta and left > 0 else "")

    def _facts(self) -> list[str]:
        state = self._state
        facts = [] if self._live is not None or not state.step_seconds else [self._pace()]
        if state.rewards:
            facts.append(f"reward {state.rewards[-1]:.3f} {sparkline(list(state.rewards))}")
        if state.tokens_per_s is not None:
            facts.append(f"{state.tokens_per_s:,.0f} tok/s")
        if state.staleness is not None:
            facts.append(f"staleness {state.staleness:g}")
        return facts

    def _running(self) -> list[str]:
        now = self._clock()
        shown = {name: start for name, start in self._state.running.items() if name != _WHOLE_STEP}
        return [" + ".join(f"{name} {duration(now - start)}" for name, start in shown.items())] if shown else []


def sparkline(values: list[float]) -> str:
    """Small bars from the lowest to the highest of the values; a non-finite value is a blank."""
    finite = [v for v in values if abs(v) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if abs(v) < float("inf") else " " for v in values)


def duration(seconds: float) -> str:
    """Seconds as people read them: 0.4 s, 12 s, 3:05, 2:10:00."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
