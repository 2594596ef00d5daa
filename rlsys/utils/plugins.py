"""Functions and classes of the user's, named by file and name."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlsys.utils.errors import ConfigError


def load_from_file(path: str, name: str, *, key: str) -> Any:
    """What `name` is in the local Python file `path`; `key` is the setting to name in the ConfigError.

    The file is imported once per process. Errors of the file itself pass through as the cause.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{key}.path={path}: there is no such local file")
    resolved = str(file.resolve())
    module_name = f"rlsys_plugin_{file.stem}_{sha256(resolved.encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, resolved)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}.path={path}: this is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ConfigError(f"{key}.path={path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}.name={name}: {path} has nothing of that name")
    return getattr(module, name)
