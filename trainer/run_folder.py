"""The folder of a run: the lock that keeps a second job out, what was run, and its log."""

import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile

import yaml

from rlsys.config.compat.reader import REFERENCE, absolute_names
from rlsys.config.introspect import default_of, leaves, shown
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import JobConfig
from rlsys.config.schema.trainer import RunConfig, TrainingConfig
from rlsys.telemetry.log import FILE_ONLY, get_logger, log_to_file, redact, redact_tree
from rlsys.telemetry.trackers import flat_settings
from rlsys.utils.atomic import write_whole
from rlsys.utils.errors import ConfigError, raised_as
from trainer.checkpoint import CheckpointStore

CONFIG, STARTS, LOG, LOCK = "config.yaml", "starts.jsonl", "train.log", "run.lock"
PACKAGES = ("rlsys", "torch", "transformers", "ray", "vllm", "sglang", "megatron-core", "peft")
MEANING = (
    *("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora", "critic.model.path", "model.path"),
    *("dpo.loss_type", "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    *("reward.custom_reward_function", "reward.reward_manager", "reward.reward_model.model_path", "code of "),
)
"""Prefixes of keys whose change blocks a resume unless the user confirms it."""
MAX_SHOWN = 20
Begin = Callable[[], None]

log = get_logger(__name__)


_held: dict[Path, Begin] = {}
"""Folders that this process has locked, with the function that records its start: a job and its trainer share it."""


@contextmanager
def run_folder(config: JobConfig) -> Iterator[Begin]:
    """Lock the folder of a run and log to its `train.log`; yields the function that records the start, once.

    It is called when workers and checkpoint are loaded, so that a start that fails leaves the record of the run before
    it: `config.yaml`, the resolved configuration, and in `starts.jsonl` a line with time, command, folder, host,
    versions, state of the repository and checksums of the code files it names. Inside another `run_folder` of this
    process for the same folder it is that one's. ConfigError if nothing can be written there, another job has the
    folder, or its checkpoint is of another experiment.
    """
    root = _make_root(config.trainer)
    if root in _held:
        yield _held[root]
        return
    with locked(root / LOCK), ExitStack() as stack:
        changes, command = _compared(config, root), redact(shlex.join(sys.orig_argv))
        stack.enter_context(log_to_file(root / LOG))
        get_logger(FILE_ONLY).info("started: %s", command)
        if changes:
            log.info("changed since the run that is resumed:\n%s", _listed(changes))

        @cache
        def begin() -> None:
            header = f"# {command}\n# The settings of this command with all defaults filled in.\n"
            settings = yaml.safe_dump(_settings(config), sort_keys=False, allow_unicode=True)
            write_whole(root / CONFIG, (header + settings).encode(), durable=True)
            with (root / STARTS).open("a") as file:
                file.write(json.dumps(_start(config, command)) + "\n")

        stack.callback(_held.pop, root)
        _held[root] = begin
        yield begin


def _compared(config: JobConfig, root: Path) -> list[str]:
    """Settings and code that differ from those of the run to resume; ConfigError if one changes its meaning."""
    run = config.trainer
    if not isinstance(run, TrainingConfig):
        if (root / "metrics.jsonl").exists():
            raise ConfigError(f"trainer.default_local_dir={root} has a training run: set another one for an evaluation")
        return []
    store = CheckpointStore(root, keep={}, remote=run.default_hdfs_dir)
    if store.remote is not None:
        store.remote.check()
    resumed = store.to_resume(run.resume_mode, run.resume_from_path)
    if resumed is None or not (resumed.parent / CONFIG).is_file():
        return []
    before, now = _before(resumed.parent), flat_settings(_settings(config)) | _code(config)
    changes = {
        key: f"  {key} {shown(before.get(key))} -> {shown(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not key.startswith("trainer.resume")
        and not all(_follows(type(config), key, settings) for settings in (before, now))
    }
    refused = [line for key, line in changes.items() if key.startswith(MEANING)]
    if refused and not run.resume_changed:
        over = "To start over: trainer.resume_mode=disable, or another trainer.default_local_dir"
        ways = f"To continue it with these changes: trainer.resume_changed=true\n{over}"
        raise ConfigError(f"{resumed} belongs to another experiment:\n{_listed(refused)}\n{ways}")
    return list(changes.values())


def _follows(schema: type[Section], key: str, settings: Mapping[str, object]) -> bool:
    """Whether a setting is its default and that is made of other settings, which are listed themselves."""
    text = absolute_names(str(default_of(leaves(schema)[key])), key) if key in leaves(schema) else ""
    made = REFERENCE.sub(lambda match: str(settings.get(match[1])), text)
    return made != text and made == str(settings.get(key))


def _settings(config: JobConfig) -> dict[str, object]:
    return redact_tree(config.model_dump(mode="json"))


def _start(config: JobConfig, command: str) -> dict[str, object]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "versions": {one.name: one.version for name in PACKAGES for one in metadata.distributions(name=name)},
        "git": {"rlsys": _git_state(Path(__file__).parent), "folder": _git_state(Path.cwd())},
        "code": _code(config),
    }


def _code(config: JobConfig) -> dict[str, str]:
    """Checksums of the Python files that settings name, also as `file.py:name`."""
    settings = flat_settings(config.model_dump(mode="json"))
    files = {key: Path(value.rpartition(".py")[0] + ".py") for key, value in settings.items() if isinstance(value, str)}
    # Path.is_file raises for a text that is longer than a name may be
    return {f"code of {key}": sha256(f.read_bytes()).hexdigest()[:12] for key, f in files.items() if os.path.isfile(f)}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system frees when the process ends, and name its owner in the file; else ConfigError."""
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            why = f"another job writes there ({file.read().strip()})"
            how = "wait for it, stop it, or set another trainer.default_local_dir or trainer.experiment_name"
            raise ConfigError(f"trainer.default_local_dir={path.parent}: {why}; {how}") from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): see that no second job writes there", path.parent, error)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
        file.truncate(0)


def _make_root(run: RunConfig) -> Path:
    """Make the run's folder and write in it once, before anything heavy starts; ConfigError if that fails.

    ConfigError also for a relative folder in the package of a submitted Ray job, which Ray deletes with the job.
    """
    path = Path(run.default_local_dir)
    if not path.is_absolute() and "/runtime_resources/working_dir_files/" in f"{Path.cwd()}/":
        why = f"relative to {Path.cwd()}, which Ray deletes after the job"
        how = f"set an absolute path, e.g. trainer.default_local_dir={Path.home() / path}"
        raise ConfigError(f"trainer.default_local_dir={path}: {why}; {how}")
    with raised_as(ConfigError, f"trainer.default_local_dir={path}: cannot write there", OSError):
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as probe:
            probe.write(b" ")
    return path.absolute()


def _before(root: Path) -> dict[str, object]:
    """Settings and checksums of the last start in a folder; what cannot be read is left out."""
    try:
        settings = flat_settings(yaml.safe_load((root / CONFIG).read_text()))
        return settings | json.loads((root / STARTS).read_text().splitlines()[-1])["code"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        log.warning("%s and %s cannot be compared with this run: %s", root / CONFIG, STARTS, error)
        return {}


def _listed(lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return "\n".join([*lines[:MAX_SHOWN], *more])


def _git_state(folder: Path) -> str | None:
    """Commit of the repository around a folder, and whether files differ from it; None where there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
