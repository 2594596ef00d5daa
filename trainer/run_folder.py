"""The folder of a training run: the lock that keeps a second job out, what was run, and its log."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml

from rlsys.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.config.schema.trainer import RunConfig
from rlsys.telemetry.log import FILE_ONLY, get_logger, log_to_file, redact, redact_tree
from rlsys.telemetry.tracker_adapters import flat_settings
from rlsys.utils.atomic import write_text_atomic
from rlsys.utils.errors import ConfigError
from trainer.checkpoint import CheckpointStore

CONFIG, STARTS, LOG, LOCK = "config.yaml", "starts.jsonl", "train.log", "run.lock"
PACKAGES = ("rlsys", "torch", "transformers", "ray", "vllm", "sglang", "megatron-core", "peft")
MEANING = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora",
    "critic.model.path",
    "model.path",
    "dpo.loss_type",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "reward.custom_reward_function",
    "reward.reward_manager",
    "reward.reward_model.model_path",
    "code of ",
)
"""What a checkpoint must not be continued with unless the user confirms it: keys that start with one of these."""
MAX_SHOWN = 20

log = get_logger(__name__)


@dataclass
class RunFolder:
    """What a training run leaves of itself beside its checkpoints, for the process that holds its lock.

    `config.yaml` is the resolved configuration, `starts.jsonl` has a line for each start: time, command, folder, host,
    versions, state of the repository and checksums of the code files it names. `train.log` is the log of all starts.
    """

    config: PPOConfig | SFTConfig | RMConfig | DPOConfig
    command: Sequence[str]

    def __post_init__(self) -> None:
        self.root = Path(self.config.trainer.default_local_dir).absolute()
        self._stack = ExitStack()

    def __enter__(self) -> RunFolder:
        """Lock the folder; ConfigError if another job has it, or if its checkpoint is of another experiment."""
        with ExitStack() as stack:
            stack.enter_context(locked(self.root / LOCK))
            self._changes = self._compared()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Write down what is about to run; report what differs from the run that is resumed."""
        self._stack.enter_context(log_to_file(self.root / LOG))
        write_text_atomic(self.root / CONFIG, self._config_text())
        with (self.root / STARTS).open("a") as file:
            file.write(json.dumps(self._start()) + "\n")
        get_logger(FILE_ONLY).info("started: %s", redact(shlex.join(self.command)))
        if self._changes:
            log.info("changed since the run that is resumed:\n%s", _listed(self._changes))

    def _compared(self) -> list[str]:
        """Settings and code that differ from those of the run to resume; ConfigError if one changes its meaning."""
        run = self.config.trainer
        resumed = CheckpointStore(self.root, keep={}).to_resume(run.resume_mode, run.resume_from_path)
        if resumed is None or not (resumed.parent / CONFIG).is_file():
            return []
        before, now = _recorded(resumed.parent), flat_settings(self._resolved()) | self._code()
        changes = {
            key: f"  {key} {_short(before.get(key))} -> {_short(now.get(key))}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith("trainer.resume")
        }
        refused = [line for key, line in changes.items() if key.startswith(MEANING)]
        if refused and not run.resume_changed:
            raise ConfigError(
                f"{resumed} belongs to another experiment:\n{_listed(refused)}\n"
                "To continue it with these changes: trainer.resume_changed=true\n"
                "To start over: trainer.resume_mode=disable, or another trainer.default_local_dir"
            )
        return list(changes.values())

    def _resolved(self) -> dict[str, Any]:
        return redact_tree(self.config.model_dump(mode="json"))

    def _config_text(self) -> str:
        header = f"# {redact(shlex.join(self.command))}\n# The settings of this command with all defaults filled in.\n"
        return header + yaml.safe_dump(self._resolved(), sort_keys=False, allow_unicode=True)

    def _start(self) -> dict[str, Any]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": redact(shlex.join(self.command)),
            "folder": os.getcwd(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": sys.version.split()[0],
            "versions": dict(_versions()),
            "git": {"rlsys": _git_state(Path(__file__).parent), "folder": _git_state(Path.cwd())},
            "code": self._code(),
        }

    def _code(self) -> dict[str, str]:
        """Checksums of the Python files that settings name."""
        named = {
            key: value for key, value in flat_settings(self.config.model_dump(mode="json")).items() if _is_code(value)
        }
        return {f"code of {key}": sha256(Path(value).read_bytes()).hexdigest()[:12] for key, value in named.items()}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system frees when the process ends, and name its owner in the file; else ConfigError."""
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"trainer.default_local_dir={path.parent}: another job writes there ({file.read().strip()}); wait for "
                "it, stop it, or set another trainer.default_local_dir or trainer.experiment_name"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): see that no second job writes there", path.parent, error)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
        file.truncate(0)


def make_root(run: RunConfig) -> None:
    """Make the run's folder and write in it once, before anything heavy starts; ConfigError if that fails.

    ConfigError also for a relative folder in the package of a submitted Ray job, which Ray deletes with the job.
    """
    path = Path(run.default_local_dir)
    if not path.is_absolute() and "/runtime_resources/working_dir_files/" in f"{Path.cwd()}/":
        raise ConfigError(
            f"trainer.default_local_dir={path}: relative to {Path.cwd()}, which Ray deletes after the job; set an "
            f"absolute path, e.g. trainer.default_local_dir={Path.home() / path}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as probe:
            probe.write(b" ")
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir={path}: cannot write there: {error}") from error


def _recorded(root: Path) -> dict[str, Any]:
    """Settings and checksums of the last start in a folder; what cannot be read is left out."""
    try:
        settings = flat_settings(yaml.safe_load((root / CONFIG).read_text()))
        return settings | json.loads((root / STARTS).read_text().splitlines()[-1])["code"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        log.warning("%s and %s cannot be compared with this run: %s", root / CONFIG, STARTS, error)
        return {}


def _is_code(value: object) -> bool:
    return isinstance(value, str) and value.endswith(".py") and Path(value).is_file()


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _listed(lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return "\n".join([*lines[:MAX_SHOWN], *more])


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _git_state(folder: Path) -> str | None:
    """Commit and number of changed files of the repository around a folder; None where there is none."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit, changed = git("rev-parse", "HEAD"), len(git("status", "--porcelain").splitlines())
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with {changed} changed files" if changed else commit
