"""Live progress of a run: what is running now and for how long, speed, reward, staleness and time left.

On a terminal two lines stay at the bottom while log lines scroll above them; otherwise a plain line is printed every
30 s, also within a step. Several stages may run at once (generation beside training). A breakpoint ends the display.
"""

import pdb
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from rlsys.telemetry.log import shared_console
from rlsys.utils.data_files import read_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_BARS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 20
_STAGE_WIDTH, _BAR_WIDTH, _SHORTEST_BAR = 24, 32, 6
_SPARE_COLUMNS = 3  # a key echoed by the terminal, as Ctrl-C is, must not wrap the line and push the display up
REWARD, STALENESS = "critic/score/mean", "training/staleness"
SHOWN = read_table(__file__, "console.toml")["progress"]
"""Metrics that are shown, and how."""

Counts = Callable[[], tuple[int, int]]
"""(done, begun) since the start of the run, e.g. answers received and asked for."""


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
        console: "Console | None" = None,
        out: TextIO | None = None,
        plain_every_s: float = 30.0,
        counts: Mapping[str, Counts] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step, self._total, self._title = first_step, total_steps, title
        self._running: dict[str, tuple[float, tuple[int, int]]] = {}  # stage: clock and counts at its start
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._rewards: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._facts: dict[str, str] = {}
        self._console, self._out = console or shared_console(), out
        self._plain_every_s, self._counts, self._clock = plain_every_s, counts or {}, clock
        self._over, self._lock = threading.Event(), threading.Lock()
        self._live: Live | None = None
        self._last_step_at = self._last_print_at = clock()
        self._printed_step = -1

    def __enter__(self) -> "Progress":
        self._last_step_at = self._last_print_at = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)
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
        elif self._printed_step != self._step:
            self._print_plain()

    def _ending_the_display(self, debug: Callable[..., object]) -> Callable[..., Any]:
        """A debugger's entry that first ends the display, which would draw over its prompt."""

        def enter(*args: object, **kwargs: object) -> object:
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
        with self._lock:
            self._running[name] = self._clock(), self._counts.get(name, lambda: (0, 0))()
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(name, None)

    def step_done(self, step: int, metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        """Record that `step` steps are done; of its metrics those of SHOWN are shown, staleness once it was above 0."""
        now = self._clock()
        with self._lock:
            self._step_seconds.append((now - self._last_step_at) / max(step - self._step, 1))
            self._last_step_at, self._step = now, step
            for name, text in SHOWN.items():
                if name in metrics and (metrics[name] or name != STALENESS or name in self._facts):
                    self._facts[name] = text.format(metrics[name])
            if REWARD in metrics:
                self._rewards.append(metrics[REWARD])
                self._facts[REWARD] += f" {sparkline(self._rewards)}"
        if self._live is None and now - self._last_print_at >= self._plain_every_s:
            self._print_plain()

    def _print_plain(self) -> None:
        self._last_print_at, self._printed_step = self._clock(), self._step
        print(self.line(), file=self._out or sys.stdout, flush=True)

    def line(self) -> str:
        """The whole state in one line of plain text."""
        with self._lock:
            parts = [self._pace(), *self._facts.values(), self._stages()]
            return f"{self._title} {self._step}/{self._total}  ".lstrip() + "  ".join(filter(None, parts))

    def _render(self, over: bool = False) -> "RenderableType":
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            grid = Table.grid(padding=(0, 1))
            done = self._step / self._total if self._total else 0.0
            title, counts = self._title or "steps", f"{self._step}/{self._total} {done:4.0%}"
            pace = self._pace(eta=not over)
            room = self._console.width - _SPARE_COLUMNS - len(counts) - len(pace) - 4
            width = min(_BAR_WIDTH, room - len(title))
            bar = [ProgressBar(total=max(self._total, 1), completed=self._step, width=width)]
            title = title if len(title) <= max(room, 8) else title[: max(room, 8) - 1] + "…"
            grid.add_row(
                Text(title, style="bold"),
                *(bar if width >= _SHORTEST_BAR else []),
                Text(counts, style="bold"),
                Text(pace, style="dim", no_wrap=True, overflow="ellipsis"),
            )
            below = Text(no_wrap=True, overflow="ellipsis")
            if not over:
                below.append(f"{self._stages():<{_STAGE_WIDTH}}  ", style="bold cyan")
            below.append("  ".join(self._facts.values()))
        return Constrain(Group(grid, below) if below.plain.strip() else grid, self._console.width - _SPARE_COLUMNS)

    def _pace(self, *, eta: bool = True) -> str:
        if not self._step_seconds:
            return ""
        mean = sum(self._step_seconds) / len(self._step_seconds)
        left = self._total - self._step
        return f"{duration(mean)}/step" + (f"  eta {duration(mean * left)}" if eta and left > 0 else "")

    def _stages(self) -> str:
        now, shown = self._clock(), []
        for name, (start, (done_before, begun_before)) in self._running.items():
            done, begun = self._counts[name]() if name in self._counts else (0, 0)
            total = begun - begun_before
            share = f"{min(done - done_before, total)}/{total} " if total > 0 else ""
            if name != "step":
                shown.append(f"{name} {share}{duration(now - start)}")
        return " + ".join(shown)


def sparkline(values: Collection[float]) -> str:
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
