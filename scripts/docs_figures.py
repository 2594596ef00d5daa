"""Draw the figures of the docs: the layers from the import rules, the others from the files of a real run.

python scripts/docs_figures.py architecture
python scripts/docs_figures.py step RUN_FOLDER/timeline.json
python scripts/docs_figures.py timeline RUN_FOLDER/timeline.json
python scripts/docs_figures.py terminal OUTPUT_OF_THE_RUN.txt
"""

import argparse
import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
WIDTH = 960
SIDE = 12
DRIVER = ("trainer", "rlsys.fleet", "rlsys.planning")
STYLE = """
  text { font-family: ui-sans-serif, system-ui, sans-serif; fill: #1f2937 }
  .name { font-size: 14px; font-weight: 600 } .note { font-size: 11px; fill: #4b5563 }
  .driver { fill: #dbeafe; stroke: #2563eb } .worker { fill: #dcfce7; stroke: #16a34a }
  .library { fill: #f3f4f6; stroke: #9ca3af } .lane { stroke: #d1d5db } .call { fill: #bfdbfe; stroke: #2563eb }
  .work { fill: #bbf7d0; stroke: #16a34a } .arrow { stroke: #6b7280; fill: none; marker-end: url(#head) }
"""


@dataclass(frozen=True)
class Span:
    """One call in a timeline; `lane` is the process that ran it, times in microseconds."""

    lane: str
    name: str
    start: int
    end: int


def svg(height: float, body: Iterable[str]) -> str:
    """A picture of the given height (pixels) on a white ground, readable in light and dark pages."""
    size = 'markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"'
    head = f'<marker id="head" {size}><path d="M0 0 8 4 0 8z"/></marker>'
    lines = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img"><style>{STYLE}</style>'
        f'<defs>{head}</defs><rect width="{WIDTH}" height="{height:g}" fill="#ffffff" rx="6"/>\n{lines}\n</svg>\n'
    )


def summary(package: str) -> str:
    """The first sentence of a package's docstring."""
    path = ROOT.joinpath(*package.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    return docstring.split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".")


def layers() -> list[list[str]]:
    """The packages of each layer from the top, as the import contract lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in row.split("|") if "(" not in name] for row in rows]


def architecture() -> str:
    """Every package as a box in its layer: a package imports only from rows below its own."""
    body, y = [], 34.0
    body.append(f'<text x="{SIDE}" y="22" class="note">A package imports only packages in rows below it.</text>')
    for row in layers():
        width = (WIDTH - SIDE * (len(row) + 1)) / len(row)
        notes = {name: wrap(summary(name), int((width - 20) / 6.2))[:4] for name in row}
        height = 34 + 14 * max(map(len, notes.values()))
        for column, name in enumerate(row):
            kind = "driver" if name in DRIVER else "worker" if name == "workers" else "library"
            x = SIDE + column * (width + SIDE)
            body.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="5" class="{kind}"/>')
            body.append(f'<text x="{x + 10:g}" y="{y + 20:g}" class="name">{escape(name)}</text>')
            for line, note in enumerate(notes[name]):
                body.append(f'<text x="{x + 10:g}" y="{y + 36 + 14 * line:g}" class="note">{escape(note)}</text>')
        y += height + 10
    return svg(y, body)


def spans_of(events: Sequence[dict]) -> list[Span]:
    """All complete spans of a timeline in the order of their start."""
    lanes = {e["pid"]: e["args"]["name"].split(" @ ")[0] for e in events if e["name"] == "process_name"}
    spans = [Span(lanes[e["pid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def step(timeline: Path) -> str:
    """The calls of the second step of a run, from top to bottom in their order; one column for each process."""
    spans = spans_of(json.loads(timeline.read_text()))
    whole = [span for span in spans if span.name == "step" and span.lane == "controller"][1]
    inside = [span for span in spans if whole.start <= span.start < whole.end and span != whole]
    stages = [span for span in inside if span.lane == "controller" and span.name != "source"]
    lanes = ["controller", *dict.fromkeys(span.lane for span in inside if span.lane != "controller")]
    x = {lane: WIDTH * (column + 0.5) / len(lanes) for column, lane in enumerate(lanes)}
    box, y, body = WIDTH / len(lanes) - 24, 60, []
    for stage in stages:
        calls = [s for s in inside if s.lane != "controller" and stage.start <= s.start < stage.end]
        body.append(_box(x["controller"], y, box, stage.name, "call"))
        for call in calls:
            body.append(_box(x[call.lane], y, box, call.name, "work"))
            body.append(
                f'<path class="arrow" d="M{x["controller"] + box / 2:g} {y + 15} H{x[call.lane] - box / 2:g}"/>'
            )
        y += 38
    heads = [f'<text x="{x[lane]:g}" y="30" text-anchor="middle" class="name">{escape(lane)}</text>' for lane in lanes]
    rules = [f'<path class="lane" d="M{x[lane]:g} 42 V{y}"/>' for lane in lanes]
    return svg(y + 12, [*heads, *rules, *body])


def timeline(path: Path) -> str:
    """The first two steps of a run: a lane for each process, a box for each call, its stages one below another."""
    spans = spans_of(json.loads(path.read_text()))
    steps = [span for span in spans if span.name == "step" and span.lane == "controller"][:2]
    first, last = steps[0].start, steps[-1].end
    shown = [span for span in spans if first <= span.start and span.end <= last]
    margin, body, y = 110, [], 34
    scale = (WIDTH - margin - SIDE) / (last - first)
    for tenth in range(0, (last - first) // 100_000 + 1, 2):
        x = margin + tenth * 100_000 * scale
        body.append(f'<text x="{x:.1f}" y="18" class="note">{tenth / 10:g} s</text>')
        body.append(f'<path class="lane" d="M{x:.1f} 24 V{{bottom}}"/>')
    for lane in dict.fromkeys(span.lane for span in shown):
        ends: list[list[int]] = []
        body.append(f'<text x="{SIDE}" y="{y + 17}" class="name">{escape(lane)}</text>')
        for span in (span for span in shown if span.lane == lane):
            depth = next((row for row, busy in enumerate(ends) if busy[-1] <= span.start), len(ends))
            ends[depth : depth + 1] = [[span.end]]
            x, width = margin + (span.start - first) * scale, max((span.end - span.start) * scale, 1)
            kind, top = "call" if lane == "controller" else "work", y + depth * 26
            body.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="24" rx="3" class="{kind}"/>')
            if width > 6.2 * len(span.name) + 6:
                body.append(f'<text x="{x + 4:.1f}" y="{top + 16}" class="note">{escape(span.name)}</text>')
        y += 26 * len(ends) + 14
    return svg(y, [line.replace("{bottom}", str(y - 8)) for line in body])


def terminal(output: Path) -> str:
    """What a run prints, as a picture of the terminal; without the fonts that rich would load from the network."""
    console = Console(record=True, width=116, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(output.read_text()), soft_wrap=False)
    picture = console.export_svg(title="python -m trainer.main_ppo ...", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\n?", "", picture, flags=re.DOTALL)


def _box(x: float, y: float, width: float, name: str, kind: str) -> str:
    return (
        f'<rect x="{x - width / 2:g}" y="{y}" width="{width:g}" height="30" rx="4" class="{kind}"/>'
        f'<text x="{x:g}" y="{y + 19}" text-anchor="middle" class="note">{escape(name)}</text>'
    )


def main() -> None:
    """Write the figure that the command line names."""
    drawn: dict[str, Callable[[Path], str]] = {"step": step, "timeline": timeline, "terminal": terminal}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("figure", choices=["architecture", *drawn])
    parser.add_argument("file", type=Path, nargs="?", help="the file of a run that shows what is drawn")
    args = parser.parse_args()
    if args.figure in drawn and args.file is None:
        parser.error(f"{args.figure} needs a file of a run")
    FIGURES.mkdir(exist_ok=True)
    picture = drawn[args.figure](args.file) if args.figure in drawn else architecture()
    (FIGURES / f"{args.figure}.svg").write_text(picture)
    print(FIGURES / f"{args.figure}.svg")


if __name__ == "__main__":
    main()
