"""Tools and environments of other libraries: MCP servers, Gymnasium, OpenEnv and verifiers.

The last two are large: `pip install -e '.[openenv,verifiers]'`, then
`scripts/test.sh -m slow tests/unit/agent/test_adapters.py`.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlsys.agent.environments import GymnasiumEnvironment, OpenEnvEnvironment
from rlsys.agent.programs import command_workflow
from rlsys.agent.runner import EpisodeRunner, EpisodeStart
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tool_config import tools_of_yaml
from rlsys.agent.tool_pool import EpisodeTools, ToolPool, result_text
from rlsys.agent.tools import target_of, tools_of_class
from rlsys.types import SamplingParams
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s, wait_until
from tests.unit.agent.engine import RandomEngine, settings_for, tool_pool
from tests.unit.agent.templates import HERMES, tokenizer_with

SERVER = Path(__file__).with_name("mcp_server.py")


@pytest.fixture(scope="module")
def pool() -> Iterator[ToolPool]:
    pool = tool_pool(num_workers=1, timeout_s=scaled_s(20.0), max_chars=1000)
    yield pool
    pool.close()


def yaml_for(folder: Path, server: dict, **more) -> str:
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"arithmetic": server}}))
    mcp = {"mcp_servers_config_path": str(folder / "servers.json"), **more}
    entry = {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}, "mcp": mcp}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return str(folder / "tools.yaml")


def stdio() -> dict:
    return {"command": sys.executable, "args": [str(SERVER)]}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def http() -> Iterator[dict]:
    port = free_port()
    with subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL) as process:
        assert wait_until(lambda: listens(port))
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
        process.terminate()


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_tools_of_an_mcp_server_are_tools(pool, tmp_path, transport, request):
    server = stdio() if transport == "stdio" else request.getfixturevalue("http")
    tools = EpisodeTools(pool, tools_of_yaml(yaml_for(tmp_path, server), key="k"))
    assert [schema["function"]["name"] for schema in tools.schemas] == ["multiply", "fail"]
    assert set(tools.schemas[0]["function"]["parameters"]["required"]) == {"a", "b"}
    product = await tools.call("multiply", {"a": 6, "b": 7})
    assert (result_text(product), product.status) == ("42", "ok")
    failed = await tools.call("fail", {})
    assert (failed.status, "Error executing tool fail" in result_text(failed)) == ("error", True)


def test_only_the_selected_tools_of_a_server(tmp_path):
    (tool,) = tools_of_yaml(yaml_for(tmp_path, stdio(), tool_selected_list=["multiply"]), key="k")
    assert tool.name == "multiply"
    with pytest.raises(ConfigError, match="has divide"):
        tools_of_yaml(yaml_for(tmp_path, stdio(), tool_selected_list=["divide"]), key="k")


def test_a_server_that_does_not_start_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"MCP server arithmetic of .* does not list its tools"):
        tools_of_yaml(yaml_for(tmp_path, {"command": "/no/such/program"}), key="k")
    with pytest.raises(ConfigError, match="does not list its tools: MCPError: Connection closed"):
        tools_of_yaml(yaml_for(tmp_path, {"command": "false"}), key="k")
    (tmp_path / "servers.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a JSON file with mcpServers"):
        tools_of_yaml(str(tmp_path / "tools.yaml"), key="k")


async def test_a_gymnasium_environment_is_played_by_calls_of_step(pool):
    tools = EpisodeTools(pool, tools_of_class(GymnasiumEnvironment), environment=target_of(GymnasiumEnvironment))
    environment = tools.environment
    assert environment is not None
    row = {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}, "seed": 1, "prompt": "ignored"}
    assert (await environment.call("create", row)).extra["text"] == "\n0"
    assert "must be one of" in result_text(await tools.call("step", {"action": "9"}))
    moves = [result_text(await tools.call("step", {"action": str(move)})) for move in (1, 1, 2, 2, 1, 2)]
    assert moves == ["4", "8", "9", "10", "14", "15\nThe episode is over."]
    assert result_text(await tools.call("step", {"action": "0"})) == "The episode is over."
    assert (await environment.call("get_reward")).extra["value"] == 1.0


ECHO = """
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    text: str


class Heard(Observation):
    text: str


class Echo(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(text="say hello", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        return Heard(text=action.text, done=True, reward=float(action.text == "hello"))

    @property
    def state(self):
        return State()


app = create_app(Echo, Say, Heard, env_name="echo")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openenv") is None, reason="needs pip install -e '.[openenv]'")
async def test_an_openenv_server_is_played_by_calls_of_step(pool, tmp_path):
    (tmp_path / "echo_server.py").write_text(ECHO)
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "echo_server:app", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        assert wait_until(lambda: listens(port))
        tools = EpisodeTools(pool, tools_of_class(OpenEnvEnvironment), environment=target_of(OpenEnvEnvironment))
        environment = tools.environment
        assert environment is not None
        opened = await environment.call("create", {"base_url": f"http://127.0.0.1:{port}"})
        assert "say hello" in opened.extra["text"]
        answer = await tools.call("step", {"action": {"text": "hello"}})
        assert result_text(answer).endswith('"hello"}\nThe episode is over.'), answer
        assert (await environment.call("get_reward")).extra["value"] == 1.0
        await environment.call("close")
        process.terminate()


REVERSE = """
import verifiers as vf
from datasets import Dataset


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def load_environment(limit: int = 1):
    rows = Dataset.from_list([{"question": "Reverse ko.", "answer": "ok"}] * limit)
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("verifiers") is None, reason="needs pip install -e '.[verifiers]'")
def test_an_environment_of_verifiers_scores_its_rollout(tmp_path, monkeypatch):
    (tmp_path / "reverse_words.py").write_text(REVERSE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    template = ChatTemplate(tokenizer_with(HERMES), kinds=("user", "tool"))
    engine = RandomEngine(template.tokenizer, lambda _: "ok")
    workflow = command_workflow(f"{sys.executable} -m rlsys.agent.verifiers")
    runner = EpisodeRunner(settings_for(engine, template), workflow, tool_pool(), deadline_s=scaled_s(60.0))
    row = {
        "prompt": [{"role": "user", "content": "Reverse ko."}],
        "reward_model": {"ground_truth": "ok"},
        "extra_info": {"env_id": "reverse-words", "env_args": {"limit": 2}},
    }
    try:
        result = runner.submit([EpisodeStart(row, 3)], SamplingParams(64))[0].result(scaled_s(60.0))
    finally:
        runner.close()
    assert (result.reward, result.end, result.error) == (1.0, "stop", "")
