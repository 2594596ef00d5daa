"""Functions registered by name with a decorator: how estimators and losses are plugged in."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from rlsys.config.schema.base import Section
from rlsys.utils.plugins import named_arguments

F = TypeVar("F", bound=Callable[..., object])


class SectionView:
    """A section of the configuration as functions written for verl read it: by attribute, item and `get`."""

    global_batch_info: Mapping[str, object] = {}
    """Empty: sums are divided by the counts of the whole mini-batch afterwards."""

    def __init__(self, section: Section) -> None:
        self._section = section

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        return SectionView(value) if isinstance(value, Section) else value

    __getitem__ = __getattr__

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, or `default` where the section has none of that name."""
        return getattr(self, name, default)


class Registry(Generic[F]):
    """Functions by name. `takes` are the arguments that callers can supply (None: any); others must have a default.

    `adapt` turns a function of verl's form into one of ours.
    """

    def __init__(self, what: str, *, takes: Collection[str] | None, adapt: Callable[[F], F] = lambda f: f) -> None:
        self.what, self.takes, self._adapt = what, takes, adapt
        self._functions: dict[str, tuple[F, str]] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator; ValueError if a name is taken or the function requires an argument that is not supplied.

        A function of the same module and name takes the place of the one before: a cell or a file that ran again.
        """

        def add(function: F) -> F:
            adapted = self._adapt(function)
            self._check_signature(names[0], adapted)
            origin = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
            for name in names:
                if (first := self._functions.setdefault(name, (adapted, origin))[1]) != origin:
                    raise ValueError(f"{self.what} '{name}' is already registered as {first}")
                self._functions[name] = adapted, origin
            return function

        return add

    def get(self, name: str) -> F:
        """The function registered as `name`; ValueError with the nearest name otherwise."""
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(self.names())}"
            raise ValueError(f"unknown {self.what} '{name}': {hint}")
        return self._functions[name][0]

    def call(self, name: str, inputs: Mapping[str, Any]) -> Any:
        """Call the function of that name with those of the inputs it names and that are not None.

        ValueError naming the missing arguments.
        """
        function = self.get(name)
        given = named_arguments(function, {name: value for name, value in inputs.items() if value is not None})
        required = [p.name for p in inspect.signature(function).parameters.values() if _is_required(p)]
        if missing := [key for key in required if key not in given]:
            raise ValueError(f"{self.what} '{name}' needs {', '.join(missing)}")
        return function(**given)

    def names(self) -> list[str]:
        return sorted(self._functions)

    def _check_signature(self, name: str, function: F) -> None:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ValueError(f"{self.what} '{name}': '{parameter.name}' must be a keyword argument")
            if self.takes is not None and _is_required(parameter) and parameter.name not in self.takes:
                known = ", ".join(sorted(self.takes))
                raise ValueError(f"{self.what} '{name}' requires '{parameter.name}', which is not one of {known}")


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
