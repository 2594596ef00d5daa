"""A tool-calling agent of smolagents."""

import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


model = OpenAIServerModel(
    model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[multiply], model=model, verbosity_level=0)
answer = agent.run(json.loads(os.environ["RLSYS_ROW"])["prompt"][0]["content"])
assert str(answer) == "42", answer
