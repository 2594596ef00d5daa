"""The environment report: real runs, and each verdict from made-up circumstances."""

import compileall
import contextlib
import importlib.util
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlsys.rollout.versions import VersionTable
from tests.timing import scaled_s
from trainer import machine

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "doctor.py"


@pytest.fixture(scope="module")
def doctor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rlsys_doctor", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_plain_report_of_this_machine() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=scaled_s(60), check=False)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith("fail")]
    assert all(line.split()[1] == "ray" for line in failed), failed
    assert done.returncode == bool(failed)
    assert lines[-1].startswith("Not ready" if failed else "Ready")
    assert any(line.startswith("ok    packages     torch ") for line in lines)
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_json_report_has_a_verdict_an_item() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json"], capture_output=True, text=True, timeout=scaled_s(60), check=False
    )
    findings = json.loads(done.stdout)
    assert {f["section"] for f in findings} == {"machine", "gpu", "packages", "extras", "engines", "ray", "directories"}
    assert {f["verdict"] for f in findings} <= {"ok", "note", "warn", "fail"}
    assert all(f["advice"] for f in findings if f["verdict"] != "ok")


def test_terminal_gets_a_table() -> None:
    main, side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, SCRIPT], stdout=side, env={**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    )
    os.close(side)
    shown = b""
    try:
        while data := os.read(main, 65536):
            shown += data
    except OSError:  # the terminal is gone with its last process
        pass
    os.close(main)
    child.wait(timeout=scaled_s(30))
    assert b"\x1b[32mok" in shown
    assert b"Ready" in shown or b"Not ready" in shown


def test_missing_and_unfit_packages_fail(doctor: ModuleType) -> None:
    findings = list(doctor.package_findings(["numpy>=2.0", "numpy>=99", "no-such-package>=1"]))
    assert [f.verdict for f in findings] == ["ok", "fail", "fail"]
    assert findings[1].advice == "pip install 'numpy>=99'"
    assert findings[2].value == "not installed, needs >=1"


def test_packages_without_bytecode_are_compiled_by_every_process(
    doctor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fresh"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (warning,) = doctor.bytecode_findings("fresh")
    assert (warning.verdict, warning.value) == ("warn", "fresh has none, and none is written")
    assert warning.advice.startswith("unset PYTHONDONTWRITEBYTECODE, or run ")
    assert f"-m compileall -q {tmp_path}:" in warning.advice
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    assert [finding.verdict for finding in doctor.bytecode_findings("fresh")] == ["note"]
    compileall.compile_dir(tmp_path, quiet=1)
    assert [finding.verdict for finding in doctor.bytecode_findings("fresh")] == ["ok"]
    assert not list(doctor.bytecode_findings("no_such_package"))


def test_a_missing_extra_is_a_note_that_says_what_it_gives(doctor: ModuleType) -> None:
    (finding,) = doctor.extra_findings({"wandb": ["no-such-package>=1"]})
    assert (finding.verdict, finding.value) == ("note", "not installed")
    assert finding.advice == (
        "for Weights & Biases in trainer.logger: pip install -e '.[wandb]' (missing: no-such-package)"
    )


def test_every_extra_of_the_project_is_described(doctor: ModuleType) -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == set(doctor.EXTRAS)


def test_old_python_fails(doctor: ModuleType) -> None:
    finding = next(doctor.python_findings(">=99"))
    assert finding.verdict == "fail"
    assert "RLSYS_PYTHON" in finding.advice


def test_memory_is_what_a_container_may_have_by_either_version_of_cgroups(
    doctor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.CONTAINER_LIMITS == machine.CONTAINER_LIMITS
    whole, file = doctor.memory_bytes()[0], tmp_path / "limit"
    for places in ((str(file), "/none"), ("/none", str(file))):
        monkeypatch.setattr(doctor, "CONTAINER_LIMITS", places)
        for limit, expected in (("1048576", 1 << 20), ("max", whole), ("9223372036854771712", whole)):
            file.write_text(f"{limit}\n")
            assert doctor.memory_bytes()[0] == expected


def test_missing_shared_memory_fails(doctor: ModuleType, tmp_path: Path) -> None:
    assert doctor.shm_finding(tmp_path / "none").verdict == "fail"
    assert doctor.shm_finding(tmp_path).value.endswith("free")


def listeners(doctor: ModuleType, *addresses: str) -> list[object]:
    gcs = [doctor.Listener("s1", "gcs", address, 6379) for address in addresses]
    return [*gcs, doctor.Listener("s1", "dashboard", "127.0.0.1", 8265)]


@pytest.mark.parametrize(
    ("address", "token", "verdict"),
    [
        ("127.0.0.1", False, "ok"),
        ("0.0.0.0", True, "ok"),
        ("0.0.0.0", False, "fail"),
        ("::", False, "fail"),
        ("192.0.2.2", None, "warn"),
    ],
)
def test_exposure_of_a_ray_head(doctor: ModuleType, address: str, token: bool | None, verdict: str) -> None:
    findings = list(doctor.ray_findings(listeners(doctor, address), lambda _: token))
    assert findings[-1].verdict == verdict


def test_each_cluster_of_a_shared_machine_is_judged_separately(doctor: ModuleType) -> None:
    both = [*listeners(doctor, "0.0.0.0"), doctor.Listener("s2", "gcs", "127.0.0.1", 7000)]
    findings = list(doctor.ray_findings(both, lambda _: False))
    assert [f.verdict for f in findings] == ["fail", "ok"]


def test_no_ray_is_fine_and_an_address_is_printed(doctor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    findings = list(doctor.ray_findings([], lambda _: None))
    assert [(f.name, f.verdict) for f in findings] == [("RAY_ADDRESS", "note"), ("head", "ok")]


@pytest.mark.parametrize(
    ("status", "body", "asks"), [(401, b"", True), (200, b'{"ray_version": "2.60.0"}', False), (404, b"", None)]
)
def test_asking_a_dashboard(doctor: ModuleType, status: int, body: bytes, asks: bool | None) -> None:
    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Dashboard)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        listener = doctor.Listener("s1", "dashboard", "0.0.0.0", server.server_port)
        assert doctor.dashboard_asks_for_token(listener) is asks
    finally:
        server.shutdown()
        server.server_close()
    assert doctor.dashboard_asks_for_token(listener) is None


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("0.0.0.0", socket.AF_INET)])
def test_listening_sockets_are_read_from_proc(doctor: ModuleType, host: str, family: int) -> None:
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        inode = str(os.fstat(server.fileno()).st_ino)
        assert doctor._listening(Path("/proc/net/tcp"))[inode] == (host, server.getsockname()[1])


def test_addresses_of_the_kernel(doctor: ModuleType) -> None:
    assert doctor._address("0100007F") == "127.0.0.1"
    assert doctor._address("00000000000000000000000001000000") == "::1"
    assert doctor._address("0000000000000000FFFF00000100007F") == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "verdict"), [("token", "ok"), ("disabled", "fail")])
def test_a_real_ray_head_open_to_the_network(tmp_path: Path, mode: str, verdict: str) -> None:
    """Ray's control service listens on every address; only the token protects it."""
    temp = Path(f"/tmp/rlsys_doctor_{os.getpid()}_{mode}")
    ports = free_ports(5)
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--head",
        "--block",
        "--num-cpus=1",
        f"--temp-dir={temp}",
    ]
    command += [f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}"]
    command += [f"--dashboard-agent-listen-port={ports[3]}", "--disable-usage-stats"]
    command += [f"--min-worker-port={ports[4]}", f"--max-worker-port={ports[4] + 50}"]
    token = {"RAY_AUTH_TOKEN": "a-token-for-this-test-only-0123456789"} if mode == "token" else {}
    env = {**os.environ, "RAY_AUTH_MODE": mode, **token}
    head = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for_port(ports[1])
        done = subprocess.run(
            [sys.executable, SCRIPT, "--json"], capture_output=True, text=True, timeout=scaled_s(60), check=False
        )
        (finding,) = [f for f in json.loads(done.stdout) if f["name"] == "head" and f":{ports[0]}" in f["value"]]
        assert finding["verdict"] == verdict, finding
    finally:
        end_cluster(head, str(temp))
        shutil.rmtree(temp, ignore_errors=True)


def end_cluster(head: subprocess.Popen[bytes], temp: str) -> None:
    """End the head and then whatever still runs with this cluster's own directory in its command line."""
    head.kill()
    head.wait(timeout=scaled_s(30))
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit() and int(directory.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{temp}/".encode() in (directory / "cmdline").read_bytes():
                    os.kill(int(directory.name), signal.SIGKILL)


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for_port(port: int) -> None:
    end = time.monotonic() + scaled_s(60)
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise TimeoutError(f"nothing listens on {port}")


def test_the_doctor_says_which_adapter_serves_what_is_installed(
    doctor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"vllm": "0.26.0", "sglang": "0.4.6"}

    def installed(table: VersionTable[Any]) -> str | None:
        return here.get(table.distributions[0])

    monkeypatch.setattr(VersionTable, "installed", installed)
    vllm, sglang = doctor.engine_findings()
    assert (vllm.verdict, sglang.verdict) == ("ok", "warn")
    assert vllm.value.startswith("0.26.0 by the adapter of >=0.26,<0.31")
    assert "rollout.name=sglang_remote" in sglang.advice
    here |= {"vllm": "0.1.0"}
    del here["sglang"]
    vllm, sglang = doctor.engine_findings()
    assert (vllm.verdict, sglang.verdict) == ("warn", "note")
    assert ">=0.26,<0.31" in vllm.advice
    assert ">=0.8.5,<0.10.1" not in vllm.advice
