"""The start of a Ray cluster or the connection to one, and what is known of its nodes."""

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import uuid4

import ray
from ray import exceptions as ray_exceptions
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.services import get_ray_address_from_environment
from ray.runtime_env import RuntimeEnv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.single_controller.diagnosis import ProcessInfo
from rlsys.single_controller.guard import MARK, Guard
from rlsys.single_controller.resource_pool import NodeCapacity
from rlsys.utils.environment import environment
from rlsys.utils.errors import ConfigError
from rlsys.utils.polling import poll_until

T = TypeVar("T")
NAMESPACE = "rlsys"
ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
"""A client that exits with an error if the cluster at its argument refuses it, in a process that can be given up."""
RAY_WAITS = "RAY_py_gcs_connect_timeout_s"
"""How long such a client waits for an answer, in whole seconds."""
RAY_ENDS = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Seconds without its GCS after which Ray ends a process without any message."""
GCS_LOST_S, GCS_POLL_S, ASK_NODE_S = 0.75 * float(os.environ.get(RAY_ENDS, "60")), 2.0, 10.0
_SOURCE_ROOT = str(Path(__file__).resolve().parents[3])
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray. `close` writes the timeline if asked for and ends what `connect` began.

    That is the connection, and the cluster itself if it was started here; what was there before stays.
    """

    address: str
    connected_here: bool
    timeline_json_file: str | None = None
    guard: Guard | None = None
    is_closed: threading.Event = field(default_factory=threading.Event)

    def watch_gcs(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the address, from another thread, once nothing has listened there for GCS_LOST_S."""
        host, _, port = self.address.rpartition(":")

        def is_there() -> bool:
            with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=GCS_POLL_S):
                return True
            return self.is_closed.is_set() or not ray.is_initialized()

        def watch() -> None:
            while ray.is_initialized() and not self.is_closed.wait(GCS_POLL_S):
                if not poll_until(is_there, GCS_LOST_S, every_s=GCS_POLL_S):
                    on_lost(self.address)

        threading.Thread(target=watch, name="gcs", daemon=True).start()

    def close(self) -> None:
        self.is_closed.set()
        if self.timeline_json_file and ray.is_initialized():
            ray.timeline(filename=self.timeline_json_file)
        if self.connected_here:
            ray.shutdown()
        if self.guard is not None:
            self.guard.close()


def connect(
    ray_init: Mapping[str, Any] | None = None, *, timeline_json_file: str | None = None, deadline_s: float = 300.0
) -> Cluster:
    """Use a running Ray cluster (initialised, RAY_ADDRESS, a submitted job, `address` in ray_init) or start one here.

    `ray_init` goes to ray.init. A cluster started here listens on the loopback interface only, has no dashboard and
    sends no usage statistics; its workers' children end with them. ConfigError for one that does not answer within
    `deadline_s`.
    """
    options = dict(ray_init or {})
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        return _checked(Cluster(cluster_address(), False, timeline_json_file))
    env = runtime_env(options.pop("runtime_env", None) or {})
    options = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": NAMESPACE, **options}
    if address not in (None, "local"):
        for name in ("num_cpus", "num_gpus", "resources", "object_store_memory", "include_dashboard"):
            if options.pop(name, None) is not None:
                _log.warning("ray_init.%s has no meaning on the existing cluster %s and is left out", name, address)
        _log.info("connecting to Ray at %s", address)
        _check_answers(address, deadline_s)
        _init(address, env, options)
        return _checked(Cluster(cluster_address(), True, timeline_json_file))
    _set_defaults_for_local_cluster()
    options.setdefault("include_dashboard", False)
    _log.info("starting Ray")
    mark = uuid4().hex
    guard = Guard(mark)
    try:
        # for 127.0.0.1 Ray has no argument but a variable, which this process has read and its servers will read
        variables = environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", MARK: mark})
        with patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False), variables:
            context = _init("local", env, options)
    except BaseException as error:
        guard.close()
        if isinstance(error, SystemExit):
            atexit.register(_exit_now, 128 + signal.SIGTERM)
        raise
    guard.watch(context.address_info["session_dir"])
    return Cluster(cluster_address(), True, timeline_json_file, guard)


def _init(address: str, env: dict[str, Any], options: Mapping[str, Any]) -> Any:
    """ray.init that leaves the handler of SIGTERM alone; ConfigError where it refuses its arguments or the cluster."""
    if unknown := sorted({*env} - {*RuntimeEnv.known_fields}):
        known = ", ".join(sorted(RuntimeEnv.known_fields))
        raise ConfigError(f"ray_kwargs.ray_init.runtime_env has no field {unknown[0]}; Ray's are {known}")
    if not options["log_to_driver"]:
        ray_worker.print_to_stdstream = _log_first_lines
    try:
        with patch.object(ray_utils, "set_sigterm_handler"):
            return ray.init(address=address, runtime_env=RuntimeEnv(**env), **options)
    except (ValueError, TypeError, RuntimeError, ConnectionError, ray_exceptions.RayError) as error:
        first, *rest = str(error).strip().splitlines()
        why = " ".join([first, *map(str.strip, rest)]) if first.startswith("Version mismatch") else first
        raise ConfigError(f"ray_kwargs.ray_init (address {address}): {why}") from error


def _exit_now(code: int) -> None:
    """End the process without Ray's own end, which crashes in a driver whose ray.init was cut short."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_first_lines(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Report the errors of Ray's own processes without the pages of state that follow them."""
    for text in data["lines"]:
        _log.warning("Ray: %s", text.partition("\n")[0])


def _check_answers(address: str, deadline_s: float) -> None:
    """ConfigError, within `deadline_s`, unless a Ray cluster that takes our token answers at host:port.

    For "auto" that is the address that Ray finds, which may be of a cluster that has ended.
    """
    set_another = "; correct RAY_ADDRESS (ray_kwargs.ray_init.address), or unset it to start a cluster here"
    if address == "auto":
        try:
            address = str(get_ray_address_from_environment("auto", None))
        except ConnectionError as error:
            raise ConfigError(f"no Ray cluster runs on this machine (address auto){set_another}") from error
    if "://" in address:
        raise ConfigError(f"{address}: jobs do not run through Ray's clients; use `ray job submit`, or host:port there")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"the Ray address {address!r} is not host:port{set_another}")
    end_s = time.monotonic() + deadline_s
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s).close()
        left_s, environ = end_s - time.monotonic(), os.environ | {RAY_WAITS: str(int(deadline_s) + 1)}
        asked = [sys.executable, "-c", ASK, address]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=left_s, env=environ)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        problem = f"what is at {address} did not answer as a Ray cluster within {deadline_s:g} s at stage 'connect'"
        raise ConfigError(f"{problem} (trainer.deadlines.start_s){set_another}") from error
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster listens at {address} ({error}){set_another}") from error
    if "AuthenticationError" in done.stderr:
        how = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as for its head"
        raise ConfigError(f"the Ray cluster at {address} refuses our token: {how}")
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"what listens at {address} is not a Ray cluster: {why}{set_another}")


def cluster_address() -> str:
    """The address (host:port) of the cluster that this process is connected to."""
    return ray.get_runtime_context().gcs_address


def _checked(cluster: Cluster) -> Cluster:
    """Warn about a cluster that others reach and that asks for no token."""
    host = cluster.address.rpartition(":")[0].strip("[]")
    if host.startswith("127.") or host in ("localhost", "::1") or os.environ.get("RAY_AUTH_MODE") == "token":
        return cluster
    _log.warning("the Ray cluster at %s runs anyone's code; start its head with RAY_AUTH_MODE=token", cluster.address)
    return cluster


def _set_defaults_for_local_cluster() -> None:
    """What Ray's own processes read from the environment; a variable that is set is not changed.

    Ray enables token authentication for local clusters and warns about it; the warning is of no use here. By Ray's own
    default workers have niceness 15: beside any other busy process they would get a thirtieth of its time.
    """
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RUNTIME_ENV_RETRY_TIMES": "1",
        "RAY_process_group_cleanup_enabled": "1",
        "RAY_kill_worker_timeout_milliseconds": "1000",
        "RAY_worker_niceness": "0",
    }
    if "RAY_AUTH_TOKEN_PATH" not in os.environ and not (Path.home() / ".ray" / "auth_token").exists():
        defaults["RAY_AUTH_TOKEN"] = uuid4().hex * 2
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def runtime_env(given: Mapping[str, Any]) -> dict[str, object]:
    """Let workers import rlsys (and workers/, trainer/) from a checkout that is not installed.

    Ray's workers search the driver's folder themselves, unless a `working_dir` is uploaded; an environment costs each
    the time of one more `import ray`.
    """
    env_vars = given.get("env_vars") or {}
    own = os.environ.get("PYTHONPATH", "")
    searched = "" if own or given.get("working_dir") else os.getcwd()
    found_in = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), searched)
    if _SOURCE_ROOT in found_in or "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or "PYTHONPATH" in env_vars:
        return dict(given)
    return {**given, "env_vars": {**env_vars, "PYTHONPATH": os.pathsep.join(filter(None, [_SOURCE_ROOT, own]))}}


def import_options() -> dict[str, object]:
    """Options with which actors and tasks can import rlsys, where the job's own environment does not let them.

    That is so when Ray was initialised by other code; repeating what the job has would cost a process start.
    """
    job = dict(ray.get_runtime_context().runtime_env or {})
    env = runtime_env(job)
    return {} if env == job else {"runtime_env": env}


def cluster_nodes() -> list[NodeCapacity]:
    """What the living nodes have in all."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [NodeCapacity(has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in alive]


def node_size(use_gpu: bool) -> int:
    """The number of processes that the largest node has room for, by its GPUs or CPUs, or 1 where none has."""
    return max(1, *(int(node.num_gpus if use_gpu else node.num_cpus) for node in cluster_nodes()))


def on_its_node(function: Callable[[ProcessInfo], T], info: ProcessInfo) -> T | None:
    """Run a function on the node of a worker: here if it is this one, else as a small task; None without an answer."""
    if info.node_id == ray.get_runtime_context().get_node_id():
        return function(info)
    there = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there, **import_options())
    try:
        return ray.get(task.remote(info), timeout=ASK_NODE_S)
    except ray_exceptions.RayError as error:
        _log.warning("node %s cannot be asked about pid %d: %s", info.node_id, info.pid, error)
        return None
