"""How long starting takes: the configuration's import, the time to report a wrong setting, 1 and 8 workers, as ratios.

Each figure is the least of several runs taken in turns in the same minute with yardsticks. Of the configuration, in
fresh processes: an empty Python (the limit) and `import torch` (what a job that imports first and checks later would
cost). Of workers, until the last of them has answered a first call: as many bare Ray actors on the same cluster.

    python scripts/bench/startup.py [--runs 7] [--json startup.json]
    python scripts/bench/startup.py --engine sglang --device cuda [--runs 2]

With `--engine` a rollout worker in a Ray actor of its own, until it has built vLLM or SGLang over a tiny random model
without CUDA graphs, beside the engine that a fresh Python builds with the same options and nothing of ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers import machine, python_path  # pyrefly: ignore

ROOT = Path(__file__).resolve().parents[2]
LIMIT, PEER = "python -c pass", "import torch"
LOAD = "import sys; from rlsys.config import PPOConfig, main_config; main_config(sys.argv[1:], PPOConfig)"
COMMANDS: dict[str, tuple[str, ...]] = {
    LIMIT: ("-c", "pass"),
    PEER: ("-c", "import torch"),
    "import rlsys.config": ("-c", "import rlsys.config"),
    "report an unknown key": ("-c", LOAD, "data.train_batch_sise=4"),
    "report a wrong value": ("-c", LOAD, "data.train_batch_size=-4"),
    "print the plan (--dry-run)": ("-c", LOAD, "--dry-run"),
}
COUNTS = (1, 8)
SHORT = 512
ALONE = {
    "vllm": (
        "import sys; from vllm import LLM; LLM(sys.argv[1], load_format='dummy', enforce_eager=True,"
        f" skip_tokenizer_init=True, max_model_len={SHORT}, gpu_memory_utilization=0.2)"
    ),
    "sglang": (
        "import os, sys; os.environ.setdefault('SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN', '1');"
        "from sglang.srt.entrypoints.engine import Engine; Engine(model_path=sys.argv[1], load_format='dummy',"
        " device=sys.argv[2], disable_cuda_graph=True, skip_tokenizer_init=True, mem_fraction_static=0.2,"
        f" context_length={SHORT}, max_total_tokens=4096).shutdown()"
    ),
}
"""Programs that build an engine over the model of the first argument on the device of the second."""
EXIT_CODES = {"report an unknown key": 2, "report a wrong value": 2}


@dataclass(frozen=True)
class Figure:
    """Seconds of the quickest run."""

    name: str
    seconds: float


def fresh_process_s(name: str) -> float:
    """Seconds one fresh process takes, from spawning it to its exit."""
    environment = os.environ | {"PYTHONPATH": python_path()}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *COMMANDS[name]], env=environment, capture_output=True, cwd=ROOT, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode != EXIT_CODES.get(name, 0):
        raise SystemExit(f"'{name}' ended with {done.returncode}:\n{done.stderr.decode()}")
    return seconds


def write_tiny_model(folder: Path) -> None:
    """A random Qwen2 of 1 MB, with what engines read beside its weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=256, num_key_value_heads=2, eos_token_id=255, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def engine_start_s(name: str, model: Path, device: str) -> float:
    """Seconds until a rollout worker has built its engine, in a Ray actor that was not there before."""
    from rlsys.config.schema.model import ModelFolderConfig
    from rlsys.config.schema.rollout import GenerationConfig
    from rlsys.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from workers import rollout as workers
    from workers.build import EngineRun

    worker = {"vllm": workers.VLLMRolloutWorker, "sglang": workers.SGLangRolloutWorker}[name]
    sizes = {"max_model_len": SHORT, "gpu_memory_utilization": 0.2, "kv_cache_gib": 1}
    config = GenerationConfig(enforce_eager=True, **sizes)
    start = time.perf_counter()
    pool = RayResourcePool([1], use_gpu=device == "cuda", max_colocate_count=1)
    made = RayClassWithInitArgs(worker, ModelFolderConfig(path=str(model)), config, EngineRun(device, 300.0))
    with RayWorkerGroup(pool, made, role="rollout", deadlines=600.0) as group:
        group.execute_all_sync("init_model")
        return time.perf_counter() - start


def measure_engine(name: str, device: str, runs: int) -> list[Figure]:
    """The start of an engine in a rollout worker, and of the engine alone."""
    from rlsys.single_controller.ray import connect

    with tempfile.TemporaryDirectory() as folder, closing(connect({"num_cpus": 2})):
        model = Path(folder) / "model"
        write_tiny_model(model)
        COMMANDS[f"{name} alone"] = ("-c", ALONE[name], str(model), device)
        starts = {
            f"{name} alone": partial(fresh_process_s, f"{name} alone"),
            f"{name} in a rollout worker": partial(engine_start_s, name, model, device),
        }
        return measure(starts, runs)


class Bare:
    """An actor without anything."""

    def answer(self) -> int:
        return os.getpid()


def bare_start_s(num_workers: int) -> float:
    """Seconds until bare Ray actors have answered their first call."""
    import ray

    start = time.perf_counter()
    actors: list[Any] = [ray.remote(num_cpus=1)(Bare).remote() for _ in range(num_workers)]
    ray.get([actor.answer.remote() for actor in actors], timeout=300)
    seconds = time.perf_counter() - start
    for actor in actors:
        ray.kill(actor)
    return seconds


def group_start_s(num_workers: int) -> float:
    """Seconds until a worker group has answered its first call."""
    from rlsys.single_controller.base import Worker
    from rlsys.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    start = time.perf_counter()
    pool = RayResourcePool([num_workers], use_gpu=False, max_colocate_count=1)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Worker), role="idle", deadlines=300.0) as group:
        group.execute_all_sync("get_cuda_visible_devices")
        return time.perf_counter() - start


def measure_workers(counts: Sequence[int], runs: int) -> list[Figure]:
    """The start of bare actors and of groups, on a cluster of this process that has started its first workers."""
    from rlsys.single_controller.ray import connect

    with closing(connect({"num_cpus": max(counts)})):
        group_start_s(max(counts))
        starts: dict[str, Callable[[], float]] = {}
        for count in counts:
            starts[bare_name(count)] = partial(bare_start_s, count)
            starts[group_name(count)] = partial(group_start_s, count)
        return measure(starts, runs)


def bare_name(count: int) -> str:
    return f"{count} bare actor{'s' if count > 1 else ''}"


def group_name(count: int) -> str:
    return f"a group of {count}"


def measure(names: dict[str, Callable[[], float]], runs: int) -> list[Figure]:
    """The least seconds of each, all taken in turns so that a busy minute hits them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs):
        for name, run in names.items():
            seconds[name].append(run())
    return [Figure(name, min(taken)) for name, taken in seconds.items()]


def main() -> None:
    """Measure and print the table; --json keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=sorted(ALONE))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.engine:
        alone, ours = measure_engine(options.engine, options.device, options.runs)
        print(f"machine: {machine()}, load {os.getloadavg()[0]:.1f}, least of {options.runs} runs")
        for figure in (alone, ours):
            print(f"{figure.name:<28}{figure.seconds:>9.2f} s{figure.seconds / alone.seconds:>9.2f} x")
        return
    figures = measure({name: lambda name=name: fresh_process_s(name) for name in COMMANDS}, options.runs)
    workers = measure_workers(COUNTS, min(options.runs, 5))
    by_name = {figure.name: figure.seconds for figure in (*figures, *workers)}
    print(f"machine: {machine()}, load {os.getloadavg()[0]:.1f}\n")
    print(f"{'':<28}{'seconds':>9}{'x ' + LIMIT:>18}{'x ' + PEER:>16}   (least of {options.runs} runs)")
    for figure in figures:
        ratios = f"{figure.seconds / by_name[LIMIT]:>18.2f}{figure.seconds / by_name[PEER]:>16.3f}"
        print(f"{figure.name:<28}{figure.seconds:>9.3f}{ratios}")
    print(f"\n{'':<28}{'seconds':>9}{'x bare actors':>18}")
    for count in COUNTS:
        bare, ours = by_name[bare_name(count)], by_name[group_name(count)]
        print(f"{bare_name(count):<28}{bare:>9.3f}\n{group_name(count):<28}{ours:>9.3f}{ours / bare:>18.2f}")
    if options.json:
        options.json.write_text(json.dumps(by_name, indent=2) + "\n")


if __name__ == "__main__":
    main()
