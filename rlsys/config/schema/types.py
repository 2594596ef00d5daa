"""The types of values, with their ranges, and of what several keys say together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema

from rlsys.config.overrides import parse_value

MAX_COUNT = 1_000_000_000


def _text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _texts(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(_text(item) for item in value) if isinstance(value, Sequence) else value


def as_tuple(value: object) -> object:
    """A list, also one in quotes, as a tuple; anything else is left to be refused."""
    value = parse_value(value) if isinstance(value, str) and value.startswith("[") else value
    return tuple(value) if isinstance(value, list) else value


def as_numbers(value: object) -> object:
    """As `as_tuple`, and one number as a tuple of it."""
    return (value,) if isinstance(value, int) else as_tuple(value)


def _expand(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("no home folder of that user")
    return expanded


def _shown_as(words: str) -> WithJsonSchema:
    """What errors and --help say that the text must be."""
    return WithJsonSchema({"type": "string", "format": words})


Flag = Annotated[bool, Strict()]
Text = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_texts)]
LocalPath = Annotated[Text, AfterValidator(_expand), _shown_as("a path")]
_NAME = r"^\.*[\w@+=,:-][\w.@+=,: -]*$"
FolderName = Annotated[Text, Field(pattern=_NAME), _shown_as("text that becomes a folder name: letters, digits, -_.")]
Url = Annotated[Text, Field(pattern="^https?://"), _shown_as("the address of a server, e.g. http://HOST:8080/run_code")]
Template = Annotated[Text, Field(pattern=r"\{[{%]"), _shown_as('the text of a Jinja template, e.g. "$(cat FILE)"')]
LocalPaths = Annotated[tuple[LocalPath, ...], BeforeValidator(_texts)]
Number = Annotated[float, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Strict(), Field(ge=0, le=MAX_COUNT)]
Versions = Annotated[int, Strict(), Field(ge=0, le=64)]
CountOrAll = Literal[-1] | Count
Frequency = Literal["after_each_epoch"] | Annotated[int, Strict(), Field(ge=-1, le=MAX_COUNT)]
CountOrOff = Annotated[int, Strict(), Field(ge=-1, le=MAX_COUNT)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1)]
Coefficient = Annotated[float, Strict(), Field(ge=0, le=1e6)]
Positive = Annotated[float, Strict(), Field(gt=0, le=1e9)]
Seconds = Annotated[float, Strict(), Field(gt=0, le=30 * 86400)]
Betas = Annotated[tuple[Fraction, Fraction], BeforeValidator(as_tuple)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(as_numbers)]
TokenIds = Annotated[tuple[CountOrZero, ...], BeforeValidator(as_numbers), Field(min_length=1)]
Numbers = Annotated[tuple[Number, ...], BeforeValidator(as_tuple)]
OpenDict = dict[str, Any]

Strategy = Annotated[Literal["fsdp", "fsdp2", "megatron"], BeforeValidator(lambda v: "fsdp" if v == "dp" else v)]


@dataclass(frozen=True)
class MicroBatches:
    """How a rank's rows are split: `rows` of them each, as many as fit `max_tokens` real tokens, or all at once."""

    rows: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        sizes = [size for size in (self.rows, self.max_tokens) if size is not None]
        if len(sizes) > 1 or min(sizes, default=1) < 1:
            raise ValueError(f"a micro-batch needs either rows or max_tokens, at least 1; got {self}")


def micro_batches(dynamic: bool, rows: int | None, max_tokens: int) -> MicroBatches:
    """Micro-batches by tokens if `dynamic`, else by rows."""
    return MicroBatches(max_tokens=max_tokens) if dynamic else MicroBatches(rows=rows)
