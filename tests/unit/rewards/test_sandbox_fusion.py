"""Programs run by a SandboxFusion server: a server on loopback behaves as its documentation of POST /run_code says."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlsys.config import load_config
from rlsys.rewards import code
from rlsys.rewards.pool.pool import RewardItem, reward_metrics
from rlsys.rewards.sandbox import remote
from rlsys.rewards.sandbox.run import SandboxError, SandboxLimits, run_python
from tests.timing import wait_until
from trainer.rewards import check_data_sources, reward_pool

SUM = "print(sum(map(int, input().split())))"
CASES = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}


class SandboxFusion(ThreadingHTTPServer):
    """Runs the programs; `faults` are statuses or bodies of the next answers, `delay_s` is added to each.

    No answer is given before `wanted` requests are there at once.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[int | str] = []
        self.requests: list[dict[str, Any]] = []
        self.delay_s, self.num_running, self.most_running, self.wanted = 0.0, 0, 0, 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/run_code"

    def answer(self, request: dict[str, Any]) -> tuple[int, str]:
        with self.lock:
            self.requests.append(request)
            fault = self.faults.pop(0) if self.faults else None
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(self.delay_s)
        wait_until(lambda: self.most_running >= self.wanted)
        body = json.dumps(self.run(request)) if fault is None else str(fault)
        with self.lock:
            self.num_running -= 1
        return (fault if isinstance(fault, int) else 200), body

    @staticmethod
    def run(request: dict[str, Any]) -> dict[str, Any]:
        limits = SandboxLimits(wall_s=request["run_timeout"], cpu_s=request["run_timeout"])
        run = run_python(request["code"], stdin=request["stdin"], limits=limits)
        status = "TimeLimitExceeded" if run.status == "time limit" else "Finished"
        result = {"status": status, "execution_time": 0.1, "return_code": 0, "stdout": run.stdout, "stderr": run.stderr}
        whole = "Success" if run.status == "exit" else "Failed"
        return {"status": whole, "message": "", "compile_result": None, "run_result": result, "files": {}}


class Handler(BaseHTTPRequestHandler):
    server: SandboxFusion

    def do_POST(self) -> None:
        assert self.path == "/run_code"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = self.server.answer(request)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # a caller that met its deadline is gone
            self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[SandboxFusion]:
    with SandboxFusion() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def grade(server: SandboxFusion, program: str, truth: Any = None, **more: Any) -> dict[str, Any]:
    return code.compute_score(f"```python\n{program}\n```", truth or CASES, sandbox_url=server.url, **more)


@pytest.mark.parametrize(
    ("program", "verdict", "score"),
    [
        (SUM, "pass", 1.0),
        ("print(3)", "wrong answer", 0.5),
        ("raise ValueError('no')", "failed: ValueError: no", 0.0),
    ],
)
def test_verdicts_are_those_of_programs_that_run_here(
    server: SandboxFusion, program: str, verdict: str, score: float
) -> None:
    graded = grade(server, program)
    assert (graded["verdict"], graded["score"]) == (verdict, score)
    assert graded == code.compute_score(f"```python\n{program}\n```", CASES)


def test_the_request_is_the_documented_one(server: SandboxFusion) -> None:
    double = {"fn_name": "double", "inputs": [[2]], "outputs": [4]}
    assert grade(server, "def double(x): return 2 * x", double, memory_limit_mb=64, timeout_s=3.0)["score"] == 1.0
    (request,) = server.requests
    assert "def double" in request.pop("code")
    limits = {"compile_timeout": 3.0, "run_timeout": 3.0, "memory_limit_MB": 64}
    assert request == {"language": "python", "stdin": "", **limits}


def test_a_time_limit_is_the_servers(server: SandboxFusion) -> None:
    assert grade(server, "while True: pass", timeout_s=1.0)["verdict"] == "time limit"


def test_a_busy_server_is_asked_again_and_others_are_not(server: SandboxFusion) -> None:
    server.faults = [503, 429]
    assert grade(server, SUM)["score"] == 1.0
    assert len(server.requests) == 4
    server.faults = [500, 500]
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1.*500"):
        grade(server, SUM)
    assert len(server.requests) in (5, 6)  # the second may be given up before it is sent, and none is sent again


FULL = '{"status": "SandboxError", "message": "full", "run_result": {"status": "Finished", "stdout": "3"}}'


@pytest.mark.parametrize("fault", ["<html>", "[]", '{"status": "Fine"}', '{"status": "Success"}', FULL])
def test_an_answer_without_a_result_of_the_program_is_an_error(server: SandboxFusion, fault: str) -> None:
    server.faults = [fault, fault]
    with pytest.raises(SandboxError, match="full" if fault == FULL else "no program|could not run"):
        grade(server, SUM)


def test_no_more_programs_run_at_a_time_than_allowed(server: SandboxFusion) -> None:
    server.delay_s, server.wanted = 0.05, 3
    many = {"inputs": ["1 1"] * 8, "outputs": ["2"] * 8}
    assert grade(server, SUM, many, max_concurrent=3)["score"] == 1.0
    assert server.most_running == 3


def test_a_server_that_does_not_answer_is_an_error_by_a_deadline(
    server: SandboxFusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.1)
    server.delay_s = 60.0
    with pytest.raises(SandboxError, match="TimeoutError"):
        grade(server, SUM, timeout_s=0.1)


def test_a_run_grades_by_the_configured_server_and_counts_what_it_could_not(server: SandboxFusion) -> None:
    job = load_config([f"reward.sandbox_fusion.url={server.url}", "reward.num_workers=1"])
    check_data_sources(job.reward, ["codecontests"])
    config = job.reward
    truth = json.dumps(CASES)
    with reward_pool(config) as pool:
        server.faults = [500, 500]
        results = [pool.score([RewardItem("codecontests", f"```\n{SUM}\n```", truth)])[0] for _ in range(2)]
    assert [result.status for result in results] == ["error", "ok"]
    assert "127.0.0.1" in results[0].message
    assert results[1].score == 1.0
    assert reward_metrics(results)["reward/errors"] == 1
