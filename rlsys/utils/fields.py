"""Which settings of an installed package there are, and of which type, by its source, which is not imported."""

import ast
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

TYPES = {"int": (int,), "float": (float, int), "bool": (bool, int), "str": (str, dict)}
"""Types of values for a simple annotation: a switch may be 0 or 1, and SGLang takes a dict for text that is JSON."""
SIMPLE = re.compile(r"(A\[)?(Optional\[)?(?P<kind>int|float|bool|str)(]| \| None)?(, .*)?")
"""An annotation with one of `TYPES`, as it is or in the form A[type, ...] of SGLang's, which may be None."""


def wrong_fields(package: str, places: Iterable[tuple[str, str]], given: Mapping[str, object]) -> dict[str, str] | None:
    """What is wrong with settings, by name: what is no annotated field of a package's classes, and what has not the
    type of one with a simple annotation. None if the package is not installed, or nothing is given.

    `places`: patterns of files in the package's folder, and of the classes in them.
    """
    known, folders = dict[str, str](), getattr(given and find_spec(package), "submodule_search_locations", None) or ()
    for pattern, wanted in places:
        for file in (file for folder in folders for file in Path(folder).glob(pattern)):
            for kind in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(kind, ast.ClassDef) and fnmatch(kind.name, wanted):
                    fields = (field for field in kind.body if isinstance(field, ast.AnnAssign))
                    known |= {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    wrong = dict[str, str]()
    for name, value in sorted(given.items()):
        if name not in known:
            near = " or ".join(get_close_matches(name.replace("-", "_"), known, cutoff=0.8))
            wrong[name] = f"has no such setting; {f'set {near} instead' if near else 'remove it'}"
        elif (simple := SIMPLE.fullmatch(known[name])) and type(value) not in (type(None), *TYPES[simple["kind"]]):
            wrong[name] = f"takes a value of type {simple['kind']}, not {value!r}; set one"
    return wrong if known else None
