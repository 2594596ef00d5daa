"""Episodes of a reproducible run: the same bits however long tools take, on one or three replicas, after a kill."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlsys.agent.episode_log import read_episodes
from tests.e2e.conftest import Toy
from tests.e2e.fork_server import ForkServer, Kill, Patches
from tests.e2e.test_async import SAVED, metrics_of, trained_on
from tests.e2e.test_resume_after_kill import OPTIM_STEP, Runs, assert_same
from trainer.main_ppo import main

AGENT = '''
import asyncio, time
from pathlib import Path

from rlsys.agent.tools import function_tool


@function_tool()
def slow_add(a: int, line: str) -> int:
    """Add one to a number.

    Args:
        a: The number.
        line: What is written down of the call.
    """
    time.sleep(time.time_ns() % 50 / 1000)
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(f"{line}\\n")
    return a + 1


async def turns(row, session):
    session.add(*row["prompt"])
    answer = await session.draw(max_new_tokens=6)
    for n in range(session.seed % 4):
        await asyncio.sleep(time.time_ns() % 50 / 1000)
        session.add(await session.call("slow_add", a=len(answer.text), line=f"{session.name}/{n}"))
        answer = await session.draw(max_new_tokens=6)
    if session.seed % 5 == 0:
        answer = await session.draw([{"role": "user", "content": "again"}], max_new_tokens=2)
    return (sum(answer.text.encode()) % 7) / 6
'''
ROLLOUT = "actor_rollout_ref.rollout"
SAVE = Patches(Kill("trainer.episodes:OpenEpisodes.save"))


@pytest.fixture(scope="module")
def runs(server: ForkServer, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, toy, tmp_path_factory.mktemp("runs"))


def episodes_of(out: Path) -> list[Any]:
    """The logs of trained and of saved episodes, without what a clock or a counter says; the files are removed."""
    files = sorted([*out.glob("rollouts/episodes/*"), *out.glob("global_step_*/open_episodes.jsonl")])
    episodes = [episode for file in files for episode in read_episodes(file).values()]
    for entry in (entry for episode in episodes for entry in episode["log"]):
        result = entry["result"] or {}
        entry["result"] = {key: value for key, value in result.items() if key not in ("seconds", "rid")}
    for file in files:
        file.unlink()
    return episodes


def overrides(folder: Path) -> tuple[str, ...]:
    agent = folder / "my_agent.py"
    agent.write_text(AGENT)
    return (
        *(f"{ROLLOUT}.workflow={agent}:turns", f"{ROLLOUT}.multi_turn.function_tool_path={agent}"),
        *(f"{ROLLOUT}.agent.num_workers=2", "data.max_response_length=36", "data.train_batch_size=4"),
        *("trainer.max_staleness=2", "trainer.reproducible=true", "trainer.device=cpu"),
        "trainer.total_training_steps=4",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_runs_with_sleeping_tools_end_in_the_same_bits_and_repeat_no_recorded_call(
    runs: Runs, tmp_path: Path
) -> None:
    more = overrides(tmp_path)
    whole = runs.uninterrupted("agents", more)
    calls = tmp_path / "calls"
    made = Counter(calls.read_text().splitlines())
    assert set(made.values()) == {1}
    assert len(made) > 40
    calls.unlink()
    saved = read_episodes(whole / "global_step_1" / "open_episodes.jsonl")
    killed = runs.killed("agents", more, [Patches(SAVED), Patches(Kill(OPTIM_STEP)), SAVE])
    for one, other in zip(episodes_of(killed), episodes_of(whole), strict=True):
        assert one["name"] == other["name"]
        assert one["log"] == other["log"]
    assert_same(killed, whole, ignored=("agent/episode_seconds", "agent/tool_seconds"), last=4)
    again = Counter(calls.read_text().splitlines())
    assert set(again) == set(made)
    entries = [entry for episode in saved.values() for entry in episode["log"] if entry["result"] is not None]
    recorded = [entry["request"]["arguments"]["line"] for entry in entries if entry["request"].get("tool")]
    assert recorded
    assert {again[line] for line in recorded} == {1}
    steps = metrics_of(whole)
    assert max(step["training/staleness_max"] for step in steps) == 2
    assert all(step["agent/end/stop"] > 0 for step in steps[:2])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_and_three_replicas_train_on_the_same_episodes(toy: Toy, tmp_path: Path) -> None:
    trained = []
    for replicas in (1, 3):
        out = tmp_path / str(replicas)
        own = (f"trainer.rollout_workers={replicas}", "trainer.backend=ray", f"{ROLLOUT}.max_num_seqs=4")
        more = (
            *overrides(tmp_path),
            *own,
            f"trainer.rollout_data_dir={out}/rollouts",
            "ray_kwargs.ray_init.num_cpus=4",
        )
        assert main(toy.overrides(out, *more)) == 0
        weights = out / "global_step_4" / "actor" / "model_world_size_1_rank_0.safetensors"
        trained.append((trained_on(out), weights.read_bytes()))
    assert trained[0] == trained[1]
