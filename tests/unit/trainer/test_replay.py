"""An episode is run again from the folder of its run, whatever the run left to its defaults."""

import json
from pathlib import Path

import pytest

from trainer import replay

AGENT = """
async def agent(row, session):
    session.add(*row["prompt"])
    return float((await session.draw()).text == "2")
"""


def test_an_episode_of_the_start_model_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    rollout = {"workflow": f"{tmp_path}/agent.py:agent"}
    config = {"data": {"train_files": None}, "actor_rollout_ref": {"rollout": rollout}, "reward": {"num_workers": 1}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    prompt = [{"role": "user", "content": "1+1="}]
    row = {"prompt": prompt, "data_source": "rlsys/arithmetic", "reward_model": {"ground_truth": "2"}}
    episode = {"name": "000-0", "seed": 0, "row": row, "log": []}
    (tmp_path / "1.jsonl").write_text(json.dumps(episode) + "\n")
    assert replay.main([str(tmp_path / "1.jsonl")]) == 0
    assert "the log ends before the episode does" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, '{"input": "1+1=", "output": "2"}\n'], ids=["missing", "samples"])
def test_a_file_without_episodes_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "1.jsonl").write_text(text)
    assert replay.main([str(tmp_path / "1.jsonl")]) == 2
    assert "1.jsonl has none or is missing" in capsys.readouterr().err
