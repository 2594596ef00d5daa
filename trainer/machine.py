"""Whether this machine can run a job: packages, GPUs, processes, models by name, servers. Nothing heavy is imported."""

import glob
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from rlsys.config import GradedJob, PPOConfig
from rlsys.config.checks.all import check
from rlsys.config.introspect import replaced, shown
from rlsys.config.pools import min_nodes, process_pools, resolve_pools
from rlsys.config.schema.jobs import JobConfig
from rlsys.fleet.external.settings import settings_of
from rlsys.rollout.versions import SGLANG, VLLM
from rlsys.telemetry.trackers import flat_settings
from rlsys.utils.errors import ConfigError, raised_as
from rlsys.utils.fields import wrong_fields
from rlsys.utils.gpus import OTHER_GPUS
from rlsys.utils.hub import download_config, is_hub_id

SERVING = {"vllm": VLLM, "sglang": SGLANG}
"""Serving engines, the one to choose first, and the versions of each that work."""
ARGUMENTS = {
    "vllm": (("engine/arg_utils.py", "EngineArgs"),),
    "sglang": (("srt/server_args.py", "ServerArgs"), ("srt/arg_groups/fields/*.py", "*")),
}
"""Files of an engine's package, and the classes in them, whose fields are its arguments."""
OWN_ENVIRONMENT = ("pip", "uv", "conda", "py_executable", "container", "image_uri")
"""Fields of Ray's runtime_env that give workers other packages than this process has."""
GRADER = "reward.reward_model.model_path"
MODELS = ("actor_rollout_ref.model.path", "actor_rollout_ref.ref.model.path", "critic.model.path", "model.path", GRADER)
CONTAINER_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
"""Files of cgroups, of version 2 and 1."""
ANSWER_S, SMI_S = 2.0, 20.0


def check_machine(config: JobConfig, *, dry_run: bool, here: bool = True) -> list[str]:
    """Notes on what a run here would lack; ConfigError for an engine, a device, a model or a server that is not there.

    A run that is not `here` is only compared with models and with the arguments of an engine that is installed here,
    which is noted where it has a Ray cluster to join.
    Models by name, servers and the Ray cluster to join are only looked for in a dry run; a run waits for servers and
    downloads models itself, but for a reward model, whose config.json is read first.
    """
    notes: list[str] = []
    if isinstance(config, GradedJob):
        name = config.actor_rollout_ref.rollout.name
        has_ours = not set(OWN_ENVIRONMENT) & set(config.ray_kwargs.ray_init.runtime_env)
        if name in SERVING and here and has_ours:
            with raised_as(ConfigError, f"actor_rollout_ref.rollout.name = {name}", ConfigError):
                SERVING[name].installed_features()
        notes += _check_arguments(config, is_here=has_ours)
    if here and not _joins_a_cluster(config):
        notes += _capacity(config)
    elif here and dry_run:
        _check_cluster(config)
    elif not here and _joins_a_cluster(config):
        notes.append("the job's Ray cluster is not compared with a plan for another machine; for that remove --gpu")
    settings = flat_settings(config.model_dump())
    keys: tuple[str, ...] = ()
    if dry_run:
        keys = (*MODELS, *(key for key in settings if key.startswith("distillation.") and key.endswith(".model_path")))
    elif isinstance(config, PPOConfig) and not config.reward.has_judge:
        keys = (GRADER,)
    for key in keys:
        if (name := settings.get(key)) and is_hub_id(name):
            folder = download_config(name, key=key)
            if key in MODELS and (problems := check(replaced(config, {key: str(folder)}))[0]):
                raise ConfigError("\n".join(problems).replace(shown(str(folder)), name))
    if dry_run and here and isinstance(config, PPOConfig) and resolve_pools(config).external:
        _check_servers(config)
    return notes


def installed_engines() -> Iterator[str]:
    """The serving engines that are installed here, in versions that work."""
    for name, table in SERVING.items():
        with suppress(ConfigError):
            table.installed_features()
            yield name


def _check_arguments(config: GradedJob, *, is_here: bool) -> Iterator[str]:
    """ConfigError for engine_kwargs that the workers' engine does not take, and a note where it is not here."""
    name = config.actor_rollout_ref.rollout.name
    asked = getattr(config.actor_rollout_ref.rollout.engine_kwargs, name, {})
    key = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
    wrong = wrong_fields(name, ARGUMENTS[name], asked) if asked and is_here else None
    if asked and wrong is None:
        yield f"{key}: the workers' {name} is not installed here, so its arguments are not checked"
    elif wrong:
        owner = f"{name} {SERVING[name].installed()}"
        raise ConfigError("\n".join(f"{key}.{field}: {owner} {why}" for field, why in wrong.items()))


def _joins_a_cluster(config: JobConfig) -> bool:
    ray = sys.modules.get("ray")
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")
    is_joining = address not in (None, "", "local") or (ray is not None and ray.is_initialized())
    return is_joining and config.trainer.backend == "ray"


def _check_cluster(config: JobConfig) -> None:
    """ConfigError unless the Ray cluster of the configured address answers and has room for the processes."""
    from rlsys.single_controller import ray as on_ray

    run = config.trainer
    with closing(on_ray.connect({"address": config.ray_kwargs.ray_init.address}, deadline_s=run.deadlines.start_s)):
        use_gpu = run.device == "cuda" or (run.device == "auto" and any(n.num_gpus for n in on_ray.cluster_nodes()))
        pools, least = {"train": [run.n_gpus_per_node] * run.nnodes}, dict[str, int]()
        if isinstance(config, PPOConfig):
            pools, least = process_pools(config, on_ray.node_size(use_gpu)), min_nodes(config)
        on_ray.ResourcePoolManager(pools, {}, use_gpu=use_gpu, min_nodes=least).create_resource_pool()


def _capacity(config: JobConfig) -> Iterator[str]:
    """What a cluster that consists of this machine lacks; ConfigError if it is the device that was asked for."""
    run, num_gpus, is_ppo = config.trainer, visible_gpus(), isinstance(config, PPOConfig)
    other = f"; {OTHER_GPUS}" if is_ppo else ""
    why = "no GPU is visible on this machine (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    if run.device == "auto" and not num_gpus:
        _, known = check(config)
        problems, notes = check(replaced(config, {"trainer.device": "cpu"}))
        if problems:
            raise ConfigError("\n".join([*problems, f"trainer.device = auto: {why}{other}"]))
        yield from (note for note in notes if note not in known)
    if run.device == "cuda" and not num_gpus:
        raise ConfigError(f"trainer.device = cuda: {why}; set it to cpu, or start the job where GPUs are{other}")
    if run.nnodes > 1:
        why = "start Ray on all nodes and set ray_kwargs.ray_init.address=auto"
        yield f"trainer.nnodes = {run.nnodes}: a job without a Ray cluster to join has this machine only; {why}"
        return
    num_processes = resolve_pools(config).total_ranks if isinstance(config, PPOConfig) else run.n_gpus_per_node
    on_gpus = bool(num_gpus) and run.device != "cpu"
    room = num_gpus if on_gpus else config.ray_kwargs.ray_init.num_cpus or os.cpu_count() or 1
    if num_processes > room:
        kind = f"{room} GPUs" if on_gpus else f"no GPUs, and {room} CPUs for one process each"
        needs = f"{num_processes} processes, trainer.n_gpus_per_node={run.n_gpus_per_node} of them for training"
        keys = "trainer.n_gpus_per_node or trainer.rollout_workers" if is_ppo else "trainer.n_gpus_per_node"
        fix = f"lower {keys}, or join a larger Ray cluster"
        yield f"the run needs {needs}, and this machine has {kind}: {fix}{'' if on_gpus else other}"


def visible_gpus() -> int:
    """NVIDIA GPUs that a process here can use, as /dev and CUDA_VISIBLE_DEVICES say."""
    num_gpus = len(glob.glob("/dev/nvidia[0-9]*")) or len(glob.glob("/dev/dxg"))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return num_gpus
    return min(num_gpus, sum(name.strip() not in ("", "-1", "NoDevFiles") for name in visible.split(",")))


def device_memory(config: PPOConfig) -> tuple[Literal["cuda", "cpu"], int]:
    """The kind of device that a process of the job has, and its bytes: the smallest GPU here, or its share of the host.

    A cluster is taken to have this machine's GPUs; where there are none here, GPUs have 0 bytes.
    """
    device = config.trainer.device
    if device == "cpu" or (device == "auto" and not visible_gpus() and not _joins_a_cluster(config)):
        return "cpu", host_bytes() * config.trainer.nnodes // max(1, resolve_pools(config).total_ranks)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
        return "cuda", min(int(float(line)) for line in done.stdout.split("\n") if line.strip()) << 20
    return "cuda", 0


def host_bytes() -> int:
    """Bytes of this machine's memory, or of what its container may have of it."""
    limits = [path.read_text().strip() for path in map(Path, CONTAINER_LIMITS) if path.is_file()]
    return min([psutil.virtual_memory().total, *(int(limit) for limit in limits if limit.isdecimal())])


def _check_servers(config: PPOConfig) -> None:
    for url in settings_of(config.actor_rollout_ref.rollout, config.trainer.deadlines, max_staleness=0).urls:
        address = urlsplit(url)
        port = address.port or (443 if address.scheme == "https" else 80)
        why = "nothing listens there; start the server, or correct the address"
        with raised_as(ConfigError, f"actor_rollout_ref.rollout.servers.urls: {url}: {why}", OSError):
            socket.create_connection((address.hostname or "", port), timeout=ANSWER_S).close()
