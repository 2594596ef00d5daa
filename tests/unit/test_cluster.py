"""scripts/cluster.py on hosts behind a fake ssh, and the examples for SLURM and Kubernetes."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[2]
SSH = """#!/bin/bash
host="${@: -2:1}"
[ "$host" = latin ] && { printf 'H\\344tte\\n' >&2; exit 255; }
[ "$host" = broken ] && { echo "no route to host" >&2; exit 255; }
HOST="$host" bash -c "${@: -1}"
"""
RAY = """#!/bin/bash
echo "$HOST mode=$RAY_AUTH_MODE token=$RAY_AUTH_TOKEN: ray $*" >> "$CALLS"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the fake hosts were asked to do; their shell is this machine's."""
    for name, text in (("ssh", SSH), ("ray", RAY)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "secret" / "token"))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "calls"


def cluster(folder: Path, hosts: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "hosts.txt").write_text(hosts)
    action, *rest = arguments
    command = [sys.executable, str(ROOT / "scripts/cluster.py"), action, str(folder / "hosts.txt"), *rest]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ray_starts_with_one_token_on_all_hosts_and_stops(calls: Path, tmp_path: Path) -> None:
    hosts = "me@node0  # the head\n\nnode1\n"
    printed = cluster(tmp_path, hosts, "up")
    assert not calls.exists()
    done = cluster(tmp_path, hosts, "up", "--run", "--setup", "export SET=up", "--port", "7000")
    assert done.returncode == 0, done.stderr
    token_file = tmp_path / "secret" / "token"
    token = token_file.read_text()
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert token not in done.stdout + printed.stdout
    given = f"mode=token token={token}: ray start"
    assert calls.read_text().splitlines() == [
        f"me@node0 {given} --head --port=7000 --dashboard-host=127.0.0.1 --disable-usage-stats",
        f"node1 {given} --address=node0:7000 --disable-usage-stats",
    ]
    assert "RAY_ADDRESS=node0:7000" in done.stdout
    calls.unlink()
    assert cluster(tmp_path, hosts, "down", "--run").returncode == 0
    assert sorted(line.split()[0] for line in calls.read_text().splitlines()) == ["me@node0", "node1"]


def test_a_host_that_fails_is_named(calls: Path, tmp_path: Path) -> None:
    done = cluster(tmp_path, "node0\nbroken\nnode2", "up", "--run")
    assert done.returncode == 1
    assert done.stderr.strip() == "broken failed with exit code 255: no route to host"
    assert len(calls.read_text().splitlines()) == 2
    for action in ("up", "down"):
        done = cluster(tmp_path, "node0\nlatin\nbroken", action, "--run")
        assert "latin failed with exit code 255: H\ufffdtte" in done.stderr
        assert "broken failed with exit code 255: no route to host" in done.stderr
    assert "once" in cluster(tmp_path, "node0\nnode0", "up").stderr
    assert "names no host" in cluster(tmp_path, "# nothing", "up").stderr


def test_a_head_that_the_others_cannot_reach_by_its_name_and_a_missing_ssh_are_errors(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for head in ("localhost", "me@127.0.0.1"):
        assert f"'{head}' is another machine on every host" in cluster(tmp_path, f"{head}\nnode1", "up", "--run").stderr
    assert cluster(tmp_path, "localhost", "up").returncode == 0
    assert "--timeout-s above 0 and below" in cluster(tmp_path, "node0", "up", "--timeout-s", "inf").stderr
    monkeypatch.setenv("RAY_AUTH_TOKEN", " ")
    assert cluster(tmp_path, "node0", "up", "--run").returncode == 0
    assert "token= " not in calls.read_text()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    done = cluster(tmp_path, "node0\nnode1", "down", "--run")
    assert (done.returncode, done.stderr.count("cannot be reached")) == (1, 2)


def test_a_file_that_an_editor_began_with_a_mark_of_its_encoding_is_read(tmp_path: Path) -> None:
    printed = cluster(tmp_path, "\ufeffnode0\nnode1\n", "up")
    assert printed.stdout.startswith("ssh node0 "), printed.stderr


@pytest.mark.parametrize("host", ["me@", "node0:22", "ssh://node0", "-oProxyCommand=x", "::1", "me@node1\nNode1"])
def test_what_is_no_host_is_refused(host: str, tmp_path: Path) -> None:
    done = cluster(tmp_path, host, "up")
    assert (done.returncode, done.stdout) == (1, "")
    assert "write host or user@host on a line" in done.stderr


def test_files_that_cannot_be_read_and_wrong_numbers_are_refused(calls: Path, tmp_path: Path) -> None:
    for port in ("0", "99999999"):
        assert "--port must be 1 to 65535" in cluster(tmp_path, "node0", "up", "--port", port).stderr
    token = tmp_path / "secret" / "token"
    token.mkdir(parents=True)
    assert f"no token in {token}" in (done := cluster(tmp_path, "node0", "up", "--run")).stderr
    token.rmdir()
    token.write_text("\n")
    assert f"{token} is empty" in cluster(tmp_path, "node0", "up", "--run").stderr
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary", "."):
        command = [sys.executable, str(ROOT / "scripts/cluster.py"), "up", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "name a text file with a host on each line" in done.stderr
        assert "Traceback" not in done.stderr
    assert not calls.exists()


SCRIPTS = sorted(path for folder in ("", "scripts", "docs/cluster") for path in (ROOT / folder).glob("*.sh"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_script(path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck, of the dev extra")
    command = [shellcheck, "--external-sources", f"--source-path={ROOT}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_has_known_options() -> None:
    path = ROOT / "docs/cluster/slurm.sh"
    options = {
        line.split()[1].partition("=")[0] for line in path.read_text().splitlines() if line.startswith("#SBATCH")
    }
    per_node = {"--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--exclusive"}
    assert options == {"--job-name", "--nodes", "--time", "--signal", *per_node}


SLURM = {
    "scontrol": "echo node0",
    "srun": "",
    "ray": "",
    "python": """case "$1" in
  -c) echo token ;;
  -m) trap 'echo saved; exit "${STATUS:-143}"' TERM; echo started; sleep "${SLEEPS:-60}" & wait; exit "$STATUS" ;;
esac""",
}


@pytest.mark.parametrize(("has_signal", "status"), [(True, 143), (True, 0), (False, 0), (False, 2)])
def test_the_slurm_script_hands_its_signal_to_the_job_and_ends_as_that_does(
    tmp_path: Path, has_signal: bool, status: int
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'PATH="{tmp_path}:$PATH"')
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "SLURM_JOB_NODELIST": "node0", "STATUS": str(status)}
    environment |= {} if has_signal else {"SLEEPS": "0"}
    command = ["bash", str(ROOT / "docs/cluster/slurm.sh")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "started\n"
        if has_signal:
            script.send_signal(signal.SIGTERM)
            assert script.stdout.readline() == "saved\n"
        assert script.wait(scaled_s(20)) == status


def only(required: str, **properties: Any) -> dict[str, Any]:
    keys = required.split()
    return {"type": "object", "required": keys, "properties": properties, "additionalProperties": False}


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
POD = only("spec", spec=only("containers", containers={"type": "array", "minItems": 1}, volumes={"type": "array"}))
PARAMS = {"type": "object", "additionalProperties": TEXT}
HEAD = only("rayStartParams template", rayStartParams=PARAMS, template=POD)
NUMBERS = {"replicas": WHOLE, "minReplicas": WHOLE, "maxReplicas": WHOLE}
WORKERS = only("groupName template", groupName=TEXT, rayStartParams=PARAMS, template=POD, **NUMBERS)
RAY_CLUSTER = only(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=only("mode", mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_JOB = only(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=only("name", name=TEXT),
    spec=only(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        backoffLimit=WHOLE,
        rayClusterSpec=RAY_CLUSTER,
    ),
)
"""What the example uses of the schema of RayJob in KubeRay's ray.io_rayjobs.yaml, which has authOptions since 1.5.1."""


def test_the_ray_job_follows_the_schema_of_kuberay() -> None:
    job = yaml.safe_load((ROOT / "docs/cluster/rayjob.yaml").read_text())
    Draft202012Validator(RAY_JOB).validate(job)
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
