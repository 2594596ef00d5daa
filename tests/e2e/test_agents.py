"""Whole runs whose answers are episodes: several turns, a tool and an environment."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from rlsys.agent.episode_log import read_episodes
from rlsys.config import PPOConfig, load_config
from rlsys.telemetry.jsonl import read_jsonl
from rlsys.utils.errors import ConfigError, DataError
from tests.e2e.conftest import Toy
from trainer import main_eval, main_ppo, replay
from trainer.build import prepare

AGENT = '''
import asyncio
from pathlib import Path

from rlsys.agent.tools import function_tool


@function_tool()
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def two_turns(row, session):
    session.add(*row["prompt"])
    answer = await session.draw(max_new_tokens=6)
    length = await session.call("add", a=len(answer.text), b=1)
    session.add({"role": "tool", "name": "add", "tool_call_id": "call00000", "content": length})
    answer = await session.draw(max_new_tokens=6)
    for n in range(int(session.seed) % 3):
        await session.draw([{"role": "user", "content": f"{n}"}], max_new_tokens=3)
    return (sum(answer.text.encode()) % 7) / 6


async def uneven(row, session):
    session.add(*row["prompt"])
    for _ in range(1 + session.seed % 4):
        await session.draw(max_new_tokens=2)
        session.add("more")
    return session.seed % 2


waiting = []


async def waits_for_a_checkpoint(row, session):
    """Episodes of the first step wait for one of a later step to be under way; those wait until the first is saved."""
    session.add(*row["prompt"])
    await session.draw(max_new_tokens=6)
    session.add(await session.call("add", a=1, b=1))
    saved = Path(__file__).with_name("out") / "global_step_1"
    if int(session.name.split("-")[0]) >= 8:
        waiting.append(session.name)
        while not saved.exists():
            await asyncio.sleep(0.01)
    while not waiting:
        await asyncio.sleep(0.01)
    await session.draw(max_new_tokens=6)
    return 0.5 + session.seed % 2


async def never_ends(row, session):
    session.add(*row["prompt"])
    await session.draw(max_new_tokens=2)
    await asyncio.Event().wait()


async def fails(row, session):
    raise KeyError("no such column")


def program(prompt, base_url, api_key):
    import json, urllib.request
    body = json.dumps({"model": "any", "messages": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
    answer = json.load(urllib.request.urlopen(request))
    return (answer["usage"]["completion_tokens"] + len(answer["choices"][0]["message"]["content"])) % 3 / 2


class Parrot:
    """An environment without tool calls by the model."""

    def reset(self, data_source, **row):
        return f" {data_source}"[:3]

    def say(self, text: str) -> str:
        """Say something.

        Args:
            text: What.
        """
        return text

    def get_reward(self):
        return 0.5
'''
ROLLOUT = "actor_rollout_ref.rollout."


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "my_agent.py"
    path.write_text(AGENT)
    return path


def arguments(toy: Toy, out: Path, agent: Path, workflow: str) -> list[str]:
    more = [f"{ROLLOUT}workflow={agent}:{workflow}", f"{ROLLOUT}multi_turn.function_tool_path={agent}"]
    more += ["trainer.backend=local", "data.max_response_length=40", f"{ROLLOUT}agent.num_workers=1"]
    return toy.overrides(out, *more, "trainer.total_training_steps=2", "trainer.val_before_train=true")


def test_a_run_trains_on_episodes_with_a_tool_and_repeats_bit_for_bit(
    toy: Toy, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = []
    for name in ("one", "two"):
        out = tmp_path / name
        argv = [*arguments(toy, out, agent, "two_turns"), f"trainer.rollout_data_dir={out}/rollouts"]
        assert main_ppo.main(argv) == 0
        rollouts.append((out / "rollouts" / "2.jsonl").read_text())
    assert rollouts[0] == rollouts[1]
    steps = [record for record in read_jsonl(out / "metrics.jsonl") if "agent/end/stop" in record]
    assert [step["agent/end/stop"] for step in steps] == [32.0, 32.0]
    assert all(step["agent/tool_ok"] == 32.0 for step in steps)
    assert all(32.0 < step["agent/rows"] <= 96.0 for step in steps), "branches are rows of their own"
    assert all(step["agent/untrained_rows"] == 0.0 for step in steps)
    assert [len(rows.splitlines()) for rows in rollouts] == [32, 32]
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in steps)
    assert len({json.loads(row)["score"] for row in rollouts[0].splitlines()}) > 2
    episodes = read_jsonl(out / "rollouts" / "episodes" / "2.jsonl")
    capsys.readouterr()
    for episode, row in zip(episodes, rollouts[0].splitlines()[:3]):
        assert replay.main([f"{out}/rollouts/episodes/2.jsonl", "--name", episode["name"]]) == 0
        printed = capsys.readouterr().out
        turns = sum("num_prompt_tokens" in entry["request"] for entry in episode["log"])
        assert f"reward {json.loads(row)['score']:g}, {turns} turns, end stop" in printed
        assert "--- tool" in printed or turns > 2
    other = out / "other.jsonl"
    other.write_text((out / "rollouts" / "episodes" / "2.jsonl").read_text().replace('"b": 1', '"b": 2'))
    assert replay.main([str(other)]) == 1
    assert replay.main([str(other), "--name", "none"]) == 2


def test_the_last_episodes_of_a_step_are_not_waited_for(toy: Toy, agent: Path, tmp_path: Path) -> None:
    argv = [*arguments(toy, tmp_path, agent, "uneven"), f"{ROLLOUT}over_sample_rate=0.5"]
    assert main_ppo.main([*argv, "trainer.total_training_steps=1"]) == 0
    *_, step = read_jsonl(tmp_path / "metrics.jsonl")
    assert 0 < step["agent/end/over_sampled"] <= 16
    assert step["agent/end/over_sampled"] + step["agent/end/stop"] == 32.0


def test_logs_of_episodes_that_the_disk_does_not_take_do_not_stop_the_run(
    toy: Toy, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "episodes").write_text("a file where the folder belongs")
    argv = [*arguments(toy, tmp_path, agent, "Parrot"), f"trainer.rollout_data_dir={tmp_path}/rollouts"]
    assert main_ppo.main(argv) == 0
    steps = [record for record in read_jsonl(tmp_path / "metrics.jsonl") if "agent/rows" in record]
    assert [step["training/tracker_errors"] for step in steps] == [1.0, 2.0]
    output = capsys.readouterr()
    assert (output.out + output.err).count("rollouts failed, its record is incomplete: FileExistsError") == 1


def test_an_environment_class_trains_and_evaluates(toy: Toy, agent: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [*arguments(toy, out, agent, "Parrot"), f"trainer.rollout_data_dir={out}/rollouts"]
    assert main_ppo.main(argv) == 0
    rows = [json.loads(row) for row in (out / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert {row["score"] for row in rows} == {0.5}
    assert all("= te" in row["input"] for row in rows)
    evaluation = [
        f"actor_rollout_ref.model.path={toy.model}",
        f"data.val_files={toy.val}",
        f"{ROLLOUT}workflow={agent}:Parrot",
        *("data.max_prompt_length=16", "data.max_response_length=40", "trainer.backend=local"),
        f"trainer.default_local_dir={tmp_path / 'eval'}",
    ]
    assert main_eval.main(evaluation) == 0
    metrics = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert metrics["val-core/text/exact/reward/mean@1"] == 0.5


def test_episodes_of_an_asynchronous_run_are_young_enough_and_resume(toy: Toy, agent: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [*arguments(toy, out, agent, "waits_for_a_checkpoint"), "trainer.max_staleness=2", "trainer.device=cpu"]
    argv += ["trainer.save_freq=1", "algorithm.rollout_correction.rollout_is=token"]
    assert main_ppo.main(argv) == 0
    saved = read_episodes(out / "global_step_1" / "open_episodes.jsonl")
    answered = [entry for episode in saved.values() for entry in episode["log"] if entry["result"]]
    assert answered
    shutil.rmtree(out / "rollouts" / "episodes")
    argv += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={out}/global_step_1"]
    assert main_ppo.main([*argv, "trainer.total_training_steps=4"]) == 0
    finished = {}
    for file in (out / "rollouts" / "episodes").glob("*.jsonl"):
        finished |= read_episodes(file)
    for name, episode in saved.items():
        recorded = [entry for entry in episode["log"] if entry["result"]]
        assert finished[name]["log"][: len(recorded)] == recorded
        assert finished[name]["row"] == episode["row"]  # else the requests of an environment would differ
    steps = [record for record in read_jsonl(out / "metrics.jsonl") if "training/staleness_max" in record]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert sum(step.get("agent/tool_ok", 0.0) for step in steps) >= 4 * 32
    assert all(step["training/staleness_max"] <= 2 for step in steps)
    assert max(step["training/staleness_max"] for step in steps) > 0


def test_a_program_that_speaks_chat_completions_is_trained(toy: Toy, agent: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = [f"{ROLLOUT}agent.path={agent}:program", "trainer.backend=local", "data.max_response_length=8"]
    assert main_ppo.main(toy.overrides(out, *argv, "trainer.total_training_steps=2")) == 0
    steps = [record for record in read_jsonl(out / "metrics.jsonl") if "agent/end/stop" in record]
    assert [step["agent/end/stop"] for step in steps] == [32.0, 32.0]
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in steps)


def test_episodes_that_all_fail_stop_the_run_with_their_cause(
    toy: Toy, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo.main(arguments(toy, tmp_path / "out", agent, "fails")) != 0
    output = capsys.readouterr()
    assert "KeyError: 'no such column'" in output.out + output.err
    assert "max_failed_share" in output.out + output.err


def test_answers_of_episodes_that_cannot_be_graded_stop_the_run_with_their_cause(
    toy: Toy, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("def compute_score(*given, **others): return float('nan')\n")
    argv = [f"{ROLLOUT}workflow=ToolWorkflow", "trainer.backend=local", f"reward.custom_reward_function.path={grader}"]
    assert main_ppo.main(toy.overrides(tmp_path / "out", *argv)) != 0
    output = capsys.readouterr()
    assert "32 of 32 episodes have no score. First: the grader returned nan" in output.err


def test_a_workflow_that_cannot_be_loaded_is_a_config_error(
    toy: Toy, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo.main(arguments(toy, tmp_path / "out", agent, "nothing")) == 2
    output = capsys.readouterr()
    assert "does not define it" in output.out + output.err


def test_the_agent_of_the_guide_and_the_python_agent_run(toy: Toy, tmp_path: Path) -> None:
    common = ["trainer.backend=local", "trainer.total_training_steps=1", f"{ROLLOUT}agent.num_workers=1"]
    calculator = [f"{ROLLOUT}workflow=scripts/agent_calculator.py:AskCalculator", *common]
    assert main_ppo.main(toy.overrides(tmp_path / "calculator", *calculator)) == 0
    python = ["--config-name=agent_python", *toy.overrides(tmp_path / "python", *common), "data.max_response_length=20"]
    assert main_ppo.main(python) == 0


OWN_RLVR = """
from rlsys.agent.presets import RLVRWorkflow


class Own(RLVRWorkflow):
    pass
"""


def test_rlvr_by_name_is_the_run_without_a_workflow(toy: Toy, agent: Path, tmp_path: Path) -> None:
    loops, own = tmp_path / "loops.yaml", tmp_path / "own.py"
    loops.write_text("[{name: one, _target_: rlsys.agent.presets.RLVRWorkflow}, {name: two, _target_: ToolWorkflow}]")
    own.write_text(OWN_RLVR)

    def rows(*names: str) -> str:
        path, row = tmp_path / f"{'-'.join(names)}.jsonl", json.loads(toy.train.read_text().splitlines()[0])
        path.write_text("".join(json.dumps(row | {"agent_name": name}) + "\n" for name in names * 8))
        return f"data.train_files={path}"

    def prepared(*argv: str) -> PPOConfig:
        return prepare(load_config(toy.overrides(tmp_path, *argv), PPOConfig)).config

    rlvr, by_rows = f"{ROLLOUT}workflow=RLVRWorkflow", f"{ROLLOUT}agent.agent_loop_config_path={loops}"
    plain, same = prepared(), rows("single_turn_agent", "one")
    for target in ("RLVRWorkflow", "rlsys.agent.presets:RLVRWorkflow", "rlsys.areal.RLVRWorkflow"):
        assert prepared(f"{ROLLOUT}workflow={target}") == plain
    assert prepared(by_rows, f"{ROLLOUT}agent.default_agent_loop=one") == plain
    assert prepared(rlvr, by_rows, same).actor_rollout_ref == plain.actor_rollout_ref
    for argv in (
        [f"{ROLLOUT}workflow={own}:Own"],
        [by_rows, rows("one", "two")],
        [rlvr, rows("single_turn_agent", "tool_agent")],
        [rlvr, f"{ROLLOUT}agent.max_tokens_per_turn=2"],
        [rlvr, f"{ROLLOUT}multi_turn.function_tool_path={agent}"],
        [rlvr, f"{ROLLOUT}over_sample_rate=0.5"],
        [rlvr, "algorithm.adv_unit=turn"],
        [rlvr, "data.streaming=true", "trainer.total_training_steps=1"],
    ):
        assert prepared(*argv).actor_rollout_ref.rollout.has_workflow, argv
    with pytest.raises(ConfigError, match=r"set one of .*workflow, agent.command and agent.path"):
        prepared(rlvr, f"{ROLLOUT}agent.command=cat")
    agent.with_name("tools.py").write_text(AGENT.replace("def add", "def python"))
    with pytest.raises(ConfigError, match="tools: python is defined by more than one tool"):
        prepared(f"{ROLLOUT}workflow=MathRLVRWorkflow", f"{ROLLOUT}multi_turn.function_tool_path={tmp_path}/tools.py")
    with pytest.raises(DataError, match="row 1: agent_name=three: choose from single_turn_agent, tool_agent, one, two"):
        prepared(by_rows, rows("one", "three"))
    loops.write_text("[{name: one}]")
    with pytest.raises(ConfigError, match=r"agent_loop_config_path=.*missing required field `_target_`"):
        prepared(by_rows)


def rewards_of(out: Path) -> list[float]:
    """The mean reward of every step."""
    return [
        record["critic/score/mean"] for record in read_jsonl(out / "metrics.jsonl") if "critic/score/mean" in record
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_of_the_guide_learns_to_ask(tmp_path: Path) -> None:
    argv = ["--config-name=quickstart", f"{ROLLOUT}workflow=scripts/agent_calculator.py:AskCalculator"]
    argv += ["trainer.backend=local", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}"]
    assert main_ppo.main(argv) == 0
    rewards = rewards_of(tmp_path)
    assert len(rewards) == 25
    assert fmean(rewards[-5:]) > fmean(rewards[:2]) + 0.15


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_python_agent_learns_to_write_programs(tmp_path: Path) -> None:
    options = ["--tool=python", "--seeds=1", "--ks=0", "--steps=24", f"--out={tmp_path}"]
    subprocess.run([sys.executable, "scripts/agent_learning.py", *options], check=True)
    rewards = rewards_of(tmp_path / "k0-seed1")
    assert len(rewards) == 24
    assert fmean(rewards[-5:]) > fmean(rewards[:3]) + 0.5


def test_an_episode_without_end_ends_a_reproducible_run_with_what_to_do(
    toy: Toy, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["trainer.deadlines.generate_s=1", f"{ROLLOUT}agent.episode_timeout_s=1", "trainer.val_before_train=false"]
    ahead = ["trainer.max_staleness=1", "trainer.reproducible=true", "trainer.device=cpu"]
    assert main_ppo.main([*arguments(toy, tmp_path / "out", agent, "never_ends"), *limits, *ahead]) != 0
    output = capsys.readouterr()
    lines = (output.out + output.err).splitlines()
    (error,) = (line for line in lines if "did not answer within 2 s at stage 'generate an epoch'" in line)
    assert error.startswith("rlsys: DeadlineError: the episodes")
    assert "never ends holds all of them up; else raise agent.episode_timeout_s" in error
