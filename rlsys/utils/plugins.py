"""User code: functions and classes of a file, and modules that register names."""

import importlib.util
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsys.utils.errors import ConfigError, raised_as

IMPORT_S = 60.0
PACKAGE = "pkg://"
NAMESAKES = ("trainer.py", "workers.py")
_sources: dict[str, bytes] = {}
"""What the imported files held, by the names of their modules."""


def named_arguments(function: Callable[..., Any], given: Mapping[str, object]) -> dict[str, object]:
    """Those of the given arguments that a function or a class names, all of them where it takes **kwargs."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def load_from_file(path: str, name: str, *, key: str) -> Any:
    """The attribute `name` of the local Python file `path`; a ConfigError names the setting `key` of the file.

    The file is imported once per process, and again where it was changed since, as between two runs of a notebook. An
    error raised by the file is the cause of the ConfigError.
    """
    module = _module_of_file(path, key)
    if not hasattr(module, name):
        raise ConfigError(f"{key}={path}, {name}: the file does not define it")
    return getattr(module, name)


def import_libraries(libraries: Iterable[tuple[str, str]]) -> None:
    """Import the libraries of (configuration key, module name or path of a .py file), each once per process.

    A file that was changed since is imported again: workers, which are new processes, would have other code than this.
    ConfigError naming the key for one that cannot be imported.
    """
    for key, library in libraries:
        _module_of_file(library if library.endswith(".py") else PACKAGE + library, key)


def search_last_beside_namesakes() -> None:
    """Move folders with a trainer.py or workers.py, which are not our packages, to the end of this process's path."""
    theirs = [path for path in sys.path if any(Path(path or ".", name).is_file() for name in NAMESAKES)]
    sys.path[:] = [path for path in sys.path if path not in theirs] + theirs


@contextmanager
def _import_deadline() -> Iterator[None]:
    """TimeoutError, in the main thread, where an import hangs; the timer of others is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"its import did not end within {IMPORT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, IMPORT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, others_s)
        signal.signal(signal.SIGALRM, before)


def _module_of_file(path: str, key: str) -> ModuleType:
    """The module of a Python file, under the same name in every process; pkg://module is imported by its name."""
    if path.startswith(PACKAGE):
        name = path.removeprefix(PACKAGE)
        with raised_as(ConfigError, f"{key}={name} cannot be imported"):
            return importlib.import_module(name)
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{key}={path}: not a local file")
    module_name = f"rlsys_plugin_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
    source = file.read_bytes()
    if _sources.get(module_name) != source:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{key}={path}: not a Python file")
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        _sources.pop(module_name, None)  # until it is whole: an edit that fails to load may be taken back
        if (folder := str(file.parent)) not in sys.path:
            sys.path.append(folder)  # the modules beside it, after all others
        with raised_as(ConfigError, f"{key}={path} cannot be loaded"), _import_deadline():
            spec.loader.exec_module(module)
        _sources[module_name] = source
    return sys.modules[module_name]
