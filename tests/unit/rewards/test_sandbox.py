"""Untrusted programs: what they try must fail, cost no more than their limits and leave nothing behind."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from rlsys.rewards import code
from rlsys.rewards.pool.pool import RewardItem, RewardPool
from rlsys.rewards.registry import check_sources
from rlsys.rewards.sandbox import run as sandbox
from rlsys.rewards.sandbox.run import (
    GUARANTEES,
    ISOLATION,
    SandboxError,
    SandboxLimits,
    SandboxRun,
    available_guarantees,
)
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s

NEEDS_KERNEL = pytest.mark.skipif(
    not set(available_guarantees()) >= set(GUARANTEES), reason="this kernel offers no Landlock or no seccomp"
)

pytestmark = NEEDS_KERNEL


def run_python(source: str, *, limits: SandboxLimits | None = None, **more: Any) -> SandboxRun:
    """Run a program that has all the time it wants, where a test gives no limits."""
    return sandbox.run_python(source, limits=limits or SandboxLimits(wall_s=scaled_s(30)), **more)


SUCCESS = "ESCAPED"
CALL = "import ctypes, os; l = ctypes.CDLL(None)\n"
FILL = "import os\nfor i in range(20):\n  f = os.open(str(i), 66); "
ESCAPES = {
    "read a file": "open({secret!r}).read()",
    "read a system file": "open('/etc/passwd').read()",
    "read through a symlink": "import os; os.symlink({secret!r}, 'l'); open('l').read()",
    "read through a hard link": "import os; os.link({secret!r}, 'l'); open('l').read()",
    "read through dot-dot": "open('../' * 20 + {secret!r}.lstrip('/')).read()",
    "list a folder": "import os; os.listdir({folder!r})",
    "list the root": "import os; os.listdir('/')",
    "write a file": "open({folder!r} + '/new', 'w').write('x')",
    "overwrite a file": "open({secret!r}, 'w').write('x')",
    "append to a file": "open({secret!r}, 'a').write('x')",
    "truncate a file": "import os; os.truncate({secret!r}, 0); assert os.stat({secret!r}).st_size == 0",
    "delete a file": "import os; os.remove({secret!r})",
    "rename a file": "import os; os.rename({secret!r}, {secret!r} + '2')",
    "write to tmp": "open('/tmp/rlsys-escape', 'w')",
    "write to shared memory": "open('/dev/shm/rlsys-escape', 'w')",
    "write to the interpreter": "import os; open(os.__file__, 'a').write('#')",
    "make a folder outside": "import os; os.mkdir({folder!r} + '/d')",
    "make a pipe outside": "import os; os.mkfifo({folder!r} + '/p')",
    "make a device": "import os, stat; os.mknod('d', 0o600 | stat.S_IFCHR, os.makedev(1, 1))",
    "open an internet socket": "import socket; socket.socket()",
    "open an IPv6 socket": "import socket; socket.socket(socket.AF_INET6)",
    "open a local socket": "import socket; socket.socket(socket.AF_UNIX)",
    "open a netlink socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "fetch a page": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
    "set up io_uring": "import ctypes; l = ctypes.CDLL(None); assert l.syscall(425, 4, bytes(120)) >= 0",
    "fork": "import os; os.fork()",
    "vfork and execute": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "os.system": "import os; assert os.system('true') == 0",
    "spawn by multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
    "clone by hand": "import ctypes; assert ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0",
    "clone3 by hand": "import ctypes; assert ctypes.CDLL(None).syscall(435, bytes(88), 88) >= 0",
    "kill the grader": "import os; os.kill(os.getppid(), 9)",
    "kill everybody": "import os; os.kill(-1, 9)",
    "kill the group of the grader": "import os; os.killpg(os.getpgid(os.getppid()), 9)",
    "queue a signal": "import ctypes, os; assert ctypes.CDLL(None).sigqueue(os.getppid(), 9, 0) == 0",
    "signal through a pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "leave the session": "import os; os.setsid()",
    "trace the grader": "import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "read the grader's memory": "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)",
    "read the grader's environment": "import os; open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    "read the grader's files": "import os; os.listdir(f'/proc/{{os.getppid()}}/fd')",
    "read memory by system call": (
        "import ctypes, os; assert ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) >= 0"
    ),
    "raise its limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
    "raise its limits by prlimit": "import resource as r; r.prlimit(0, r.RLIMIT_CPU, (99, 99))",
    "outlive the grader": "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "become another user": "import os; os.setuid(12345); os.fork()",
    "new namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'.', b'tmpfs', 0, 0) == 0",
    "change the root": "import os; os.chroot('.')",
    "shared memory segment": "import ctypes; assert ctypes.CDLL(None).shmget(1234, 1 << 20, 0o1600) >= 0",
    "memfd": "import os; os.memfd_create('x')",
    "memfd without a mapping": CALL + "assert l.syscall(447, 0) >= 0",
    "see shared memory": CALL + "assert l.shmctl(0, 14, ctypes.create_string_buffer(256)) >= 0",
    "attach shared memory": CALL + "l.shmat.restype = ctypes.c_long; assert l.shmat(0, None, 0) > 0",
    "see semaphores": CALL + "assert l.semctl(0, 0, 19, ctypes.create_string_buffer(256)) >= 0",
    "open a message queue": CALL + "assert l.msgget(1234, 0o1600) >= 0",
    "see message queues": CALL + "assert l.msgctl(0, 12, ctypes.create_string_buffer(256)) >= 0",
    "open a POSIX queue": CALL + "assert l.mq_open(b'/rlsys', 0o102, 0o600, None) >= 0",
    "datagrams by a socket pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "change the mode of a file": "import os; os.chmod({secret!r}, 0o777)",
    "change the times of a file": "import os; os.utime({secret!r}, (0, 0))",
    "set an attribute of a file": "import os; os.setxattr({secret!r}, 'user.x', b'1')",
    "change the owner of its output": "import os; os.fchown(1, 12345, 12345)",
    "disk by unlinked files": FILL + "os.write(f, b'x' * (7 << 20)); os.unlink(str(i))",
    "disk by reserved space": FILL + "os.posix_fallocate(f, 0, 7 << 20)",
    "disk by many large files": FILL + "os.write(f, b'x' * (7 << 20)); os.close(f)",
    "keyring": "import ctypes; assert ctypes.CDLL(None).syscall(250, 0, -3, 1) >= 0",
    "eval with subclasses": (
        "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen' or c.__name__ == '_wrap_close']"
        "[0].__init__.__globals__['system']('true') and 1 / 0; import os; os.fork()"
    ),
    "poisoned sympy text": "eval(\"__import__('os').fork()\")",
    "patch the grader": "import sys; sys.modules['rlsys.rewards.code'].same_output = lambda *_: True",
    "import the grader": "import rlsys.rewards.code",
    "inherited descriptors": "import os; assert any(os.read(fd, 1) for fd in range(3, 64))",
    "10 GB of memory": "x = bytearray(10 << 30); x[-1] = 1",
    "memory by many pieces": "x = [bytearray(1 << 20) for _ in range(10000)]",
    "memory by mapping": "import mmap; x = [mmap.mmap(-1, 1 << 28) for _ in range(40)]",
    "a large file": "f = open('big', 'wb'); f.write(b'x' * (100 << 20)); f.close()",
    "many files": "for i in range(100000): open(str(i), 'wb').write(b'x' * (4 << 20))",
    "many open files": "f = [open('main.py') for _ in range(1000)]",
    "endless output": "while True: print('x' * 4096)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 4096)",
    "endless loop": "while True: pass",
    "endless sleep": "import time; time.sleep(1000)",
    "endless sleep without output": "import os, time; os.close(1); os.close(2); time.sleep(1000)",
    "endless regex": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "huge power": "7 ** 10 ** 9",
    "thread bomb": (
        "import threading, time; threading.stack_size(32768)\n"
        "for _ in range(5000): threading.Thread(target=time.sleep, args=(9,)).start()"
    ),
    "stop itself": "import os; os.kill(os.getpid(), 19)",
    "ignore signals": (
        "import signal, time\nfor s in range(1, 32):\n  if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
        "time.sleep(100)"
    ),
    "crash": "import ctypes; ctypes.string_at(0)",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
}  # fmt: skip


UNSEEN = {
    "metadata of a file": "os.stat({secret!r})",
    "whether a file exists": "assert os.path.exists({folder!r})",
    "processes": "assert os.path.exists('/proc/1')",
    "mounts": "assert os.path.exists('/proc/self/mounts')",
    "sockets by path": "assert os.path.exists('/run') or os.path.exists('/tmp/.X11-unix')",
    "empty files": "[open(str(i), 'w').close() for i in range(20000)]",
}


@pytest.mark.skipif(ISOLATION not in available_guarantees(), reason="this container may not make namespaces")
@pytest.mark.parametrize("name", UNSEEN)
def test_with_namespaces_the_outside_is_not_even_seen(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x7y8z9")
    attempt = UNSEEN[name].format(secret=str(secret), folder=str(tmp_path))
    run = run_python(f"import os\n{attempt}\nprint({SUCCESS!r})", require=[*GUARANTEES, ISOLATION])
    assert run.status == "failed", run
    assert SUCCESS not in run.stdout
    assert any(error in run.stderr for error in ("FileNotFoundError", "AssertionError", "No space left")), run


def test_without_namespaces_programs_run_and_the_folder_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jail, original = tmp_path / "jail.py", sandbox.JAIL.read_text()
    jail.write_text(original.replace("libc.unshare(", "(lambda flags: -1)("))
    monkeypatch.setattr(sandbox, "JAIL", jail)
    assert run_python("open('note', 'w').write('x'); print(open('note').read())").stdout == "x\n"
    source = "import time\nfor i in range(9): open(str(i), 'wb').write(b'x' * (7 << 20))\ntime.sleep(1000)"
    assert run_python(source).status == "disk limit"
    with pytest.raises(SandboxError, match="isolation"):
        run_python("print(1)", require=[ISOLATION])
    check_sources(["apps", "openai/gsm8k"])
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("no namespaces in this container")
    jail.write_text(original.replace("(444, 445, 446)", "(9444, 9445, 9446)"))
    with pytest.raises(ConfigError, match="programs are not run here: files cannot be restricted"):
        check_sources(["apps"])
    check_sources(["openai/gsm8k"])


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_fails_within_its_limits(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x7y8z9")
    attempt = ESCAPES[name].format(secret=str(secret), folder=str(tmp_path))
    limits = SandboxLimits(wall_s=scaled_s(0.6), cpu_s=1.0, memory_bytes=512 << 20)
    start = time.monotonic()
    run = run_python(f"{attempt}\nprint({SUCCESS!r})", limits=limits)
    assert time.monotonic() - start < limits.wall_s + scaled_s(20.0)
    assert run.status != "exit", run
    assert not any(broken in run.stderr for broken in ("SyntaxError", "NameError", "TypeError")), run
    assert SUCCESS not in run.stdout
    assert len(run.stdout) + len(run.stderr) <= 2 * limits.output_bytes
    assert secret.read_text() == "x7y8z9"
    assert os.listdir(tmp_path) == ["secret"]
    assert not Path("/tmp/rlsys-escape").exists()
    assert not Path("/dev/shm/rlsys-escape").exists()


def test_a_program_that_has_used_its_cpu_time_met_a_time_limit() -> None:
    assert run_python("while True: pass", limits=SandboxLimits(wall_s=scaled_s(60), cpu_s=1.0)).status == "time limit"


def test_honest_programs_run_as_usual() -> None:
    source = """
import collections, heapq, json, math, random, re, sys, threading
from decimal import Decimal
sys.setrecursionlimit(10000)
threading.stack_size(1 << 26)
def work():
    lines = sys.stdin.read().split()
    with open("note.txt", "w") as f: f.write(lines[0])
    print(open("note.txt").read(), sum(map(int, lines[1:])), list({"b", "a", "c"}))
thread = threading.Thread(target=work); thread.start(); thread.join()
"""
    runs = [run_python(source, stdin="sum\n1 2 3\n") for _ in range(2)]
    assert runs[0].status == "exit", runs[0]
    assert runs[0].stdout.startswith("sum 6 ")
    assert runs[0].stdout == runs[1].stdout  # sets of texts have the same order in every run


def test_large_input_and_output_pass() -> None:
    text = "y" * 900_000
    run = run_python("print(input())", stdin=text)
    assert run.stdout == text + "\n"
    assert run_python("print(1)", stdin=text).stdout == "1\n"


def test_nothing_is_left_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_python("open('left', 'w').write('x')\nwhile True: pass", limits=SandboxLimits(wall_s=0.2))
    assert os.listdir(tmp_path) == []


def test_without_what_is_required_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jail, original = tmp_path / "jail.py", sandbox.JAIL.read_text()
    jail.write_text(original.replace('"x86_64": 0x', '"other": 0x').replace('"aarch64": 0x', '"more": 0x'))
    monkeypatch.setattr(sandbox, "JAIL", jail)
    with pytest.raises(SandboxError, match="network,processes"):
        run_python("open('ran', 'w')")
    assert run_python("print(1)", require=["files", "privileges"]).stdout == "1\n"
    jail.write_text(original.replace("(444, 445, 446)", "(9444, 9445, 9446)"))
    with pytest.raises(SandboxError, match="cannot restrict files"):
        run_python("open('ran', 'w')")
    with pytest.raises(ValueError, match="dreams"):
        run_python("print(1)", require=["dreams"])


PASSES = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TRUTH = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


@pytest.mark.parametrize(
    ("solution", "share", "verdict"),
    [
        (PASSES, 1.0, "pass"),
        ("I think:\n```python\nprint(9)\n```\nno, rather\n" + PASSES, 1.0, "pass"),
        ("print(sum(map(int, input().split())))", 1.0, "pass"),
        ("```\nprint(3)\n```", 0.5, "wrong answer"),
        ("```python\nprint(1 / 0)\n```", 0.0, "failed: ZeroDivisionError: division by zero"),
        ("```python\nwhile True: pass\n```", 0.0, "time limit"),
        ("```python\nwhile True: print('x' * 10000)\n```", 0.0, "output limit"),
        ("no code at all", 0.0, "failed: SyntaxError: invalid syntax"),
        ("", 0.0, "wrong answer"),
        ("```python\nprint('\ud800')\n```", 0.0, None),
    ],
)
def test_programs_are_graded_by_their_output(solution: str, share: float, verdict: str | None) -> None:
    timeout_s = scaled_s(0.4 if "while True" in solution else 20)
    result = code.compute_score(solution, TRUTH, timeout_s=timeout_s)
    assert (result["score"], result["acc"]) == (share, float(share == 1.0))
    assert verdict is None or result["verdict"] == verdict
    all_or_nothing = code.compute_score(solution, TRUTH, timeout_s=timeout_s, continuous=False)
    assert all_or_nothing["score"] == float(share == 1.0)


def test_functions_are_graded_by_their_value() -> None:
    truth = '{"fn_name": "add", "inputs": [[1, 2], "[3]\\n[4]"], "outputs": [3, [[3, 4]]]}'
    plain = "```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```"
    method = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
    assert code.compute_score(plain, truth)["score"] == 1.0
    assert code.compute_score(method, truth)["score"] == 1.0
    assert code.compute_score("def add(a, b): return a - b", truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("output", "wanted", "same"),
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.3333333", "0.33333331", True),
        ("0.333", "0.33333331", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("Yes", "yes", False),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_word_by_word(output: str, wanted: str, same: bool) -> None:
    assert code.same_output(output, wanted) is same


@pytest.mark.parametrize("truth", ["", "[]", {"inputs": []}, {"inputs": ["1"], "outputs": []}, "{", 3, None])
def test_a_malformed_ground_truth_is_an_error_not_a_zero(truth: object) -> None:
    with pytest.raises(ValueError, match=r"ground truth|Expecting"):
        code.compute_score(PASSES, truth)


def test_in_the_pool_a_hostile_program_changes_no_neighbours_score() -> None:
    truth = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    hostile = [
        f"```python\n{ESCAPES[n].format(secret='/etc/passwd', folder='/tmp')}\n```" for n in list(ESCAPES)[:56:8]
    ]
    items = [RewardItem("apps", text, truth) for bad in hostile for text in (PASSES, bad)]
    with RewardPool(num_workers=2, timeout_s=scaled_s(20)) as pool:
        results = pool.score(items)
    assert [r.score for r in results] == [1.0, 0.0] * len(hostile)
    assert {r.status for r in results} == {"ok"}
