"""An agent: the model answers a sum itself, or asks a calculator by anything else, which costs a tenth of the reward.

python -m trainer.main_ppo --config-name quickstart \
    actor_rollout_ref.rollout.workflow=scripts/agent_calculator.py:AskCalculator
"""

import re
from operator import add, mul, sub

from rlsys.agent.tools import tool_of


def calculator(expression: str) -> int:
    """Compute a sum, a difference or a product.

    Args:
        expression: Two numbers and an operator, e.g. "12*3".
    """
    left, operator, right = re.findall(r"\d+|[-+*]", expression)
    return {"+": add, "-": sub, "*": mul}[operator](int(left), int(right))


class AskCalculator:
    tools = (tool_of(calculator),)

    async def run(self, row, session):
        session.add(*row["prompt"])
        answer = await session.draw()
        if answer.text.lstrip("-").isdigit():
            return await session.grade(answer)
        result = await session.call("calculator", expression=row["prompt"][-1]["content"])
        return 0.9 if result == row["reward_model"]["ground_truth"] else 0.0
