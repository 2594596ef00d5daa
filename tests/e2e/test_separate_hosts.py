"""Jobs on two hosts that share neither network, names nor a folder: namespaces of this machine, which needs root.

The own name of each is 127.0.1.1 to it, as on Debian, and the other does not know it, as among pods of Kubernetes.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from tests.timing import scaled_s, wait_until

pytestmark = pytest.mark.slow
PORT = 6379
JOB = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.validate_weight=true",
)
IN_HOST = (
    'hostname "$0" && mount --bind "$HOSTS" /etc/hosts && { [ -z "$HIDDEN" ] || mount -t tmpfs none "$HIDDEN"; } && '
)
"""Starts a program in a host: its own name and /etc/hosts, and an empty folder where it must not see one."""
ASK = f"import ray; ray.init('10.9.0.1:{PORT}', logging_level='ERROR'); print(len(ray.nodes()))"


@dataclass
class Hosts:
    """Two hosts, 10.9.0.1 and 10.9.0.2, the second of which has a `hidden` folder of its own."""

    folder: Path
    environment: dict[str, str]

    @property
    def hidden(self) -> Path:
        return self.folder / "hidden"

    def start(self, number: int, *command: str) -> subprocess.Popen[str]:
        (self.folder / f"hosts{number}").write_text(f"127.0.0.1 localhost\n127.0.1.1 host-{number}\n")
        own = {"HOSTS": str(self.folder / f"hosts{number}"), "HIDDEN": str(self.hidden) if number else ""}
        entered = ["ip", "netns", "exec", f"{self.folder.name}-{number}", "unshare", "-u", "-m", "sh", "-c"]
        return subprocess.Popen(
            [*entered, f'{IN_HOST} exec "$@"', f"host-{number}", *command],
            env=self.environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str) -> tuple[int, str]:
        """The exit code and the output of a program on the first host."""
        with self.start(0, sys.executable, *command) as process:
            output, _ = process.communicate(timeout=scaled_s(200))
        return process.returncode, output


def ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        pytest.skip("needs root, iproute2 and unshare")
    folder = tmp_path_factory.mktemp("rl")
    temporary = Path("/tmp") / f"r{secrets.token_hex(3)}"  # short: Ray puts sockets there
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(temporary)}
    both = Hosts(folder, {**os.environ, **token, "PYTHONPATH": os.getcwd(), "RAY_ADDRESS": ""})
    names, rays = [f"{folder.name}-{number}" for number in range(2)], list[subprocess.Popen[str]]()
    both.hidden.mkdir()
    temporary.mkdir()
    try:
        try:
            ip(*(f"netns add {name}" for name in names))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces: {error.stderr!r}")
        ip(f"link add v{temporary.name}0 type veth peer name v{temporary.name}1")
        for number, name in enumerate(names):
            link = f"v{temporary.name}{number}"
            ip(f"link set {link} netns {name}", f"-n {name} addr add 10.9.0.{number + 1}/24 dev {link}")
            ip(f"-n {name} link set {link} up", f"-n {name} link set lo up")
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address=10.9.0.{number + 1}"]
            where = f"--address=10.9.0.1:{PORT}" if number else f"--head --port={PORT} --include-dashboard=false"
            rays.append(both.start(number, *ray, *where.split(), "--num-cpus=1", "--disable-usage-stats", "--block"))
            assert wait_until(lambda count=number + 1: both.run("-c", ASK) == (0, f"{count}\n"), 60)
        yield both
    finally:
        for ray in rays:
            os.killpg(ray.pid, signal.SIGKILL)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)
        shutil.rmtree(temporary, ignore_errors=True)


def job(hosts: Hosts, toy: Toy, out: Path, *more: str) -> tuple[int, str]:
    arguments: Sequence[str] = toy.overrides(out, *JOB, *more)
    return hosts.run("-m", "trainer.main_ppo", *arguments, f"ray_kwargs.ray_init.address=10.9.0.1:{PORT}")


@pytest.mark.parametrize("layout", ["trainer.nnodes=2", "trainer.rollout_workers=1"])
def test_hosts_that_do_not_know_each_others_names_train_and_get_weights(
    hosts: Hosts, toy: Toy, tmp_path: Path, layout: str
) -> None:
    status, output = job(hosts, toy, tmp_path / "out", layout)
    assert status == 0, output
    assert (tmp_path / "out" / "global_step_2").is_dir()


def test_a_host_that_does_not_see_the_folder_of_the_run_ends_it_before_it_trains(hosts: Hosts, toy: Toy) -> None:
    status, output = job(hosts, toy, hosts.hidden / "out", "trainer.nnodes=2")
    assert (status, "actor rank 1 does not see it; share it" in output) == (2, True), output
