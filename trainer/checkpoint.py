"""Checkpoints of a run, in verl's layout: global_step_N/{actor,critic}/..., data.pt, latest_checkpointed_iteration.txt.

A checkpoint is written beside its final folder, made durable, and renamed; only then does the pointer name it. So a
crash at any moment leaves the pointer on a complete checkpoint. Copies may be at an address that fsspec reads and
writes, such as s3://bucket/run.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path

import fsspec
import torch

from rlsys.interfaces import State
from rlsys.utils.atomic import digest_of, read_checked_json, write_checked_json, write_whole, written_dir
from rlsys.utils.errors import CheckpointError, ConfigError, DeadlineError, UnsavedCheckpointError, raised_as
from rlsys.utils.run_folders import LATEST, latest_step, pointer_text, step_of

STATE = "trainer.json"
DATA = "data.pt"
_STEP_DIR = re.compile(r"global_step_(\d+)")


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
        local = to / name
        with written_dir(local) as part, self._readable():
            self.files.get(f"{self.root}/{name}/", f"{part}/", recursive=True)
        return local

    def _readable(self) -> AbstractContextManager[None]:
        what = f"checkpoints at {self.url} cannot be read or written; check the address and its credentials"
        return raised_as(ConfigError, what)  # object stores raise errors of their own libraries


@dataclass(frozen=True)
class TrainerState:
    """What the controller itself saves; everything else is in the roles' own folders."""

    global_step: int
    kl_ctrl: State = field(default_factory=dict)
    source: State = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints under one folder."""

    def __init__(self, root: Path, *, keep: Mapping[str, int | None], remote: str | None = None) -> None:
        """`keep` maps a role's folder name to how many of its latest checkpoints stay (None: all); `remote` is where
        their copies are."""
        self.root, self._keep = root, dict(keep)
        self.remote = None if remote is None else RemoteCheckpoints(remote)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, downloaded where the remote one is newer, or None where there is none."""
        step = self._pointed_at()
        remote_step = self.remote.latest_step() if self.remote else None
        if self.remote is not None and remote_step is not None and (step is None or remote_step > step):
            self.remote.download(f"global_step_{remote_step}", self.root)
            self._point_at(remote_step)
            step = remote_step
        if step is not None and not self.path(step).is_dir():
            how = f"write another step into it, one of {steps_in(self.root)}, or delete it to start over"
            raise CheckpointError(f"{self.root / LATEST} names {self.path(step)}, which does not exist; {how}")
        return None if step is None else self._existing(self.path(step))

    def path(self, step: int) -> Path:
        """The folder of checkpoint `step`."""
        return self.root / f"global_step_{step}"

    def to_resume(self, mode: str, path: str | None) -> Path | None:
        """The checkpoint that `trainer.resume_mode` asks for."""
        if mode == "disable":
            return None
        if mode == "auto":
            return self.latest()
        assert path is not None, "checked with the configuration"
        if "://" in path:
            parent, _, name = path.rpartition("/")
            return self._existing(RemoteCheckpoints(parent).download(name, self.root))
        return self._existing(Path(path))

    def sweep(self) -> None:
        """Clean up what an interrupted save or removal left."""
        for old in self.root.glob("global_step_*.old"):
            if old.with_suffix("").exists():
                shutil.rmtree(old)
            else:
                old.rename(old.with_suffix(""))
        for left in self.root.glob("global_step_*.tmp"):
            shutil.rmtree(left)
        with suppress(CheckpointError):  # to_resume reports a damaged pointer, where it matters
            if (newest := self._pointed_at()) is not None:
                self.prune(newest)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder that each role fills too; left without error it is checkpoint `step`, which the pointer names."""
        final = self.path(step)
        try:
            with written_dir(final) as staging:
                yield staging
                if unseen := [role for role in self._keep if not (staging / role).is_dir()]:
                    raise OSError(f"{unseen[0]} is not visible here: all nodes need one shared directory")
            self._point_at(step)
        except DeadlineError:
            raise
        except (OSError, CheckpointError) as error:
            why = f"checkpoint {final} could not be written: {error}; earlier checkpoints are untouched"
            raise UnsavedCheckpointError(why) from error
        self.prune(step)

    def prune(self, newest: int) -> None:
        """Remove the checkpoints before `newest` that are not to be kept."""
        steps = [step for step in steps_in(self.root) if step <= newest]
        for role, keep in self._keep.items():
            for step in steps[keep:] if keep is not None else []:
                shutil.rmtree(self.path(step) / role, ignore_errors=True)
        if self._keep and all(keep is not None for keep in self._keep.values()):
            for step in steps[max(keep for keep in self._keep.values() if keep is not None) :]:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def _point_at(self, step: int) -> None:
        write_whole(self.root / LATEST, str(step).encode(), durable=True)

    def _pointed_at(self) -> int | None:
        step, pointer = latest_step(self.root), self.root / LATEST
        if step is None and pointer.exists():
            held = pointer_text(self.root)[:40]
            raise CheckpointError(f"{pointer} should hold a step number but holds {held!r}; correct or delete it")
        return step

    @staticmethod
    def _existing(path: Path) -> Path:
        if not (path / STATE).is_file():
            raise CheckpointError(f"{path} is not a complete checkpoint: {STATE} is missing")
        return path


def steps_in(root: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder, the newest first."""
    return sorted((int(m[1]) for p in root.glob("global_step_*") if (m := _STEP_DIR.fullmatch(p.name))), reverse=True)


def load_failure(folder: Path) -> str:
    """The message for a checkpoint that cannot be loaded: it names the newest other one with the same parts."""
    paths = (folder.parent / f"global_step_{step}" for step in steps_in(folder.parent))
    others = [str(p) for p in paths if p != folder and all(any(p.glob(part.name)) for part in folder.iterdir())]
    instead = f"resume_mode=resume_path trainer.resume_from_path={others[0]}" if others else "resume_mode=disable"
    return f"{folder} cannot be loaded; to do without it set trainer.{instead}"


def save_state(folder: Path, state: TrainerState) -> None:
    """Write the controller's part of a checkpoint."""
    record = asdict(state)
    torch.save(json.dumps(record.pop("source")), buffer := BytesIO())  # to a file it would hide that the disk is full
    write_whole(folder / DATA, buffer.getvalue(), durable=True)
    write_checked_json(folder / STATE, {**record, "data_blake2b": digest_of((folder / DATA).read_bytes())})


def load_state(folder: Path) -> TrainerState:
    """Read what `save_state` wrote; CheckpointError names a damaged file."""
    with raised_as(CheckpointError, f"{load_failure(folder)}: {STATE} or {DATA} is damaged"):
        record = read_checked_json(folder / STATE)
        if record.pop("data_blake2b") != digest_of((folder / DATA).read_bytes()):
            raise ValueError(f"the checksum of {DATA} is not the one that was saved")
        return TrainerState(**record, source=json.loads(torch.load(folder / DATA, weights_only=True)))
