"""A look at the first rows of every file before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rlsys.config.schema.jobs import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.data.files import BadRow, Row, read_rows
from rlsys.data.remote import is_remote
from rlsys.data.rows import MissingColumns, default_source, read_prompt_row
from rlsys.data.supervised import read_conversations
from rlsys.utils.errors import ConfigError, DataError
from rlsys.utils.hub import is_rows_id

NUM_ROWS = 20
JobConfig = PPOConfig | SFTConfig | RMConfig | DPOConfig | EvalConfig


def check_first_rows(config: JobConfig) -> set[str]:
    """The data sources of the prompts at the start of the files.

    ConfigError for files without the columns that the settings name, DataError for other bad rows at their start. Rows
    of a dataset class of your own, and what only the tokenizer shows, are checked later.
    """
    if config.data.custom_cls.path is not None:
        return set()
    data_sources: set[str] = set()
    for file in _files(config):
        missing: list[str] = []
        rows = list(islice(read_rows(file), NUM_ROWS))
        for row in rows:
            try:
                data_sources |= _read(config, row)
            except MissingColumns as error:
                missing.append(f"{row.file}: {error}")
            except ValueError as error:
                if config.data.bad_rows == "refuse":
                    bad = BadRow(row.file, row.place, str(error))
                    raise DataError(f"{bad}{bad.fix}") from error
        if missing and (config.data.bad_rows == "refuse" or len(missing) == len(rows)):
            raise ConfigError(missing[0])
    return data_sources


def _files(config: JobConfig) -> Sequence[str]:
    train = () if isinstance(config, EvalConfig) else config.data.train_files
    return [
        file for file in (*(train or ()), *(config.data.val_files or ())) if not (is_rows_id(file) or is_remote(file))
    ]


def _read(config: JobConfig, row: Row | BadRow) -> set[str]:
    """Read a row as the job will: its data source, if it has one; ValueError if it cannot be used."""
    if isinstance(row, BadRow):
        raise ValueError(row.reason)
    if isinstance(config, PPOConfig | EvalConfig):
        return {read_prompt_row(row.values, config.data, source=default_source(config.reward)).data_source}
    read_conversations(row.values, config.data)
    return set()
