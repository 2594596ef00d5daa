"""Cost of agents' episodes beside the model: CPU of a call, memory, hanging tools; and peers' servers in the same run.

    python scripts/bench/agents.py [--episodes 1000] [--turns 8] [--peers gateway miles] [--json agents.json]

A stub engine answers at once with about 100 tokens, a tool call among them. Sides, one after the other, each in a
process of its own:

- `episodes`: a workflow of `EpisodeRunner`, all episodes at once; each turn is a draw and a call of a tool process.
  Then the same with a share --hang of the calls hanging: how long the longest held a process up, and whether the rows
  of the episodes without one are bit for bit the same.
- `endpoint`: the same conversations by requests of a client in another process, with the tools at the client.
- with --peers the servers that record the tokens of agents in other systems: rllm-model-gateway, and
  the session server of miles (with a stand-in for the one class that it takes from SGLang). Their engine is a stub
  behind HTTP. They are installed into an environment of their own on first use (needs a package index).

Printed for each side: CPU milliseconds of its process for one call of the model, with the training rows made (peers:
with each session's records fetched), and its largest memory over what it had before. The stub behind the peers and the
client are not counted; the stub of our own sides is.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from peers import ROOT, machine, start_side  # pyrefly: ignore

sys.path.insert(0, str(ROOT))

PEER_PACKAGES = ("rllm-model-gateway==0.1.0", "transformers==5.12.1", "jinja2", "setproctitle", "uvloop", "httptools")
MILES = "miles-rl==0.0.2"
PEERS = ("gateway", "miles")
QUESTION = "z" * 400
NUM_ANSWERS = 64
TOOL_TIMEOUT_S = 0.5
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TOOL_FILE = '''
import os, time
from rlsys.agent.tools import function_tool

@function_tool()
def add(a: int, b: int, hangs: bool = False) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
        hangs: Whether the call never ends.
    """
    if hangs and os.environ.get("BENCH_HANGS"):
        time.sleep(3600)
    return a + b
'''
SHIM = "from pydantic import BaseModel\nclass Tool(BaseModel):\n    type: str = 'function'\n    function: dict\n"


def answer_text(number: int) -> str:
    """What the stub draws: some words and a call of the tool."""
    return f"{Random(number).getrandbits(128):032x} " + json.dumps({"name": "add", "arguments": {"a": number, "b": 1}})


class StubEngine:
    """Draws one of NUM_ANSWERS answers by the seed of the request."""

    def __init__(self, tokenizer: Any) -> None:
        ids = [tokenizer(answer_text(n), add_special_tokens=False)["input_ids"] for n in range(NUM_ANSWERS)]
        self.answers = [(*answer, tokenizer.eos_token_id) for answer in ids]

    async def sample(self, request: Any) -> Any:
        from rlsys.types import Finish, ModelResponse

        ids, params = request.input_ids, request.gconfig
        tokens = self.answers[params.seed % NUM_ANSWERS]
        logs = tuple(-params.seed / (at + 1e20) for at in range(len(tokens)))
        return ModelResponse("", tuple(ids), tokens, logs, logs, (0,) * len(tokens), Finish.STOP)


def measured(work: Any, num_calls: int) -> tuple[Any, dict[str, float]]:
    """What `work()` returns, and this process's CPU milliseconds for a call and megabytes over those of before."""
    before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    idle = psutil.Process().memory_info().rss
    result = work()
    cpu_ms = 1e3 * (time.process_time() - start_s) / num_calls
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak >= before.ru_maxrss
    return result, {"cpu_ms": cpu_ms, "rss_mb": (peak - idle) / 1e6}


def run_episodes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The sides `episodes` and `endpoint`."""
    from transformers import PreTrainedTokenizerFast

    from rlsys.agent.presets import load_workflow
    from rlsys.agent.programs import function_workflow
    from rlsys.agent.runner import EpisodeRunner, EpisodeStart
    from rlsys.agent.session import SessionSettings
    from rlsys.agent.template import ChatTemplate
    from rlsys.agent.tool_pool import ToolPool
    from rlsys.agent.tools import tools_of_file
    from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
    from rlsys.data.start_assets import START_MODEL
    from rlsys.types import SamplingParams

    async def turns(row: Any, session: Any) -> float:
        session.add(*row["prompt"])
        for hangs in row["hangs"]:
            answer = await session.draw()
            call = {**answer.tool_calls[0].arguments, "hangs": hangs}
            text = await session.call("add", **call)
            session.add({"role": "tool", "name": "add", "tool_call_id": "call00000", "content": text})
        return 1.0

    is_endpoint = options.side == "endpoint"
    template = ChatTemplate(PreTrainedTokenizerFast.from_pretrained(START_MODEL), kinds=("user", "tool"))
    sampling, own = SamplingParams(512), MultiTurnConfig(format="json")
    agent = AgentConfig(num_workers=options.workers, tool_timeout_s=TOOL_TIMEOUT_S if options.hangs else 60.0)
    engine = StubEngine(template.tokenizer)
    settings = SessionSettings(engine.sample, template, sampling, 1 << 20, 1 << 20, agent, own)
    pool = ToolPool(agent, own)
    workflow = function_workflow("agents:hand_over") if is_endpoint else load_workflow(turns)
    (folder / "tools.py").write_text(TOOL_FILE)
    tools = tools_of_file(str(folder / "tools.py"), key="tools")
    runner = EpisodeRunner(settings, workflow, pool, tools=tools, max_concurrent=options.episodes)
    hangs = Random(1)

    def starts(num_episodes: int) -> list[EpisodeStart]:
        prompt = [{"role": "user", "content": QUESTION}]
        rows = [[hangs.random() < options.hang for _ in range(options.turns)] for _ in range(num_episodes)]
        return [EpisodeStart({"prompt": prompt, "hangs": row}, n, f"{n:05d}") for n, row in enumerate(rows)]

    def run(these: list[EpisodeStart]) -> list[Any]:
        return [future.result(options.deadline_s) for future in runner.submit(these, sampling)]

    if is_endpoint:
        listener = threading.Thread(target=take_ends, daemon=True)
        listener.start()
    else:
        run(starts(options.workers))
        time.sleep(3.0)  # all tool processes have started
    print("ready", flush=True)
    these = starts(options.episodes)
    children = psutil.Process().children(recursive=True)
    before = sum(sum(child.cpu_times()[:2]) for child in children)
    results, figures = measured(lambda: run(these), options.episodes * options.turns)
    if not options.hangs:
        spent = sum(sum(child.cpu_times()[:2]) for child in children) - before
        figures["tools_cpu_ms"] = 1e3 * spent / options.episodes / options.turns
    assert all(result.num_turns == options.turns and len(result.rows) == 1 for result in results)
    assert all("tool_error" not in result.counts for result in results)
    calls = [entry["result"] for start in these for entry in start.log.rows() if "tool" in entry["request"]]
    late = [call["seconds"] for call in calls if call["status"] == "timeout"]
    calm = [start.name for start in these if not any(start.row["hangs"])]
    rows = {start.name: repr(result.rows) for start, result in zip(these, results)}
    runner.close()
    pool.close()
    left = len(psutil.Process().children(recursive=True))
    figures |= {"timeouts": len(late), "longest_s": max(late, default=0.0), "left": left}
    return figures | {"rows": str(hash_of([rows[name] for name in calm])), "calm": len(calm)}


def hash_of(texts: Sequence[str]) -> str:
    """A digest of texts."""
    from hashlib import sha256

    return sha256("\n".join(texts).encode()).hexdigest()


# ---- the endpoint: an agent that hands its URL to the client's process and waits for the end ----------------------

WAITING: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}


async def hand_over(base_url: str, api_key: str) -> float:
    """The agent of an episode: the client's process makes its requests."""
    import agents  # pyrefly: ignore

    ended = asyncio.Event()
    agents.WAITING[base_url] = asyncio.get_running_loop(), ended
    print(json.dumps({"url": base_url, "key": api_key}), flush=True)
    await ended.wait()
    return 1.0


def take_ends() -> None:
    """End the episodes whose URLs come on standard input."""
    import agents  # pyrefly: ignore

    for line in sys.stdin:
        loop, ended = agents.WAITING.pop(line.strip())
        loop.call_soon_threadsafe(ended.set)


# ---- peers -----------------------------------------------------------------------------------------------------------


def run_stub(options: argparse.Namespace) -> None:
    """An engine behind HTTP that answers as vLLM and SGLang do, with token ids and log-probs."""
    from aiohttp import web
    from transformers import PreTrainedTokenizerFast

    from rlsys.data.start_assets import START_MODEL

    tokenizer = PreTrainedTokenizerFast.from_pretrained(START_MODEL)
    bodies = []
    for number in range(NUM_ANSWERS):
        text = answer_text(number)
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        words, _, call = text.partition(" ")
        arguments = json.dumps(json.loads(call)["arguments"])
        calls = [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}]
        message = {"role": "assistant", "content": words, "tool_calls": calls}
        logs = [-1.0 / (1 + at) for at in range(len(ids))]
        content = [{"token": str(i), "logprob": log, "top_logprobs": []} for i, log in zip(ids, logs)]
        meta = {"completion_tokens": len(ids), "output_token_logprobs": [[log, i, None] for i, log in zip(ids, logs)]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": {"content": content}}
        choice |= {"token_ids": ids, "meta_info": meta}
        whole = {"id": "c", "object": "chat.completion", "model": "policy", "created": 0, "choices": [choice]}
        bodies.append(json.dumps(whole | {"prompt_token_ids": list(range(400)), "usage": {}}))

    async def complete(request: web.Request) -> web.Response:
        body = await request.read()
        return web.Response(text=bodies[len(body) % NUM_ANSWERS], content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


def run_miles(options: argparse.Namespace) -> None:
    """The session server of miles before the stub."""
    from types import SimpleNamespace

    from miles.rollout.session.session_server import run_session_server  # type: ignore

    args = SimpleNamespace(
        hf_checkpoint=options.model,
        session_server_ip="127.0.0.1",
        session_server_port=options.port,
        tito_allowed_append_roles=["tool", "user"],
    )
    run_session_server(args, f"http://127.0.0.1:{options.stub_port}")


def peer_python() -> Path:
    """The interpreter of an environment with the peers."""
    home = Path(os.environ.get("RLSYS_CACHE", Path.home() / ".cache" / "rlsys")) / "bench-agents"
    python, shim = home / "bin" / "python", home / "shim"
    if not (home / "complete").exists():
        print(f"installing {PEER_PACKAGES[0]} and {MILES} into {home} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        for wanted in (PEER_PACKAGES, ("--no-deps", MILES), ("psutil",)):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True, stdout=sys.stderr)
        folder = shim / "sglang/srt/entrypoints/openai"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "protocol.py").write_text(SHIM)
        for parent in (folder, *folder.parents[:3]):
            (parent / "__init__.py").touch()
        (home / "complete").touch()
    return python


# ---- the client --------------------------------------------------------------------------------------------------


async def post(http: Any, url: str, body: Any, key: str = "key") -> Any:
    """The answer to a request, sent again where a server closed its idle connection."""
    import aiohttp

    for _ in range(10):
        try:
            async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as got:
                assert got.status == 200, await got.text()
                return await got.json()
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            print(f"again: {error!r}", file=sys.stderr)
    raise SystemExit(f"{url} does not answer")


async def converse(http: Any, url: str, key: str, num_turns: int) -> None:
    """The requests of one episode, each with the whole conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for _ in range(num_turns):
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        message = (await post(http, f"{url}/chat/completions", body, key))["choices"][0]["message"]
        calls = message["tool_calls"]
        sums = [sum(json.loads(call["function"]["arguments"]).values()) for call in calls]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": str(s)} for c, s in zip(calls, sums)]
        messages += [{k: v for k, v in message.items() if v is not None}, *results]


async def drive_endpoint(side: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The conversations of our own endpoint, whose episodes come on its output."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=options.connections)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:

        async def one(episode: dict[str, str]) -> None:
            await converse(http, episode["url"], episode["key"], options.turns)
            side.stdin.write(f"{episode['url']}\n")
            side.stdin.flush()

        tasks = []
        for _ in range(options.episodes):
            line = await asyncio.to_thread(side.stdout.readline)
            tasks.append(asyncio.create_task(one(json.loads(line))))
        await asyncio.gather(*tasks)
        return json.loads(await asyncio.to_thread(side.stdout.readline))


async def drive_peer(name: str, process: psutil.Process, port: int, options: argparse.Namespace) -> dict[str, float]:
    """The conversations through a peer's server, and the records of each session as they are fetched to train."""
    import aiohttp

    base = f"http://127.0.0.1:{port}"
    connector = aiohttp.TCPConnector(limit=options.connections)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as http:

        async def one() -> None:
            session = (await post(http, f"{base}/sessions", {}))["session_id"]
            await converse(http, f"{base}/sessions/{session}/v1", "key", options.turns)
            path = f"{base}/sessions/{session}" + ("/traces" if name == "gateway" else "")
            async with http.get(path) as records:
                body = await records.json()
                assert len(body if name == "gateway" else body["records"]) == options.turns

        await one()
        spent, idle, peak = sum(process.cpu_times()[:2]), process.memory_info().rss, 0
        tasks = [asyncio.create_task(one()) for _ in range(options.episodes)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.2)
            peak = max(peak, process.memory_info().rss)
        await asyncio.gather(*tasks)
        cpu_s = sum(process.cpu_times()[:2]) - spent
    return {"cpu_ms": 1e3 * cpu_s / options.episodes / options.turns, "rss_mb": (peak - idle) / 1e6}


def measure_peer(name: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One peer's server with the stub behind it."""
    from transformers import PreTrainedTokenizerFast

    from rlsys.data.start_assets import START_MODEL
    from rlsys.single_controller.worker import free_port

    port, stub_port = free_port(), free_port()
    PreTrainedTokenizerFast.from_pretrained(START_MODEL).save_pretrained(str(folder))
    python = str(peer_python())
    stub = start_server([sys.executable, __file__, "--side=stub", f"--port={stub_port}"], ROOT)
    if name == "gateway":
        config = folder / "gateway.yaml"
        config.write_text(json.dumps({"store_worker": "memory", "workers": [{"url": f"http://127.0.0.1:{stub_port}"}]}))
        own = (f"--config={config}", "--log-level=error")
        command = [python, "-m", "rllm_model_gateway", "--host=127.0.0.1", f"--port={port}", *own]
    else:
        own = (f"--port={port}", f"--stub-port={stub_port}", f"--model={folder}")
        command = [python, __file__, "--side=miles", *own]
    side = start_server(command, Path(python).parents[1] / "shim")
    try:
        for waiting in (port, stub_port):
            wait_for(waiting)
        return asyncio.run(drive_peer(name, psutil.Process(side.pid), port, options))
    finally:
        for process in (side, stub):
            process.kill()
            process.wait()


def start_server(command: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
    """A server in its own process; what it prints is dropped."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(port: int) -> None:
    """Until a server listens."""
    import socket

    for _ in range(600):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"nothing listens on port {port}")


def own_side(name: str, options: argparse.Namespace, *, hangs: bool = False) -> dict[str, Any]:
    """The figures of one of our own sides."""
    sizes = [f"--{key}={getattr(options, key)}" for key in ("episodes", "turns", "hang", "workers")]
    command = [sys.executable, __file__, f"--side={name}", *sizes, *(["--hangs"] if hangs else [])]
    side = start_side(command, {"BENCH_HANGS": "1"} if hangs else {})
    assert side.stdout is not None
    assert side.stdout.readline().strip() == "ready"
    figures = asyncio.run(drive_endpoint(side, options)) if name == "endpoint" else json.loads(side.stdout.readline())
    assert side.wait(60) == 0
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 1000), ("turns", 8), ("workers", 8), ("connections", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--hang", type=float, default=0.05)
    parser.add_argument("--deadline-s", type=float, default=900.0)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=["episodes", "endpoint", "stub", "miles"], help=argparse.SUPPRESS)
    parser.add_argument("--hangs", action="store_true", help=argparse.SUPPRESS)
    for name in ("port", "stub-port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "stub":
        run_stub(options)
    elif options.side == "miles":
        run_miles(options)
    elif options.side:
        with TemporaryDirectory() as folder:
            print(json.dumps(run_episodes(options, Path(folder))), flush=True)
    if options.side:
        return 0
    print(machine())
    sides = {"episodes": own_side("episodes", options)}
    sides["episodes, hanging"] = own_side("episodes", options, hangs=True)
    sides["endpoint"] = own_side("endpoint", options)
    for name in options.peers:
        print(sides, flush=True, file=sys.stderr)
        with TemporaryDirectory() as folder:
            sides[name] = measure_peer(name, options, Path(folder))
    print(f"{'side':20}{'CPU ms a call':>15}{'MB over idle':>15}{'of endpoint':>13}", flush=True)
    for name, figures in sides.items():
        ratio = figures["cpu_ms"] / sides["endpoint"]["cpu_ms"]
        print(f"{name:20}{figures['cpu_ms']:15.2f}{figures['rss_mb']:15.0f}{ratio:12.1f}x")
    calm, hanging = sides["episodes"], sides["episodes, hanging"]
    print(f"tool processes: {calm['tools_cpu_ms']:.2f} CPU ms a call")
    same = "bit-identical" if calm["rows"] == hanging["rows"] else "DIFFERENT"
    print(
        f"{hanging['timeouts']} hanging calls, deadline {TOOL_TIMEOUT_S:g} s, the longest held a process for "
        f"{hanging['longest_s']:.2f} s, {hanging['left']} processes left; {hanging['calm']} neighbours {same}"
    )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **sides}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
