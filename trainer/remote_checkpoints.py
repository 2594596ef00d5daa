"""Copies of a run's checkpoints at an address that fsspec reads and writes, such as s3://bucket/run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from rlsys.utils.atomic import commit_dir
from rlsys.utils.errors import ConfigError
from rlsys.utils.run_folders import LATEST, step_of


class RemoteCheckpoints:
    """The checkpoints under one address, in the layout of a run's folder; the pointer is written last."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with self._readable():
            self.files, self.root = fsspec.url_to_fs(self.url)

    def check(self) -> None:
        """ConfigError unless a file can be written there, and removed again."""
        with self._readable():
            self.files.makedirs(self.root, exist_ok=True)
            self.files.pipe_file(f"{self.root}/.write_test", b"rlsys")
            self.files.rm_file(f"{self.root}/.write_test")

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, None without any."""
        with self._readable():
            pointer = f"{self.root}/{LATEST}"
            return step_of(self.files.cat_file(pointer).decode()) if self.files.exists(pointer) else None

    def upload(self, folder: Path) -> None:
        """Copy a complete checkpoint, and then name it in the pointer."""
        self.files.put(f"{folder}/", f"{self.root}/{folder.name}/", recursive=True)
        self.files.pipe_file(f"{self.root}/{LATEST}", folder.name.rpartition("_")[2].encode())

    def download(self, name: str, to: Path) -> Path:
        """The local folder `to`/`name` with a copy of the checkpoint of that name."""
        local, part = to / name, to / f"{name}.tmp"
        with self._readable():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self.files.get(f"{self.root}/{name}/", f"{part}/", recursive=True)
        commit_dir(part, local)
        return local

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # object stores raise errors of their own libraries
            why = f"{type(error).__name__}: {error}; check the address and its credentials"
            raise ConfigError(f"checkpoints at {self.url} cannot be read or written: {why}") from error
