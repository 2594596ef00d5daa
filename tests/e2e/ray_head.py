"""A Ray head as a user would run it: on loopback, with a token, on ports of its own beside other clusters."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil

from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
START_S = 90.0
PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
)

"""A second head on this host would take the same defaults; where the port of its agent is taken, it starts but refuses
jobs: "No available agent"."""


@dataclass(frozen=True)
class Head:
    """A running head."""

    env: dict[str, str]
    """Of its clients: address and token."""
    dashboard: str
    process: subprocess.Popen[bytes]
    folder: Path
    own: set[int] = field(default_factory=set)
    """Its own processes: those of the start."""

    def ask(self, what: str) -> Any:
        """A GET of the dashboard, e.g. /api/v0/actors."""
        request = urllib.request.Request(
            self.dashboard + what, headers={"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        )
        with urllib.request.urlopen(request, timeout=scaled_s(20)) as answer:
            return json.load(answer)

    def living(self) -> list[str]:
        """Actors and placement groups that are not gone."""
        alive = []
        for what, gone in (("actors", "DEAD"), ("placement_groups", "REMOVED")):
            rows = self.ask(f"/api/v0/{what}")["data"]["result"]["result"]
            alive += [f"{row['name']} {row['state']}" for row in rows if row["state"] != gone]
        return alive

    def processes(self) -> list[str]:
        """Command lines of what has been started since the head came up, but for idle workers."""
        born = {one.pid for one in psutil.Process(self.process.pid).children(recursive=True)}
        born |= {one.pid for one in psutil.process_iter() if self.env["RAY_AUTH_TOKEN"] in _environ(one)}
        lines = [_command(pid) for pid in sorted(born - self.own)]
        return [line for line in lines if line and "ray::IDLE" not in line and "default_worker.py" not in line]

    def jobs_are_taken(self) -> bool:
        """The agent that starts submitted jobs answers."""
        try:
            with urllib.request.urlopen(self.env["AGENT"] + "/api/local_raylet_healthz", timeout=scaled_s(5)) as answer:
                return answer.status == 200
        except OSError:
            return False


@contextmanager
def ray_head() -> Iterator[Head]:
    """A head that takes jobs; with its processes and files it is gone afterwards."""
    folder = Path(mkdtemp(prefix="rh"))  # short: paths of sockets end at 107 bytes
    ports = dict(zip(PORTS, free_ports(len(PORTS))))
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 stays what it is
        "OMP_NUM_THREADS": "1",
    }
    command = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
    command += ["--dashboard-host=127.0.0.1", "--include-dashboard=true", f"--temp-dir={folder}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=100000000"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    clients = {
        **env,
        "RAY_ADDRESS": f"127.0.0.1:{ports['port']}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports['dashboard-port']}",
        "AGENT": f"http://127.0.0.1:{ports['dashboard-agent-listen-port']}",
    }
    with (folder / "head.log").open("wb") as log:
        running = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    head = Head(clients, clients["RAY_API_SERVER_ADDRESS"], running, folder)
    try:
        end_s = time.monotonic() + scaled_s(START_S)
        while not head.jobs_are_taken():
            assert running.poll() is None, _logs(folder)
            assert time.monotonic() < end_s, _logs(folder)
            time.sleep(0.2)
        head.own.update(one.pid for one in psutil.Process(running.pid).children(recursive=True))
        head.own.update((running.pid, os.getpid()))
        yield head
    finally:
        _end(running)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Distinct ports that no process listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _environ(process: psutil.Process) -> Iterable[str]:
    try:
        return process.environ().values()
    except psutil.Error:
        return ()


def _command(pid: int) -> str:
    """Empty for one that is gone."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def _end(running: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(running.pid).children(recursive=True) if running.poll() is None else []
    running.terminate()
    _, living = psutil.wait_procs([psutil.Process(running.pid), *family] if family else [], timeout=scaled_s(20))
    for one in living:
        one.kill()
    running.wait(10)


def _logs(folder: Path) -> str:
    """The logs of the head and its agent."""
    files = [folder / "head.log", *folder.glob("session_2*/logs/dashboard_agent.*")]
    return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)
