"""Environments of the verifiers library: actor_rollout_ref.rollout.agent.command="python -m rlsys.agent.verifiers".

A row's `extra_info` has `env_id`, if needed `env_args`, and of the environment's own dataset `info` and
`example_id`; the answer is the row's ground truth. The reward is that of the environment's rubric.
"""

import asyncio
import json
import os

from rlsys.agent.session import Row


async def run_episode(row: Row) -> None:
    """One rollout of a row's environment, whose reward is posted."""
    import verifiers
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    about = row["extra_info"]
    environment = verifiers.load_environment(about["env_id"], **(about.get("env_args") or {}))
    given = {
        "prompt": row["prompt"],
        "answer": row["reward_model"]["ground_truth"],
        "info": {"env_id": about["env_id"], **(about.get("info") or {})},
        "example_id": int(about.get("example_id") or 0),
    }
    async with AsyncOpenAI() as client:
        state = await environment.rollout(given, OpenAIChatCompletionsClient(client), "policy")
        await environment.rubric.score_rollout(state)
        await client.post("/reward", cast_to=object, body={"reward": float(state["reward"])})


if __name__ == "__main__":
    asyncio.run(run_episode(json.loads(os.environ["RLSYS_ROW"])))
