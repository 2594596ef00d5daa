"""For every trained token, the ids before it in its training row are those that the engine was given."""

import asyncio
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.agent.session import Session
from rlsys.agent.template import ChatTemplate, call_id
from rlsys.agent.trace import Trace
from rlsys.config.schema.rollout import AgentConfig
from tests.unit.agent.engine import RandomEngine, settings_for
from tests.unit.agent.templates import APPENDING, tokenizer_with

TEMPLATES = {**APPENDING, "none": None}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_with(TEMPLATES[name]))


async def random_episode(seed: int, name: str, history: str) -> tuple[RandomEngine, Trace, bool]:
    """A session that appends, rewrites, branches, retries, is cut and calls tools in parallel, by chance."""
    random, template = Random(seed), template_of(name)
    writes = (lambda _: random.choice(["ok", CALL, f"so {CALL}{CALL}"])) if random.random() < 0.5 else None
    engine = RandomEngine(template.tokenizer, writes)
    session = Session(settings_for(engine, template, agent=AgentConfig(history=history)), seed=seed)
    session.add({"role": "system", "content": "be brief"}, f"question {seed}")
    is_append_only = history == "as_drawn"
    answer = await session.draw()
    for _ in range(random.randrange(6)):
        action = random.choice(["append", "append", "cut", "retry", "branch", "rewrite", "compact", "together"])
        is_append_only &= action in ("append", "cut")
        if action == "retry":
            await session.draw(session.messages[:-1])
        elif action == "branch":
            await session.draw([*session.messages[:2], {"role": "user", "content": "instead"}])
        elif action == "rewrite":
            changed = [
                {**m, "content": f"{m['content']}!"} if m["role"] == "assistant" else m for m in session.messages
            ]
            await session.draw([*changed, {"role": "user", "content": "next"}])
        elif action == "compact":
            await session.draw([{"role": "user", "content": f"summary of {len(session.messages)}"}])
        elif action == "together":
            asks = [[*session.messages, {"role": "user", "content": f"part {n}"}] for n in range(2)]
            await asyncio.gather(*(session.draw(ask) for ask in asks))
        elif answer.tool_calls and session.messages[-1] is answer.message:
            calls = answer.message["tool_calls"]
            session.add(*({"role": "tool", "name": "f", "tool_call_id": c["id"], "content": "7"} for c in calls))
            answer = await session.draw()
        else:
            session.add("and then?")
            answer = await session.draw(max_new_tokens=random.randint(1, 3) if action == "cut" else 64)
    return engine, session.trace, is_append_only


def check_rows(engine: RandomEngine, trace: Trace, is_append_only: bool) -> None:
    draws = list(engine.draws)
    rows = trace.rows(reward=1.0)
    assert sum(row.weight for row in rows) == pytest.approx(1.0)
    for row in rows:
        ids = row.prompt_ids + row.response_ids
        assert row.rewards[-1] == 1.0
        assert row.mask[-1] == 1
        at = 0
        while at < len(row.mask):
            end = at + 1
            while end < len(row.mask) and row.turn_ids[end] == row.turn_ids[at]:
                end += 1
            assert (row.turn_ids[at] >= 0) or not any(row.mask[at:end])
            assert all(version == (3 if row.turn_ids[at] >= 0 else -1) for version in row.versions[at:end])
            if row.mask[at]:
                start = len(row.prompt_ids) + at
                draws.remove((ids[:start], ids[start : start + end - at]))
            else:
                assert row.turn_ids[at] == -1 or not is_append_only
            at = end
    assert draws == [], "a drawn span is trained in exactly one row"
    assert not is_append_only or len(rows) == 1


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), name=st.sampled_from(list(TEMPLATES)), drawn=st.booleans())
def test_a_row_holds_what_the_engine_was_given(seed, name, drawn):
    check_rows(*asyncio.run(random_episode(seed, name, "as_drawn" if drawn else "as_rendered")))


@pytest.mark.slow
def test_10000_episodes_hold_what_the_engine_was_given():
    for seed in range(10_000):
        name = list(TEMPLATES)[seed % len(TEMPLATES)]
        check_rows(*asyncio.run(random_episode(seed, name, "as_rendered" if seed % 7 == 0 else "as_drawn")))


def test_calls_of_two_answers_have_different_ids():
    assert len({call_id(n) for n in range(1000)}) == 1000
