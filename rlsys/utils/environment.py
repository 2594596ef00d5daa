"""Environment variables of this process for a while."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def environment(values: Mapping[str, str], unset: Sequence[str] = ()) -> Iterator[None]:
    """Set variables of this process, and unset others, for a while."""
    names = (*unset, *values)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
