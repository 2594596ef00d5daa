"""Files and directories that are wholly there or not at all."""

import os
import signal
from pathlib import Path

import pytest

from rlsys.utils.atomic import commit_dir, staging_dir, write_whole


def filled(final: Path, text: str) -> Path:
    staging = staging_dir(final)
    (staging / "inner").mkdir()
    (staging / "inner" / "file").write_text(text)
    return staging


def test_commit_moves_a_directory_to_its_name_and_replaces_an_older_one(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "step_1"
    for text in ("first", "second"):
        commit_dir(filled(final, text), final)
        assert (final / "inner" / "file").read_text() == text
    assert os.listdir(final.parent) == ["step_1"]


def test_leftovers_of_a_killed_run_do_not_get_in(tmp_path: Path) -> None:
    final = tmp_path / "step_1"
    (filled(final, "half") / "stray").touch()
    (final.with_name("step_1.old")).mkdir()
    commit_dir(filled(final, "whole"), final)
    assert os.listdir(final) == ["inner"]
    assert os.listdir(tmp_path) == ["step_1"]


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for text in ("1", "22"):
        write_whole(path, text.encode(), durable=True)
        assert path.read_text() == text
    assert os.listdir(tmp_path) == ["latest"]


def test_a_failed_write_leaves_the_old_text_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, 5)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["latest"]


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 5, 10])
def test_a_reader_never_sees_a_part_although_the_writer_is_killed(tmp_path: Path, delay_ms: int) -> None:
    path = tmp_path / "latest"
    write_whole(path, b"0" * 10_000)
    child = os.fork()
    if child == 0:
        for number in range(100_000):
            write_whole(path, str(number % 10).encode() * 10_000, durable=True)
        os._exit(0)
    signal.sigtimedwait([], delay_ms / 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    text = path.read_text()
    assert len(text) == 10_000
    assert len(set(text)) == 1
