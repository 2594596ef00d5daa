"""Files of object stores and other file systems that fsspec knows, as local copies."""

import os
from hashlib import blake2b
from pathlib import PurePosixPath

from rlsys.data.start_assets import cache_dir
from rlsys.utils.errors import ConfigError, raised_as


def is_remote(name: str) -> bool:
    """Whether a name is an address such as s3://bucket/rows.parquet."""
    return "://" in name


def local_copy(url: str) -> str:
    """A copy of the file in the cache, made again where the file has changed; ConfigError that says why not."""
    import fsspec

    with raised_as(ConfigError, f"{url} cannot be read; check the address and its credentials"):
        files, path = fsspec.url_to_fs(url)
        version = blake2b(f"{url} {files.ukey(path)}".encode(), digest_size=8).hexdigest()
        copy = cache_dir() / "files" / version / PurePosixPath(path).name
        if not copy.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            beside = copy.with_name(f".{os.getpid()}.{copy.name}")
            files.get_file(path, str(beside))
            beside.replace(copy)
        return str(copy)
