"""Functions registered by name with a decorator: how estimators and losses are plugged in."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name. `takes` are the keyword arguments that callers can supply; others must have a default."""

    def __init__(self, what: str, *, takes: frozenset[str]) -> None:
        self.what = what
        self.takes = takes
        self._functions: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator; ValueError if a name is taken or the function requires an argument that is not supplied."""

        def add(function: F) -> F:
            self._check_signature(names[0], function)
            for name in names:
                if self._functions.setdefault(name, function) is not function:
                    raise ValueError(f"{self.what} '{name}' is already registered as {self._functions[name]!r}")
            return function

        return add

    def get(self, name: str) -> F:
        """The function registered as `name`; ValueError with the nearest name otherwise."""
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(self.names())}"
            raise ValueError(f"unknown {self.what} '{name}': {hint}")
        return self._functions[name]

    def call(self, name: str, inputs: Mapping[str, Any]) -> Any:
        """Call the function of that name with those of the inputs it names and that are not None.

        ValueError naming the missing arguments.
        """
        function = self.get(name)
        parameters = inspect.signature(function).parameters
        given = {key: value for key, value in inputs.items() if key in parameters and value is not None}
        required = [p.name for p in parameters.values() if p.default is inspect.Parameter.empty]
        if missing := [key for key in required if key not in given]:
            raise ValueError(f"{self.what} '{name}' needs {', '.join(missing)}")
        return function(**given)

    def names(self) -> list[str]:
        return sorted(self._functions)

    def _check_signature(self, name: str, function: F) -> None:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                raise ValueError(f"{self.what} '{name}': '{parameter.name}' must be keyword-only (put * before it)")
            if parameter.name not in self.takes and parameter.default is inspect.Parameter.empty:
                known = ", ".join(sorted(self.takes))
                raise ValueError(f"{self.what} '{name}' requires '{parameter.name}', which is not one of {known}")
