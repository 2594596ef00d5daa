#!/usr/bin/env python3
"""Start or stop Ray with token authentication on the hosts of a file, the first of which is the head.

python scripts/cluster.py up hosts.txt [--run] [--setup 'source /shared/venv/bin/activate'] [--port 6379]
python scripts/cluster.py down hosts.txt [--run]

`down` is `ray stop`, which ends all of your Ray clusters on these hosts.
Prints the command for each host; with --run executes them over ssh, which must not ask for a password. A line of the
file is a host or user@host; what follows # is ignored. The token is read from RAY_AUTH_TOKEN, from the file
RAY_AUTH_TOKEN_PATH or from ~/.ray/auth_token, where `up --run` writes a new one if there is none; it goes to the hosts
through ssh's standard input and never appears in a command line.
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shlex import quote

HOST = re.compile(r"([\w.][\w.-]*@)?\w[\w.-]*")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
TAKE_TOKEN = "IFS= read -r RAY_AUTH_TOKEN && export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0"


def read_hosts(path: Path) -> list[str]:
    """The hosts of a file, the head first; SystemExit for none, for a duplicated one, and for what is no host."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read ({error}): name a text file with a host on each line") from None
    hosts = [host for line in text.splitlines() if (host := line.partition("#")[0].strip())]
    names = [host.rpartition("@")[2].lower() for host in hosts]
    if not hosts:
        raise SystemExit(f"{path} names no host: write one on each line, the head first")
    for host, name in zip(hosts, names, strict=True):
        if names.count(name) > 1 or not HOST.fullmatch(host):
            raise SystemExit(f"{path}: '{host}' is not a host that is there once: write host or user@host on a line")
    if len(hosts) > 1 and (names[0] == "localhost" or names[0].startswith("127.")):
        raise SystemExit(f"{path}: '{hosts[0]}' is another machine on every host: write the name by which all reach it")
    return hosts


def ray_commands(hosts: Sequence[str], action: str, *, port: int, setup: str) -> list[tuple[str, str]]:
    """Each host with what its shell runs: of `up` the head first, of `down` last."""
    prepared = f"{setup} && " if setup else ""
    if action == "down":
        return [(host, f"{prepared}ray stop") for host in reversed(hosts)]
    head = hosts[0].rpartition("@")[2]
    start = f"{TAKE_TOKEN} && {prepared}ray start"
    commands = [(hosts[0], f"{start} --head --port={port} --dashboard-host=127.0.0.1 --disable-usage-stats")]
    return commands + [(host, f"{start} --address={quote(head)}:{port} --disable-usage-stats") for host in hosts[1:]]


def auth_token() -> str:
    """The token of the environment or of its file, or a new one that is written there."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            print(f"wrote a new token to {path}")
        token = path.read_text().strip()
    except OSError as error:
        raise SystemExit(f"no token in {path} ({error}): set RAY_AUTH_TOKEN_PATH to a file of yours") from None
    if not token:
        raise SystemExit(f"{path} is empty: remove it to get a new token, or set RAY_AUTH_TOKEN")
    return token


def run_on(command: tuple[str, str], *, token: str, timeout_s: float) -> str:
    """Run a command on its host; returns what went wrong, "" for nothing."""
    host, text = command
    try:
        done = subprocess.run(
            [*SSH, host, text],
            input=f"{token}\n",
            capture_output=True,
            text=True,
            errors="replace",  # a host may write in another encoding
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{host} did not answer within {timeout_s:g} s"
    except OSError as error:
        return f"{host} cannot be reached: {error}"
    lines = (done.stderr or done.stdout).strip().splitlines() or [""]
    return f"{host} failed with exit code {done.returncode}: {lines[-1]}" if done.returncode else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a host failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("hosts", type=Path, help="file with a host on each line, the head first")
    parser.add_argument("--run", action="store_true", help="execute the commands over ssh")
    parser.add_argument("--setup", default="", help="shell command before ray's, e.g. to activate an environment")
    parser.add_argument("--port", type=int, default=6379, help="port of the head")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="seconds that a host may take")
    options = parser.parse_args(argv)
    if not (0 < options.port < 65536 and 0 < options.timeout_s < 1e6):
        parser.error("--port must be 1 to 65535, and --timeout-s above 0 and below 1e6")
    hosts = read_hosts(options.hosts)
    commands = ray_commands(hosts, options.action, port=options.port, setup=options.setup)
    for host, text in commands:
        print(f"ssh {quote(host)} {quote(text)}", flush=True)
    if not options.run:
        return 0
    start = partial(run_on, token=auth_token() if options.action == "up" else "", timeout_s=options.timeout_s)
    first = start(commands[0]) if options.action == "up" else ""
    with ThreadPoolExecutor(32) as pool:
        rest = [] if first else pool.map(start, commands[1:] if options.action == "up" else commands)
        problems = [problem for problem in (first, *rest) if problem]
    print("\n".join(problems), file=sys.stderr)
    if not problems and options.action == "up":
        print(
            f"{len(hosts)} hosts are up; RAY_AUTH_MODE=token RAY_ADDRESS={hosts[0].rpartition('@')[2]}:{options.port}"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
