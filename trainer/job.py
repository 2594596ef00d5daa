"""How a job runs from the command line: expected errors in one line, an orderly end on SIGTERM, a summary.

Imports nothing heavy: the entry points import it together with the configuration.
"""

import errno
import gc
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, TextIO, TypeVar

from rlsys.config import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig, main_config
from rlsys.config.arguments import Arguments
from rlsys.config.derive import ENGINE
from rlsys.config.introspect import replaced, value_at
from rlsys.config.schema.jobs import GradedJob, JobConfig, SupervisedConfig
from rlsys.config.schema.model import ShardConfig
from rlsys.telemetry.log import FILE_ONLY, get_logger, redact, setup_logging
from rlsys.utils import errors
from rlsys.utils.gpus import GPUS
from rlsys.utils.hub import download_config, is_hub_id
from trainer.machine import SERVING, check_machine, device_memory, installed_engines
from trainer.summary import summary_lines

if TYPE_CHECKING:
    from rlsys.planning.memory import Machine

C = TypeVar("C", PPOConfig, SFTConfig, RMConfig, DPOConfig, EvalConfig)
EXPECTED_ERRORS = tuple(cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception))
STOP_S = 30.0
MISSING = "a package that checks these settings is not installed here; pip install -e . brings those of every job"
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)
FILE_ERRNOS = (*DISK_ERRNOS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's SIGTERM is not ours, see _exit_late


def job_main(schema: type[C], job: str) -> Callable[..., int]:
    """`main(argv=None)` of a job's command; its exit code is 0, 1 for a failed run or 2 for a wrong configuration."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run_job(checked_config(argv, schema), job)

    return main


def checked_config(argv: Sequence[str] | None, schema: type[C]) -> C:
    """The configuration of the command line, printed with its plan; exits with 2 and a message if it is wrong.

    An interrupt while it is checked, or another error, is reported as in `run_job`, a missing package as what it is.
    """
    named = errors.raised_as(errors.ConfigError, MISSING, ModuleNotFoundError)
    with exit_on_sigterm(), report_errors(sys.stderr) as outcome, named:
        return main_config(sys.argv[1:] if argv is None else argv, schema, check=_check, choose=_choose)
    raise SystemExit(outcome.exit_code)


def _check(config: C, arguments: Arguments) -> tuple[list[str], dict[str, str]]:
    """Check the first rows, that a reward function grades them, and the machine, unless the plan is for another one.

    Returns notes, and facts for the plan.
    """
    if sys.flags.optimize > 1:
        raise errors.ConfigError("PYTHONOPTIMIZE=2 removes docstrings that transformers needs; unset it")
    for key in _keys_without_default(config):
        if value_at(config, key) is None:
            raise errors.ConfigError(f"{key} is not set, and this job has no default: name one")
    from rlsys.data.first_rows import check_first_rows  # numpy, which a wrong key need not wait for

    tokenizer = None
    if arguments.dry_run and isinstance(config, SFTConfig | RMConfig | DPOConfig):
        from trainer.texts import tokenizer_here

        tokenizer = tokenizer_here(config)
    data_sources, facts = check_first_rows(config, tokenizer)
    if isinstance(config, GradedJob):
        from trainer.rewards import check_data_sources, check_reward_function

        check_reward_function(config.reward)
        filters = isinstance(config, PPOConfig) and config.algorithm.filter_groups.enable
        may_score = config.actor_rollout_ref.rollout.may_score
        check_data_sources(config.reward, data_sources, may_score=may_score, filters_groups=filters)
        if arguments.dry_run and config.actor_rollout_ref.rollout.has_workflow:
            from trainer.episodes import load_agents

            load_agents(config)
    if arguments.dry_run and isinstance(config, PPOConfig | SupervisedConfig) and _is_split(config):
        from workers.build import check_models  # torch, where a model may be refused

        check_models(config, all_here=False, is_here=arguments.gpu is None)
    notes = check_machine(config, dry_run=arguments.dry_run, here=arguments.gpu is None)
    machine = _machine(config, arguments) if isinstance(config, PPOConfig) else None
    if arguments.gpu is not None and not (machine and machine.actor):
        raise errors.ConfigError("--gpu plans PPO jobs whose model's config.json is here or on the hub; remove --gpu")
    if isinstance(config, PPOConfig) and machine is not None:
        from rlsys.planning import advice

        if arguments.gpu is not None:
            facts |= advice.time_facts(config, machine, GPUS[arguments.gpu])
        facts |= {"memory": advice.memory_line(config, machine)}
    return notes, facts


def _keys_without_default(config: JobConfig) -> tuple[str, ...]:
    """The keys that must be set for a job of this kind."""
    if isinstance(config, SupervisedConfig):
        return ("model.path", "data.train_files")
    return ("actor_rollout_ref.model.path", "data.val_files") if isinstance(config, EvalConfig) else ()


def _is_split(config: PPOConfig | SupervisedConfig) -> bool:
    """Whether a model is split by a plan that not every architecture has: on Megatron, or tensor-parallel on FSDP."""
    if isinstance(config, SupervisedConfig):
        shards: list[object] = [config.engine.shard]
    else:
        shards = [config.actor_rollout_ref.actor.shard, config.actor_rollout_ref.ref_shard, config.critic.shard]
    return any(not isinstance(shard, ShardConfig) or shard.tensor_parallel_size > 1 for shard in shards)


def _choose(config: C, given: Collection[str], arguments: Arguments) -> tuple[Mapping[str, object], str]:
    """Values for settings that are not given, and why, for this machine's device or the one that is planned for."""
    if not isinstance(config, PPOConfig):
        return {}, ""
    from rlsys.planning import advice, sizes

    machine = _machine(config, arguments)
    engines = list(SERVING if arguments.gpu else installed_engines())
    if config.actor_rollout_ref.model.path is None:  # the start model: trained before a serving engine would be up
        engines, machine = list[str](), replace(machine, actor={})
    try:
        return sizes.choose_sizes(config, given, machine, engines=engines)
    except errors.ConfigError as error:
        if arguments.gpu is None:
            raise
        serving = replaced(config, {ENGINE: engines[0]}) if engines and ENGINE not in given else config
        lines = advice.layout_lines(serving, machine, GPUS[arguments.gpu])
        raise errors.ConfigError("\n  ".join([f"{error}; layouts that fit:", *lines])) from None


def _machine(config: PPOConfig, arguments: Arguments) -> "Machine":
    from rlsys.planning.advice import facts_of  # the planner, which --help and a wrong key do without

    key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    if arguments.gpu is not None:
        here = replaced(config, {key: str(download_config(path, key=key))}) if path and is_hub_id(path) else config
        return facts_of(here, "cuda", GPUS[arguments.gpu].memory_bytes)
    return facts_of(config, *device_memory(config))


def run_job(config: C, job: str) -> int:
    """Run the function `job` ("module:name") and print a summary; returns the exit code (see `Outcome`).

    It is called with the configuration; what it returns replaces the first line of the summary.
    """
    start = time.perf_counter()
    with exit_on_sigterm(), ExitStack() as stack:
        with report_errors(sys.stderr) as outcome:
            setup_logging()
            from trainer.run_folder import run_folder

            stack.enter_context(run_folder(config))
            module, _, name = job.partition(":")
            gc.disable()  # the imports of torch and transformers leave no garbage, and looking for it takes a fifth
            run: Callable[[C], str | None] = getattr(import_module(module), name)
            gc.enable()
            outcome.text = run(config) or f"rlsys: done in {time.perf_counter() - start:.0f} s"
            print(outcome.text)
        if outcome.exit_code != 2:
            summary = "\n".join(summary_lines(config.trainer, finished=outcome.exit_code == 0, resumes=outcome.resumes))
            get_logger(FILE_ONLY).info("%s\n%s", outcome.text, summary)
            print(summary, flush=True)
    return outcome.exit_code


@dataclass
class Outcome:
    """0 for a finished job, 1 for a failed one, 2 for a wrong configuration, 130 or 143 for a stopped one.

    `resumes`: whether the same command may continue the job.
    """

    exit_code: int = 0
    text: str = ""
    resumes: bool = True

    def report(self, text: str, exit_code: int, out: TextIO) -> None:
        """Print the line that says why the job ended."""
        self.text, self.exit_code = f"rlsys: {text}", exit_code
        print(self.text, file=out, flush=True)


@contextmanager
def report_errors(out: TextIO) -> Iterator[Outcome]:
    """Print the error that ends the job, without a traceback if it is an expected one."""
    outcome = Outcome()
    try:
        yield outcome
    except EXPECTED_ERRORS as error:
        outcome.resumes = not isinstance(error, errors.CheckpointError)
        outcome.report(f"{type(error).__name__}: {error}", 2 if isinstance(error, errors.ConfigError) else 1, out)
    except Exception as error:
        of_a_file = isinstance(error, OSError) and error.errno in FILE_ERRNOS
        if not of_a_file:
            get_logger(__name__).exception("unexpected error")
        what = "a file could not be written or read" if of_a_file else type(error).__name__
        outcome.report(f"{what}: {error}", 1, out)
    except KeyboardInterrupt:
        outcome.report("interrupted (Ctrl-C)", 130, out)
    except SystemExit as stop:
        if stop.code != signal.SIGTERM and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            raise
        outcome.report("stopped by SIGTERM", 128 + signal.SIGTERM, out)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit(SIGTERM) where the signal arrives, for `report_errors`; enter it again once Ray is connected.

    What has not ended STOP_S later is left to the guard of the cluster: the process exits with 143 then, also where
    this thread waits in a call of Ray, which never returns while the raylet is stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler_before = signal.signal(signal.SIGTERM, _stop)
    hook_before, sys.unraisablehook = sys.unraisablehook, _stop_again
    received, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    wakeup_before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_exit_late, args=(received,), daemon=True).start()
    try:
        yield
    except SystemExit as stop:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            raise
        raise SystemExit(signal.SIGTERM) from stop  # where the signal came in a call of Ray, Ray exits with 1
    finally:
        signal.signal(signal.SIGTERM, handler_before)
        sys.unraisablehook = hook_before
        signal.set_wakeup_fd(wakeup_before)
        wakeup.close()


def exit_without_gcs(address: str) -> None:
    """Print how to resume, and exit at once: calls of Ray wait for its GCS until Ray ends the process."""
    outcome = Outcome()
    why = f"Ray's GCS at {address} is lost: see gcs_server.out on the head node and start the cluster again"
    outcome.report(f"{why}; resume with: {redact(shlex.join(sys.orig_argv))}", 1, sys.stderr)
    get_logger(FILE_ONLY).info(outcome.text)
    os._exit(outcome.exit_code)


def _exit_late(received: socket.socket) -> None:
    """Exit STOP_S after SIGTERM is received; the wakeup socket gets it even while the main thread is blocked."""
    with received:
        while number := received.recv(1):
            if number[0] == signal.SIGTERM:
                time.sleep(STOP_S)
                os.write(2, b"rlsys: the job did not end within %g s of SIGTERM; its processes are killed\n" % STOP_S)
                os._exit(128 + signal.SIGTERM)


def _stop_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Send SIGTERM once more where Python has ignored its exception, as in a callback of a fork."""
    if isinstance(ignored.exc_value, SystemExit) and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _stop)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    sys.__unraisablehook__(ignored)


def _stop(number: int, _: FrameType | None) -> None:
    signal.alarm(0)  # Ray's handler, where it came first, would abort the process 3 s later
    signal.signal(number, signal.SIG_IGN)
    os.write(2, b"SIGTERM: stopping\n")
    sys.exit(number)
