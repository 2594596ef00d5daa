"""Live progress of a run: what is running now and for how long, speed, reward, staleness and time left.

On a terminal two lines stay at the bottom while log lines scroll above them; otherwise a plain line is printed every
30 s, also within a step. Several stages may run at once (generation beside training). A breakpoint ends the display.
"""

from __future__ import annotations

import pdb
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from rlsys.telemetry.log import shared_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_BARS = "▁▂▃▄▅▆▇█"
_REFRESH_PER_S = 4
_RECENT_STEPS = 20
_WHOLE_STEP = "step"
_STAGE_WIDTH = 24
_BAR_WIDTH, _SHORTEST_BAR = 32, 6
_SPARE_COLUMNS = 3  # a key echoed by the terminal, as Ctrl-C is, must not wrap the line and push the display up

Counts = Callable[[], tuple[int, int]]
"""(done, begun) since the start of the run, e.g. answers received and asked for."""


@dataclass
class _State:
    """What is shown; `running` maps a stage to the clock and its counts at its start."""

    step: int
    total: int
    running: dict[str, tuple[float, tuple[int, int]]]
    step_seconds: deque[float]
    rewards: deque[float]
    facts: dict[str, str] = field(default_factory=dict)


class Progress:
    """Shows a run of `total_steps`; a context manager that restores the terminal, also on errors.

    `first_step` is the last step already done (resume). Without a terminal a line is printed to `out` (stdout) every
    `plain_every_s` seconds, and at the end. A stage named in `counts` shows how much of its work is done.
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
        counts: Mapping[str, Counts] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = _State(first_step, total_steps, {}, deque(maxlen=_RECENT_STEPS), deque(maxlen=_RECENT_STEPS))
        self._title = title
        self._console, self._out = console or shared_console(), out
        self._plain_every_s = plain_every_s
        self._counts = counts or {}
        self._over = threading.Event()
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
        else:
            threading.Thread(target=self._print_regularly, name="progress", daemon=True).start()
        self._hooks = sys.breakpointhook, pdb.set_trace
        sys.breakpointhook, pdb.set_trace = map(self._ending_the_display, self._hooks)
        return self

    def __exit__(self, *_: object) -> None:
        sys.breakpointhook, pdb.set_trace = self._hooks
        self._over.set()
        if self._live is not None:
            self._stop_live()
            self._console.print(self._render(over=True))
        elif self._printed_step != self._state.step:
            self._print_plain()

    def _ending_the_display(self, debug: Callable[..., Any]) -> Callable[..., Any]:
        """A debugger's entry that first ends the display, which would draw over its prompt."""

        def enter(*args: Any, **kwargs: Any) -> Any:
            self._over.set()
            self._stop_live()
            return debug(*args, **kwargs)

        return enter

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _print_regularly(self) -> None:
        while not self._over.wait(self._plain_every_s / 2):
            if self._clock() - self._last_print_at >= self._plain_every_s:
                self._print_plain()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Show that a stage is running; usable from any thread, and as a listener of StageTimer."""
        counts = self._counts.get(name, _no_counts)
        with self._lock:
            self._state.running[name] = self._clock(), counts()
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
        staleness_max: float | None = None,
    ) -> None:
        """Record that `step` steps are done; None keeps the last value, staleness is shown once it was above 0."""
        now = self._clock()
        with self._lock:
            state = self._state
            state.step_seconds.append((now - self._last_step_at) / max(step - state.step, 1))
            self._last_step_at, state.step = now, step
            if reward is not None:
                state.rewards.append(reward)
                state.facts["reward"] = f"reward {reward:.3f} {sparkline(list(state.rewards))}"
            if tokens_per_s is not None:
                state.facts["speed"] = f"{tokens_per_s:,.0f} tok/s"
            if staleness or (staleness is not None and "staleness" in state.facts):
                oldest = "" if staleness_max is None else f" (max {staleness_max:g})"
                state.facts["staleness"] = f"staleness {staleness:.3g}{oldest}"
        if self._live is None and now - self._last_print_at >= self._plain_every_s:
            self._print_plain()

    def _print_plain(self) -> None:
        self._last_print_at, self._printed_step = self._clock(), self._state.step
        print(self.line(), file=self._out or sys.stdout, flush=True)

    def line(self) -> str:
        """The whole state in one line of plain text."""
        with self._lock:
            head = f"{self._title} " if self._title else ""
            parts = [self._pace(), *self._state.facts.values(), self._running()]
            return f"{head}{self._state.step}/{self._state.total}  " + "  ".join(filter(None, parts))

    def _render(self, over: bool = False) -> RenderableType:
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            state = self._state
            grid = Table.grid(padding=(0, 1))
            done = state.step / state.total if state.total else 0.0
            title, counts = self._title or "steps", f"{state.step}/{state.total} {done:4.0%}"
            pace = self._pace(eta=not over)
            room = self._console.width - _SPARE_COLUMNS - len(counts) - len(pace) - 4
            width = min(_BAR_WIDTH, room - len(title))
            bar = [ProgressBar(total=max(state.total, 1), completed=state.step, width=width)]
            title = title if len(title) <= max(room, 8) else title[: max(room, 8) - 1] + "…"
            grid.add_row(
                Text(title, style="bold"),
                *(bar if width >= _SHORTEST_BAR else []),
                Text(counts, style="bold"),
                Text(pace, style="dim", no_wrap=True, overflow="ellipsis"),
            )
            below = Text(no_wrap=True, overflow="ellipsis")
            if not over:
                below.append(f"{self._running():<{_STAGE_WIDTH}}  ", style="bold cyan")
            below.append("  ".join(state.facts.values()))
        lines = Group(grid, below) if below.plain.strip() else grid
        return Constrain(lines, self._console.width - _SPARE_COLUMNS)

    def _pace(self, *, eta: bool = True) -> str:
        seconds = self._state.step_seconds
        if not seconds:
            return ""
        mean = sum(seconds) / len(seconds)
        left = self._state.total - self._state.step
        return f"{duration(mean)}/step" + (f"  eta {duration(mean * left)}" if eta and left > 0 else "")

    def _running(self) -> str:
        now, shown = self._clock(), []
        for name, (start, (done_before, begun_before)) in self._state.running.items():
            done, begun = self._counts.get(name, _no_counts)()
            total = begun - begun_before
            share = f"{min(done - done_before, total)}/{total} " if total > 0 else ""
            if name != _WHOLE_STEP:
                shown.append(f"{name} {share}{duration(now - start)}")
        return " + ".join(shown)


def _no_counts() -> tuple[int, int]:
    return 0, 0


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
