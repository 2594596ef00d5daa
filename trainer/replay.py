"""python -m trainer.replay EPISODES: run an episode again by its log, without a model, print it and grade it again.

EPISODES is a file that a run wrote (rollouts/episodes/1.jsonl, or open_episodes.jsonl of a checkpoint). The workflow
runs in the main thread with the tokens and tool results of the log: breakpoint() and `python -m pdb -m` work.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlsys.agent.episode_log import EpisodeLog, read_episodes
from rlsys.agent.runner import EpisodeStart
from rlsys.config import PPOConfig, load_config
from rlsys.telemetry.jsonl import JsonObject
from rlsys.telemetry.metrics import StageTimer
from rlsys.utils.errors import ConfigError
from trainer.episodes import EpisodeRollout, graded_rollout
from trainer.local_files import load_tokenizer, with_local_files, with_start_assets
from trainer.run_folder import CONFIG


def main(argv: Sequence[str] | None = None) -> int:
    """Print the conversation and its reward; 0, 1 if the workflow asks for something else than the log has, or 2."""
    parser = argparse.ArgumentParser(prog="python -m trainer.replay", description=__doc__)
    parser.add_argument("file", type=Path, help="file of episodes")
    parser.add_argument("--name", help="the episode's name; without it the first one")
    given = parser.parse_args(argv)
    try:
        episodes = read_episodes(given.file)
        name = given.name or next(iter(episodes), "")
        if name not in episodes:
            held = ", ".join([*episodes][:5]) or "none or is missing"
            raise ConfigError(f"no episode {name or 'to run'}: {given.file} has {held}")
        folder = next((folder for folder in given.file.resolve().parents if (folder / CONFIG).exists()), None)
        if folder is None:
            raise ConfigError(f"there is no {CONFIG} in the folders above {given.file}: put it into the run's folder")
        return _replay(episodes[name], folder)
    except ConfigError as error:
        print(f"rlsys: {error}", file=sys.stderr)
        return 2


def _replay(episode: JsonObject, folder: Path) -> int:
    cfg = with_local_files(with_start_assets(load_config([f"--config-name={folder / CONFIG}"], PPOConfig)))
    tokenizer = load_tokenizer(cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.padding)
    start = EpisodeStart(episode["row"], episode["seed"], episode["name"], EpisodeLog(episode["log"], is_closed=True))
    no_engine: Any = SimpleNamespace(sample=None, generate=None, push_if_stranded=None)
    with ExitStack() as stack:
        rollout = graded_rollout(cfg, no_engine, tokenizer, stack, StageTimer())
        if not isinstance(rollout, EpisodeRollout):
            raise ConfigError(f"{folder / CONFIG}: actor_rollout_ref.rollout has no workflow")
        rollout.runner.deadline_s = None
        result = asyncio.run(rollout.runner.attempt(start, rollout.sampling))
    for message in result.messages:
        print(f"--- {message['role']}", message["content"], *message.get("tool_calls", ()), sep="\n")
    if not result.messages:
        print(*(tokenizer.decode([*row.prompt_ids, *row.response_ids]) for row in result.rows), sep="\n---\n")
    print(f"=== {start.name}: reward {result.reward:g}, {result.num_turns} turns, end {result.end}", result.error)
    if start.log.differs:
        print("the workflow asks for something else than the log has", file=sys.stderr)
        return 1
    if start.log.has_ended:
        print("the log ends before the episode does: it was still open")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
