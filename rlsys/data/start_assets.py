"""What training starts from when nothing else is given: a small model and its rows, which are files of this package.

A tokenizer of single bytes, a Qwen2-shaped model of about a million parameters, and arithmetic. The model has learnt
to answer, and to answer "?" now and then: like a language model that hedges, it knows more than it says, and
reinforcement learning shows an effect within minutes. scripts/start_model.py made them.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "start"
START_MODEL = _FOLDER / "model"
TRAIN_ROWS, HELD_OUT_ROWS = _FOLDER / "train.parquet", _FOLDER / "test.parquet"


def cache_dir() -> Path:
    """Where copies of files and converted models are kept: RLSYS_CACHE, else rlsys in XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("RLSYS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlsys"
