"""What a job would lack on this machine is reported before anything starts, in a dry run too."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlsys.config import SFTConfig, load_config
from rlsys.rewards.registry import check_sources
from rlsys.rollout.versions import VLLM
from rlsys.utils.errors import ConfigError
from tests.hub import Hub
from tests.timing import scaled_s
from trainer import machine
from trainer.machine import check_machine, device_memory, visible_gpus

ROOT = Path(__file__).resolve().parents[3]
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def notes(*argv: str, dry_run: bool = True) -> list[str]:
    return check_machine(load_config(argv), dry_run=dry_run)


def test_a_missing_engine_is_refused_unless_workers_have_packages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.SERVING, "vllm", replace(VLLM, distributions=("no-such-package",)))
    argv = [f"{ROLLOUT}.name=vllm", "ray_kwargs.ray_init.num_cpus=8"]
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=r"rollout.name = vllm: .* is not installed: pip install"):
            notes(*argv, dry_run=dry_run)
    assert notes(*argv, "ray_kwargs.ray_init.runtime_env={pip: [vllm]}") == []


NOT_RUN = "raise AssertionError('the package is read, not run')\n"


def install(root: Path, engine: str, version: str, files: dict[str, str]) -> None:
    """A package with source that fails if anything of it is executed."""
    info = root / f"{engine}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    for name, source in {"__init__.py": "", **files}.items():
        path = root / engine / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NOT_RUN + source)


ENGINE_ARGS = "class Other:\n    nonsense: int\nclass EngineArgs:\n    swap_space: float = 4\n    made = 1\n"


def test_arguments_of_an_engine_are_checked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "vllm", "0.33.0", {"engine/arg_utils.py": ENGINE_ARGS})
    fields = "class Moe:\n    moe_runner_backend: str = 'auto'\n"
    files = {"srt/server_args.py": "class ServerArgs:\n    trust: bool\n", "srt/arg_groups/fields/exec_.py": fields}
    install(tmp_path, "sglang", "0.5.23", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    vllm = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm.swap_space=8"]
    arguments = f"{ROLLOUT}.engine_kwargs.sglang"
    assert notes(*vllm) == []
    assert notes(f"{ROLLOUT}.name=sglang", f"{arguments}.moe_runner_backend=triton", f"{arguments}.trust=true") == []
    for name, fix in (("swap-spaces", "set swap_space instead"), ("nonsense", "remove it"), ("made", "remove it")):
        for dry_run in (True, False):
            with pytest.raises(ConfigError, match=rf"\.vllm\.{name}: vllm 0\.33\.0 has no such setting; {fix}"):
                notes(*vllm, f"{ROLLOUT}.engine_kwargs.vllm.{name}=1", dry_run=dry_run)
    (note,) = notes(*vllm, "ray_kwargs.ray_init.runtime_env={pip: [vllm]}")
    assert "the workers' vllm is not installed here, so its arguments are not checked" in note


FIELDS = """
class EngineArgs:
    block_size: int | None = None
    max_num_seqs: int = 1
    swap_space: float = 4
    enforce_eager: bool = False
    revision: str | None = None
    served_model_name: str | list[str] | None = None
    max_lora_rank: MaxLoRARanks = 16
class ServerArgs:
    max_running_requests: A[Optional[int], "The maximum, number."] = None
    page_size: A[int | None, Arg(help="tokens")] = None
    loader_config: A[str, "JSON"] = "{}"
    trust: Optional[bool] = None
    names: A[Optional[List[str]], "names"] = None
"""


@pytest.mark.parametrize(
    ("engine", "setting", "wants"),
    [
        ("vllm", "block_size=foo", "int, not 'foo'"),
        ("vllm", "max_num_seqs=true", "int, not True"),
        ("vllm", "max_num_seqs=64.5", "int, not 64.5"),
        ("vllm", "swap_space=[4]", r"float, not \[4\]"),
        ("vllm", "enforce_eager=maybe", "bool, not 'maybe'"),
        ("vllm", "revision=7", "str, not 7"),
        ("sglang", "max_running_requests=foo", "int, not 'foo'"),
        ("sglang", "page_size=foo", "int, not 'foo'"),
        ("sglang", "trust=maybe", "bool, not 'maybe'"),
        ("vllm", "block_size=16", ""),
        ("vllm", "block_size=null", ""),
        ("vllm", "swap_space=8", ""),
        ("vllm", "enforce_eager=1", ""),
        ("vllm", "served_model_name=7", ""),
        ("vllm", "max_lora_rank=foo", ""),
        ("sglang", "loader_config={threads: 8}", ""),
        ("sglang", "names=foo", ""),
    ],
)
def test_arguments_of_an_engine_are_checked_by_simple_types(
    engine: str, setting: str, wants: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "vllm", "0.33.0", {"engine/arg_utils.py": FIELDS})
    install(tmp_path, "sglang", "0.5.23", {"srt/server_args.py": FIELDS})
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = [f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.engine_kwargs.{engine}.{setting}"]
    if not wants:
        assert notes(*argv) == []
        return
    key = rf"\.{engine}\.{setting.partition('=')[0]}"
    with pytest.raises(ConfigError, match=rf"{key}: {engine} [\d.]+ takes a value of type {wants}; set one"):
        notes(*argv)


def test_a_gpu_that_is_asked_for_must_be_visible() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device = cuda: no GPU is visible .*add --dry-run --gpu="):
        notes("trainer.device=cuda")
    (note,) = check_machine(load_config(["trainer.n_gpus_per_node=256"], SFTConfig), dry_run=True)
    assert note.endswith("lower trainer.n_gpus_per_node, or join a larger Ray cluster")
    joined = ["ray_kwargs.ray_init.address=10.0.0.1:6379", "trainer.nnodes=4", "trainer.n_gpus_per_node=8"]
    assert notes("trainer.device=cuda", *joined, dry_run=False) == []


def test_what_needs_a_gpu_is_reported_where_an_automatic_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = ["global_profiler.steps=[2]", "global_profiler.tool=torch_memory"]
    (note,) = notes(*profile)
    assert note.startswith("global_profiler.tool = torch_memory: it needs a GPU, so nothing is profiled")
    actor = "actor_rollout_ref.actor"
    in_fp8 = [f"{actor}.strategy=megatron", f"{actor}.megatron.fp8=hybrid"]
    with pytest.raises(
        ConfigError, match=r"fp8 = hybrid: .* on GPUs only(?s:.*)device = auto: no GPU is visible .*--gpu="
    ):
        notes(*in_fp8)
    assert notes(*profile, "ray_kwargs.ray_init.address=10.0.0.1:6379", dry_run=False) == []
    monkeypatch.setattr(machine, "visible_gpus", lambda: 1)
    assert notes(*profile, *in_fp8) == []


@pytest.mark.parametrize("limit", ["1073741824", "max", "9223372036854771712"])
def test_a_process_on_cpus_is_planned_for_the_memory_of_its_container(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["trainer.device=cpu", "trainer.n_gpus_per_node=2"])
    (tmp_path / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(tmp_path / "limit")))
    whole = psutil.virtual_memory().total
    assert device_memory(config) == ("cpu", (int(limit) if limit == "1073741824" else whole) // 2)


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(4)])
    for visible, expected in (("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == 4
    (note,) = notes("trainer.n_gpus_per_node=3", "trainer.rollout_workers=2", "trainer.max_staleness=1")
    assert note.startswith("the run needs 5 processes, trainer.n_gpus_per_node=3 of them for training, and")
    assert note.endswith(
        "4 GPUs: lower trainer.n_gpus_per_node or trainer.rollout_workers, or join a larger Ray cluster"
    )


def test_a_plan_for_another_machine_notes_that_the_cluster_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "the job's Ray cluster is not compared with a plan for another machine"
    joined = load_config(["ray_kwargs.ray_init.address=10.0.0.1:6379"])
    (note,) = check_machine(joined, dry_run=True, here=False)
    assert says in note
    assert check_machine(load_config(), dry_run=True, here=False) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (note,) = check_machine(load_config(), dry_run=True, here=False)
    assert says in note
    assert check_machine(load_config(), dry_run=False) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trainer.nnodes=2"], "trainer.nnodes = 2: a job without a Ray cluster to join has this machine only"),
        (["trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_cpus=2"], "the run needs 4 processes"),
    ],
)
def test_nodes_and_processes_that_this_machine_lacks_are_noted(argv: list[str], says: str) -> None:
    (note,) = notes(*argv)
    assert says in note
    assert notes("ray_kwargs.ray_init.num_cpus=1") == []
    assert check_machine(load_config(["trainer.nnodes=1"], SFTConfig), dry_run=True) == []
    (note,) = check_machine(load_config(["trainer.n_gpus_per_node=256"], SFTConfig), dry_run=True)
    assert note.endswith(": lower trainer.n_gpus_per_node, or join a larger Ray cluster")


def test_servers_must_listen_in_a_dry_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        argv = [f"{ROLLOUT}.name=vllm_remote", f"{ROLLOUT}.servers.urls={url}"]
        assert notes(*argv) == []
    assert notes(*argv, dry_run=False) == []
    with pytest.raises(ConfigError, match=rf"servers\.urls: {url}: nothing listens there"):
        notes(*argv)


def test_a_grader_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sources(["openai/gsm8k", "math"])
    monkeypatch.setitem(sys.modules, "math_verify", None)
    check_sources(["openai/gsm8k"])
    with pytest.raises(ConfigError, match=r"math_verify, .* is not installed: pip install 'math-verify"):
        check_sources(["openai/gsm8k", "math"])


def dry_run(hub: Hub, home: Path, name: str, *overrides: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A dry run with a model by name, in a process of its own, since the hub's address is read at import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **more}
    command = [sys.executable, "-m", "trainer.main_ppo", "data.train_files=null", "--dry-run"]
    command.append(f"actor_rollout_ref.model.path={name}")
    return subprocess.run(
        [*command, *overrides],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled_s(60),
        check=False,
    )


def test_a_model_by_name_must_be_in_the_cache_or_on_the_hub(tmp_path: Path) -> None:
    sizes = b'{"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4}'
    with Hub({"org/model": {"config.json": sizes}}).served() as hub:
        known = dry_run(hub, tmp_path, "org/model")
        assert (known.returncode, known.stderr.count("no folder")) == (0, 0), known.stderr
        install(tmp_path, "vllm", "0.33.0", {"engine/arg_utils.py": ENGINE_ARGS})
        vllm = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=4")
        cut = dry_run(hub, tmp_path, "org/model", *vllm, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
        assert cut.returncode == 2
        planned = dry_run(hub, tmp_path, "org/model", "--gpu=H100")
        assert (planned.returncode, planned.stdout.count("  memory ")) == (0, 1), planned.stderr
        assert (
            "6 attention heads, 2 key-value heads: these cannot be cut into 4 equal parts; set one of 1, 2, 6"
            in cut.stderr
        )
        mistyped = dry_run(hub, tmp_path, "models/qwen")
        assert mistyped.returncode == 2
        assert f"there is no folder {tmp_path}/models/qwen" in mistyped.stderr
        assert f"{hub.url} has no such model" in mistyped.stderr
        offline = dry_run(hub, tmp_path, "models/qwen", HF_HUB_OFFLINE="1")
        assert offline.returncode == 2
        assert "HF_HUB_OFFLINE is set" in offline.stderr
        judge = ("reward.reward_model.enable=true", "reward.reward_model.model_path=org/judge")
        hub.repositories["org/judge"] = {
            "config.json": b'{"architectures": ["Qwen2ForCausalLM"]}',
            "big.safetensors": b"",
        }
        generative = dry_run(hub, tmp_path, "org/model", *judge)
        assert generative.returncode == 2
        assert "reward.reward_model.model_path = org/judge: a language model without a score head" in generative.stderr
        assert hub.downloads["big.safetensors"] == 0
        assert dry_run(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1").returncode == 0
