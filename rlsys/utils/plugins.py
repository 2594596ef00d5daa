"""User functions and classes, loaded from a file by name."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlsys.utils.errors import ConfigError


def load_from_file(path: str, name: str, *, key: str) -> Any:
    """The attribute `name` of the local Python file `path`; a ConfigError names the setting `key`.

    The file is imported once per process. An error raised by the file is the cause of the ConfigError.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}.path={path}: not a local file")
    resolved = str(file.resolve())
    module_name = f"rlsys_plugin_{file.stem}_{sha256(resolved.encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, resolved)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}.path={path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ConfigError(f"{key}.path={path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}.name={name}: {path} does not define it")
    return getattr(module, name)
