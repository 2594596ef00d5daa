"""What goes wrong around a run ends in recovery or in one clear error: exit code 1 or 2, no traceback, nothing left."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import Toy, enlarge
from tests.e2e.fork_server import Ended, ForkServer, Patches
from tests.timing import scaled_s

DEADLINE_S = 60.0
POINTER = "latest_checkpointed_iteration.txt"
MODEL = "model_world_size_1_rank_0.safetensors"
OPTIM = "optim_world_size_1_rank_0.safetensors"


@dataclass(frozen=True)
class Job:
    """A run of three steps that saves each, in its own folder."""

    server: ForkServer
    toy: Toy
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def run(self, *overrides: str, patches: Patches | None = None) -> Ended:
        given = [f"reward.custom_reward_function.path={self.toy.grader}", *overrides]
        argv = self.toy.overrides(self.out, "trainer.backend=local", "trainer.save_freq=1", *given)
        ended = self.server.run(argv, self.folder / "log", patches, deadline_s=DEADLINE_S)
        assert ended.orphans == 0
        return ended

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def weights(self, step: int) -> dict[str, Any]:
        return load_file(str(self.out / f"global_step_{step}" / "actor" / MODEL))

    def grader(self, body: str) -> str:
        path = self.folder / "grader.py"
        path.write_text(
            f"import os, time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n{body}"
        )
        return f"reward.custom_reward_function.path={path}"


@pytest.fixture
def job(server: ForkServer, toy: Toy, tmp_path: Path) -> Job:
    return Job(server, toy, tmp_path)


def assert_one_error(ended: Ended, code: int, *messages: str) -> None:
    """The run ended with `code` and one error that contains all of `messages`."""
    assert ended.status == code, ended.log
    assert "Traceback" not in ended.log, ended.log
    (error,) = [line for line in ended.log.splitlines() if line.startswith("rlsys: ") and "preset" not in line]
    text = ended.log[ended.log.index(error) :]
    assert all(message in text for message in messages), text


@pytest.mark.parametrize(
    ("patches", "step", "why"),
    [
        (Patches(max_file_bytes=1 << 16), 1, "File too large"),
        (Patches(inject=("disk_full_at_second_checkpoint",)), 2, "No space left on device"),
        (Patches(inject=("disk_read_only_at_second_checkpoint",)), 2, "Read-only file system"),
    ],
    ids=["file size limit", "disk full", "read-only"],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_next_run_continues(
    job: Job, patches: Patches, step: int, why: str
) -> None:
    ended = job.run(patches=patches)
    assert_one_error(
        ended, 1, "CheckpointError", f"global_step_{step}", why, "\n  next        the same command continues "
    )
    assert not list(job.out.glob(f"global_step_{step}*"))
    assert (job.out / POINTER).exists() == (step > 1)
    assert job.run().status == 0
    assert [line["step"] for line in job.metrics()] == [1, 2, 3]


def test_a_disk_that_fails_beside_a_step_ends_the_run_at_the_end_of_that_step(job: Job) -> None:
    """Also where the thread fails between two saves: nothing of the checkpoint stays, and the one before does."""
    in_background = "actor_rollout_ref.actor.checkpoint.async_save=true"
    ended = job.run(in_background, patches=Patches(inject=("device_fails_for_the_second_checkpoint",)))
    assert_one_error(ended, 1, "CheckpointError", "global_step_2", "Input/output error")
    assert sorted(path.name for path in job.out.glob("global_step_*")) == ["global_step_1"]
    assert (job.out / POINTER).read_text() == "1"
    assert [line["step"] for line in job.metrics()][:2] == [1, 2]
    assert job.run(in_background).status == 0
    assert (job.out / POINTER).read_text() == "3"


def test_an_interrupted_run_completes_the_checkpoint_that_is_being_written(job: Job) -> None:
    in_background = "actor_rollout_ref.actor.checkpoint.async_save=true"
    ended = job.run(in_background, patches=Patches(inject=("interrupted_while_the_disk_is_slow",)))
    assert ended.status == 130, ended.log
    assert (job.out / POINTER).read_text() == "1"
    assert job.run(in_background).status == 0


@pytest.mark.parametrize(
    ("settings", "failed"),
    [((), 2), pytest.param(("trainer.max_staleness=2", "trainer.device=cpu"), 1, marks=pytest.mark.slow)],
    ids=["synchronous", "asynchronous"],  # whose first checkpoint has answers in flight and fills the disk
)
def test_a_full_disk_ends_the_run_and_with_more_space_the_next_run_continues(
    job: Job, small_disk: Path, settings: tuple[str, ...], failed: int
) -> None:
    here = (f"trainer.default_local_dir={small_disk}/out", *settings)
    assert_one_error(job.run(*here), 1, "CheckpointError", f"global_step_{failed}", "No space left on device")
    kept = [f"global_step_{step}" for step in range(1, failed)]
    assert sorted(path.name for path in (small_disk / "out").glob("global_step_*")) == kept
    enlarge(small_disk)
    assert job.run(*here).status == 0
    assert (small_disk / "out" / POINTER).read_text() == "3"


def test_metrics_that_cannot_be_written_are_reported_and_training_continues(job: Job) -> None:
    ended = job.run(patches=Patches(inject=("disk_full_for_metrics",)))
    assert ended.status == 0, ended.log
    assert ended.log.count("metrics.jsonl failed, its record is incomplete") == 1
    assert (job.out / POINTER).read_text() == "3"


def test_an_unexpected_error_ends_with_its_traceback_and_the_summary(job: Job) -> None:
    ended = job.run(patches=Patches(inject=("unexpected_error_in_step_2",)))
    assert ended.status == 1
    assert ended.log.index("Traceback") < ended.log.index("\nrlsys: ZeroDivisionError: division by zero\n")
    assert "\n  reward      " in ended.log
    assert ended.log.rstrip().endswith("  next        the same command continues from step 1")
    assert "ZeroDivisionError" in (job.out / "train.log").read_text()


def test_an_output_folder_that_cannot_be_created_is_reported_with_its_key(job: Job) -> None:
    ended = job.run("trainer.default_local_dir=/proc/rlsys")
    assert_one_error(ended, 2, "trainer.default_local_dir", "/proc/rlsys")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (f"global_step_2/actor/{MODEL}", _flip),
        (f"global_step_2/actor/{OPTIM}", lambda path: path.write_bytes(path.read_bytes()[:-100])),
        ("global_step_2/actor/extra_state_world_size_1_rank_0.json", Path.unlink),
        ("global_step_2/actor/manifest.json", lambda path: path.write_text("{")),
        ("global_step_2/actor/manifest.json", _flip),
        ("global_step_2/trainer.json", lambda path: path.write_text("[]")),
        ("global_step_2/trainer.json", Path.unlink),
        ("global_step_2/data.pt", _flip),
        ("global_step_2/data.pt", lambda path: path.write_bytes(b"")),
        (POINTER, lambda path: path.write_text("two")),
        (POINTER, lambda path: path.write_text("7")),
        (POINTER, lambda path: path.write_bytes(b"\xff\xfe")),
    ],
    ids=[
        "bit of the model",
        "end of the optimizer",
        "no random state",
        "manifest",
        "bit of the manifest",
        "state of another kind",
        "no state",
        "bit of the data state",
        "empty data state",
        "pointer not a number",
        "pointer to nothing",
        "pointer not text",
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    job: Job, saved: Callable[[Path], None], name: str, damage: Callable[[Path], object]
) -> None:
    saved(job.out)
    damage(job.out / name)
    before = sorted(job.out.rglob("*"))
    named = "global_step_7" if "7" in (job.out / POINTER).read_text(errors="replace") else Path(name).name
    assert_one_error(job.run(), 1, "CheckpointError", named)
    assert set(before) <= set(job.out.rglob("*"))


@pytest.mark.parametrize("name", [f"global_step_2/actor/{MODEL}", "global_step_2/trainer.json", POINTER])
def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    job: Job, saved: Callable[[Path], None], name: str
) -> None:
    saved(job.out)
    (job.out / name).write_bytes(b"")
    older = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={job.out}/global_step_1")
    if name != POINTER:
        assert_one_error(job.run(), 1, "cannot be loaded", *older)
    assert job.run(*older).status == 0
    assert [line["step"] for line in job.metrics()] == [1, 2, 3]
    assert (job.out / POINTER).read_text() == "3"


@pytest.fixture(scope="module")
def saved(server: ForkServer, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Copies a run that was stopped after two of its steps."""
    import shutil

    folder = tmp_path_factory.mktemp("saved")
    first = Job(server, toy, folder)
    assert first.run("trainer.total_training_steps=2").status == 0
    return lambda out: shutil.copytree(first.out, out)  # pyrefly: ignore


@pytest.mark.parametrize(
    ("sometimes", "metric"),
    [
        pytest.param("return float('nan')", "reward/errors", id="nan"),
        pytest.param("os._exit(3)", "reward/errors", id="exits"),
        pytest.param("raise SystemExit(3)", "reward/errors", id="gives up"),
        pytest.param("time.sleep(999)", "reward/timeouts", id="hangs"),
        pytest.param("while True: print('x' * 999)", "reward/timeouts", id="prints forever", marks=pytest.mark.slow),
        pytest.param(
            "if os.fork() == 0: os.setsid()\n        time.sleep(999)",
            "reward/timeouts",
            id="forks and hangs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_grader_is_counted_and_training_continues(job: Job, sometimes: str, metric: str) -> None:
    body = f"    if extra_info['index'] % 16 == 0:\n        {sometimes}\n    return 1.0"
    limits = (f"reward.timeout_s={scaled_s(1):g}", "reward.max_failed=1")
    ended = job.run(job.grader(body), *limits, "trainer.total_training_steps=1")
    assert ended.status == 0, ended.log
    (line,) = job.metrics()
    assert line[metric] > 0
    assert line["actor/skipped_steps"] == 0


def test_a_gradient_that_is_not_a_number_is_not_applied(job: Job) -> None:
    assert job.run(patches=Patches(inject=("nan_gradient_in_step_2",))).status == 0
    assert [line["actor/skipped_steps"] for line in job.metrics()] == [0, 2, 0]
    first, second, third = (job.weights(step) for step in (1, 2, 3))
    assert all(first[name].equal(second[name]) for name in first)
    assert not all(second[name].equal(third[name]) for name in first)


def test_fewer_rows_than_a_batch_is_a_configuration_error(job: Job) -> None:
    few = job.folder / "few.jsonl"
    few.write_text("".join(job.toy.train.read_text().splitlines(keepends=True)[:5]))
    ended = job.run(f"data.train_files={few}")
    assert_one_error(ended, 2, "5 usable rows, fewer than a batch of 8")
