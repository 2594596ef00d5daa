"""The rows of SFT, reward models and DPO as the configuration asks, and their tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.config import DPOConfig, RMConfig, SFTConfig
from rlsys.config.introspect import replaced
from rlsys.data.dataset import RowStream, configured_source
from rlsys.data.supervised import TokenizedText, load_texts, parse_row
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
        is_kto = isinstance(config, DPOConfig) and config.dpo.loss_type == "kto"
        return load_texts(source, tokenizer, data, is_kto=is_kto, max_samples=max_samples, shuffle=shuffle)

    if data.streaming:
        train = RowStream(data.train_files, data, lambda r: parse_row(r.values, tokenizer, data), data.train_batch_size)
    else:
        train = rows(data.train_files, data.train_max_samples, shuffle=data.shuffle)
    return train, rows(data.val_files, data.val_max_samples, shuffle=False) if data.val_files else None


def tokenizer_here(config: Config) -> Tokenizer | None:
    """The tokenizer of a model whose folder is on this machine."""
    folder = config_folder(Path(config.model.tokenizer_path or config.model.path or ""))
    if not (folder / "tokenizer_config.json").is_file():
        return None
    return load_tokenizer(replaced(config.model, {"tokenizer_path": str(folder)}))
