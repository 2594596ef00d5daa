"""The report of a run: `index.html` in its folder, curves of everything in metrics.jsonl and links to the other files.

It is made from the files of the run alone, so it can be made again at any time: `rlsys report RUN_FOLDER`.
"""

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rlsys.telemetry.jsonl import JsonObject, read_jsonl
from rlsys.telemetry.page import ascii_json, page
from rlsys.utils.atomic import write_whole

MAX_POINTS = 1000
MIN_GAP_S, MAX_SHARE = 15.0, 0.02
_PATHS = ("rollouts/index.html", "validation/index.html", "timeline.json", "metrics.jsonl", "memory.txt")
RUN_FILES = {Path(path).parts[0].partition(".")[0]: path for path in (*_PATHS, "staleness.txt", "config.yaml")}
RUN_FILES["log"] = "train.log"
"""Files of a run by the names that its report and its summary give them."""


@dataclass
class RunReport:
    """The page of a folder; `links` are further files, relative to it or absolute, left out where they do not exist."""

    folder: Path
    title: str = ""
    total_steps: int = 0
    links: Mapping[str, str] = field(default_factory=dict)
    _next_s: float = 0.0

    def update(self) -> None:
        """Write the page as the run continues, at most every 15 s and in at most 2 % of the time; raises OSError."""
        start_s = time.monotonic()
        if start_s >= self._next_s:
            self.write(running=True)
            now_s = time.monotonic()
            self._next_s = now_s + max(MIN_GAP_S, (now_s - start_s) / MAX_SHARE)

    def write(self, *, running: bool = False) -> Path:
        """Write `index.html` from metrics.jsonl, or evaluation.json where there are no metrics; returns its path."""
        folder = self.folder.absolute()
        steps, columns, every = thinned(_records(folder))
        targets = {name: folder / target for name, target in {**RUN_FILES, **self.links}.items()}
        data = {
            "title": self.title or folder.name,
            "total": self.total_steps,
            "running": running,
            "updated": time.time(),
            "every": every,
            "links": [[name, _address(path, folder)] for name, path in targets.items() if path.exists()],
            "steps": steps,
            "columns": columns,
        }
        path = self.folder / "index.html"
        write_whole(path, page("report").replace("{{data}}", ascii_json(data), 1).encode())
        return path


def thinned(
    records: Sequence[JsonObject], max_points: int = MAX_POINTS
) -> tuple[list[int], dict[str, list[float | None]], int]:
    """(steps, columns by metric, N): beyond `max_points` each point is the mean of N neighbouring records.

    Only finite numbers count; where there are none a column holds None. The step is that of the last record.
    """
    every = max(1, math.ceil(len(records) / max_points))
    parts = [records[at : at + every] for at in range(0, len(records), every)]
    columns: dict[str, list[float | None]] = defaultdict(lambda: [None] * len(parts))
    for row, part in enumerate(parts):
        for name in dict.fromkeys(name for record in part for name in record if name != "step"):
            values = [record.get(name) for record in part]
            if finite := [value for value in values if isinstance(value, int | float) and math.isfinite(value)]:
                columns[name][row] = float(f"{math.fsum(finite) / len(finite):.6g}")
    return [int(part[-1].get("step", 0)) for part in parts], dict(columns), every


def _address(path: Path, folder: Path) -> str:
    return quote(str(path.relative_to(folder))) if path.is_relative_to(folder) else path.as_uri()


def _records(folder: Path) -> list[dict[str, object]]:
    if (metrics := folder / "metrics.jsonl").exists():
        return list(read_jsonl(metrics))
    result = folder / "evaluation.json"
    return [json.loads(result.read_text())] if result.exists() else []


if __name__ == "__main__":
    if len(sys.argv) != 2 or not _records(Path(sys.argv[1])):
        raise SystemExit("rlsys report RUN_FOLDER: writes index.html, the report page, from a run's metrics.jsonl")
    try:
        print(RunReport(Path(sys.argv[1])).write())
    except OSError as error:
        raise SystemExit(f"rlsys report: {error}; copy metrics.jsonl into a folder of your own") from None
