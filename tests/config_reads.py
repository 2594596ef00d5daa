"""Which keys of a configuration a real run reads: every attribute read of its sections after loading is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import trainer.job
from rlsys.config.introspect import leaves
from rlsys.config.schema.base import Section


def placed_sections(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    """Every section of a configuration with its path."""
    yield path, section
    for name in type(section).model_fields:
        below = getattr(section, name)
        if isinstance(below, Section):
            yield from placed_sections(below, f"{path}.{name}" if path else name)


@contextmanager
def recorded_reads(config: Section) -> Iterator[set[str]]:
    """The keys of `config` that are read inside the block; a section that is dumped is read whole, the tree is not.

    A copy of a section with some changes counts as the section at every path that has this class.
    """
    read: set[str] = set()
    placed = dict(placed_sections(config))
    paths = {id(section): path for path, section in placed.items()}
    paths_of_class: dict[type, list[str]] = {}
    for path, section in placed.items():
        paths_of_class.setdefault(type(section), []).append(path)
    fields = {cls: frozenset(cls.model_fields) for cls in paths_of_class}

    def places(section: Section) -> list[str]:
        path = paths.get(id(section))
        return paths_of_class.get(type(section), []) if path is None else [path]

    def getattribute(self: Section, name: str) -> Any:
        if name in fields.get(type(self), ()):
            read.update(f"{path}.{name}" if path else name for path in places(self))
        return object.__getattribute__(self, name)

    def model_dump(self: Section, **options: Any) -> dict[str, Any]:
        read.update(f"{path}.{leaf}" for path in places(self) if path for leaf in leaves(type(self)))
        return original(self, **options)

    original = Section.model_dump
    with mock.patch.multiple(Section, create=True, __getattribute__=getattribute, model_dump=model_dump):
        yield read


def keys_read_by(job: ModuleType, argv: list[str]) -> set[str]:
    """Run `trainer.main_*` in this process; the keys that it reads once its configuration is loaded and checked."""
    read: set[str] = set()
    run_job = trainer.job.run_job

    def recorded(config: Any, work: str) -> int:
        with recorded_reads(config) as keys:
            code = run_job(config, work)
        read.update(keys)
        return code

    with mock.patch.object(trainer.job, "run_job", recorded):
        assert job.main(argv) == 0
    return read & set(leaves(schema_of(job)))


def schema_of(job: ModuleType) -> type[Section]:
    return next(value for value in vars(job).values() if isinstance(value, type) and issubclass(value, Section))
