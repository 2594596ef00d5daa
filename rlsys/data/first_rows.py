"""A look at the first rows of every file, and at their number, before anything heavy is imported."""

import json
from itertools import islice
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlsys.config.plan import check_enough_rows
from rlsys.config.schema.jobs import DPOConfig, EvalConfig, GradedJob, JobConfig, PPOConfig
from rlsys.data.chat import Messages, Tokenizer, as_messages
from rlsys.data.files import BadRow, Row, count_rows, read_rows
from rlsys.data.remote import is_remote
from rlsys.data.rows import MissingColumns, default_source, read_prompt_row
from rlsys.data.supervised import parse_row, read_conversations
from rlsys.utils.errors import ConfigError, DataError
from rlsys.utils.hub import is_rows_id
from rlsys.utils.run_folders import config_folder

FirstRows = tuple[set[str], dict[str, str]]
"""The data sources of the first prompts, and what the plan shows of the files: "data" and "validation"."""
NUM_ROWS = 20
SHOWN_CHARS = 100


def check_first_rows(config: JobConfig, tokenizer: "Tokenizer | None" = None) -> FirstRows:
    """A look at the first rows of all files.

    ConfigError for files without the columns that the settings name or with fewer rows than a batch, DataError for
    other bad rows at their start. Rows of a dataset class of your own, and without a `tokenizer` what only it shows of
    texts, are checked later.
    """
    first: FirstRows = set(), {}
    if config.data.custom_cls.path is not None:
        return first
    if not isinstance(config, EvalConfig):
        batch = config.data.gen_batch_size if isinstance(config, PPOConfig) else config.data.train_batch_size
        num_rows = _check_files(config, "data", first, tokenizer)
        check_enough_rows(batch if num_rows is None else num_rows, batch)
    _check_files(config, "validation", first, tokenizer)
    return first


def _check_files(config: JobConfig, name: str, first: FirstRows, tokenizer: "Tokenizer | None") -> int | None:
    """Read the start of each file into `first`; returns how many rows are used at most, None if that is not known."""
    data_sources, plan = first
    files, max_samples = config.data.val_files, config.data.val_max_samples
    if name == "data" and not isinstance(config, EvalConfig):
        files, max_samples = config.data.train_files, config.data.train_max_samples
    local = [file for file in files or () if not (is_rows_id(file) or is_remote(file))]
    shown, num_bad = "", 0
    for file in local:
        missing: list[str] = []
        rows = list(islice(read_rows(file), NUM_ROWS))
        for row in rows:
            try:
                source, messages, answer = _read(config, row, tokenizer)
            except ValueError as error:
                num_bad += 1
                if isinstance(error, MissingColumns):
                    missing.append(f"{row.file}: {error}")
                elif config.data.bad_rows == "refuse":
                    bad = BadRow(row.file, row.place, str(error))
                    raise DataError(f"{bad}{bad.fix}") from error
            else:
                data_sources.update(source)
                shown = shown or f"{_short(_rendered(config, messages))} -> {_short(str(answer))}"
        if missing and (config.data.bad_rows == "refuse" or len(missing) == len(rows)):
            raise ConfigError(missing[0])
    if not local or len(local) < len(files or ()):
        return None
    num_rows = sum(map(count_rows, local))
    used = min(num_rows if max_samples < 0 else max_samples, num_rows - num_bad)
    most, of = "at most " if num_bad else "", f" of {num_rows}" if used < num_rows else ""
    plan[name] = f"{most}{used}{of} rows of {', '.join(local)}" + (f"; the first: {shown}" if shown else "")
    return used


def _read(config: JobConfig, row: Row | BadRow, tokenizer: "Tokenizer | None") -> tuple[set[str], Messages, object]:
    """Read a row as the job will: its data source, if it has one, its prompt and its answer.

    ValueError if it cannot be used.
    """
    if isinstance(row, BadRow):
        raise ValueError(row.reason)
    if isinstance(config, GradedJob):
        prompt = read_prompt_row(row.values, config.data, source=default_source(config))
        return {prompt.data_source}, as_messages(prompt.raw_prompt), prompt.reward_model["ground_truth"]
    is_kto = isinstance(config, DPOConfig) and config.dpo.loss_type == "kto"
    (*messages, answer), *_ = read_conversations(row.values, config.data, is_kto)[0]
    if tokenizer is not None:
        parse_row(row.values, tokenizer, config.data, is_kto)
    return set(), messages, answer["content"]


def _rendered(config: JobConfig, messages: Messages) -> str:
    """The prompt by the chat template of a model's folder, without transformers; else the contents alone."""
    model = config.actor_rollout_ref.model if isinstance(config, GradedJob) else config.model
    folder = config_folder(Path(model.tokenizer_path or model.path or ""))
    template_file, tokenizer_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        known = json.loads(tokenizer_file.read_text())
        template = model.custom_chat_template or known.get("chat_template")
        if template_file.is_file() and not model.custom_chat_template:
            template = template_file.read_text()
        special = {name: text for name, text in known.items() if name.endswith("_token") and isinstance(text, str)}
        loops = ["jinja2.ext.loopcontrols"]
        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
        arguments = special | config.data.apply_chat_template_kwargs
        return jinja.from_string(template).render(messages=messages, add_generation_prompt=True, **arguments)
    except Exception:  # a template is a program of the model's author; the tokenizer reports what is wrong with it
        return "\n".join(message["content"] for message in messages)


def _short(text: str) -> str:
    """A text in one line, its middle left out where it is long."""
    half = SHOWN_CHARS // 2
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}")
