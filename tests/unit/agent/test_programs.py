"""Programs written with the agent libraries of others are agents without a change."""

import sys
from pathlib import Path

import pytest

from rlsys.agent.programs import command_workflow
from rlsys.agent.runner import EpisodeRunner, EpisodeStart
from rlsys.agent.session import Score
from rlsys.agent.template import ChatTemplate
from rlsys.types import SamplingParams
from tests.timing import scaled_s
from tests.unit.agent.engine import RandomEngine, settings_for, tool_pool
from tests.unit.agent.templates import HERMES, tokenizer_with

PROGRAMS = Path(__file__).parent / "programs"
TEMPLATE = ChatTemplate(tokenizer_with(HERMES), kinds=("user", "tool"))
ROW = {"prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "42"}}


def calculator(text: str) -> str:
    """A model that calls `multiply`, then gives its result in the way that the program's tools ask for."""
    asked = text.rsplit("6*7?", 1)[1]
    if "42" not in asked:
        return '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    if "final_answer" in text:
        return '<tool_call>{"name": "final_answer", "arguments": {"answer": "42"}}</tool_call>'
    return "42"


async def grade(row, answer, extra_info):
    return Score(float("42" in answer))


@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_a_program_of_another_library_is_an_agent_with_exact_tokens(program):
    engine = RandomEngine(TEMPLATE.tokenizer, calculator)
    settings = settings_for(engine, TEMPLATE, grade=grade)
    workflow = command_workflow(f"{sys.executable} {PROGRAMS / program}.py")
    runner = EpisodeRunner(settings, workflow, tool_pool(), deadline_s=scaled_s(60.0))
    try:
        result = runner.submit([EpisodeStart(ROW, 3)], SamplingParams(512))[0].result(scaled_s(90.0))
    finally:
        runner.close()
    assert (result.end, result.error, result.reward) == ("stop", "", 1.0)
    assert result.num_turns == len(engine.draws) == 2
    rows = [((*row.prompt_ids, *row.response_ids), (*[0] * len(row.prompt_ids), *row.mask)) for row in result.rows]
    for given, drawn in engine.draws:
        place = slice(len(given), len(given) + len(drawn))
        assert any(ids[: place.stop] == (*given, *drawn) and all(mask[place]) for ids, mask in rows)
