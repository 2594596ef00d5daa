"""Which settings of an installed package there are, by its source, which is not imported."""

import ast
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path


def unknown_fields(package: str, places: Iterable[tuple[str, str]], given: Collection[str]) -> dict[str, str] | None:
    """Names that are no annotated fields of a package's classes, and what to do about each: set a similar one, or
    remove it. None if the package is not installed.

    `places`: patterns of files in the package's folder, and of the classes in them.
    """
    known, folders = list[str](), getattr(find_spec(package), "submodule_search_locations", None) or ()
    for pattern, wanted in places:
        for file in (file for folder in folders for file in Path(folder).glob(pattern)):
            for kind in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(kind, ast.ClassDef) and fnmatch(kind.name, wanted):
                    known += [ast.unparse(field.target) for field in kind.body if isinstance(field, ast.AnnAssign)]
    near = {one: " or ".join(get_close_matches(one.replace("-", "_"), known)) for one in sorted({*given} - {*known})}
    fixes = {one: f"set {names} instead" if names else "remove it" for one, names in near.items()}
    return fixes if known else None
