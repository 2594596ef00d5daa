"""Asynchronous runs in this process: ages, what is trained on, checkpoints, and runs that are repeated to the bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlsys.protocol import DataProto
from tests.e2e.conftest import Toy
from tests.e2e.fork_server import ForkServer, Kill, Patches
from tests.e2e.test_resume_after_kill import COMMIT, OPTIM_STEP, POINTER, Runs, assert_same
from trainer.main_ppo import main

LOCAL = ("trainer.backend=local", "trainer.device=cpu", "data.max_response_length=12")


@pytest.fixture(scope="module")
def runs(server: ForkServer, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, toy, tmp_path_factory.mktemp("runs"))


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def trained_on(out: Path) -> list[list[Any]]:
    """Prompts, answers and scores of every step."""
    files = sorted((out / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    return [[(row["input"], row["output"], row["score"]) for row in step] for step in rows]


def run(toy: Toy, out: Path, *more: str) -> None:
    grader = f"reward.custom_reward_function.path={toy.grader}"
    assert main(toy.overrides(out, *LOCAL, grader, f"trainer.rollout_data_dir={out}/rollouts", *more)) == 0


@pytest.mark.parametrize("reproducible", ["false", "true"])
def test_ages_stay_within_the_limit_and_prompts_in_their_order(toy: Toy, tmp_path: Path, reproducible: str) -> None:
    sync, ahead = tmp_path / "sync", tmp_path / "async"
    steps = "trainer.total_training_steps=6"
    run(toy, sync, steps)
    run(toy, ahead, steps, "trainer.max_staleness=2", f"trainer.reproducible={reproducible}")
    lines = metrics_of(ahead)
    oldest = max(line["training/staleness_max"] for line in lines)
    assert oldest == 2 if reproducible == "true" else oldest <= 2, "without, prompts start no earlier than needed"
    last = lines[-1]
    assert last["rollout/groups_issued"] == last["rollout/groups_trained"] == 48
    prompts = [[prompt for prompt, _, _ in step] for step in trained_on(ahead)]
    assert prompts == [[prompt for prompt, _, _ in step] for step in trained_on(sync)]
    assert trained_on(ahead)[0] == trained_on(sync)[0]


EPOCH = "trainer.epochs:EpochSource"
AHEAD = (
    "trainer.max_staleness=2",
    "trainer.reproducible=true",
    "trainer.device=cpu",
    "data.max_response_length=9",
    "data.train_batch_size=4",
    "trainer.total_training_steps=4",
)


STAGES = [
    Kill(f"{EPOCH}._advance"),
    Kill(f"{EPOCH}._advance", 2),
    Kill(f"{EPOCH}._advance", 2, "after"),
    Kill("rlsys.rollout.hf.decode:DecodeLoop._step", 18),  # the probe takes 14
    Kill(OPTIM_STEP),
    Kill(f"{EPOCH}.save"),
    Kill(COMMIT, when="after"),
]
SAVED = Kill(POINTER, when="after")


def test_a_reproducible_run_killed_at_any_point_ends_in_the_same_bits(runs: Runs) -> None:
    """Killed within an epoch, between epochs and pushes, and around saves, each time in a later step."""
    points = [Patches(kill) for kill in (*STAGES[1:3], SAVED, STAGES[3], *STAGES[5:], STAGES[2])]
    assert_same(runs.killed("ahead", AHEAD, points), runs.uninterrupted("ahead", AHEAD), last=4)


def test_requests_of_validation_and_of_the_parity_probe_are_not_those_of_a_step(runs: Runs) -> None:
    """A resumed run does not make them again, and the one before the first push it makes twice."""
    more = (*AHEAD, "trainer.test_freq=1", "actor_rollout_ref.rollout.parity.freq=2")
    whole = runs.uninterrupted("tested", more)
    assert_same(runs.killed("tested", more, [Patches(SAVED)] * 2), whole, last=4)
    answered = sum(line["rollout/answered"] for line in metrics_of(whole))
    assert answered == 16 * (1 + 1 + 2 + 2), "the answers of the first two steps are drawn in one epoch"


def test_a_free_run_that_is_killed_loses_no_prompt_and_no_answer(runs: Runs, tmp_path: Path) -> None:
    more = (*AHEAD[2:], "trainer.max_staleness=2")
    points = [Patches(kill) for kill in (SAVED, Kill(OPTIM_STEP), SAVED)]
    out = runs.killed("free", more, points)
    prompts = [[prompt for prompt, _, _ in step] for step in trained_on(out)]
    whole = runs.uninterrupted("ahead", AHEAD)
    assert prompts == [[prompt for prompt, _, _ in step] for step in trained_on(whole)]
    last = metrics_of(out)[-1]
    assert last["rollout/groups_issued"] == last["rollout/groups_trained"] == 16
    assert max(line["training/staleness_max"] for line in metrics_of(out)) <= 2
    kept = DataProto.load_from_disk(next(out.glob("global_step_1/*.dp")))
    assert set(kept.tensors["weight_versions"].unique().tolist()) <= {-1, 0, 1}


@pytest.fixture(scope="module")
def checkpoint(runs: Runs) -> Path:
    return runs.uninterrupted("ahead", AHEAD) / "global_step_1"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("trainer.max_staleness=1",), "set trainer.max_staleness=2 or more"),
        (("trainer.max_staleness=0", "trainer.reproducible=false"), "set trainer.max_staleness as in the run"),
        (("data.train_batch_size=8",), "set data.train_batch_size to the value of the run"),
        (("actor_rollout_ref.rollout.n=2",), "open prompts of n=4, and here it is 2"),
        (("actor_rollout_ref.rollout.temperature=0.5",), "open prompts of temperature=1.0, and here it is 0.5"),
        (("data.max_response_length=12",), "open prompts of response_length=9, and here it is 12"),
        (("data.max_prompt_length=20",), "open prompts of prompt_length=16, and here it is 20"),
        (("actor_rollout_ref.rollout.workflow=MultiTurnWorkflow",), "open prompts without episodes"),
    ],
)
def test_a_checkpoint_with_open_prompts_is_refused_by_a_run_that_cannot_continue_them(
    runs: Runs, checkpoint: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    ended = runs.server.run(runs.argv(tmp_path / "out", (*AHEAD, *more, *resume)), tmp_path / "log")
    assert ended.status == 2
    assert message in ended.log


@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_damaged_open_prompts_are_refused_by_name(runs: Runs, checkpoint: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, copy)
    path = next(copy.glob("*.dp"))
    content = path.read_bytes()
    path.unlink()
    if damage == "cut off":
        path.write_bytes(content[:-9])
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={copy}")
    ended = runs.server.run(runs.argv(tmp_path / "out", (*AHEAD, *resume)), tmp_path / "log")
    assert ended.status == 1
    assert path.name in ended.log


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reproducible_run_survives_two_hundred_kills(runs: Runs) -> None:
    steps = ("trainer.total_training_steps=110", "trainer.max_staleness=3", "trainer.total_epochs=30")
    points = [Patches(kill) for _ in range(22) for kill in (*STAGES, *STAGES[1:2], SAVED)]
    assert len(points) >= 198
    assert_same(runs.killed("many", (*AHEAD, *steps), points), runs.uninterrupted("many", (*AHEAD, *steps)), last=110)
