"""Prompts to train on: rows of files, checked, tokenised and cut to length before anything heavy starts.

A prompt is a list of messages or a text. With a chat template it is rendered by that (a text as one message of the
user), without one the contents are taken as they are.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, Self

from rlsys.data.chat import Truncation, encode_prompt, truncate
from rlsys.data.cursor import permutation
from rlsys.data.files import BadRow, Row, read_rows
from rlsys.data.policy import BadRowPolicy, read_all
from rlsys.data.rows import PromptRow, read_prompt_row
from rlsys.utils.errors import ConfigError, DataError
from rlsys.utils.plugins import load_from_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


class VerlDataset(Protocol):
    """What a dataset class of the user's must offer: rows as dicts with verl's columns."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts; the names are the keys of the config's `data` section.

    Prompts over `max_prompt_length` tokens are filtered if asked for, and otherwise cut by `truncation`, where "error"
    makes them bad rows. `template_kwargs` go to the chat template.
    """

    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    truncation: Truncation = "error"
    filter_overlong_prompts: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.truncation not in ("error", "left", "right", "middle"):
            raise ConfigError(f"data.truncation={self.truncation}: must be error, left, right or middle")
        if self.max_prompt_length < 1:
            raise ConfigError(f"data.max_prompt_length={self.max_prompt_length}: must be at least 1")


class PromptDataset:
    """Prompts by position. `bad_rows` are those that were skipped, `num_overlong` how many were filtered by length."""

    def __init__(self, rows: Sequence[PromptRow], *, bad_rows: Sequence[BadRow] = (), num_overlong: int = 0) -> None:
        self._rows, self.bad_rows, self.num_overlong = rows, tuple(bad_rows), num_overlong

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)

    @property
    def data_sources(self) -> tuple[str, ...]:
        """All data sources, in the order in which they first occur."""
        return tuple(dict.fromkeys(row.data_source for row in self._rows))

    @property
    def fingerprint(self) -> str:
        """Identifies the prompts and their order; given to the cursor, it makes a resume notice other data."""
        digest = sha256()
        for row in self._rows:
            digest.update(array("q", row.token_ids).tobytes() + b"|")
        return digest.hexdigest()[:16]

    def metrics(self) -> dict[str, float]:
        """Counts of rows used, skipped as bad, and filtered as too long."""
        return {
            "data/rows": float(len(self)),
            "data/bad_rows": float(len(self.bad_rows)),
            "data/overlong_prompts": float(self.num_overlong),
        }

    @classmethod
    def load(
        cls,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        form: PromptFormat | None = None,
        *,
        max_samples: int = -1,
        shuffle: bool = False,
        seed: int = 1,
        bad_rows: BadRowPolicy = "refuse",
        num_threads: int = 1,
    ) -> Self:
        """The rows of all `files`, one file after the other.

        `max_samples` takes so many of them, drawn by `seed` if `shuffle`, else the first; -1 takes all. Raises
        DataError with file and row, ConfigError for wrong settings and missing files.
        """
        if max_samples < 1 and max_samples != -1:
            raise ConfigError(f"data.max_samples={max_samples}: must be at least 1, or -1 for all")
        rows = sample(read_rows(files), max_samples, seed=seed if shuffle else None)
        return cls._read(rows, tokenizer, form or PromptFormat(), bad_rows, num_threads)

    @classmethod
    def wrap(
        cls,
        dataset: VerlDataset,
        tokenizer: PreTrainedTokenizerBase,
        form: PromptFormat | None = None,
        *,
        bad_rows: BadRowPolicy = "refuse",
        num_threads: int = 1,
    ) -> Self:
        """As `load`, with the rows of a dataset object."""
        form = form or PromptFormat()
        return cls._read(rows_of(dataset, form.prompt_key), tokenizer, form, bad_rows, num_threads)

    @classmethod
    def _read(
        cls,
        rows: Iterable[Row | BadRow],
        tokenizer: PreTrainedTokenizerBase,
        form: PromptFormat,
        bad_rows: BadRowPolicy,
        num_threads: int,
    ) -> Self:
        def read(row: Row) -> PromptRow | None:
            return prompt_of(row.values, tokenizer, form)

        good, bad = read_all(rows, read, bad_rows=bad_rows, num_threads=num_threads)
        kept = [row for row in good if row is not None]
        if not kept:
            raise DataError(f"no prompt is left: all {len(good)} have more than {form.max_prompt_length} tokens")
        if lost := len(good) - len(kept):
            limit = form.max_prompt_length
            log.warning("%d of %d prompts have more than %d tokens and are left out", lost, len(good), limit)
        numbered = [replace(row, index=index) for index, row in enumerate(kept)]
        return cls(numbered, bad_rows=bad, num_overlong=lost)


def prompt_of(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, form: PromptFormat) -> PromptRow | None:
    """The prompt of one row, or None where it is too long and to be filtered. Raises ValueError for a bad row."""
    row = read_prompt_row(values, prompt_key=form.prompt_key, reward_fn_key=form.reward_fn_key)
    ids = encode_prompt(tokenizer, row.raw_prompt, template_kwargs=form.template_kwargs)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if form.filter_overlong_prompts and len(ids) > form.max_prompt_length:
        return None
    return replace(row, token_ids=array("i", truncate(ids, form.max_prompt_length, form.truncation)))


def load_custom_dataset(
    path: str, name: str, *, data_files: Sequence[str], tokenizer: Any, config: Any, max_samples: int = -1
) -> VerlDataset:
    """An object of the user's dataset class (data.custom_cls), made with verl's arguments."""
    cls = load_from_file(path, name, key="data.custom_cls")
    dataset = cls(
        data_files=list(data_files), tokenizer=tokenizer, config=config, processor=None, max_samples=max_samples
    )
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise ConfigError(f"data.custom_cls.name={name}: the class has no {method}")
    return dataset


def sample(rows: Iterable[Row | BadRow], max_samples: int, *, seed: int | None) -> Iterable[Row | BadRow]:
    """At most `max_samples` of the rows in their order: drawn by `seed`, or the first ones by None; -1 takes all."""
    if max_samples < 0:
        return rows
    rows = list(rows)
    if max_samples >= len(rows):
        return rows
    if seed is None:
        return rows[:max_samples]
    return [rows[i] for i in sorted(permutation(len(rows), seed=seed, epoch=0)[:max_samples].tolist())]


def rows_of(dataset: VerlDataset, prompt_key: str) -> Iterator[Row | BadRow]:
    """The rows of a dataset object; its `raw_prompt` stands for a missing prompt column."""
    for index in range(len(dataset)):
        values, name, place = dataset[index], type(dataset).__name__, f"row {index}"
        if not isinstance(values, Mapping):
            yield BadRow(name, place, f"a row must be a dict, this is a {type(values).__name__}")
            continue
        values = dict(values)
        if prompt_key not in values and "raw_prompt" in values:
            values[prompt_key] = values.pop("raw_prompt")
        yield Row(name, place, values)
