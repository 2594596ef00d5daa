"""Episodes of every kind of workflow: their tokens, rewards and ends."""

import asyncio
import json
import math
import random
import re
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlsys.agent.collate import collate_episodes
from rlsys.agent.interactions import InteractionWorkflow
from rlsys.agent.presets import MathRLVRWorkflow, RLVRWorkflow, load_workflow
from rlsys.agent.runner import EpisodeRunner, EpisodeStart, Rounds, episode_metrics
from rlsys.agent.session import Score
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tools import tool_of
from rlsys.config import PPOConfig
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.data.chat import encode_text
from rlsys.protocol import DataProto, object_array
from rlsys.rewards.pool.pool import RewardResult
from rlsys.types import Finish, GenerationHyperparameters, ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import ConfigError, RewardError, RolloutError
from tests.timing import scaled_s
from tests.unit.agent import user_tools
from tests.unit.agent.engine import RandomEngine, settings_for, tool_pool
from tests.unit.agent.templates import HERMES, tokenizer_with
from trainer.episodes import check_episodes
from trainer.source import joined

TOKENIZER = tokenizer_with(HERMES)
TEMPLATE = ChatTemplate(TOKENIZER, kinds=("user", "tool"))
ROW = {"prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "42"}, "uid": "0-0"}


async def grade(row, answer, extra_info):
    if answer == "lost":
        return Score(0.0, extra={"reward_error": "the grader is gone"})
    return Score(float(answer == row["reward_model"]["ground_truth"]), extra={"turns": extra_info["num_turns"]})


@pytest.fixture(scope="module")
def pool():
    pool = tool_pool(num_workers=1, timeout_s=scaled_s(3.0))
    yield pool
    pool.close()


@pytest.fixture
def episode(pool):
    """Runs one episode of a workflow with a model that writes `write(prompt text)`."""
    runners = []

    def run(workflow, write, *, kwargs=None, row=ROW, tools=(), deadline_s=60.0, **changes):
        run.engine = engine = RandomEngine(TOKENIZER, write)
        settings = settings_for(engine, TEMPLATE, grade=grade, **changes)
        runner = EpisodeRunner(settings, load_workflow(workflow, kwargs), pool, tools=tools, deadline_s=deadline_s)
        runners.append(runner)
        return runner.submit([EpisodeStart(row, 1)], SamplingParams(512))[0].result(scaled_s(60.0))

    yield run
    for runner in runners:
        runner.close()


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def text_of(result, row=0) -> str:
    return TOKENIZER.decode(result.rows[row].prompt_ids + result.rows[row].response_ids)


def test_rlvr_draws_once_and_is_graded(episode):
    result = episode("RLVRWorkflow", lambda _: "42")
    assert (result.reward, result.end, result.num_turns, len(result.rows)) == (1.0, "stop", 1, 1)
    assert text_of(result) == "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    assert result.rows[0].rewards == (0.0, 0.0, 1.0)


def test_texts_that_no_row_can_hold_are_not_made_tokens(episode, monkeypatch):
    """5 MB took 12 s and more, in which every other episode waited and met its deadline."""
    encoded = []

    def noted(tokenizer, text, **options):
        encoded.append(len(text))
        return encode_text(tokenizer, text, **options)

    async def run(row, session):
        session.add(*row["prompt"])
        await session.draw()
        session.add("x" * 5_000_000)
        await session.draw()

    monkeypatch.setattr("rlsys.agent.template.encode_text", noted)
    result = episode(run, lambda _: "42", limits=(1000, 1000))
    assert (result.end, result.num_turns) == ("length", 1)
    huge = {**ROW, "prompt": [{"role": "user", "content": "x " * 2_500_000}]}
    assert episode(run, lambda _: "42", limits=(1000, 1000), row=huge).end == "context"
    assert max(encoded) < 1_000


def test_several_turns_discount_the_reward(episode):
    answers = iter(["41", "43", "42"])
    result = episode("MultiTurnWorkflow", lambda _: next(answers), kwargs={"turn_discount": 0.5})
    assert (result.reward, result.num_turns) == (0.25, 3)
    assert text_of(result).count("Your answer is wrong") == 2
    assert sum(result.rows[0].mask) == 9


def test_mathematics_with_python_as_a_tool(episode):
    def write(prompt):
        output = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)
        return output[-1] if output else call("python", code="print(6*7)")

    result = episode("MathRLVRWorkflow", write)
    assert (result.reward, result.end, result.counts["tool_ok"]) == (1.0, "stop", 1)
    assert "python" in TOKENIZER.decode(result.rows[0].prompt_ids)
    assert "<tool_response>\n42\n</tool_response>" in text_of(result)


def test_trls_environment_class_runs_unchanged(episode):
    writes = iter([call("step", by=2) + call("step", by=3), "done"])
    result = episode(user_tools.Counter, lambda _: next(writes), row={**ROW, "goal": 5})
    assert (result.reward, result.num_turns, result.counts["tool_calls"]) == (1.0, 2, 2)
    assert "6*7? Count to 5.<|im_end|>" in text_of(result)
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == ["now 2", "now 5"]


@pytest.mark.parametrize(
    ("goal", "reward", "error"),
    [
        (5, 0.5, ""),
        (6, 0.0, "get_reward returned no number: 0.5"),
        (7, 0.0, "no number: Error: KeyError: 7"),
    ],
)
def test_a_reward_of_an_environment_that_is_no_number_is_an_episode_that_failed(episode, goal, reward, error):
    result = episode(user_tools.Judged, lambda _: "42", row={**ROW, "goal": goal})  # 42 is what the job's grader likes
    assert (result.reward, result.end) == (reward, "error" if error else "stop")
    assert error in result.error


class ArealRetry:
    """As AReaL's users write it: token ids in, tensors out."""

    reward = 2.0

    async def arun_episode(self, engine, data):
        ids = list(TOKENIZER(data["messages"][0]["content"], add_special_tokens=False)["input_ids"])
        for _ in range(2):
            gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=16).new(n_samples=1)
            request = ModelRequest(rid=str(len(ids)), input_ids=ids, gconfig=gconfig, tokenizer=TOKENIZER)
            response = await engine.agenerate(request)
            ids += list(response.output_tokens)
        tensors = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "rewards": [self.reward]}
        return {name: torch.tensor(value) for name, value in tensors.items()}


def test_verls_interaction_answers_as_the_user_until_it_ends(episode, tmp_path):
    path = tmp_path / "interactions.yaml"
    entry = "{class_name: tests.unit.agent.user_tools.TeacherInteraction, config: {mark: no, ended: %s}}"
    path.write_text(f"interaction: [{entry % (tmp_path / 'ended')}]".replace("mark: no", "mark: 'no'"))
    asked = {"name": "teacher", "ground_truth": "42"}
    row = {**ROW, "extra_info": {"interaction_kwargs": asked}}
    workflow = InteractionWorkflow(str(path), key="multi_turn.interaction_config_path")
    result = episode(workflow, lambda text: "42" if "nono" in text else "41", row=row)
    assert [message["content"] for message in result.messages] == ["6*7?", "41", "no" * 300, "42"]
    assert [message["role"] for message in result.messages] == ["user", "assistant", "user", "assistant"]
    assert (result.reward, result.num_turns, result.end) == (1.0, 2, "stop")
    assert result.extra == {"turns": 2, "interaction_score": 1.5}
    assert (tmp_path / "ended").read_text() == "teacher 42"
    with pytest.raises(ConfigError, match=r"interaction_kwargs\.name=None: choose from teacher"):
        episode(workflow, lambda text: "41")


def test_areals_workflow_class_runs_unchanged(episode):
    result = episode(ArealRetry(), lambda _: "42")
    assert text_of(result) == "6*7?42<|im_end|>42<|im_end|>"
    assert (result.reward, result.rows[0].mask) == (2.0, (1,) * 6)


@pytest.mark.parametrize("reward", [float("nan"), 1e39])
def test_a_reward_of_an_arun_episode_that_is_not_finite_is_refused(episode, monkeypatch, reward):
    monkeypatch.setattr(ArealRetry, "reward", reward)
    assert episode(ArealRetry(), lambda _: "42").error.startswith("ValueError: the workflow returned the reward")


async def test_areals_arun_episode_needs_no_job():
    engine, asked = RandomEngine(TOKENIZER, lambda _: next(answers)), []

    def reward_fn(prompt, completion, prompt_ids, completion_ids, *, answer, **data):
        asked.append((prompt, len(prompt_ids), TOKENIZER.decode(completion_ids)))
        return 2.0 * (completion == answer)

    data, answers = {"messages": ROW["prompt"], "answer": "42"}, iter(["42", "4"])
    workflow = RLVRWorkflow(reward_fn, TOKENIZER, n_generations=2, temperature=0.5, max_tokens=8)
    tensors = await workflow.arun_episode(engine, data)
    assert [params.temperature for params in engine.params] == [0.5, 0.5]
    assert engine.params[0].seed != engine.params[1].seed
    prompt = TEMPLATE.encode(None, ROW["prompt"])[0]
    assert asked == [(TOKENIZER.decode(prompt), len(prompt), f"{text}<|im_end|>") for text in ("42", "4")]
    assert tensors["rewards"].tolist() == [2.0, 0.0]
    (first, second), size = engine.draws, len(prompt)
    assert tensors["input_ids"].tolist() == [[*prompt, *first[1]], [*prompt, *second[1], 0]]
    assert tensors["attention_mask"].sum(1).tolist() == [size + 3, size + 2]
    assert tensors["loss_mask"].tolist() == [[0] * size + [1] * 3, [0] * size + [1] * 2 + [0]]
    assert tensors["versions"].tolist() == [[-1] * size + [3] * 3, [-1] * size + [3] * 2 + [-1]]
    assert (tensors["logprobs"] < 0).equal(tensors["loss_mask"].bool())
    with pytest.raises(ValueError, match="needs reward_fn and tokenizer"):
        await RLVRWorkflow().arun_episode(engine, data)
    with pytest.raises(ConfigError, match="n_generations is for arun_episode"):
        load_workflow("RLVRWorkflow", {"n_generations": 2})


async def test_mathematics_is_verified_without_a_reward_function():
    answers = iter([r"\boxed{84/2}", "41"])
    workflow = MathRLVRWorkflow(use_tool=False, tokenizer=TOKENIZER, n_generations=2, max_tokens=32)
    data = {"messages": ROW["prompt"], "answer": "42"}
    tensors = await workflow.arun_episode(RandomEngine(TOKENIZER, lambda _: next(answers)), data)
    assert tensors["rewards"].tolist() == [1.0, 0.0]


class ArealScripted:
    """Its arguments are those that AReaL's scripts pass."""

    def __init__(self, gconfig, tokenizer, max_turns):
        self.gconfig, self.tokenizer = gconfig.new_with_stop_and_pad_token_ids(tokenizer), tokenizer
        self.max_turns = max_turns

    async def arun_episode(self, engine, data):
        ids = self.tokenizer(data["messages"][0]["content"], add_special_tokens=False)["input_ids"]
        answer = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig.new(top_p=0.5)))
        tokens = [*ids, *answer.output_tokens]
        return {"input_ids": torch.tensor([tokens]), "rewards": torch.tensor([float(self.max_turns)])}


def test_areals_class_gets_what_its_script_passes_and_the_sampling_of_the_batch(episode):
    job = GenerationHyperparameters(max_new_tokens=16, temperature=0.25)  # the batch is drawn at 1
    of_areal = {"gconfig": job, "tokenizer": TOKENIZER, "reward_fn": None}
    result = episode(load_workflow(ArealScripted, {"max_turns": 3}, of_areal=of_areal), lambda _: "42")
    (drawn,) = episode.engine.params
    assert (result.reward, drawn.temperature, drawn.top_p, drawn.max_new_tokens) == (3.0, 1.0, 0.5, 512)


async def rejects(row, session):
    await session.draw(row["prompt"])


async def fails(row, session):
    await session.draw(row["prompt"])
    raise KeyError("oops")


async def sleeps(row, session):
    await session.draw(row["prompt"])
    await asyncio.sleep(1000)


async def never_draws(row, session):
    return 1.0


async def talks_on(row, session):
    session.add(*row["prompt"])
    while True:
        await session.draw()
        session.add("more")


async def takes_notes(row, session):
    row["extra_info"]["notes"].append(session.seed)
    return float(len(row["extra_info"]["notes"]))


def test_what_a_workflow_writes_into_its_row_stays_in_its_episode(episode):
    row = {**ROW, "extra_info": {"notes": []}}
    assert [episode(takes_notes, None, row=row).reward for _ in range(2)] == [1.0, 1.0]
    assert row["extra_info"] == {"notes": []}


async def takes_no_session(row):
    return 1.0


class Refuses:
    def __init__(self):
        raise RuntimeError("no licence")

    async def run(self, row, session):
        return 1.0


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("1.0", "TypeError: the workflow returned '1.0': return a number, a Score, or None"),
        ([1.0], "TypeError: the workflow returned [1.0]: return a number"),
        (float("nan"), "ValueError: the workflow returned the reward nan, which is not finite"),
        (-1e39, "ValueError: the workflow returned the reward -1e+39, which is not finite in float32"),
        (Score(0.0, [1.0, 2.0]), "ValueError: 2 rewards for 1 turns"),
    ],
)
def test_a_workflow_that_returns_something_else_is_an_episode_that_failed(episode, value, error):
    async def returns(row, session):
        await session.draw(row["prompt"])
        return value

    result = episode(returns, lambda _: "x")
    assert (result.end, len(result.rows), result.error[: len(error)]) == ("error", 0, error)


async def rewards_turns(row, session):
    session.add(*row["prompt"])
    await session.draw()
    session.add("more")
    await session.draw()
    return Score(0.0, turn_rewards=[0.5, 1.0])


@pytest.mark.parametrize(
    ("workflow", "end", "num_rows"), [(rejects, "rejected", 0), (fails, "error", 0), (never_draws, "no_draw", 0)]
)
def test_an_episode_without_a_result_has_no_rows(episode, workflow, end, num_rows):
    result = episode(workflow, lambda _: "x")
    assert (result.end, len(result.rows)) == (end, num_rows)


def test_episodes_that_fail_by_one_cause_are_one_warning_that_names_the_users_line(pool, caplog):
    """A thousand episodes of a broken agent were a thousand warnings."""
    settings = settings_for(RandomEngine(TOKENIZER, lambda _: "x"), TEMPLATE, grade=grade)
    with closing(EpisodeRunner(settings, load_workflow(fails), pool)) as runner:
        ended = runner.submit([EpisodeStart(ROW, seed) for seed in range(8)], SamplingParams(64))
        assert {future.result(scaled_s(60.0)).end for future in ended} == {"error"}
    (warning,) = caplog.messages
    assert re.fullmatch(r"episode .* failed: KeyError: .* \(test_workflows.py:\d+\)", warning)


@pytest.mark.parametrize("in_task", [False, True])
def test_a_workflow_that_exits_ends_its_episode_only(episode, in_task):
    """An exit in a coroutine ends asyncio's loop, and with it went every other episode."""

    async def leave():
        sys.exit(4)

    async def exits(row, session):
        await session.draw(row["prompt"])
        await (asyncio.gather(leave()) if in_task else leave())

    result = episode(exits, lambda _: "x")
    assert (result.end, result.error[:13]) == ("error", "SystemExit: 4")


def test_an_episode_ends_at_its_deadline(episode):
    assert episode(sleeps, lambda _: "x", deadline_s=0.2).end == "deadline"


@pytest.mark.parametrize(
    ("changes", "end", "turns"),
    [
        ({"turns": MultiTurnConfig(max_assistant_turns=3)}, "turns", 3),
        ({"limits": (1000, 60)}, "length", 2),
        ({"limits": (10, 60)}, "context", 0),
    ],
)
def test_a_budget_that_is_used_up_ends_the_episode(episode, changes, end, turns):
    result = episode(talks_on, lambda _: "x" * 10, **changes)
    assert (result.end, result.num_turns) == (end if turns else "context", turns)
    assert sum(len(row.response_ids) for row in result.rows) <= changes.get("limits", (1000, 1000))[1]


def test_turns_are_cut_at_their_own_limit(episode):
    result = episode("RLVRWorkflow", lambda _: "x" * 50, agent=AgentConfig(max_tokens_per_turn=7))
    assert len(result.rows[0].response_ids) == 7


def test_turns_have_rewards_of_their_own(episode):
    result = episode(rewards_turns, lambda _: "y")
    row = result.rows[0]
    assert (result.reward, sum(row.rewards)) == (1.5, 1.5)
    assert [row.rewards[at] for at in (1, len(row.rewards) - 1)] == [0.5, 1.0]
    assert [row.turn_ids[at] for at in (1, len(row.rewards) - 1)] == [0, 1]


def test_malformed_and_unknown_calls_are_answered(episode):
    writes = iter(["<tool_call>{oops</tool_call>", call("nothing"), call("add", a=1, b=2), "42"])
    result = episode("ToolWorkflow", lambda _: next(writes), tools=[tool_of(user_tools.add)])
    texts = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert [text[:30] for text in texts] == ["Error: the tool call is not JS", "Error: there is no tool 'nothi", "3"]
    assert (result.reward, result.counts["tool_error"], result.counts["tool_ok"]) == (1.0, 2, 1)


@pytest.mark.parametrize("deadline_s", [60.0, None])
def test_a_timeout_of_the_workflow_itself_is_its_error(episode, deadline_s):
    async def searches(row, session):
        raise TimeoutError("the search does not answer")

    result = episode(searches, lambda _: "42", deadline_s=deadline_s)
    assert (result.end, "the search does not answer" in result.error) == ("error", True)


def test_nothing_is_decoded_behind_episodes_that_have_ended(pool):
    engine, is_open = RandomEngine(TOKENIZER), threading.Event()

    def generate(requests):
        is_open.set()
        time.sleep(0.5)
        answers = [asyncio.run(engine.sample(r)) for r in requests]
        is_open.clear()
        return answers

    rounds = Rounds(generate, max_concurrent=5)
    settings = replace(settings_for(engine, TEMPLATE), sample=rounds.sample)
    runner = EpisodeRunner(settings, load_workflow("RLVRWorkflow"), pool, rounds=rounds, deadline_s=0.1)
    futures = runner.submit([EpisodeStart(ROW, seed, f"{seed}") for seed in range(2)], SamplingParams(64))
    assert [future.result(scaled_s(20.0)).end for future in futures] == ["deadline", "deadline"]
    assert not is_open.is_set()
    runner.close()


def test_thousands_of_episodes_hold_no_round_up():
    rounds_of, num, num_turns = [], 2048, 2

    def generate(requests):
        rounds_of.append(len(requests))
        return [ModelResponse(one.rid, one.input_ids, (7,), (0.0,), (0.0,), (0,), Finish.STOP) for one in requests]

    async def run():
        rounds = Rounds(generate, max_concurrent=num)

        async def turns(name):
            for _ in range(num_turns):
                await rounds.sample(ModelRequest((7,) * 400, SamplingParams(8), session=name))
            rounds.end(name)

        rounds.add(num)
        await asyncio.wait_for(asyncio.gather(*(turns(f"{n:05d}") for n in range(num))), scaled_s(10.0))

    asyncio.run(run())
    assert rounds_of == [num] * num_turns


def test_an_engine_that_fails_is_not_an_episode_that_fails(episode):
    async def broken(request):
        raise RolloutError("all replicas are gone")

    engine = RandomEngine(TOKENIZER)
    engine.sample = broken
    settings = settings_for(engine, TEMPLATE, grade=grade)
    runner = EpisodeRunner(settings, load_workflow("RLVRWorkflow"), tool_pool())
    with pytest.raises(RolloutError, match="gone"):
        runner.submit([EpisodeStart(ROW, 0)], SamplingParams(512))[0].result(scaled_s(10.0))
    runner.close()


def test_equal_seeds_give_equal_episodes(episode):
    one, two = (episode(talks_on, None, turns=MultiTurnConfig(max_user_turns=3)) for _ in range(2))
    assert one.rows == two.rows


def test_a_row_that_names_an_unknown_agent_is_a_config_error(episode):
    with pytest.raises(ConfigError, match="agent_name=clever_agent"):
        episode("RLVRWorkflow", None, row={**ROW, "agent_name": "clever_agent"})


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ("no.such.Class", None, "rollout.workflow=no.such.Class cannot be loaded"),
        ("MultiTurnWorkflow", {"turns": 3}, "workflow_kwargs"),
        (dict, None, "none of run"),
        (user_tools.Counter, {"goal": 5}, "Counter is made without arguments"),
        (lambda row, session: 1.0, None, "async function"),
        (takes_no_session, None, r"async function run\(row, session\)"),
        (talks_on, {"turns": 3}, "no class"),
        ("RLVRWorkflo", None, "choose from RLVRWorkflow, "),
        ("mine/agent.py", None, "set module:name or file.py:name"),
        (Refuses, None, "Refuses cannot be made with agent.workflow_kwargs: RuntimeError: no licence"),
    ],
)
def test_a_workflow_that_cannot_run_is_a_config_error(spec, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load_workflow(spec, kwargs)


def test_episodes_become_a_batch_in_verls_columns(episode):
    answers = iter(["41", "42"])
    two = episode("MultiTurnWorkflow", lambda _: next(answers), kwargs={"turn_discount": 0.5})
    failed = episode(fails, lambda _: "x")
    prompts = DataProto.from_dict({"prompts": torch.zeros(2, 1)}, {"uid": object_array(["0-0", "0-0"])})
    batch = collate_episodes([two, failed], prompts, pad_token_id=0, prompt_length=64, response_length=128)
    rows, n = batch.tensors, len(two.rows[0].response_ids)
    assert rows["responses"][0, :n].tolist() == list(two.rows[0].response_ids)
    assert rows["response_mask"].sum(-1).tolist() == [6, 0]
    assert rows["attention_mask"].sum(-1).tolist() == [len(two.rows[0].prompt_ids) + n, 2]
    assert rows["token_level_scores"].sum(-1).tolist() == [0.5, 0.0]
    assert rows["turn_ids"][0, :3].tolist() == [0, 0, 0]
    assert rows["weight_versions"].max() == 3
    assert list(batch.non_tensor_batch["uid"]) == ["0-0", "0-0/1"]
    assert list(batch.non_tensor_batch["episode_end"]) == ["stop", "error"]
    assert np.array_equal(batch.non_tensor_batch["turns"], [2.0, 0.0])
    metrics = episode_metrics([two, failed])
    assert (metrics["agent/end/error"], metrics["agent/num_turns/mean"]) == (1.0, 1.5)


def test_an_episode_whose_grader_is_lost_ends_ungraded_and_not_as_scored_by_its_workflow(episode):
    async def with_bonus(row, session):
        return (await session.grade(await session.draw(row["prompt"]))).reward + 0.5

    async def itself(row, session):
        await session.draw(row["prompt"])
        return 0.5

    async def graded(row, session):
        score = await session.grade(await session.draw(row["prompt"]))
        return Score(score.reward, extra={"acc": score.reward})

    lost, own = episode(with_bonus, lambda _: "lost"), episode(itself, lambda _: "lost")
    right = episode(graded, lambda _: "42")
    assert [(one.end, one.reward) for one in (lost, own, right)] == [("ungraded", 0.5), ("stop", 0.5), ("stop", 1.0)]
    prompts = DataProto.from_dict({"prompts": torch.zeros(2, 1)}, {"uid": object_array(["0-0", "0-0"])})
    collate = partial(collate_episodes, prompts=prompts, pad_token_id=0, prompt_length=64, response_length=128)
    apart = joined([collate([lost, own]), collate([right, right])]).non_tensor_batch["acc"]
    assert list(apart) == [0.0, None, 1.0, 1.0]


def test_an_answer_that_gets_its_score_at_the_second_grading_is_graded(episode):
    async def persistent(row, session):
        await session.draw(row["prompt"])
        return [await session.grade(answer) for answer in answers][-1]

    answers = ["lost", "42"]
    graded = episode(persistent, lambda _: "x")
    answers.reverse()
    lost = episode(persistent, lambda _: "x")
    assert [(one.end, one.reward, one.error) for one in (graded, lost)] == [
        ("stop", 1.0, ""),
        ("ungraded", 0.0, "the grader is gone"),
    ]
    assert episode_metrics([graded, lost])["agent/ungraded"] == 2.0


def test_too_many_episodes_without_a_score_end_the_run_with_the_cause(episode):
    async def with_bonus(row, session):
        return (await session.grade(await session.draw(row["prompt"]))).reward + 0.5

    async def again(row, session):
        await session.grade(await session.draw(row["prompt"]))
        return await session.grade("42")

    lost, graded = episode(with_bonus, lambda _: "lost"), episode(again, lambda _: "lost")
    check_episodes([lost, graded, graded], PPOConfig())
    with pytest.raises(RewardError, match=r"2 of 3 episodes have no score. First: the grader is gone"):
        check_episodes([lost, lost, graded], PPOConfig())


def test_a_branch_is_a_row_of_its_own(episode):
    async def branches(row, session):
        await session.draw(row["prompt"])
        await session.draw([{"role": "user", "content": "summary"}])
        return 1.0

    result = episode(branches, lambda _: "ok")
    assert [row.weight for row in result.rows] == [0.5, 0.5]
    assert [sum(row.rewards) for row in result.rows] == [1.0, 1.0]
    assert episode_metrics([result, replace(result, rows=())])["agent/rows"] == 2


async def waits_its_time(row, session):
    session.add(*row["prompt"])
    for number in range(3):
        await session.draw()
        await asyncio.sleep(random.random() * 0.02)
        if session.seed % 3 == number:
            break
        session.add("more")
    return 1.0


def test_the_last_episodes_are_not_waited_for(pool):
    engine = RandomEngine(TOKENIZER)
    rounds = Rounds(lambda rs: [asyncio.run(engine.sample(r)) for r in rs], max_concurrent=5)
    settings = replace(settings_for(engine, TEMPLATE), sample=rounds.sample)
    runner = EpisodeRunner(settings, load_workflow(waits_its_time), pool, rounds=rounds, max_concurrent=5)
    for num_spare, num_cancelled in ((4, 4), (0, 0)):
        starts = [EpisodeStart(ROW, seed, f"{seed:03d}") for seed in range(13)]
        futures = runner.submit(starts, SamplingParams(64), num_spare=num_spare)
        wait(futures, scaled_s(20.0))
        cancelled = [start.seed for start, future in zip(starts, futures) if future.cancelled()]
        assert bool(cancelled) == bool(num_cancelled)
        assert len(cancelled) <= num_cancelled
        assert all(future.cancelled() or future.result().rows for future in futures)
    runner.close()


@pytest.mark.parametrize("max_concurrent", [4, 100])
def test_rounds_are_the_same_however_long_tools_take(pool, max_concurrent):
    engine = RandomEngine(TOKENIZER)
    batches: list[list[tuple[int, ...]]] = []

    def generate(requests):
        batches.append([request.input_ids for request in requests])
        return [asyncio.run(engine.sample(r)) for r in requests]

    seen = []
    for _ in range(2):
        rounds = Rounds(generate, max_concurrent=max_concurrent)
        settings = replace(settings_for(engine, TEMPLATE), sample=rounds.sample)
        workflow = load_workflow(waits_its_time)
        runner = EpisodeRunner(settings, workflow, pool, rounds=rounds, max_concurrent=max_concurrent)
        starts = [EpisodeStart(ROW, seed, f"{seed:03d}") for seed in range(13)]
        results = [future.result(scaled_s(20.0)) for future in runner.submit(starts, SamplingParams(64))]
        seen.append(([result.rows for result in results], batches.copy()))
        batches.clear()
        runner.close()
    assert seen[0] == seen[1]
    assert max(map(len, seen[0][1])) == min(13, max_concurrent)


def tokens_drawn(starts):
    """How many each episode has drawn so far."""
    results = [[row["result"] or {} for row in start.log.rows()] for start in starts]
    return [sum(len(result.get("output_tokens", ())) for result in of_episode) for of_episode in results]


def test_in_an_epoch_episodes_draw_up_to_its_limit_however_long_tools_take(pool):
    engine = RandomEngine(TOKENIZER)
    seen = []
    for _ in range(2):
        batches: list[list[tuple[int, ...]]] = []

        def generate(requests, batches=batches):
            batches.append([request.input_ids for request in requests])
            return [asyncio.run(engine.sample(r)) for r in requests]

        rounds = Rounds(generate, max_concurrent=100)
        settings = replace(settings_for(engine, TEMPLATE), sample=rounds.sample)
        runner = EpisodeRunner(settings, load_workflow(waits_its_time), pool, rounds=rounds, max_concurrent=100)
        starts = [EpisodeStart(ROW, seed, f"{seed:03d}") for seed in range(13)]
        futures, sizes = [], []
        for limit in (1, 1, 8, math.inf):
            before, limits = tokens_drawn(starts), {start.name: limit for start in starts}
            futures += runner.submit([] if futures else starts, SamplingParams(64), limits)
            runner.end_epoch().result(scaled_s(20.0))
            drawn = [now - was for now, was in zip(tokens_drawn(starts), before)]
            assert all(was < limit or not now for was, now in zip(before, drawn))
            sizes.append(sum(map(bool, drawn)))
        assert sizes[:2] == [13, 0], "the limit of the first epoch is reached by one turn"
        assert all(future.done() for future in futures)
        seen.append(([future.result().rows for future in futures], batches))
        runner.close()
    assert seen[0] == seen[1]


def test_parallel_conversations_are_the_same_in_whatever_order_they_ask(pool):
    """As those of a program, whose requests arrive in any order: in rounds, and as rows to train on."""
    engine, seen = RandomEngine(TOKENIZER), []

    def generate(requests):
        batches.append([request.input_ids for request in requests])
        return [asyncio.run(engine.sample(r)) for r in requests]

    for order in (1, -1):
        batches = []

        async def talks(session, text):
            prompt = {"role": "user", "content": text}
            answer = await session.draw([prompt])
            return await session.draw([prompt, answer.message, {"role": "user", "content": "and then?"}])

        async def asks_at_once(row, session, order=order):
            await asyncio.gather(*(talks(session, text) for text in ["one", "two", "three"][::order]))
            return 1.0

        rounds = Rounds(generate, max_concurrent=1)
        settings = replace(settings_for(engine, TEMPLATE), sample=rounds.sample)
        runner = EpisodeRunner(settings, load_workflow(asks_at_once), pool, rounds=rounds, max_concurrent=1)
        result = runner.submit([EpisodeStart(ROW, 1)], SamplingParams(64))[0].result(scaled_s(20.0))
        seen.append((result.rows, batches))
        runner.close()
    assert len(seen[0][0]) == 3
    assert seen[0] == seen[1]


def test_rewards_of_parallel_tool_calls_have_the_same_bits_in_whatever_order_they_end(episode):
    rewards, totals = {"one": 0.1, "two": 0.2, "three": 0.3}, []
    for order in (list(rewards), list(rewards)[::-1]):

        async def result(name, arguments, order=order):
            for _ in range(order.index(name)):
                await asyncio.sleep(0)
            return RewardResult(rewards[name], {"text": ""}, "ok", 0.0)

        async def calls_at_once(row, session, result=result):
            session.tools = SimpleNamespace(call=result)
            await asyncio.gather(*map(session.call, rewards))
            return 1.0

        totals.append(episode(calls_at_once, lambda _: "ok").extra["tool_reward"])
    assert totals == [0.6, 0.6]


def test_parallel_conversations_reach_the_limit_of_an_epoch_each_on_its_own(pool):
    """A round may begin with the first request of a program's two: the second must not wait for other weights."""
    engine = RandomEngine(TOKENIZER)

    def generate(requests):
        time.sleep(0.1)
        return [asyncio.run(engine.sample(r)) for r in requests]

    async def asks(session, text, later_s):
        await asyncio.sleep(later_s)
        answer = await session.draw([{"role": "user", "content": text}])
        await session.draw([{"role": "user", "content": text}, answer.message, {"role": "user", "content": "more"}])

    async def asks_at_once(row, session):
        await asyncio.gather(asks(session, "one", 0.0), asks(session, "two", 0.02))
        return 1.0

    rounds = Rounds(generate, max_concurrent=100)
    settings = replace(settings_for(engine, TEMPLATE), sample=rounds.sample)
    runner = EpisodeRunner(settings, load_workflow(asks_at_once), pool, rounds=rounds, max_concurrent=100)
    starts = [EpisodeStart(ROW, seed, f"{seed:03d}") for seed in range(3)]
    futures = runner.submit(starts, SamplingParams(64), dict.fromkeys(("000", "001", "002"), 1))
    runner.end_epoch().result(scaled_s(20.0))
    drawn = [sum(row["result"] is not None for row in start.log.rows()) for start in starts]
    assert drawn == [2, 2, 2], "each conversation has reached its limit by one turn"
    wait(futures, scaled_s(20.0))
    runner.close()


def test_nothing_draws_between_the_end_of_an_epoch_and_the_next():
    """Weights are pushed there: a conversation at its limit must not end the epoch for one that is about to draw."""
    events = []

    def generate(requests):
        events.append([request.input_ids[0] for request in requests])
        return [SimpleNamespace(output_tokens=(0,) * (4 if one.input_ids == (1,) else 1)) for one in requests]

    async def talks(rounds, number):
        drawn = 0
        while drawn < 8:
            request = ModelRequest((number,), SamplingParams(4), session="an episode", num_drawn=drawn)
            drawn += len((await rounds.sample(request)).output_tokens)

    async def two_epochs():
        rounds = Rounds(generate, max_concurrent=1)
        rounds.add(1, {"an episode": 4})
        both = asyncio.gather(talks(rounds, 1), talks(rounds, 2))
        await rounds.end_epoch()
        events.append("pushes")
        await asyncio.sleep(0.1)
        rounds.add(0, {"an episode": 8})
        ending = asyncio.ensure_future(rounds.end_epoch())
        await asyncio.wait_for(both, scaled_s(5.0))
        ending.cancel()

    asyncio.run(two_epochs())
    assert events[:5] == [[1, 2], [2], [2], [2], "pushes"]
    assert events[5:] == [[1, 2], [2], [2], [2]]


@pytest.mark.parametrize("in_rounds", [True, False])
def test_what_an_episode_leaves_behind_draws_no_more_once_it_has_ended(pool, in_rounds):
    """As the other conversations of a gather in which one has raised: an engine may sleep or get weights by then."""
    engine = RandomEngine(TOKENIZER)

    async def leaves_one_behind(row, session):
        async def draws_on():
            while True:
                await session.draw([{"role": "user", "content": f"{len(session.trace.spans)}"}])
                await asyncio.sleep(0.01)

        left.append(asyncio.ensure_future(draws_on()))
        await session.draw(row["prompt"])
        return 1.0

    left: list[asyncio.Future] = []
    rounds = Rounds(lambda rs: [asyncio.run(engine.sample(r)) for r in rs], max_concurrent=5) if in_rounds else None
    settings = settings_for(engine, TEMPLATE)
    settings = replace(settings, sample=rounds.sample) if rounds is not None else settings
    runner = EpisodeRunner(settings, load_workflow(leaves_one_behind), pool, rounds=rounds, max_concurrent=5)
    futures = runner.submit([EpisodeStart(ROW, seed, f"{seed}") for seed in range(2)], SamplingParams(64))
    assert [future.result(scaled_s(20.0)).end for future in futures] == ["stop", "stop"]
    time.sleep(0.1)
    num_draws = len(engine.draws)
    time.sleep(0.3)
    assert len(engine.draws) == num_draws
    assert all(one.cancelled() for one in left)
    runner.close()
