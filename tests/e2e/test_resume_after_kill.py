"""A run killed with SIGKILL anywhere and started again by the same command ends as if nothing had happened.

Each test kills one run many times in a row, every time where the restarted run has not yet been, and compares what is
left at the end with an uninterrupted run: parameters, optimizer, random generators, data order, rollouts and metrics.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Toy
from tests.e2e.fork_server import ForkServer, Kill, Patches

WALL_CLOCK = ("timing", "perf/", "weights/seconds", "reward/seconds")
SET_ASIDE = re.compile(r"metrics\.\d+\.jsonl|staleness\.txt")
"""What runs that were killed before their first checkpoint had written, and what a run of enough steps measured."""

GENERATE = "rlsys.fleet.fleet:RolloutFleet.generate_sequences"
REWARD = "rlsys.rewards.manager:PoolRewardManager.grade"
LOG_PROB = "rlsys.roles.actor:PPOActor.compute_logp"
ADVANTAGES = "trainer.steps:rewards_to_advantages"
OPTIM_STEP = "rlsys.engines.fsdp.engine:FSDPEngine.optim_step"
PUSH = "rlsys.rollout.hf.engine:HFRollout.finish_update"
METRICS = "rlsys.telemetry.jsonl:JsonlWriter.write"
ENGINE_COMMIT = "rlsys.engines.checkpoint:_commit"
SAVE_ACTOR = "workers.actor:ActorWorker.save_checkpoint"
SAVE_CRITIC = "workers.critic:CriticWorker.save_checkpoint"
BEGIN_SAVE = "rlsys.engines.base:BaseTrainEngine.begin_save"
FINISH_SAVE = "workers.base:EngineWorker.finish_save"
SAVE_STATE = "trainer.loop:save_state"
COMMIT = "rlsys.utils.atomic:commit_dir"
POINTER = "trainer.checkpoint:CheckpointStore._point_at"
PRUNE = "trainer.checkpoint:CheckpointStore.prune"


def stages_of_a_step() -> list[Patches]:
    """In the first step that a run makes: each stage, the update between two optimizer steps, the push half way."""
    kills = [
        Kill(GENERATE),
        Kill(GENERATE, when="after"),
        Kill(REWARD, when="after"),
        Kill(LOG_PROB, when="after"),
        Kill(ADVANTAGES),
        Kill(OPTIM_STEP, when="after"),
        Kill(OPTIM_STEP, call=2, when="after"),
        Kill(PUSH, call=2),
        Kill(PUSH, call=2, when="after"),
    ]
    return [
        *(Patches(kill) for kill in kills),
        Patches(inject=("torn_metric_line",)),
        Patches(Kill(METRICS, 1, "after")),
    ]


def points_of_a_save() -> list[Patches]:
    """While the first checkpoint that a run makes is written; the last one leaves it complete."""
    kills = [
        Kill(SAVE_ACTOR),
        Kill(ENGINE_COMMIT),
        Kill(SAVE_ACTOR, when="after"),
        Kill(SAVE_STATE),
        Kill(SAVE_STATE, when="after"),
        Kill(COMMIT, when="after"),
        Kill("rlsys.utils.atomic:fsync_file", when="after", inside=POINTER),
        Kill(POINTER, when="after"),
    ]
    return [Patches(kill) for kill in kills]


@dataclass(frozen=True)
class Runs:
    """Uninterrupted runs, kept by their overrides, and runs killed again and again."""

    server: ForkServer
    toy: Toy
    folder: Path

    def argv(self, out: Path, overrides: Sequence[str]) -> list[str]:
        return self.toy.overrides(
            out,
            "trainer.backend=local",
            "trainer.save_freq=1",
            "actor_rollout_ref.rollout.parity.freq=-1",
            f"reward.custom_reward_function.path={self.toy.grader}",
            f"trainer.rollout_data_dir={out}/rollouts",
            *overrides,
        )

    def uninterrupted(self, name: str, overrides: Sequence[str]) -> Path:
        out = self.folder / f"{name}_whole"
        if not out.exists():
            ended = self.server.run(self.argv(out, overrides), self.folder / f"{name}_whole.log")
            assert ended.status == 0, ended.log
        return out

    def killed(self, name: str, overrides: Sequence[str], points: Sequence[Patches]) -> Path:
        out = self.folder / name
        for number, point in enumerate(points):
            ended = self.server.run(self.argv(out, overrides), self.folder / f"{name}_{number}.log", point)
            assert ended.status == -9, f"point {number} {point} was not reached, or not survived:\n{ended.log}"
            assert ended.orphans == 0, f"{ended.orphans} processes outlived {point}"
        ended = self.server.run(self.argv(out, overrides), self.folder / f"{name}_last.log")
        assert ended.status == 0, ended.log
        return out


@pytest.fixture(scope="module")
def runs(server: ForkServer, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, toy, tmp_path_factory.mktemp("runs"))


STAGES = (GENERATE, REWARD, LOG_PROB, OPTIM_STEP, METRICS, COMMIT)
SAVED = Patches(Kill(POINTER, when="after"))


def test_killed_in_every_stage_of_a_step_and_at_every_point_of_a_save(runs: Runs) -> None:
    points = [*stages_of_a_step(), *points_of_a_save(), Patches(Kill(OPTIM_STEP, when="after")), SAVED]
    assert_same(runs.killed("grpo", (), points), runs.uninterrupted("grpo", ()))


@pytest.mark.slow
def test_killed_in_every_stage_of_later_steps(runs: Runs) -> None:
    later = [Patches(Kill(stage, when="after")) for stage in STAGES]
    points = [SAVED, *later, Patches(Kill(PUSH, call=2)), SAVED]
    assert_same(runs.killed("grpo_later", (), points), runs.uninterrupted("grpo", ()))


def test_killed_between_the_saves_of_two_roles_and_while_old_checkpoints_are_removed(runs: Runs) -> None:
    overrides = (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.max_critic_ckpt_to_keep=1",
    )
    update_critic = Patches(Kill("workers.critic:CriticWorker.update_critic", when="after"))
    between = [Patches(Kill(SAVE_CRITIC)), Patches(Kill(SAVE_CRITIC, when="after"))]
    first = [update_critic, *between, SAVED]
    pruning = [Patches(Kill("os:unlink", call=2, inside=PRUNE)), Patches(Kill(PRUNE, when="after"))]
    points = [*first, update_critic, *between, *pruning[:1], *between, *pruning[:1]]
    assert_same(runs.killed("ppo", overrides, points), runs.uninterrupted("ppo", overrides))


def test_killed_while_batches_are_made_again_for_dynamic_sampling(runs: Runs) -> None:
    overrides = (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "actor_rollout_ref.rollout.n=2",
    )
    second_batch = Patches(Kill(GENERATE, call=2, when="after"))
    points = [second_batch, SAVED, second_batch, SAVED, second_batch]
    assert_same(runs.killed("dapo", overrides, points), runs.uninterrupted("dapo", overrides))


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_while_a_thread_writes_the_checkpoint_of_the_step_before(runs: Runs, rounds: int) -> None:
    """What is written beside the next step is what a run without async_save writes; a kill leaves the one before."""
    overrides = ("actor_rollout_ref.actor.checkpoint.async_save=true",)
    thread = "rlsys.engines.checkpoint:Saving._run"
    kills = [Kill(BEGIN_SAVE, when="after"), Kill(thread), Kill(thread, when="after"), Kill(FINISH_SAVE)]
    kills += [Kill(ENGINE_COMMIT), Kill(FINISH_SAVE, when="after"), Kill(COMMIT, when="after")]
    points = [*map(Patches, kills), SAVED] * rounds
    assert_same(runs.killed(f"async_save_{rounds}", overrides, points), runs.uninterrupted("grpo", ()))


PPO = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.test_freq=1",
)
VALUES = "workers.critic:CriticWorker.compute_values"
REFERENCE = "workers.reference:ReferenceWorker.compute_ref_log_prob"
UPDATE_CRITIC = "workers.critic:CriticWorker.update_critic"
UPDATE_ACTOR = "workers.actor:ActorWorker.update_actor"
VALIDATION = "trainer.evaluation:Validation.run"
LOAD = "workers.critic:CriticWorker.load_checkpoint"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ppo_with_critic_and_reference_killed_in_every_stage(runs: Runs) -> None:
    stages = (GENERATE, REWARD, LOG_PROB, REFERENCE, VALUES, ADVANTAGES, UPDATE_CRITIC, UPDATE_ACTOR, VALIDATION)
    first = [Patches(Kill(stage, when=when)) for stage in stages for when in ("before", "after")]
    steps = [Patches(Kill(OPTIM_STEP, call=call, when="after")) for call in (1, 2, 3, 4)]
    saves = [
        Patches(Kill(stage, when=when))
        for stage in (SAVE_ACTOR, SAVE_CRITIC, SAVE_STATE, COMMIT)
        for when in ("before", "after")
    ]
    loads = [Patches(Kill(LOAD, when=when)) for when in ("before", "after")]
    saved = Patches(Kill(POINTER, when="after"))
    later = [saved, *loads, *first, saved, *loads, *first[::3], *saves]
    assert_same(runs.killed("ppo_stages", PPO, [*first, *steps, *saves, *later]), runs.uninterrupted("ppo_stages", PPO))


@pytest.mark.slow
def test_killed_around_the_ends_of_epochs(runs: Runs) -> None:
    """Two steps an epoch, so that each resume is at another place of the order and two cross into the next epoch."""
    overrides = ("data.train_max_samples=16", "trainer.total_epochs=3", "trainer.total_training_steps=null")
    around = [Patches(Kill(stage, when="after")) for stage in (GENERATE, OPTIM_STEP, SAVE_STATE, COMMIT, GENERATE)]
    points = [*around, Patches(Kill(POINTER, when="after"))] * 2
    whole = runs.uninterrupted("epochs", overrides)
    assert_same(runs.killed("epochs", overrides, points), whole, last=6)
    prompts = [[json.loads(line)["input"] for line in (whole / "rollouts" / f"{n}.jsonl").open()] for n in range(1, 7)]
    assert sorted(prompts[0] + prompts[1]) == sorted(prompts[2] + prompts[3])
    assert prompts[:2] != prompts[2:4]


@pytest.mark.slow
@pytest.mark.parametrize("function", ["fsync", "rename", "replace", "mkdir", "unlink", "rmdir"])
def test_killed_at_every_change_of_the_disk_while_saving(runs: Runs, function: str) -> None:
    """Before the first call in a save, the second, and so on until a save has no more of them."""
    overrides = ("algorithm.adv_estimator=gae", "trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1")
    out, kills = runs.folder / f"disk_{function}", 0
    while True:
        point = Patches(Kill(f"os:{function}", call=kills + 1, inside="trainer.loop:CheckpointedLoop.save"))
        ended = runs.server.run(runs.argv(out, overrides), runs.folder / f"{function}.log", point)
        assert ended.orphans == 0
        if ended.status == 0:
            break
        assert ended.status == -9, ended.log
        kills += 1
    assert kills >= {"fsync": 10, "rename": 2}.get(function, 1)
    assert_same(out, runs.uninterrupted("disk", overrides))


def assert_same(out: Path, whole: Path, *, ignored: tuple[str, ...] = (), last: int = 3) -> None:
    """Everything that two runs leave is the same, but for what the clock says and the `ignored` metrics."""
    assert files_of(out) == files_of(whole)
    assert metrics_of(out, ignored) == metrics_of(whole, ignored)
    for name in sorted(files_of(whole)):
        if name.startswith(("rollouts/", "global_step_")):
            assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert (out / "latest_checkpointed_iteration.txt").read_text() == str(last)


def files_of(out: Path) -> set[str]:
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    return {name for name in files if not SET_ASIDE.fullmatch(name)}


def metrics_of(out: Path, ignored: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith((*WALL_CLOCK, *ignored))} for line in lines]
