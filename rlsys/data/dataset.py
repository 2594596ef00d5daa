"""Prompts to train on: rows of files, checked, tokenised and cut to length before any worker starts, or as they stream.

A prompt is a list of messages or a text. The chat template renders it (a text as one user message); without a template
the contents are used as they are. Bad rows are either refused at once or skipped and counted (data.bad_rows).
"""

import logging
from array import array
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from os.path import dirname
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from rlsys.config.schema.data import BadRows, PromptsConfig, RowsConfig, TrainingRowsConfig
from rlsys.config.vocabulary import GRIDS, TILES
from rlsys.data.chat import Tokenizer, encode_prompt, truncate
from rlsys.data.cursor import BatchRows, permutation
from rlsys.data.files import BadRow, Row, read_rows
from rlsys.data.rows import MissingColumns, PromptRow, read_prompt_row
from rlsys.interfaces import State
from rlsys.utils.errors import ConfigError, DataError, raised_as
from rlsys.utils.hub import is_rows_id, open_rows
from rlsys.utils.plugins import load_from_file

NUM_SHOWN = 5
T = TypeVar("T")

if TYPE_CHECKING:
    from rlsys.data.vision_processor import VisionProcessor
    from rlsys.protocol import ImageInputs


log = logging.getLogger(__name__)


class VerlDataset(Protocol):
    """The interface of a custom dataset class: rows as dicts with verl's columns."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def parse_rows(
    rows: Iterable[Row | BadRow], parse: Callable[[Row], T], *, bad_rows: BadRows, num_threads: int = 1
) -> tuple[list[T], list[BadRow]]:
    """`parse` of every row, in order, and the rows for which it raised ValueError.

    With "refuse" the first bad row raises DataError; with "skip" only a source without any good row does.
    """
    good, bad = list[T](), list[BadRow]()
    for result in _results(rows, parse, num_threads):
        if not isinstance(result, BadRow):
            good.append(result)
            continue
        if bad_rows == "refuse":
            raise DataError(f"{result}{result.fix}")
        bad.append(result)
    if bad:
        shown = "\n  ".join(map(str, bad[:NUM_SHOWN]))
        more = f"\n  and {len(bad) - NUM_SHOWN} more" if len(bad) > NUM_SHOWN else ""
        log.warning("skipped %d bad rows, kept %d:\n  %s%s", len(bad), len(good), shown, more)
        if not good:
            raise DataError(f"no row can be used; the first bad row: {bad[0]}")
    return good, bad


def _results(rows: Iterable[Row | BadRow], parse: Callable[[Row], T], num_threads: int) -> Iterator[T | BadRow]:
    def result(row: Row | BadRow) -> T | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return parse(row)
        except MissingColumns as error:
            return BadRow(row.file, row.place, str(error), fix="")
        except ValueError as error:
            return BadRow(row.file, row.place, str(error))

    if num_threads <= 1:
        yield from map(result, rows)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(result, rows)


class PromptDataset:
    """Prompts by position; `bad_rows` were skipped, `num_overlong` prompts filtered by length, `num_truncated` cut."""

    def __init__(self, rows: Sequence[PromptRow], *, bad_rows: Sequence[BadRow] = (), num_overlong: int = 0) -> None:
        self._rows, self.bad_rows, self.num_overlong = rows, tuple(bad_rows), num_overlong
        self.num_bad, self.num_truncated = len(bad_rows), sum(row.is_truncated for row in rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)

    @property
    def data_sources(self) -> tuple[str, ...]:
        """All data sources, in order of first occurrence."""
        return tuple(dict.fromkeys(row.data_source for row in self._rows))

    @property
    def fingerprint(self) -> str:
        """Identifies the prompts and their order, so that a resume with other data is refused."""
        digest = sha256()
        for row in self._rows:
            digest.update(array("q", row.token_ids).tobytes() + b"|" + "".join(row.image_shas).encode())
        return digest.hexdigest()[:16]

    def metrics(self) -> dict[str, float]:
        """Counts of rows used, skipped as bad, and filtered or cut as too long."""
        counts = {"rows": len(self), "bad_rows": self.num_bad}
        counts |= {"overlong_prompts": self.num_overlong, "truncated_prompts": self.num_truncated}
        return {f"data/{name}": float(count) for name, count in counts.items()}

    @classmethod
    def load(
        cls,
        source: str | Sequence[str] | VerlDataset,
        tokenizer: Tokenizer,
        config: PromptsConfig = PromptsConfig(),  # noqa: B008
        *,
        max_samples: int = -1,
        seed: int | None = None,
        default_source: str | None = None,
        processor: "VisionProcessor | None" = None,
    ) -> Self:
        """The rows of all files in order, or of a dataset object, read as `config` says.

        `default_source` is the data source of rows without one, `processor` that of a vision-language model.
        `max_samples` keeps at most that many rows, drawn by `seed`, or the first for None; -1 keeps all. Raises
        DataError with file and row, ConfigError for wrong settings and missing files.
        """
        parsed, bad = parse_rows(
            sample_rows(source_rows(source, config.prompt_key), max_samples, seed=seed),
            lambda row: parse_prompt(row, tokenizer, config, default_source, processor),
            bad_rows=config.bad_rows,
            num_threads=config.filter_overlong_prompts_workers,
        )
        limit = config.max_prompt_length
        if not (kept := [row for row in parsed if row is not None]):
            raise DataError(f"no prompt is left: all {len(parsed)} exceed data.max_prompt_length={limit}; raise it")
        if num_overlong := len(parsed) - len(kept):
            log.warning("dropped %d of %d prompts with more than %d tokens", num_overlong, len(parsed), limit)
        if num_cut := sum(row.is_truncated for row in kept):
            log.warning("cut %d of %d prompts to %d tokens", num_cut, len(kept), limit)
        numbered = [replace(row, index=index) for index, row in enumerate(kept)]
        return cls(numbered, bad_rows=bad, num_overlong=num_overlong)


def parse_prompt(
    values: Row, tokenizer: Tokenizer, config: PromptsConfig, source: str | None, processor: "VisionProcessor | None"
) -> PromptRow | None:
    """The prompt of one row, or None if it is too long and filtered. Raises ValueError for a bad row."""
    row = read_prompt_row(values.values, config, source=source)
    template_kwargs = config.apply_chat_template_kwargs
    if processor is not None:
        root = dirname(values.file)
        encode = partial(processor.encode, row.raw_prompt, row.images, root=root, template_kwargs=template_kwargs)
        ids, inputs = encode()
        shas = tuple(sha for one in inputs for sha in one.shas)
        row = replace(row, image_shas=shas, load_images=partial(_load_images, encode, shas, values))
    elif row.images:
        raise ValueError(f"it has images or videos, which only models of type {', '.join((*GRIDS, *TILES))} take")
    else:
        ids = encode_prompt(tokenizer, row.raw_prompt, template_kwargs=template_kwargs)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if config.filter_overlong_prompts and len(ids) > config.max_prompt_length:
        return None
    kept = truncate(ids, config.max_prompt_length, "error" if row.images else config.truncation)
    return replace(row, token_ids=array("i", kept), is_truncated=len(kept) < len(ids))


def _load_images(
    encode: "Callable[[], tuple[list[int], tuple[ImageInputs, ...]]]", shas: tuple[str, ...], row: Row
) -> "tuple[ImageInputs, ...]":
    """The images and videos of a row again; DataError if their files have changed."""
    with raised_as(DataError, f"{row.file}, {row.place}", ValueError):
        _, inputs = encode()
    if tuple(sha for one in inputs for sha in one.shas) != shas:
        raise DataError(f"{row.file}, {row.place}: an image or video has changed since the start of the run")
    return inputs


def configured_source(
    config: RowsConfig, files: Sequence[str], *, tokenizer: Tokenizer, max_samples: int
) -> Sequence[str] | VerlDataset:
    """The files, or over them an object of the dataset class in data.custom_cls, made with verl's arguments.

    With data.streaming the first `max_samples` rows of datasets of the hub.
    """
    custom, files = config.custom_cls, list(files)
    if custom.path is None or custom.name is None:
        streams = isinstance(config, TrainingRowsConfig) and config.streaming and any(map(is_rows_id, files))
        return UserList(islice(open_rows(files), max_samples)) if streams else files
    cls = load_from_file(custom.path, custom.name, key="data.custom_cls.path")
    dataset = cls(data_files=files, tokenizer=tokenizer, config=config, processor=None, max_samples=max_samples)
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise ConfigError(f"data.custom_cls.name={custom.name}: the class has no {method}")
    return dataset


def source_rows(source: str | Sequence[str] | VerlDataset, prompt_key: str) -> Iterator[Row | BadRow]:
    """The rows of files, or of a dataset object, whose `raw_prompt` stands for a missing prompt column."""
    given: Any = source
    if isinstance(source, str | list | tuple):
        yield from read_rows(given)
        return
    for index in range(len(given)):
        values, name, place = given[index], type(given).__name__, f"row {index}"
        if not isinstance(values, Mapping):
            yield BadRow(name, place, f"a row must be a dict, this is a {type(values).__name__}")
            continue
        values = dict(values)
        if prompt_key not in values and "raw_prompt" in values:
            values[prompt_key] = values.pop("raw_prompt")
        yield Row(name, place, values)


def sample_rows(rows: Iterable[Row | BadRow], max_samples: int, *, seed: int | None) -> Iterable[Row | BadRow]:
    """At most `max_samples` rows in their order: drawn by `seed`, or the first ones for None; -1 keeps all."""
    if seed is None or max_samples < 0:
        return islice(rows, None if max_samples < 0 else max_samples)
    rows = list(rows)
    return [rows[i] for i in sorted(permutation(len(rows), seed=seed, epoch=0)[:max_samples].tolist())]


class RowStream(PromptDataset):
    """Endless rows in the order of their sources, and the cursor over them; as a dataset, the rows now in memory.

    `parse` makes a prompt or the texts of a row, or None to leave it out; batches have `batch_size` rows.
    Blocks of `shuffle_buffer_size` rows are read at a time, with `shuffle` each permuted by the seed and its number. A
    state holds where the block began in the sources and how much of it was used, so a resume is exact.
    """

    def __init__(self, names: Sequence[str], data: TrainingRowsConfig, parse: Callable[[Row], Any], batch_size: int):
        self._names, self._data, self._parse, self._batch_size = list(names), data, parse, batch_size
        self._epoch, self._block, self._position = 0, -1, 0
        self._picked: dict[int, object] = {}
        super().__init__([])
        self._open(None)
        self._read()

    def restart(self) -> None:
        """Begin with the first row again, unless none was taken."""
        if self._block or self._position:
            self.load_state_dict({**self._order(), "source": None, "block": 0, "position": 0, "epoch": 0})

    def next(self) -> BatchRows:
        """The numbers of the next batch's rows, which `self[number]` gives until the next batch."""
        picked: dict[int, Any] = {}
        while len(picked) < self._batch_size:
            if self._position == len(self._rows):
                self._read()
            end = self._position + self._batch_size - len(picked)
            picked |= zip(self._numbers[self._position : end], self._rows[self._position : end], strict=True)
            self._position = min(end, len(self._rows))
        self._picked = picked
        return BatchRows(self._epoch, tuple(picked))

    def __getitem__(self, index: int) -> Any:
        return self._picked[index] if index in self._picked else self._rows[index]

    def _open(self, state: State | None) -> None:
        self._source = open_rows(self._names)
        if state is not None:
            self._source.load_state_dict(dict(state))
        self._iterator = iter(self._source)

    def _read(self) -> None:
        """Read the next block, from the start of the sources again at their end."""
        self._block, self._position = self._block + 1, 0
        values = self._next_rows()
        if not values:
            self._open(None)
            self._epoch += 1
            values = self._next_rows()
        if not values:
            raise DataError(f"{', '.join(self._names)} have no rows")
        if self._data.shuffle:
            values = [values[row] for row in permutation(len(values), seed=self._data.seed, epoch=self._block)]
        first = self._block * self._data.shuffle_buffer_size
        rows = (Row(",".join(self._names), f"row {first + at}", row) for at, row in enumerate(values))
        parsed, bad = parse_rows(rows, self._parse, bad_rows=self._data.bad_rows)
        kept = {first + at: row for at, row in enumerate(parsed) if row is not None}
        self._numbers = list(kept)
        self._rows = [replace(row, index=at) if isinstance(row, PromptRow) else row for at, row in kept.items()]
        self.num_bad += len(bad)
        self.num_overlong += len(parsed) - len(self._rows)
        self.num_truncated += sum(isinstance(row, PromptRow) and row.is_truncated for row in self._rows)

    def _next_rows(self) -> list[Any]:
        """The next rows of the sources, a block at most, noting where they begin and what was left out before."""
        self._start = self._source.state_dict()
        self._before = [self.num_bad, self.num_overlong, self.num_truncated]
        return list(islice(self._iterator, self._data.shuffle_buffer_size))

    def state_dict(self) -> dict[str, object]:
        """Plain values, with what the order depends on."""
        place = {"source": self._start, "block": self._block, "position": self._position, "epoch": self._epoch}
        return {**place, "counts": self._before, **self._order()}

    def _order(self) -> dict[str, object]:
        return {**self._data.model_dump(include={"seed", "shuffle", "shuffle_buffer_size"}), "train_files": self._names}

    def load_state_dict(self, state: State) -> None:
        """Continue where a stream of the same sources was. ConfigError for others, or another order."""
        for name, value in self._order().items():
            if state.get(name) != value:
                back = f"set data.{name}={state.get(name)}, or start over with trainer.resume_mode=disable"
                raise ConfigError(f"data.{name} is {value}, but the checkpoint's differs: {back}")
        self._open(state["source"])
        self._block, self._epoch = state["block"] - 1, state["epoch"]
        self.num_bad, self.num_overlong, self.num_truncated = state.get("counts", (0, 0, 0))
        self._read()
        self._position = state["position"]
