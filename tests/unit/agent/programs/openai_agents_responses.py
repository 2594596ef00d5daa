"""An agent of the OpenAI Agents SDK with its defaults: the Responses API."""

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


agent = Agent(name="calculator", instructions="Use the tool.", model="policy", tools=[multiply])
result = Runner.run_sync(agent, json.loads(os.environ["RLSYS_ROW"])["prompt"][0]["content"])
assert result.final_output == "42", result
