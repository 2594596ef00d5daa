"""Programs that speak OpenAI's chat completions are agents: exact tokens, retries, streams, branches, bad requests."""

import asyncio
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import aiohttp
import psutil
import pytest

from rlsys.agent.endpoint import Endpoint
from rlsys.agent.programs import command_workflow, function_workflow
from rlsys.agent.runner import EpisodeRunner, EpisodeStart
from rlsys.agent.session import Score, Session
from rlsys.agent.template import ChatTemplate
from rlsys.types import SamplingParams
from rlsys.utils.errors import ConfigError, RolloutError
from tests.timing import scaled_s, wait_until
from tests.unit.agent.engine import RandomEngine, settings_for, tool_pool
from tests.unit.agent.templates import HERMES, tokenizer_with
from tests.unit.agent.test_exact_tokens import check_rows

TEMPLATE = ChatTemplate(tokenizer_with(HERMES), kinds=("user", "tool"))
ROW = {"prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "ok"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


async def grade(row, answer, extra_info):
    return Score(float(answer == row["reward_model"]["ground_truth"]))


class Client:
    """The requests of one episode."""

    def __init__(self, http, episode):
        self.http, self.url, self.headers = http, episode.base_url, {"Authorization": f"Bearer {episode.key}"}
        self.episode = episode

    async def post(self, body, path="/chat/completions", **headers):
        async with self.http.post(self.url + path, json=body, headers={**self.headers, **headers}) as answer:
            return answer.status, json.loads(await answer.text()) if answer.content_type == "application/json" else (
                await answer.text()
            )

    async def ask(self, *messages, **more):
        status, answer = await self.post({"model": "m", "messages": list(messages), **more})
        assert status == 200, answer
        return answer["choices"][0]["message"]


@pytest.fixture
async def episode():
    """(client, engine, session) of an open episode whose model writes `ok`, or tool calls where there are tools."""
    engine = RandomEngine(TEMPLATE.tokenizer, lambda text: CALL + CALL if "<|im_start|>system\nTools" in text else "ok")
    session = Session(settings_for(engine, TEMPLATE, limits=(2000, 2000)), seed=1)
    endpoint = Endpoint()
    opened = await endpoint.open(session)
    async with aiohttp.ClientSession() as http:
        yield Client(http, opened), engine, session
    await endpoint.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_conversation_is_one_row(episode):
    client, engine, session = episode
    messages = [{"role": "system", "content": "brief"}, user("a")]
    for text in ("b", "c"):
        messages += [await client.ask(*messages), user(text)]
    await client.ask(*messages)
    check_rows(engine, session.trace, True)


async def test_parallel_calls_and_their_results_are_one_row(episode):
    client, engine, session = episode
    first = await client.ask(user("a"), tools=[TOOL])
    assert first["content"] is None
    calls = first["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": 1}] * 2
    rewritten = [{**c, "function": {"name": "f", "arguments": '{ "x":1 }'}} for c in calls]  # as harnesses write JSON
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    await client.ask(user("a"), {**first, "tool_calls": rewritten}, *results, tools=[TOOL])
    check_rows(engine, session.trace, True)


async def test_rewritten_and_compacted_histories_are_branches(episode):
    client, engine, session = episode
    answer = await client.ask(user("a"))
    await client.ask(user("a"), {**answer, "content": "no"}, user("b"))
    await client.ask(user("summary"), user("c"))
    assert len(session.trace.rows()) == 3
    check_rows(engine, session.trace, False)


async def test_a_retry_gets_the_same_draw_and_a_second_request_another(episode):
    client, engine, session = episode
    body = {"model": "m", "messages": [user("a")]}
    await asyncio.gather(client.post(body), client.post(body, **{"x-stainless-retry-count": "1"}))
    await client.post(body, **{"x-stainless-retry-count": "2"})
    assert (len(engine.draws), session.counts["retries"]) == (1, 2)
    await client.post(body)
    assert len(engine.draws) == 2


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), "nan", 1e39, None, "good"])
async def test_a_reward_that_is_no_finite_number_is_refused_and_does_not_count(episode, reward):
    client, _, session = episode
    assert (await client.post({"reward": 0.5}, "/reward"))[0] == 200
    status, answer = await client.post({"reward": reward}, "/reward")
    assert (status, answer["error"]["code"]) == (400, "invalid_request_error")
    assert "finite" in answer["error"]["message"] or reward in (None, "good")
    assert (client.episode.reward, session.counts["bad_requests"]) == (0.5, 1)


async def test_a_stream_is_the_same_answer_in_events(episode):
    client, _, session = episode
    _, text = await client.post({"messages": [user("a")], "stream": True, "stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    parts = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert parts[0]["choices"][0]["delta"]["content"] == "ok"
    assert parts[1]["choices"][0]["finish_reason"] == "stop"
    assert parts[-1]["usage"]["completion_tokens"] == 3 == sum(session.trace.rows()[0].mask)


async def test_several_choices_are_branches(episode):
    client, engine, session = episode
    _, answer = await client.post({"messages": [user("a")], "n": 4})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(session.trace.rows()) == 4
    check_rows(engine, session.trace, False)


async def test_a_program_that_hangs_up_leaves_no_traceback(episode, caplog):
    client, engine, _ = episode
    _, writer = await asyncio.open_connection("127.0.0.1", int(client.url.split(":")[2].partition("/")[0]))
    lines = [f"{name}: {value}" for name, value in {**client.headers, "Host": "h", "Content-Length": 99}.items()]
    path = "/e/" + client.url.partition("/e/")[2]
    writer.write("\r\n".join([f"POST {path}/chat/completions HTTP/1.1", *lines, "", "{"]).encode())
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.sleep(0.1)
    await client.ask(user("a"))
    assert (caplog.records, len(engine.draws)) == ([], 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages must be a list"),
        ({"model": "m"}, "messages"),
        ({"messages": [user("a")], "n": 99}, "n from 1 to"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "has no image"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"messages": "a"}, "messages must be a list"),
        ({"messages": ["a"]}, "AttributeError: 'str' object has no attribute 'items'"),
        ({"messages": [user("a")], "frequency_penalty": 0.5}, "frequency_penalty=0.5: tokens are drawn from"),
        ({"messages": [user("a")], "logit_bias": {"5": 100}}, "drawn from the model as it is"),
        ({"messages": [user("a")], "response_format": {"type": "json_object"}}, "response_format other than text"),
        ({"messages": [user("a")], "max_tokens": 0}, "max_tokens at least 1"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 99_999}}]}]},
            "RecursionError",
        ),
        ({"messages": [user("a")], "presence_penalty": 0, "repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ],
)
async def test_a_bad_request_is_answered_and_counted(episode, body, message):
    client, _, session = episode
    status, answer = await client.post(body)
    assert (status, message in answer["error"]["message"]) == (400, True), answer
    assert session.counts["bad_requests"] == 1


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b'{"messages": [{}], "n": 1e999}', "application/json", "OverflowError"),
        (b'{"messages": ' + b"[" * 200_000, "application/json", "RecursionError"),
        (b"{}", "application/json; charset=none", "LookupError"),
        (b'{"messages": "\xff"}', "application/json", "UnicodeDecodeError"),
        (b"{}", "text/plain", "KeyError"),
        (b"", "application/json", "JSONDecodeError"),
    ],
)
async def test_what_is_no_request_is_answered_and_counted(episode, data, kind, message):
    client, _, session = episode
    headers = {**client.headers, "Content-Type": kind}
    async with client.http.post(client.url + "/chat/completions", data=data, headers=headers) as response:
        answer = json.loads(await response.text())
    assert (response.status, message in answer["error"]["message"]) == (400, True), answer
    assert session.counts["bad_requests"] == 1


async def test_a_key_that_is_not_text_is_a_wrong_key(episode):
    client, _, session = episode
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.split(":")[2].partition("/")[0]))
    path = "/e/" + client.url.partition("/e/")[2]
    writer.write(f"GET {path}/models HTTP/1.1\r\nHost: h\r\nx-api-key: ".encode() + b"\xff\r\n\r\n")
    await writer.drain()
    assert b" 401 " in await asyncio.wait_for(reader.readline(), scaled_s(10))
    writer.close()
    assert session.counts["refused_requests"] == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/responses", {"input": "a", "previous_response_id": "resp_1"}, "responses are not stored"),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "an image part has no image",
        ),
        ("/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "only functions are supported"),
        ("/responses", {}, "KeyError: 'input'"),
        ("/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, "response_format other than text"),
        (
            "/messages",
            {"messages": [user("a")], "output_config": {"format": {"type": "json_schema"}}},
            "response_format other than text",
        ),
        (
            "/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "an image part has no image",
        ),
    ],
)
async def test_what_other_apis_cannot_ask_for_is_answered_and_counted(episode, path, body, message):
    client, engine, session = episode
    status, answer = await client.post(body, path)
    assert (status, message in answer["error"]["message"]) == (400, True), answer
    assert (session.counts["bad_requests"], engine.draws) == (1, [])


async def test_wrong_keys_origins_and_ended_episodes_get_nothing(episode):
    client, engine, session = episode
    body = {"messages": [user("a")]}
    assert (await client.post(body, Authorization="Bearer x"))[0] == 401
    assert (await client.post(body, Origin="http://evil.example"))[0] == 403
    client.url = client.url.replace("/e/", "/e/x")
    assert (await client.post(body))[0] == 404
    assert (engine.draws, session.counts["refused_requests"]) == ([], 2)


async def test_a_budget_that_is_used_up_is_an_error_that_is_not_retried(episode):
    client, _, session = episode
    status, answer = await client.post({"messages": [user("a" * 3000)]})
    assert (status, answer["error"]["code"], session.end) == (400, "episode_end", "context")


def run_program(workflow, *, sample=None, **changes):
    engine = RandomEngine(TEMPLATE.tokenizer, lambda _: "ok")
    engine.sample = sample or engine.sample
    settings = settings_for(engine, TEMPLATE, grade=grade)
    runner = EpisodeRunner(settings, workflow, tool_pool(), **changes)
    try:
        return runner.submit([EpisodeStart(ROW, 3)], SamplingParams(64))[0].result(scaled_s(30.0))
    finally:
        runner.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_bash_script_is_an_agent():
    result = run_program(command_workflow(f"bash {Path(__file__).with_name('bash_agent.sh')}"))
    assert (result.reward, result.end, result.num_turns, result.error) == (0.75, "stop", 2, "")


def test_a_program_without_a_reward_is_graded_by_its_last_answer(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, urllib.request as u\n"
        "row = json.loads(os.environ['RLSYS_ROW'])\n"
        "r = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps({'messages': row['prompt']})"
        ".encode(), {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'})\n"
        "u.urlopen(r).read()\n"
    )
    assert run_program(command_workflow(f"{sys.executable} {script}")).reward == 1.0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_program_reaches_its_model_beside_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", ".corp")
    script = Path(__file__).with_name("bash_agent.sh")
    result = run_program(command_workflow(f"[ $NO_PROXY = .corp,127.0.0.1 ] && bash {script}"))
    assert (result.end, result.reward) == ("stop", 0.75), result.error


def test_a_program_that_fails_or_hangs_is_an_episode_that_failed(tmp_path):
    failed = run_program(command_workflow("echo broken >&2; exit 3"))
    assert (failed.end, "exited with code 3: broken" in failed.error) == ("error", True)
    command = f"sleep 98765.{os.getpid()}"
    hung = run_program(command_workflow(command), deadline_s=0.5)
    assert hung.end == "deadline"
    assert wait_until(lambda: command.split() not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])])
    assert run_program(command_workflow("true")).end == "no_draw"
    (tmp_path / "mine.py").write_text("from threading import Event\ndef run(row):\n    Event().wait()\n")
    assert run_program(function_workflow(f"{tmp_path}/mine.py:run"), deadline_s=0.5).end == "deadline"
    assert [thread.daemon for thread in threading.enumerate() if thread.name.startswith("agent")] == [True]


@pytest.mark.parametrize("kind", ["command", "function"])
def test_a_program_that_fails_as_a_budget_is_used_up_ends_by_that_budget(kind, tmp_path):
    """It was an error: not trained, and a reason for the run to stop by agent.max_failed_share."""
    file = tmp_path / "agent.py"
    file.write_text(
        "from openai import OpenAI\n"
        "def run(**where):\n"
        "    for content in ('a', 'a' * 3000):\n"
        "        messages = [{'role': 'user', 'content': content}]\n"
        "        OpenAI(**where).chat.completions.create(model='m', messages=messages)\n"
        "def run_here(base_url, api_key):\n"
        "    run(base_url=base_url, api_key=api_key)\n"
        "if __name__ == '__main__':\n"
        "    run()\n"
    )
    of_function = kind == "function"
    workflow = function_workflow(f"{file}:run_here") if of_function else command_workflow(f"{sys.executable} {file}")
    settings = settings_for(RandomEngine(TEMPLATE.tokenizer, lambda _: "ok"), TEMPLATE, grade=grade, limits=(99, 99))
    runner = EpisodeRunner(settings, workflow, tool_pool())
    result = runner.submit([EpisodeStart(ROW, 3)], SamplingParams(64))[0].result(scaled_s(30.0))
    runner.close()
    assert (result.end, result.error, result.reward, result.num_turns) == ("context", "", 1.0, 1)


def sleeping(seconds: str) -> bool:
    return ["sleep", seconds] in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]


def test_programs_that_are_open_when_the_runner_closes_leave_no_warning(caplog):
    seconds = f"98763.{os.getpid()}"
    settings = settings_for(RandomEngine(TEMPLATE.tokenizer, lambda _: "ok"), TEMPLATE, grade=grade)
    runner = EpisodeRunner(settings, command_workflow(f"sleep {seconds} & wait"), tool_pool())
    runner.submit([EpisodeStart(ROW, seed) for seed in range(4)], SamplingParams(64))
    assert wait_until(lambda: sleeping(seconds))
    runner.close()
    assert wait_until(lambda: not [thread for thread in threading.enumerate() if "waitpid" in thread.name])
    assert wait_until(lambda: not sleeping(seconds))  # what is killed ends a moment later
    assert caplog.messages == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("then", ["", " || true"])
def test_an_engine_that_fails_is_not_a_program_that_fails(then):
    async def broken(request):
        raise RolloutError("all replicas are gone")

    with pytest.raises(RolloutError, match="gone"):
        run_program(command_workflow(f"bash {Path(__file__).with_name('bash_agent.sh')}{then}"), sample=broken)


def test_a_function_gets_what_it_names(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json, urllib.request as u\n"
        "def run(prompt, base_url, api_key):\n"
        "    r = u.Request(base_url + '/chat/completions', json.dumps({'messages': prompt}).encode(),\n"
        "                  {'Authorization': 'Bearer ' + api_key})\n"
        "    return len(json.load(u.urlopen(r))['choices'][0]['message']['content']) / 4\n"
    )
    assert run_program(function_workflow(f"{tmp_path}/mine.py:run")).reward == 0.5


def test_a_class_is_not_taken_for_a_function_that_answers(tmp_path):
    (tmp_path / "mine.py").write_text("class Agent:\n    async def run(self, data):\n        return 1.0\n")
    with pytest.raises(ConfigError, match=r"agent.path=.*it is a class, which .*rollout.workflow takes"):
        function_workflow(f"{tmp_path}/mine.py:Agent")


OPENAI = """
import asyncio, os
from openai import AsyncOpenAI, OpenAI
client, messages = OpenAI(), [{"role": "user", "content": "a"}]
answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
messages += [answer, {"role": "user", "content": "b"}]
stream = client.chat.completions.create(model="any", messages=messages, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "c"}]
asyncio.run(AsyncOpenAI().chat.completions.create(model="any", messages=messages, temperature=0.2))
assert client.models.list().data[0].id == "policy"
"""


def test_the_openai_client_runs_unchanged(tmp_path):
    (tmp_path / "agent.py").write_text(OPENAI)
    result = run_program(command_workflow(f"{sys.executable} {tmp_path / 'agent.py'}"))
    assert (result.end, result.num_turns, len(result.rows), result.error) == ("stop", 3, 1, "")
