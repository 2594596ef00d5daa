"""The reward pool against graders that hang, fork, print, exit, crash and lie."""

import bdb
import fcntl
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlsys.rewards.pool.children import STALLED_S
from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool, RewardResult, reward_metrics
from rlsys.utils.errors import ConfigError, DeadlineError
from tests.timing import scaled_s, wait_until

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 0.6

FAULTS = """
import ctypes, os, signal, socket, sys, time, threading
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, note=""):
    fault = globals().get("fault_" + solution_str)
    return fault(ground_truth) if fault else float(solution_str)

def fault_sleep(_): time.sleep(1000)
def fault_loop(_):
    while True: pass
def fault_c_loop(_): return pow(7, 10 ** 9)
def fault_regex(_):
    import re; return re.match(r"(a+)+$", "a" * 60 + "b") is not None
def fault_block_signals(_):
    for s in range(1, 32):
        if s not in (signal.SIGKILL, signal.SIGSTOP): signal.signal(s, signal.SIG_IGN)
    time.sleep(1000)
def fault_fork(marker):
    if os.fork() == 0:
        Path(marker).write_text(str(os.getpid())); time.sleep(1000)
    time.sleep(1000)
def fault_daemon(marker):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(marker).write_text(str(os.getpid())); time.sleep(1000)
        os._exit(0)
    time.sleep(1000)
def fault_stdout(_):
    while True: print("x" * 1000)
def fault_stderr(_):
    while True: sys.stderr.write("x" * 1000)
def fault_stop(_): os.kill(os.getpid(), signal.SIGSTOP)
def fault_exit(_): os._exit(3)
def fault_exit_zero(_): os._exit(0)
def fault_sys_exit(_): sys.exit(4)
def fault_interrupt(_): raise KeyboardInterrupt
def fault_segv(_): ctypes.string_at(0)
def fault_abort(_): print("about to abort"); os.abort()
def fault_kill(_): os.kill(os.getpid(), signal.SIGKILL)
def fault_close_fds(_): os.closerange(0, 100)
def fault_garbage(_):
    for fd in range(3, 400):
        try: os.write(fd, b"garbage that is no frame at all")
        except OSError: pass
    return 1.0
def fault_raise(_): raise ValueError("no such answer")
def fault_recursion(_): return fault_recursion(_)
def fault_memory(_): return bytearray(1 << 50)
def fault_nan(_): return float("nan")
def fault_inf(_): return {"score": float("inf")}
def fault_large(_): return 1e39
def fault_none(_): return None
def fault_text(_): return "1.0"
def fault_no_score(_): return {"acc": 1}
def fault_huge_extra(_): return {"score": 1, "log": "x" * (2 << 20)}
def fault_late(_): raise TimeoutError("the judge did not answer")
"""

TIMEOUTS = ["sleep", "loop", "c_loop", "regex", "block_signals", "stdout", "stderr", "stop", "late"]
ERRORS = [
    "exit", "exit_zero", "sys_exit", "interrupt", "segv", "abort", "kill", "close_fds", "garbage", "raise", "recursion",
    "memory", "nan", "inf", "large", "none", "text", "no_score", "huge_extra",
]  # fmt: skip


@pytest.fixture(scope="module")
def grader_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("graders")
    numbers = iter(range(1000))

    def write(source: str) -> str:
        path = folder / f"grader_{next(numbers)}.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture(scope="module")
def faults(grader_file: Callable[[str], str]) -> Iterator[RewardPool]:
    with RewardPool(Grader(path=grader_file(FAULTS)), num_workers=2, timeout_s=scaled_s(TIMEOUT_S)) as pool:
        pool.start()
        yield pool


def item(solution: str, ground_truth: object = None) -> RewardItem:
    return RewardItem("any", solution, ground_truth)


def among_neighbours(pool: RewardPool, solution: str, ground_truth: object = None) -> tuple[RewardResult, float]:
    """Grade an item in the middle of good ones; all of those must get their scores."""
    items = [item(str(i)) for i in range(6)] + [item(solution, ground_truth)] + [item(str(i)) for i in range(6, 12)]
    start = time.monotonic()
    results = pool.score(items)
    seconds = time.monotonic() - start
    culprit = results.pop(6)
    assert [(r.status, r.score) for r in results] == [("ok", float(i)) for i in range(12)]
    return culprit, seconds


@pytest.mark.parametrize("fault", TIMEOUTS)
def test_a_grader_that_hangs_costs_its_timeout_and_no_neighbour(faults: RewardPool, fault: str) -> None:
    result, seconds = among_neighbours(faults, fault)
    assert (result.status, result.score) == ("timeout", 0.0)
    assert seconds < scaled_s(20)


@pytest.mark.parametrize("fault", ERRORS)
def test_a_grader_that_fails_is_an_error_and_no_neighbour_pays(faults: RewardPool, fault: str) -> None:
    result, seconds = among_neighbours(faults, fault)
    assert (result.status, result.score) == ("error", 0.0)
    assert result.message
    assert seconds < scaled_s(20)


def test_the_cause_of_an_error_is_in_its_message(faults: RewardPool) -> None:
    texts = {
        fault: among_neighbours(faults, fault)[0].message for fault in ("raise", "none", "segv", "abort", "exit", "nan")
    }
    assert re.fullmatch(r"ValueError: no such answer \(grader_\d+.py:\d+\)", texts["raise"])
    assert texts["none"] == "TypeError: the grader returned NoneType instead of a number"  # no line of ours
    assert "SIGSEGV" in texts["segv"]
    assert "SIGABRT" in texts["abort"]
    assert "about to abort" in texts["abort"]
    assert "exited with code 3" in texts["exit"]
    assert "nan" in texts["nan"]


@pytest.mark.parametrize("fault", ["fork", "daemon"])
def test_what_a_hung_grader_has_forked_dies_with_it(faults: RewardPool, fault: str, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    result, _ = among_neighbours(faults, fault, str(marker))
    assert result.status == "timeout"
    wait_until_gone(int(marker.read_text()))


def wait_until_gone(pid: int) -> None:
    assert wait_until(lambda: not is_alive(pid)), f"process {pid} is still there"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_several_hangs_at_once_cost_one_timeout_each_worker(faults: RewardPool) -> None:
    start = time.monotonic()
    results = faults.score([item("sleep"), item("loop"), *(item(str(i)) for i in range(20))])
    assert [r.status for r in results] == ["timeout"] * 2 + ["ok"] * 20
    assert time.monotonic() - start < scaled_s(20)


def test_timeouts_errors_and_zeros_are_three_numbers(faults: RewardPool) -> None:
    metrics = reward_metrics(
        faults.score([item("0"), item("0"), item("0"), item("raise"), item("raise"), item("late")])
    )
    assert (metrics["reward/zeros"], metrics["reward/errors"], metrics["reward/timeouts"]) == (3.0, 2.0, 1.0)
    assert metrics["reward/seconds/max"] >= metrics["reward/seconds/mean"] > 0


def test_threads_share_a_pool_and_get_their_own_answers(faults: RewardPool) -> None:
    answers: dict[int, list[float]] = {}

    def ask(n: int) -> None:
        answers[n] = [r.score for r in faults.score([item(str(n * 100 + i)) for i in range(50)])]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [float(n * 100 + i) for i in range(50)] for n in range(4)}


def test_no_items_need_no_children() -> None:
    assert RewardPool().score([]) == []


def test_a_large_item_passes(grader_file: Callable[[str], str]) -> None:
    big = "x" * (8 << 20)
    with RewardPool(Grader(path=grader_file(FAULTS)), num_workers=2, timeout_s=scaled_s(30)) as pool:
        results = pool.score([RewardItem("any", "1", big) for _ in range(6)])
    assert [r.score for r in results] == [1.0] * 6


def test_a_deadline_for_all_is_an_error_and_the_pool_continues(faults: RewardPool) -> None:
    with pytest.raises(DeadlineError, match="reward pool"):
        faults.score([item("sleep")] * 6, deadline_s=0.2)
    assert faults.score([item("5")])[0].score == 5.0


def test_the_first_answer_without_a_score_is_a_warning_at_once(
    grader_file: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    with RewardPool(Grader(path=grader_file(FAULTS)), num_workers=1, timeout_s=scaled_s(30)) as pool:
        graded = pool.submit([item("1"), item("raise"), item("raise"), item("sleep")])
        wait_until(lambda: caplog.messages, 20)
        assert not graded.done()
    assert [text.partition(" (")[0] for text in caplog.messages] == [
        "an answer could not be graded: ValueError: no such answer"
    ]


VALUES = """
import numpy as np
class Torchlike:
    def tolist(self): return 0.25
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1):
    return {
        "float": 0.5, "bool": True, "int": 3, "numpy": np.float32(0.5), "tensor": Torchlike(),
        "sequence": [0.75, "ignored"], "tuple": (True, 2), "array": np.array([2.0, 3.0]),
        "dict": {"score": np.int64(2), "acc": True, "parts": np.arange(2), "why": "because"},
        "echo": {"score": factor, "args": [data_source, ground_truth, extra_info]},
    }[solution_str]
"""


def test_every_kind_of_score_is_read(grader_file: Callable[[str], str]) -> None:
    kinds = ["float", "bool", "int", "numpy", "tensor", "sequence", "tuple", "array", "dict", "echo"]
    grader = Grader(path=grader_file(VALUES), kwargs={"factor": 7})
    with RewardPool(grader, num_workers=1) as pool:
        results = pool.score([RewardItem("src", kind, {"a": [1]}, {"num_turns": 2}) for kind in kinds])
    assert [(r.status, r.message) for r in results] == [("ok", "")] * len(kinds)
    assert [r.score for r in results] == [0.5, 1.0, 3.0, 0.5, 0.25, 0.75, 1.0, 2.0, 2.0, 7.0]
    assert results[0].extra == {"acc": 0.5}
    assert results[8].extra == {"acc": True, "parts": [0, 1], "why": "because"}
    assert results[9].extra == {"args": ["src", {"a": [1]}, {"num_turns": 2}]}


BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, factor):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [factor * (len(solution) + truth + info["a"]) for source, solution, truth, info in rows]
"""


def test_a_function_of_lists_in_a_module_grades_one_row_at_a_time(
    grader_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(grader_file(BATCH))
    monkeypatch.setenv("PYTHONPATH", str(file.parent))
    with RewardPool(Grader(path=f"pkg://{file.stem}", kwargs={"factor": 2}), num_workers=1) as pool:
        results = pool.score([RewardItem("src", "x" * length, 1, {"a": 10}) for length in (1, 3)])
    assert [r.score for r in results] == [24.0, 28.0]


ASYNC = """
import asyncio, os, sys, time
num_met = 0
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "meet":
        global num_met
        num_met += 1
        while num_met < ground_truth: await asyncio.sleep(0.01)
        return 1.0
    if solution_str == "block":
        await asyncio.sleep(0.01)
        while True: pass
    if solution_str == "exit": sys.exit(2)
    if solution_str == "die": os._exit(2)
    if solution_str == "never": await asyncio.sleep(1000)
    if solution_str == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if solution_str == "give_up": await asyncio.wait_for(asyncio.sleep(9), 0.01)
    if solution_str == "raise": raise ValueError("bad")
    await asyncio.sleep(0.2)
    return float(solution_str)
"""


@pytest.fixture(scope="module")
def async_pool(grader_file: Callable[[str], str]) -> Iterator[RewardPool]:
    with RewardPool(Grader(path=grader_file(ASYNC)), num_workers=1, timeout_s=scaled_s(TIMEOUT_S)) as pool:
        pool.start()
        yield pool


def test_async_graders_overlap(async_pool: RewardPool) -> None:
    """Each of them waits for all the others."""
    assert [r.score for r in async_pool.score([item("meet", 40)] * 40)] == [1.0] * 40


@pytest.mark.parametrize(
    ("fault", "status"),
    [("never", "timeout"), ("stubborn", "timeout"), ("block", "timeout"), ("give_up", "timeout"), ("exit", "error"),
     ("die", "error"), ("raise", "error")],
)  # fmt: skip
def test_an_async_grader_that_fails_costs_no_neighbour(async_pool: RewardPool, fault: str, status: str) -> None:
    result, seconds = among_neighbours(async_pool, fault)
    assert result.status == status
    assert seconds < scaled_s(2 * (TIMEOUT_S + STALLED_S) + 20.0)  # once to notice, once to name it among single items


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("def compute_score(:", "SyntaxError"),
        ("x = 1", "does not define it"),
        ("compute_score = 3", "compute_score is not a function"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("import os; print('bye'); os._exit(7)", "exited with code 7.*bye"),
    ],
    ids=["import", "syntax", "missing", "not callable", "sys.exit", "os._exit"],
)
def test_a_grader_that_cannot_be_loaded_is_a_config_error(
    grader_file: Callable[[str], str], source: str, message: str
) -> None:
    with RewardPool(Grader(path=grader_file(source)), num_workers=2) as pool:
        with pytest.raises(ConfigError, match=f"(?s)custom_reward_function.path.*{message}"):
            pool.start()
        with pytest.raises(ConfigError):
            pool.score([item("1")])


def test_a_grader_that_hangs_while_loading_is_a_config_error(
    grader_file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.rewards.pool.children.START_S", 0.3)
    path = grader_file("import time; time.sleep(100)")
    with (
        RewardPool(Grader(path=path), num_workers=1) as pool,
        pytest.raises(ConfigError, match=r"no answer within 0\.3 s"),
    ):
        pool.start()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RewardPool(Grader(path="/nonexistent/reward.py")),
        lambda: RewardPool(Grader(path="hdfs://host/reward.py")),
        lambda: RewardPool(num_workers=-1),
        lambda: RewardPool(timeout_s=0),
        lambda: RewardPool(timeout_s=float("nan")),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], RewardPool]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_closing_leaves_no_process_and_no_folder(grader_file: Callable[[str], str], tmp_path: Path) -> None:
    source = """
    import os, tempfile
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1, "pid": os.getpid(), "guard": os.getppid(), "tmp": tempfile.gettempdir()}
    """
    pool = RewardPool(Grader(path=grader_file(source)), num_workers=2)
    seen = [r.extra for r in pool.score([item("1") for _ in range(8)])]
    assert all(Path(e["tmp"]).is_dir() for e in seen)
    pool.close()
    assert not any(is_alive(pid) for e in seen for pid in (e["pid"], e["guard"]))
    assert not any(Path(e["tmp"]).exists() for e in seen)
    assert pool.score([item("1")])[0].status == "ok"
    pool.close()


@pytest.mark.parametrize(("fault", "forks"), [("sleep", False), ("daemon", False), ("c_loop", False), ("sleep", True)])
def test_kill_9_of_the_owner_leaves_no_orphan(
    grader_file: Callable[[str], str], tmp_path: Path, fault: str, forks: bool
) -> None:
    """Also where the owner has forked a process that holds copies of its sockets."""
    owner_source = f"""
    import os, sys, time
    from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool
    pool = RewardPool(Grader(path={grader_file(FAULTS)!r}), num_workers=2, timeout_s=60)
    pool.start()
    pool.submit([RewardItem("any", {fault!r}, {str(tmp_path / "marker")!r})])
    time.sleep(0.5)
    if {forks} and (copy := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    print(copy if {forks} else 0, flush=True)
    time.sleep(100)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(owner_source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as owner:
        assert owner.stdout is not None
        copy = int(owner.stdout.readline())
        assert wait_until(lambda: len(descendants(owner.pid) - {copy}) >= 4)
        below = descendants(owner.pid) - {copy}
        owner.send_signal(signal.SIGKILL)
    try:
        assert is_alive(copy) or not forks
        for pid in below:
            wait_until_gone(pid)
    finally:
        if forks:
            os.kill(copy, signal.SIGKILL)
    assert not list(tmp_path.glob("rlsys-reward-*"))


def descendants(root: int) -> set[int]:
    out = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in out.splitlines()]
    pids = {root}
    while more := {pid for pid, parent in pairs if parent in pids} - pids:
        pids |= more
    return pids - {root}


@pytest.mark.parametrize("victim", ["pid", "guard"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_killed_or_stopped_from_outside_is_replaced(
    grader_file: Callable[[str], str], victim: str, number: signal.Signals
) -> None:
    source = """
    import os, time
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1, "pid": os.getpid(), "guard": os.getppid()}
    """
    with RewardPool(Grader(path=grader_file(source)), num_workers=1, timeout_s=scaled_s(TIMEOUT_S)) as pool:
        seen = pool.score([item("1")])[0].extra
        os.kill(seen[victim], number)
        if number == signal.SIGKILL:
            wait_until_gone(seen[victim])
        results = pool.score([item("1") for _ in range(4)])
        assert sum(r.status != "ok" for r in results) <= 1
        again = pool.score([item("1")])[0]
    assert again.status == "ok", again.message
    wait_until_gone(seen["pid"])
    wait_until_gone(seen["guard"])


def test_the_owner_side_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'math_verify', 'sympy', 'ray'}"
    code = f"import sys, rlsys.rewards.pool.pool; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


SIGNATURES = """
class Reward:
    def __init__(self, data_source, solution_str, ground_truth, extra_info): pass
def trl(prompts, completions, answer): return 1.0
def no_extra(data_source, solution_str, ground_truth): return 1.0
def needs_more(data_source, solution_str, ground_truth, extra_info, threshold): return 1.0
def takes_all(**kwargs): return 1.0
"""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Reward", "Reward is not a function"),
        ("trl", r"trl\(prompts, completions, answer\) is called with data_source, solution_str, ground_truth, extra"),
        ("no_extra", "extra_info"),
        ("needs_more", "missing a required argument: 'threshold'"),
    ],
)
def test_a_grader_that_cannot_take_the_arguments_is_refused(
    grader_file: Callable[[str], str], name: str, message: str, num_workers: int
) -> None:
    path = grader_file(SIGNATURES)
    with RewardPool(Grader(path, name), num_workers=num_workers) as pool, pytest.raises(ConfigError, match=message):
        pool.start()
    needed = {"threshold": 1} if name == "needs_more" else {}
    with RewardPool(Grader(path, "needs_more" if needed else "takes_all", needed), num_workers=num_workers) as pool:
        pool.start()


def test_without_workers_the_calling_thread_grades_and_a_debugger_can_stop_there(
    grader_file: Callable[[str], str],
) -> None:
    source = """
    import bdb, os, threading
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "quit": raise bdb.BdbQuit
        if solution_str == "bad": raise ValueError("no such answer")
        return {"score": 1, "pid": os.getpid(), "thread": threading.get_ident()}
    """
    with RewardPool(Grader(path=grader_file(source)), num_workers=0) as pool:
        good, bad = pool.score([item("1"), item("bad")])
        with pytest.raises(bdb.BdbQuit):
            pool.score([item("quit")])
    assert (good.score, good.extra["pid"], good.extra["thread"]) == (1.0, os.getpid(), threading.get_ident())
    assert (bad.status, bad.score) == ("error", 0.0)
    assert "no such answer" in bad.message
    with RewardPool(Grader(path=grader_file(source)), num_workers=1) as pool:
        assert "reward.num_workers=0" in pool.score([item("quit")])[0].message


async def test_without_children_an_async_grader_grades_inside_a_loop_too(grader_file: Callable[[str], str]) -> None:
    """A cell of a notebook runs in one, and asyncio.run refused every answer there."""
    source = """
    import asyncio
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(0)
        return float(solution_str)
    """
    with RewardPool(Grader(path=grader_file(source)), num_workers=0) as pool:
        assert [(one.score, one.status) for one in pool.score([item("1"), item("0.5")])] == [(1.0, "ok"), (0.5, "ok")]


def test_folders_of_dead_owners_are_removed_and_locked_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, alive, young = (tmp_path / f"rlsys-reward-{name}" for name in ("dead", "alive", "young"))
    for folder in (dead, alive, young):
        (folder / "rlsys-run-1").mkdir(parents=True)
    for folder in (dead, alive):
        os.utime(folder, (0, 0))
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with RewardPool(num_workers=1) as pool:
        assert pool.score([RewardItem("text/number", "1", "1")])[0].score == 1.0
        assert not dead.exists()
    os.close(lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, young.name]
