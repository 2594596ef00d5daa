"""Models and datasets of the Hugging Face Hub as folders of its caches.

HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the other variables of huggingface_hub apply.
"""

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from rlsys.utils.atomic import written_dir
from rlsys.utils.errors import ConfigError, raised_as

ANSWER_S = 5.0
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_ROWS = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?(?::([\w.-]+))?:([\w.-]+)")
_SNAPSHOT = re.compile(r"(.+)/models--([^/]+)/snapshots/([0-9a-f]+)")
_PICKLED = ["*.bin", "*.bin.index.json"]
_UNUSED = ["*/*", "consolidated*", *(f"*.{end}" for end in ("pt", "pth", "gguf", "h5", "msgpack", "onnx", "ot"))]


def is_hub_id(name: str) -> bool:
    """Whether a name is `org/model` or `org/model@revision` and not a path that is there."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def download_config(name: str, *, key: str) -> Path:
    """The folder of the hub's cache with the config.json of `org/model` or `org/model@revision`, without its weights.

    Asks the hub once, with a time limit. ConfigError that names the setting `key` and says why there is none.
    """
    from huggingface_hub import constants, errors, hf_hub_download

    repo, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(repo, "config.json", revision=revision or None, etag_timeout=ANSWER_S)).parent
    except (OSError, ValueError, errors.HTTPError) as error:
        not_here = f"there is no folder {Path(name).absolute()}, and the hub does not give a model of that name"
        raise ConfigError(f"{key} = {name}: {not_here}: {_reason(error, repo, constants.HF_HUB_CACHE)}") from error


@cache
def download_model(name: str) -> str:
    """The folder of `org/model` or `org/model@revision` in the hub's cache, which gets what it lacks.

    Weights in safetensors where there are some, else pytorch_model.bin. ConfigError that says why there is no folder.
    """
    repo, _, revision = name.partition("@")
    return _download(repo, revision or None, None)


def is_rows_id(name: str) -> bool:
    """Whether a name is `org/dataset:split` or `org/dataset@revision:config:split`."""
    return _ROWS.fullmatch(name) is not None


def open_rows(names: Sequence[str]) -> Any:
    """Splits of datasets and files, one after another, as a stream of rows; ConfigError that says why there is none.

    The IterableDataset has `state_dict` and `load_state_dict`.
    """
    with _dataset_errors(", ".join(names)) as datasets:
        return datasets.concatenate_datasets([_load(datasets, name, streaming=True) for name in names])


def _load(datasets: ModuleType, name: str, *, streaming: bool) -> Any:
    if (parts := _ROWS.fullmatch(name)) is not None:
        repo, revision, config, split = parts.groups()
        return datasets.load_dataset(repo, config, split=split, revision=revision, streaming=streaming)
    kind = {".parquet": "parquet", ".csv": "csv"}.get(Path(name).suffix, "json")
    return datasets.load_dataset(kind, data_files=[name], split="train", streaming=streaming)


@contextmanager
def _dataset_errors(name: str) -> Iterator[ModuleType]:
    """The module `datasets`; what it and the hub raise becomes a ConfigError."""
    with raised_as(ConfigError, f"{name} needs the package datasets: pip install -e '.[datasets]'", ImportError):
        import datasets
        from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub import errors

    try:
        yield datasets
    except (DatasetNotFoundError, ValueError, StopIteration) as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split()) or 'there are no rows'}") from error
    except (OSError, errors.HTTPError, DatasetsError) as error:
        cache = str(datasets.config.HF_DATASETS_CACHE)
        raise ConfigError(f"{name} cannot be downloaded: {_reason(error, name, cache)}") from error


def download_rows(name: str) -> str:
    """A split of a dataset as a folder that `datasets` saved, in its cache; ConfigError that says why there is none."""
    with _dataset_errors(name) as datasets:
        rows, (repo, _, _, split) = _load(datasets, name, streaming=False), _ROWS.fullmatch(name).groups()  # type: ignore[union-attr]
        origin = blake2b(str(rows.cache_files).encode(), digest_size=8).hexdigest()
        folder = Path(datasets.config.HF_DATASETS_CACHE, "rlsys", f"{repo.replace('/', '___')}-{split}-{origin}")
        if not folder.is_dir():
            with written_dir(folder) as staging:
                rows.save_to_disk(staging)
        return str(folder)


def ensure_downloaded(path: str | None) -> None:
    """Download a folder of the hub's cache that this node lacks; any other path is left alone."""
    if path is not None and (parts := _SNAPSHOT.fullmatch(path)) and not Path(path).is_dir():
        cache, repo, revision = parts.groups()
        _download(repo.replace("--", "/"), revision, cache)


def _download(repo: str, revision: str | None, cache: str | None) -> str:
    from huggingface_hub import constants, errors, snapshot_download

    name = f"{repo}@{revision}" if revision else repo
    try:
        folder = snapshot_download(repo, revision=revision, cache_dir=cache, ignore_patterns=[*_UNUSED, *_PICKLED])
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(repo, revision=revision, cache_dir=cache, ignore_patterns=_UNUSED)
    except (OSError, ValueError, errors.HTTPError) as error:
        why = _reason(error, repo, cache or constants.HF_HUB_CACHE)
        raise ConfigError(f"{name} is not a folder here, and cannot be downloaded: {why}") from error
    return folder


def _reason(error: Exception, repo: str, cache: str) -> str:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated; accept its terms at {hub}/{repo} and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no such model, or it is private; correct the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has the model but not this revision; set a branch, tag or commit of it"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set and {cache} lacks it or a part of it; download it first, or unset HF_HUB_OFFLINE"
    if getattr(getattr(error, "response", None), "status_code", None) == 401:
        return f"{hub} refused the token (401); set HF_TOKEN to a valid one, or unset it"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"no space is left in {cache}; set HF_HOME to a folder on a larger disk"
    first = str(error.__cause__ or error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}; check the connection to {hub}; the same command continues the download"
