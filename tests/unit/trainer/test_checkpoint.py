"""Checkpoints on disk: which stay, and what an interrupted save leaves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from rlsys.data.remote import local_copy
from rlsys.utils.errors import CheckpointError, ConfigError, UnsavedCheckpointError
from trainer.checkpoint import DATA, LATEST, STATE, CheckpointStore, TrainerState, load_state, save_state
from trainer.loop import CheckpointedLoop


def save(store: CheckpointStore, step: int) -> Path:
    with store.writing(step) as folder:
        for role in ("actor", "critic"):
            (folder / role).mkdir()
        save_state(folder, TrainerState(step, {"kl": 0.5}, {"position": step}))
    return store.path(step)


def folders(root: Path) -> dict[str, set[str]]:
    return {path.name: {p.name for p in path.iterdir() if p.is_dir()} for path in sorted(root.glob("global_step_*"))}


def test_a_state_is_read_back_and_the_pointer_names_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": None, "critic": None})
    assert store.latest() is None
    assert save(store, 3) == store.latest()
    assert load_state(store.path(3)) == TrainerState(3, {"kl": 0.5}, {"position": 3})
    assert (tmp_path / LATEST).read_text() == "3"


def test_every_changed_bit_of_a_state_is_noticed(tmp_path: Path) -> None:
    save_state(tmp_path, TrainerState(4, {"kl": 0.5}))
    whole = (tmp_path / STATE).read_bytes()
    assert load_state(tmp_path) == TrainerState(4, {"kl": 0.5})
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / STATE).write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"trainer\.json"):
            load_state(tmp_path)


def test_a_disk_that_is_full_when_the_state_is_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / f"{DATA}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        save_state(tmp_path, TrainerState(1, source={"position": 1}))


@pytest.mark.parametrize(
    ("actor", "critic", "left"),
    [
        (None, None, {1: {"actor", "critic"}, 2: {"actor", "critic"}, 3: {"actor", "critic"}}),
        (1, None, {1: {"critic"}, 2: {"critic"}, 3: {"actor", "critic"}}),
        (2, 1, {2: {"actor"}, 3: {"actor", "critic"}}),
        (1, 1, {3: {"actor", "critic"}}),
    ],
)
def test_each_role_keeps_its_number_of_latest_checkpoints(
    tmp_path: Path, actor: int | None, critic: int | None, left: dict[int, set[str]]
) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": actor, "critic": critic})
    for step in (1, 2, 3):
        save(store, step)
    assert folders(tmp_path) == {f"global_step_{step}": roles for step, roles in left.items()}


def test_checkpoints_after_the_newest_are_not_pruned(tmp_path: Path) -> None:
    everything = CheckpointStore(tmp_path, keep={"actor": None})
    for step in (1, 2, 9):
        save(everything, step)
    CheckpointStore(tmp_path, keep={"actor": 1}).prune(2)
    assert list(folders(tmp_path)) == ["global_step_2", "global_step_9"]


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={})
    save(store, 1)
    with pytest.raises(UnsavedCheckpointError, match="no space"), store.writing(2):
        raise OSError("no space")
    assert store.latest() == store.path(1)
    assert list(folders(tmp_path)) == ["global_step_1"]


def test_without_the_files_of_a_role_that_another_node_wrote_there_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": None, "critic": None})
    save(store, 1)
    with pytest.raises(UnsavedCheckpointError, match="critic is not visible here"), store.writing(2) as folder:
        (folder / "actor").mkdir()
    assert store.latest() == store.path(1)
    assert list(folders(tmp_path)) == ["global_step_1"]


def test_sweeping_cleans_up_after_interrupted_saves(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={"actor": 1})
    save(store, 1)
    for name in ("global_step_2.tmp", "global_step_1.old", "global_step_7.old"):
        (tmp_path / name).mkdir()
    store.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_7", LATEST]


def test_which_checkpoint_is_resumed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep={})
    one, _ = save(store, 1), save(store, 2)
    assert store.to_resume("disable", None) is None
    assert store.to_resume("auto", None) == store.path(2)
    assert store.to_resume("resume_path", str(one)) == one
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        store.to_resume("resume_path", str(tmp_path / "global_step_5"))
    (tmp_path / LATEST).write_text("7")
    with pytest.raises(CheckpointError, match=r"names .*global_step_7, which does not exist; .* one of \[2, 1\]"):
        store.to_resume("auto", None)
    for text in ("two", "9" * 5000):
        (tmp_path / LATEST).write_text(text)
        with pytest.raises(CheckpointError, match="should hold a step number") as caught:
            store.to_resume("auto", None)
        assert len(str(caught.value)) < len(str(tmp_path)) + 200
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    with pytest.raises(CheckpointError, match="should hold a step number"):
        store.latest()


def test_a_run_that_starts_over_beside_checkpoints_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, nothing = CheckpointStore(tmp_path, keep={}), lambda *_: None
    run = SimpleNamespace(resume_mode="auto", resume_from_path=None)
    reporter = SimpleNamespace(start=nothing)
    loop: Any = SimpleNamespace(store=store, run=run, begin=nothing, reporter=reporter, global_step=0, total_steps=3)
    CheckpointedLoop.resume(loop)
    assert not caplog.records
    save(store, 2)
    (tmp_path / LATEST).unlink()
    CheckpointedLoop.resume(loop)
    assert f"starts over and overwrites: no {tmp_path / LATEST} names one of the steps [2]" in caplog.text


class StoreError(Exception):
    """As botocore's errors are, which are no OSError."""


class FullBucket(MemoryFileSystem):
    """An object store that takes what is small only."""

    protocol = "full"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        raise OSError("507 Insufficient Storage")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        raise StoreError("no such endpoint")

    def ukey(self, path: str) -> str:
        raise StoreError("no such endpoint")


register_implementation("full", FullBucket)


def test_the_newest_remote_checkpoint_is_resumed_where_no_newer_one_is_here(tmp_path: Path) -> None:
    url = f"memory://bucket/{tmp_path.name}"
    first = CheckpointStore(tmp_path / "first", keep={}, remote=url)
    first.remote.check()
    assert first.latest() is None
    for step in (1, 2):
        first.remote.upload(save(first, step))
    second = CheckpointStore(tmp_path / "second", keep={}, remote=url)
    assert second.latest() == tmp_path / "second" / "global_step_2"
    assert load_state(second.latest()).source == {"position": 2}
    assert folders(tmp_path / "second") == {"global_step_2": {"actor", "critic"}}
    given = CheckpointStore(tmp_path / "third", keep={}).to_resume("resume_path", f"{url}/global_step_1")
    assert load_state(given).global_step == 1
    save(second, 5)
    assert second.latest().name == "global_step_5"
    save(first, 3)
    first.remote.files.pipe_file(f"{first.remote.root}/global_step_9/actor/part", b"cut off")
    assert second.remote.latest_step() == 2


def test_an_address_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints at file://.*cannot be read or written.*credentials"):
        CheckpointStore(tmp_path, keep={}, remote=f"file://{tmp_path}/file/run").remote.check()
    with pytest.raises(ConfigError, match="its credentials: StoreError: no such endpoint"):
        CheckpointStore(tmp_path, keep={}, remote="full://bucket").remote.check()
    with pytest.raises(ConfigError, match=r"full://bucket/rows\.parquet cannot be read.*no such endpoint"):
        local_copy("full://bucket/rows.parquet")
    with pytest.raises(OSError, match="507"):
        CheckpointStore(tmp_path, keep={}, remote="full://bucket").remote.upload(
            save(CheckpointStore(tmp_path, keep={}), 1)
        )


def test_another_users_checkpoint_beside_it_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, exists = CheckpointStore(tmp_path, keep={}), Path.exists
    save(store, 1)
    save(store, 2)

    def refusing(path: Path) -> bool:
        if "global_step_1" in path.parts:
            raise PermissionError(path)
        return exists(path)

    monkeypatch.setattr(Path, "exists", refusing)
    assert load_state(store.path(2)).global_step == 2
