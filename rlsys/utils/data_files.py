"""Tables that stand beside a module as TOML files."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(module: str, name: str) -> dict[str, Any]:
    """The TOML file `name` beside a module, which gives its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
