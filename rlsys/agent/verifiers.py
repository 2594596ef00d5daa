"""Environments of the verifiers library: actor_rollout_ref.rollout.agent.command="python -m rlsys.agent.verifiers".

A row's `extra_info` has `env_id`, if needed `env_args`, and of the environment's own dataset `info`, `task` and
`example_id`; the answer is the row's ground truth. The reward is that of the environment's rubric.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Mapping
from typing import Any


async def rollout(row: Mapping[str, Any]) -> float:
    """The reward of one rollout of a row's environment."""
    import verifiers
    from openai import AsyncOpenAI

    about = row["extra_info"]
    environment = verifiers.load_environment(about["env_id"], **(about.get("env_args") or {}))
    given = {
        "prompt": row["prompt"],
        "answer": row["reward_model"]["ground_truth"],
        "task": about.get("task") or about["env_id"],
        "info": about.get("info") or {},
        "example_id": int(about.get("example_id") or 0),
    }
    async with AsyncOpenAI() as client:
        state = await environment.rollout(given, client, "policy")
        await environment.rubric.score_rollout(state)
    return float(state["reward"])


def main() -> None:
    """One episode of the program, with its row in RLSYS_ROW."""
    reward = asyncio.run(rollout(json.loads(os.environ["RLSYS_ROW"])))
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/reward"
    urllib.request.urlopen(
        urllib.request.Request(url, json.dumps({"reward": reward}).encode(), key), timeout=60
    ).close()


if __name__ == "__main__":
    main()
