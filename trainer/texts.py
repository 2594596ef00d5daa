"""The rows of SFT, reward models and DPO as the configuration asks, and a look at the first ones before a run."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.config import DPOConfig, RMConfig, SFTConfig
from rlsys.config.introspect import replaced
from rlsys.data.dataset import RowStream, configured_source
from rlsys.data.first_rows import NUM_ROWS
from rlsys.data.remote import is_remote
from rlsys.data.supervised import TokenizedText, load_texts, parse_row
from rlsys.utils.errors import ConfigError
from rlsys.utils.hub import is_rows_id
from rlsys.utils.run_folders import config_folder
from trainer.local_files import load_tokenizer

Config = SFTConfig | RMConfig | DPOConfig
Texts = Sequence[Sequence[TokenizedText]]


def load_rows(config: Config, tokenizer: Tokenizer) -> tuple[Texts | RowStream, Texts | None]:
    """Training and validation rows of the configured files or dataset class, the former as a stream if it is set."""
    data = config.data
    assert data.train_files is not None

    def rows(files: Sequence[str], max_samples: int, *, shuffle: bool) -> Texts:
        source = configured_source(data, files, tokenizer=tokenizer, max_samples=max_samples)
        loaded = load_texts(source, tokenizer, data, max_samples=max_samples, shuffle=shuffle)
        kind = config.dpo.loss_type if isinstance(config, DPOConfig) else None
        if kind and any((text.is_desirable is None) == (kind == "kto") for text, *_ in loaded):
            needed = "prompt, completion and label" if kind == "kto" else "prompt, chosen and rejected"
            raise ConfigError(f"dpo.loss_type={kind} needs rows of {needed}")
        return loaded

    if data.streaming:
        train = RowStream(data.train_files, data, lambda r: parse_row(r.values, tokenizer, data), data.train_batch_size)
    else:
        train = rows(data.train_files, data.train_max_samples, shuffle=data.shuffle)
    return train, rows(data.val_files, data.val_max_samples, shuffle=False) if data.val_files else None


def check_first_texts(config: Config) -> None:
    """Read the first rows of files here as the job will, by a tokenizer that is here; DataError or ConfigError."""
    data, folder = config.data, config_folder(Path(config.model.tokenizer_path or config.model.path or ""))
    is_here = (folder / "tokenizer_config.json").is_file() and data.custom_cls.path is None
    names = (*(data.train_files or ()), *(data.val_files or ()))
    if is_here and data.bad_rows == "refuse" and not any(is_rows_id(name) or is_remote(name) for name in names):
        few = dict.fromkeys(("data.train_max_samples", "data.val_max_samples"), NUM_ROWS)
        of_few = replaced(config, few | {"data.streaming": False, "data.shuffle": False})
        load_rows(of_few, load_tokenizer(replaced(config.model, {"tokenizer_path": str(folder)})))
