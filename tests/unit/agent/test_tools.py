"""Tools run in processes that can be killed: what one does wrong is a text for the model and harms no other."""

import asyncio
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import closing, suppress
from itertools import count
from types import SimpleNamespace

import psutil
import pytest

from rlsys.agent.builtin_tools import SearchTool, calculator, python
from rlsys.agent.episode_log import EpisodeEnd
from rlsys.agent.session import Session, SessionSettings
from rlsys.agent.tool_calls import ToolCall
from rlsys.agent.tool_config import tools_of_yaml
from rlsys.agent.tool_pool import EpisodeTools, result_text
from rlsys.agent.tools import Tool, as_text, tool_of, tools_of_class, tools_of_file
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.rewards.pool.children import ASYNC_WINDOW
from rlsys.rewards.pool.pool import RewardItem, RewardResult
from rlsys.types import SamplingParams
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s, wait_until
from tests.unit.agent import user_tools
from tests.unit.agent.engine import tool_pool

FILE = user_tools.__file__


@pytest.fixture(scope="module")
def pool():
    pool = tool_pool(num_workers=2, timeout_s=scaled_s(4.0), max_chars=100)
    yield pool
    pool.close()


def tools_with(pool, *functions) -> EpisodeTools:
    return EpisodeTools(pool, [tool_of(function) for function in functions])


async def test_a_tool_stays_as_it_was_at_its_first_call(tmp_path):
    """Also where its file is edited, or is half written, while the job runs; the next job has the new one."""
    file = tmp_path / "edited.py"
    code = (
        "from rlsys.agent.tools import function_tool\n\n\n@function_tool()\ndef one() -> int:\n    {}\n    return {}\n"
    )
    file.write_text(code.format('"""One."""', "1"))
    tools, results = tools_of_file(str(file), key="key"), []
    with closing(tool_pool(num_workers=1, timeout_s=scaled_s(10.0))) as pool:
        for value in ("1", "20", "("):
            file.write_text(code.format('"""One."""', value))
            results.append(result_text(await EpisodeTools(pool, tools).call("one", {})))
    assert results == ["1", "1", "1"]


SLOW = """
import time
{}


def one() -> int:
    \"""One.\"""
    return 1


async def two() -> int:
    \"""Two.\"""
    return 2


class Three:
    def reset(self):
        return "three"
"""


def schema(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


async def test_a_file_that_imports_longer_than_a_call_may_take_is_imported_before_it(tmp_path):
    """Every call timed out, and its process was ended before it had the file, for ever."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW.format(f"time.sleep({scaled_s(2.0)})"))
    tools = [Tool("one", schema("one"), f"{file}:one"), Tool("two", schema("two"), f"{file}:two", is_async=True)]
    with closing(tool_pool(num_workers=1, timeout_s=scaled_s(1.0))) as pool:
        of_episode = EpisodeTools(pool, tools, environment=f"{file}:Three")
        texts = [result_text(await of_episode.call(name, {})) for name in ("one", "two")]
        assert [*texts, result_text(await of_episode.environment.call("create"))] == ["1", "2", "three"]


async def test_a_file_that_cannot_be_imported_in_time_ends_the_run_by_its_name(tmp_path, monkeypatch):
    file = tmp_path / "slow.py"
    file.write_text(SLOW.format("time.sleep(99)"))
    monkeypatch.setattr("rlsys.rewards.pool.children.START_S", scaled_s(0.5))
    with (
        closing(tool_pool(num_workers=1, timeout_s=scaled_s(9.0))) as pool,
        pytest.raises(ConfigError, match=r"import .*slow.py:one, cannot be started .*no answer within .* imports its"),
    ):
        await EpisodeTools(pool, [Tool("one", schema("one"), f"{file}:one")]).call("one", {})


async def test_a_file_that_cannot_be_imported_is_a_text_for_the_model(tmp_path):
    """As one that is half written when its process is replaced: the other tools still work."""
    file = tmp_path / "half.py"
    file.write_text("(")
    tools = [tool_of(user_tools.add), Tool("one", schema("one"), f"{file}:one")]
    with closing(tool_pool(num_workers=1, timeout_s=scaled_s(9.0))) as pool:
        of_episode = EpisodeTools(pool, tools)
        assert result_text(await of_episode.call("add", {"a": 1, "b": 2})) == "3"
        assert "half.py" in result_text(await of_episode.call("one", {}))


async def test_a_function_is_called_with_its_arguments(pool):
    tools = tools_with(pool, user_tools.add)
    result = await tools.call("add", {"a": 2, "b": 3})
    assert (result_text(result), result.status) == ("5", "ok")
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    ("function", "text"),
    [(user_tools.fail, "no such thing"), (user_tools.exit_process, "the tool's process exited with code 3")],
)
async def test_what_a_tool_does_wrong_is_a_text_for_the_model(function, text, caplog):
    with closing(tool_pool(num_workers=1, timeout_s=scaled_s(4.0))) as pool:
        result, again = [await tools_with(pool, function).call(function.__name__, {}) for _ in range(2)]
    assert (result.status, again.status) == ("error", "error")
    assert text in result_text(result)
    (warning,) = caplog.messages  # of the first call, and it is no answer that could not be graded
    assert warning.startswith(f"a call of {function.__name__} failed: ")
    assert text in warning


async def test_wrong_arguments_and_unknown_tools_are_texts_for_the_model(pool):
    tools = tools_with(pool, user_tools.add)
    assert "missing" in result_text(await tools.call("add", {"a": 1}))
    assert result_text(await tools.call("sub", {})) == "Error: there is no tool 'sub'; the tools are: add"


async def test_huge_and_binary_results_are_cut_to_text(pool):
    tools = tools_with(pool, user_tools.huge, user_tools.noisy)
    huge = await tools.call("huge", {})
    assert result_text(huge) == "x" * 50 + "...(truncated)..." + "x" * 50
    assert result_text(await tools.call("noisy", {})) == "\ufffd\ufffd ok"


async def test_a_hung_tool_costs_its_deadline_and_no_neighbour(tmp_path):
    pool, pid_file = tool_pool(num_workers=2, timeout_s=2.0), tmp_path / "pid"
    tools = tools_with(pool, user_tools.fork_and_hang, user_tools.add)
    await tools.call("add", {"a": 0, "b": 0})  # the processes have started
    start_s = time.monotonic()
    hung, *sums = await asyncio.gather(
        tools.call("fork_and_hang", {"pid_file": str(pid_file)}),
        *(tools.call("add", {"a": n, "b": n}) for n in range(20)),
    )
    seconds = time.monotonic() - start_s
    assert hung.message == "fork_and_hang: no result within agent.tool_timeout_s=2 s"
    assert (hung.status, [result_text(result) for result in sums]) == ("timeout", [str(2 * n) for n in range(20)])
    assert 2.0 <= seconds < scaled_s(20.0)
    pool.close()
    assert wait_until(lambda: not psutil.pid_exists(int(pid_file.read_text())))


async def test_async_tools_wait_together_and_return_verls_triple(tmp_path):
    pool = tool_pool(num_workers=2, timeout_s=scaled_s(20.0))
    tools, call = tools_with(pool, user_tools.meet), {"file": str(tmp_path / "calls"), "count": 2 * ASYNC_WINDOW}
    results = await asyncio.gather(*(tools.call("all_meet", call) for _ in range(2 * ASYNC_WINDOW)))
    assert {(result_text(r), r.score) for r in results} == {("ab", 0.5)}
    pool.close()


async def test_an_environment_keeps_its_state_when_its_process_is_replaced(pool):
    tools = tools_of_class(user_tools.Counter)
    assert [tool.name for tool in tools] == ["step"]
    of_one = EpisodeTools(pool, tools, environment=tools[0].target)
    one = of_one.environment
    _, two = (EpisodeTools(pool, tools, environment=tools[0].target).environment for _ in range(2))  # two of a process
    first = await one.call("create", {"goal": 5, "other": 1})
    await two.call("create", {"goal": 1})
    assert first.extra["text"] == " Count to 5."
    assert result_text(await of_one.call("step", {"by": 2})) == "now 2"
    assert (await of_one.call("step", {"by": 13})).status == "timeout"  # its process is killed
    assert result_text(await of_one.call("step", {"by": 3})) == "now 5"
    assert (await one.call("get_reward")).extra["value"] == 1.0
    assert (await two.call("get_reward")).extra["value"] == 0.0


async def test_an_object_that_is_made_again_gets_every_parallel_call_once():
    limit_s = scaled_s(3.0)
    pool, tools = tool_pool(num_workers=1, timeout_s=limit_s), tools_of_class(user_tools.Counter)
    one, other = (EpisodeTools(pool, tools, environment=tools[0].target) for _ in range(2))
    for each in (one, other):
        await each.environment.call("create", {})
        await each.call("step", {"by": 2})
    late = await other.call("step", {"by": 13})  # the process of both is killed
    says = f"Counter.step: no result within agent.tool_timeout_s={limit_s:g} s"
    assert (late.status, late.message) == ("timeout", says)
    await asyncio.gather(*(one.call("step", {"by": by}) for by in (3, 4)))
    assert result_text(await one.call("step", {"by": 0})) == "now 9"
    pool.close()


async def test_calls_of_a_tool_that_could_not_be_made_say_why(pool):
    target, config = "tests.unit.agent.user_tools:NoNotes", {"type": "native"}
    tools = EpisodeTools(pool, [Tool("note", {"function": {"name": "note"}}, target, "execute", config=config)])
    for _ in range(2):
        assert result_text(await tools.call("note", {})).startswith("Error: OSError: no notebook")


async def test_objects_whose_neighbours_end_their_process_have_a_result():
    pool, tools = tool_pool(num_workers=1, timeout_s=scaled_s(10.0)), tools_of_class(user_tools.Ends)
    made = [EpisodeTools(pool, tools, environment=tools[0].target) for _ in range(8)]
    await asyncio.gather(*(one.environment.call("create", {}) for one in made))
    results = await asyncio.gather(*(one.call("step", {"by": 1}) for one in made))
    assert {result.status for result in results} == {"error"}
    assert all("process" in result_text(result) or "code 3" in result_text(result) for result in results)
    pool.close()


async def test_verls_tool_classes_and_tools_yaml(pool, tmp_path):
    released = tmp_path / "released"
    path = tmp_path / "tools.yaml"
    path.write_text(f"""
tools:
  - class_name: tests.unit.agent.user_tools.Notes
    config: {{type: native, mark: "!", released: {released}}}
    tool_schema:
      type: function
      function: {{name: note, description: Notes., parameters: {{type: object, properties: {{}}}}}}
""")
    (tool,) = tools_of_yaml(str(path), key="multi_turn.tool_config_path")
    tools = EpisodeTools(pool, [tool], tools_kwargs={"note": {"create_kwargs": {"first": "a"}}})
    assert result_text(await tools.call("note", {"text": "b"})) == "a b!"
    result = await tools.call("note", {"text": "c"})
    assert (result_text(result), result.score) == ("a b c!", 0.25)
    await tools.close()
    assert released.exists()


def test_functions_of_a_file_that_are_marked_are_tools():
    assert [tool.name for tool in tools_of_file(FILE, key="multi_turn.function_tool_path")] == ["all_meet"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tool_of(user_tools.untyped), "type hints"),
        (lambda: tool_of(lambda: 1), "top level|type hints|docstring"),
        (lambda: tool_of("no.module:f"), "tools=no.module:f cannot be loaded"),
        (lambda: tools_of_yaml("/no/file", key="k"), "k=/no/file: local file not found"),
        (lambda: tools_of_yaml(FILE, key="k"), "k=.*user_tools.py: "),
    ],
)
def test_a_tool_that_cannot_be_used_is_a_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_import_that_a_tools_module_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "half_tools").mkdir()
    (tmp_path / "half_tools" / "search.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"Search cannot be loaded.*not_installed_here"):
        tool_of("half_tools.search.Search")


def test_python_and_calculator_run_in_the_sandbox():
    assert python("print(123 * 457)") == "56211"
    assert "ZeroDivisionError" in python("1/0")
    assert python("open('/etc/passwd').read()").split(":")[0] in ("PermissionError", "FileNotFoundError")
    assert calculator("(2+3)*4") == "20"
    assert "Error" in calculator("2 +")


async def test_search_ranks_the_passages_that_hold_the_words(tmp_path):
    index = tmp_path / "passages.txt"
    index.write_text("Paris is the capital of France.\nRome is the capital of Italy.\nCats sleep.\n")
    search = SearchTool({"index": str(index), "top_k": 1})
    assert await search.execute("", {"query": "capital of Italy"}) == "[1] Rome is the capital of Italy."


def test_text_is_cut_where_it_is_asked():
    assert as_text("abcdef", 6) == "abcdef"
    assert as_text("abcdefgh", 4) == "ab...(truncated)...gh"
    assert as_text("abcdefgh", 4, "left") == "abcd...(truncated)..."
    assert as_text("abcdefgh", 4, "right") == "...(truncated)...efgh"
    assert as_text({"a": [1]}, 100) == '{"a": [1]}'


class ObjectPool:
    """Hosts objects in this process; every call of `quick` takes 9 s by its result, and fewer turns than the others."""

    num_workers = 2

    def __init__(self):
        self.alive, self.object_numbers, self.locks = set(), count(1), defaultdict(asyncio.Lock)
        self.functions, self.objects = set(), set()

    async def call(self, item, host):
        async with self.locks[host]:
            for _ in range(1 if item.data_source == "quick" else 20):
                await asyncio.sleep(0)
            if item.solution == "create":
                self.alive.add(item.data_source)
            elif item.solution == "close":
                self.alive.remove(item.data_source)
            return RewardResult(0.0, {"text": ""}, "ok", 9.0 if item.data_source == "quick" else 0.0)


async def test_parallel_calls_that_end_an_episode_leave_no_object_behind():
    pool, names = ObjectPool(), ("quick", "slow", "late")
    agent, turns = AgentConfig(max_tool_seconds=5.0), MultiTurnConfig(max_parallel_calls=3)
    session = Session(SessionSettings(None, None, SamplingParams(8), 8, 8, agent, turns))
    session.tools = EpisodeTools(pool, [Tool(name, {}, name, "execute", config={}) for name in names])
    calls = [ToolCall(name, {}) for name in (*names, "quick")]
    message = {"tool_calls": [{"id": str(number)} for number in range(len(calls))]}
    with pytest.raises(EpisodeEnd, match="tool"):
        await session.call_tools(SimpleNamespace(tool_calls=calls, message=message))
    with suppress(Exception):
        await session.tools.close()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
    assert not pool.alive


def test_processes_that_a_call_starts_while_all_are_ended_are_ended_too(monkeypatch):
    made = []

    class Processes:
        def __init__(self, *_, **__):
            made.append(self)
            self.closed = False

        def submit(self, items):
            results = Future()
            results.set_result([RewardResult(0.0, {}, "ok", 0.0)] * len(items))
            return results

        def close(self):
            self.closed = True
            if self is made[0]:
                asyncio.run(pool.call(item, "objects-0"))  # an episode releases its object

    monkeypatch.setattr("rlsys.agent.tool_pool.RewardPool", Processes)
    pool, item = tool_pool(), RewardItem("any", "", {}, {})
    asyncio.run(pool.call(item, "functions"))
    pool.close()
    assert [processes.closed for processes in made] == [True, True]
