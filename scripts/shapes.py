"""Pictures of coloured shapes with questions whose answers are known: how many, where, which is larger."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220), "yellow": (240, 200, 40)}
FORMS = ("circle", "square", "triangle")
ROWS, COLUMNS, CELL = ("top", "bottom"), ("left", "middle", "right"), 28
SMALL, LARGE = (4, 6), (10, 13)
CELLS = len(ROWS) * len(COLUMNS)
KINDS = ("where", "count", "larger")


@dataclass(frozen=True)
class Shape:
    """A shape in a cell (0 to 5, row by row) of a picture; its centre and radius in pixels."""

    colour: str
    form: str
    cell: int
    x: int
    y: int
    radius: int

    @property
    def place(self) -> str:
        return f"{ROWS[self.cell // len(COLUMNS)]} {COLUMNS[self.cell % len(COLUMNS)]}"


def picture(shapes: Sequence[Shape]) -> Image.Image:
    """The shapes on white, 84 x 56 pixels."""
    image = Image.new("RGB", (len(COLUMNS) * CELL, len(ROWS) * CELL), "white")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        x, y, r, fill = shape.x, shape.y, shape.radius, COLOURS[shape.colour]
        if shape.form == "triangle":
            draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=fill)
        elif shape.form == "square":
            draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
        else:
            draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    return image


def pictures(*, seed: int) -> Iterator[tuple[Shape, ...]]:
    """Two to four shapes of different colours in different cells, without end and never the same twice.

    The first two differ in size.
    """
    random = Random(seed)
    seen: set[tuple[Shape, ...]] = set()
    while True:
        num = random.randint(2, len(COLOURS))
        colours, cells = random.sample(list(COLOURS), num), random.sample(range(CELLS), num)
        sizes = random.sample([SMALL, LARGE], 2) + [random.choice([SMALL, LARGE]) for _ in range(num - 2)]
        shapes = tuple(_shape(random, *parts) for parts in zip(colours, cells, sizes))
        if shapes not in seen:
            seen.add(shapes)
            yield shapes


def _shape(random: Random, colour: str, cell: int, radii: tuple[int, int]) -> Shape:
    radius = random.randint(*radii)
    row, column = divmod(cell, len(COLUMNS))
    x, y = (CELL * start + random.randint(radius, CELL - 1 - radius) for start in (column, row))
    return Shape(colour, random.choice(FORMS), cell, x, y, radius)


def ask(shapes: Sequence[Shape], kind: str) -> tuple[str, str]:
    """A question of a kind, about the first shape where it is about one, and its answer."""
    first = shapes[0]
    if kind == "where":
        return f"Where is the {first.colour} {first.form}?", first.place
    if kind == "count":
        return "How many shapes are there?", str(len(shapes))
    second = next(shape for shape in shapes if (shape.radius > max(SMALL)) != (first.radius > max(SMALL)))
    return f"Which is larger, {first.colour} or {second.colour}?", max(first, second, key=lambda s: s.radius).colour


def rows(*, seed: int) -> Iterator[dict[str, Any]]:
    """verl rows without end, the kinds of question in turn; a picture is the bytes of a PNG file."""
    for number, shapes in enumerate(pictures(seed=seed)):
        kind = KINDS[number % len(KINDS)]
        asked, answer = ask(shapes, kind)
        stream = io.BytesIO()
        picture(shapes).save(stream, "PNG")
        yield {
            "data_source": f"rlsys/shapes-{kind}",
            "prompt": [{"role": "user", "content": f"<image>{asked}"}],
            "images": [{"bytes": stream.getvalue()}],
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "", "index": number, "question": asked, "answer": answer},
        }
