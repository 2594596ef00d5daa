"""How a job ends: exit codes and messages."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.config import EvalConfig, PPOConfig, SFTConfig
from rlsys.utils.errors import CheckpointError, ConfigError, DataError, UnsavedCheckpointError
from tests.contracts.train_engine import MODELS
from tests.timing import scaled_s
from trainer.job import checked_config, report_errors

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("write x=1"), 2, "ConfigError: write x=1"),
        (DataError("row 3"), 1, "DataError: row 3"),
        (CheckpointError("another optimizer"), 1, "CheckpointError: another optimizer"),
        (UnsavedCheckpointError("the disk is full"), 1, "UnsavedCheckpointError: the disk is full"),
        (OSError(28, "No space left on device", "/out/file"), 1, "No space left on device: '/out/file'"),
        (NotADirectoryError(20, "Not a directory", "/cache/start"), 1, "Not a directory: '/cache/start'"),
        (KeyboardInterrupt(), 130, "interrupted (Ctrl-C)"),
    ],
)
def test_expected_errors_are_one_line_and_an_exit_code(error: BaseException, code: int, printed: str) -> None:
    out = io.StringIO()
    with report_errors(out) as outcome:
        raise error
    assert outcome.exit_code == code
    assert printed in out.getvalue()
    assert out.getvalue().count("\n") == 1
    assert outcome.resumes is (type(error) is not CheckpointError)


STOPPED = """
import os, signal, sys, time
from trainer import job
job.STOP_S = 1.0
before = signal.getsignal(signal.SIGTERM)
with {contexts}:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except SystemExit:
        raise SystemExit({raised})
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned up")
        time.sleep({cleanup_s})
assert signal.getsignal(signal.SIGTERM) == before
sys.exit(outcome.exit_code)
"""


NESTED = ("job.report_errors(sys.stdout) as outcome", "job.exit_on_sigterm()")


@pytest.mark.parametrize(
    ("cleanup_s", "raised", "contexts", "last"),
    [
        (0, 15, NESTED, "rlsys: stopped by SIGTERM"),
        (0, 1, NESTED, "rlsys: stopped by SIGTERM"),
        (0, 1, NESTED[::-1], "rlsys: stopped by SIGTERM"),
        (60, 15, NESTED, "cleaned up"),
    ],
    ids=["alone", "in a call of Ray", "in a call of Ray that starts", "hangs"],
)
def test_sigterm_ends_a_job_in_order_and_in_time(
    cleanup_s: int, raised: int, contexts: tuple[str, str], last: str
) -> None:
    code = STOPPED.format(cleanup_s=cleanup_s, raised=raised, contexts=", ".join(contexts))
    ended = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, timeout=scaled_s(30))
    late = "rlsys: the job did not end within 1 s of SIGTERM; its processes are killed\n" if cleanup_s else ""
    assert (ended.returncode, ended.stderr) == (143, f"SIGTERM: stopping\n{late}")
    assert ended.stdout.splitlines()[0] == "cleaned up"
    assert ended.stdout.splitlines()[-1] == last


IN_A_CALL = """
import ctypes, os, signal, threading
from trainer import job
job.STOP_S = 0.5
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with job.exit_on_sigterm():
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)
"""


def test_sigterm_ends_a_job_whose_main_thread_never_returns_from_a_call() -> None:
    """As in a call of Ray while the raylet is stopped: no Python code of the main thread runs any more."""
    ended = subprocess.run([sys.executable, "-c", IN_A_CALL], capture_output=True, text=True, timeout=scaled_s(30))
    assert (ended.returncode, ended.stderr.count("did not end within 0.5 s of SIGTERM")) == (143, 1)


IN_A_FORK = """
import os, signal, sys, time
from trainer import job
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
with job.report_errors(sys.stdout) as outcome, job.exit_on_sigterm():
    if os.fork() == 0:
        os._exit(0)
    time.sleep(60)
sys.exit(outcome.exit_code)
"""


def test_sigterm_ends_a_job_that_forks_just_then() -> None:
    """Python ignores exceptions of the callbacks of a fork, as of those in which logging frees its locks."""
    ended = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=scaled_s(20))
    assert (ended.returncode, ended.stdout) == (143, "rlsys: stopped by SIGTERM\n")


def test_an_unexpected_error_is_one_line_after_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    with report_errors(out) as outcome:
        raise ZeroDivisionError("0 rows")
    assert (outcome.exit_code, out.getvalue()) == (1, "rlsys: ZeroDivisionError: 0 rows\n")
    assert "Traceback" in caplog.text


def test_an_exit_is_left_alone() -> None:
    with pytest.raises(SystemExit, match="3"), report_errors(io.StringIO()):
        raise SystemExit(3)


NOT_IGNORED = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""What a terminal gives; processes in the background of a script ignore the signal."""
INTERRUPTED = f"""
{NOT_IGNORED}
from rlsys.data import first_rows
from trainer.main_ppo import main
first_rows.check_first_rows = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.exit(main(["--dry-run", "--config-name=quickstart"]))
"""


def test_ctrl_c_while_the_settings_are_checked_is_one_line() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=scaled_s(30), cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (130, "rlsys: interrupted (Ctrl-C)\n")


def test_ctrl_c_while_modules_are_imported_is_one_line() -> None:
    module = f"{NOT_IGNORED}; sys.argv = ['-m']; import trainer; os.kill(os.getpid(), signal.SIGINT)"
    ended = subprocess.run(
        [sys.executable, "-c", module], capture_output=True, text=True, timeout=scaled_s(30), cwd=ROOT
    )
    assert (ended.returncode, ended.stderr) == (-2, "rlsys: interrupted (Ctrl-C)\n")


def test_a_dry_run_plans_the_ranks_that_split_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # on CPUs: the tests' Ray cluster, which a job in this process joins once it runs, has fewer GPUs
    split = ["--dry-run", "--config-name=quickstart", "trainer.device=cpu", "trainer.allocation_mode=hf:d4|fsdp:d2t2"]
    with pytest.raises(SystemExit, match="0"):
        checked_config(split, PPOConfig)
    assert "384 samples = 1 optimizer step; each rank: 192 in micro-batches" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "num_key_value_heads": 3}')
    with pytest.raises(SystemExit, match="2"):
        checked_config([*split, f"actor_rollout_ref.model.path={tmp_path}"], PPOConfig)
    key = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size"
    assert f"{key} = 2: does not divide num_key_value_heads=3; set {key}=1" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-moe"]))
    split[3:] = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=null"]
    split += ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.use_kl_loss=true"]
    for role in ("actor", "ref"):
        with pytest.raises(SystemExit, match="2"):
            checked_config([*split, f"actor_rollout_ref.{role}.fsdp_config.tensor_parallel_size=2"], PPOConfig)
        why = f"{role}.fsdp_config: tensor_parallel_size=2: transformers' plan of qwen3_moe does not say how to split"
        assert why in capsys.readouterr().err


def test_a_dry_run_refuses_a_job_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        checked_config(["--dry-run"], SFTConfig)
    assert capsys.readouterr().err == "rlsys: model.path is not set, and this job has no default: name one\n"
    with pytest.raises(SystemExit, match="2"):
        checked_config(["--dry-run"], EvalConfig)
    assert "rlsys: actor_rollout_ref.model.path is not set, and" in capsys.readouterr().err


def test_an_engine_is_chosen_that_can_have_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"]))
    two = ["--dry-run", "--config-name=quickstart", f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=null"]
    two += ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    with pytest.raises(SystemExit, match="0"):
        checked_config([*two, "--gpu=H100"], PPOConfig)
    assert "rollout.name=vllm" in capsys.readouterr().out
    for more in ["trainer.device=cpu"], ["--gpu=H100", "actor_rollout_ref.rollout.name=hf"]:
        with pytest.raises(SystemExit, match="2"):
            checked_config([*two, *more], PPOConfig)
        assert "tensor_model_parallel_size = 2: the hf engine runs a model in one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("qk_clip=true", "does not take qk_clip: remove it"),
        ("bf16=true", "does not take bf16: remove it"),
        ("mtp_num_layers=1", "does not take mtp_num_layers: remove it"),
        ("fp8_param=true", "does not take fp8_param: remove it"),
        ("use_flash_attn=true", "use_flash_attn: Megatron-Core has no such setting; remove it"),
        ("apply_dsa_kernel_fusion=true", "apply_dsa_kernel_fusion: Megatron-Core has no such setting; remove it"),
        ("softmax_typ=vanilla", "softmax_typ: Megatron-Core has no such setting; set softmax_type instead"),
        ("attention_backend=local", "attention_backend = local: set it to auto, flash, fused or unfused"),
        ("softmax_type=vanilla", "nothing was started"),
        ("attention_backend=flash", "nothing was started"),
    ],
)
def test_a_dry_run_refuses_what_megatron_would(
    override: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"]))
    given = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=null", "data.val_files=null"]
    actor = "actor_rollout_ref.actor"
    given += [f"{actor}.strategy=megatron", f"{actor}.megatron.override_transformer_config.{override}"]
    given += ["trainer.device=cpu"]
    with pytest.raises(SystemExit):
        checked_config(["--dry-run", "--config-name=quickstart", *given], PPOConfig)
    printed = capsys.readouterr()
    assert says in printed.out + printed.err


def test_a_dry_run_notes_that_flash_attention_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"]))
    given = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=null", "data.val_files=null"]
    actor = "actor_rollout_ref.actor"
    key = f"{actor}.megatron.override_transformer_config.attention_backend"
    given += [f"{actor}.strategy=megatron", f"{key}=flash"]
    monkeypatch.setattr("rlsys.config.checks.megatron.find_spec", lambda name: object())
    for has_flash in False, True:
        monkeypatch.setattr("rlsys.config.checks.megatron.HAS_FLASH_ATTENTION", has_flash)
        with pytest.raises(SystemExit, match="0"):
            checked_config(["--dry-run", "--config-name=quickstart", *given], PPOConfig)
        printed = capsys.readouterr()
        note = f"{key} = flash: flash-attn is not installed; auto is used instead"
        assert (note in printed.out + printed.err) != has_flash


def test_a_dry_run_refuses_two_attention_backends_in_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron sets them in the environment, and ends with an assertion where another is set."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"]))
    actor, critic, key = "actor_rollout_ref.actor", "critic", "megatron.override_transformer_config.attention_backend"
    given = [f"actor_rollout_ref.model.path={tmp_path}", f"critic.model.path={tmp_path}", "algorithm.adv_estimator=gae"]
    given += ["data.train_files=null", "data.val_files=null", f"{actor}.strategy=megatron", f"{actor}.{key}=flash"]
    same = [f"{critic}.{key}=flash"]
    for more, says in (
        ([f"{critic}.strategy=megatron"], f"{critic}.{key} = auto: set it to flash, which the actor has in the same"),
        ([f"{critic}.strategy=megatron", *same], "nothing was started"),
        ([f"{critic}.strategy=fsdp"], "nothing was started"),
        (
            [*same, f"{critic}.strategy=megatron", f"{actor}.use_kl_loss=true", f"actor_rollout_ref.ref.{key}=fused"],
            f"actor_rollout_ref.ref.{key} = fused: set it to flash",
        ),
    ):
        with pytest.raises(SystemExit):
            checked_config(["--dry-run", "--config-name=quickstart", *given, *more], PPOConfig)
        printed = capsys.readouterr()
        assert says in printed.out + printed.err


def test_a_dry_run_refuses_what_megatron_cannot_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 6)
    three = [f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=6", "trainer.n_gpus_per_node=3"]
    critic = [f"critic.model.path={tmp_path}", "critic.strategy=megatron", "critic.ppo_mini_batch_size=6"]
    critic += ["data.train_files=null", "actor_rollout_ref.actor.ppo_mini_batch_size=6", "algorithm.adv_estimator=gae"]
    for schema, role, settings in (
        (PPOConfig, "critic", ["--config-name=quickstart", *three, *critic]),
        (SFTConfig, "engine", [f"model.path={tmp_path}", "engine.strategy=megatron", *three]),
    ):
        with pytest.raises(SystemExit, match="2"):
            checked_config(["--dry-run", *settings, f"{role}.megatron.pipeline_model_parallel_size=3"], schema)
        assert "2 layers cannot be split over pipeline_model_parallel_size=3" in (err := capsys.readouterr().err)
        assert f"rlsys: {role}" in err


def test_a_dry_run_refuses_to_filter_groups_that_only_a_head_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Groups are filtered by the reward function's scores, which are all 0 then: the run would drop every group."""
    model = MODELS["qwen2-tied"] | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "data_source": "mine", "reward_model": {"style": "model"}}')
    rows = [f"data.train_files={tmp_path}/rows.jsonl", "data.val_files=null", "data.train_batch_size=1"]
    head = ["reward.reward_model.enable=true", f"reward.reward_model.model_path={tmp_path}"]
    filters = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward"]
    argv = ["--dry-run", "--config-name=quickstart", "actor_rollout_ref.actor.ppo_mini_batch_size=1", *rows, *head]
    for more, says in (
        (filters, "set it to false: no built-in reward function for data_source 'mine': set reward.custom_reward_func"),
        ([], "nothing was started"),
    ):
        with pytest.raises(SystemExit):
            checked_config([*argv, *more], PPOConfig)
        printed = capsys.readouterr()
        assert says in printed.out + printed.err


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
from trainer.main_ppo import main
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    "setting", ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.model.lora_rank=8"]
)
def test_a_dry_run_that_needs_torch_says_what_to_install(setting: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "--config-name=quickstart", "--dry-run", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(60), check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install -e . brings those of every job: No module named 'torch'" in done.stderr


def test_what_does_not_fit_a_machine_without_gpus_says_how_to_plan_for_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sizes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 1000, "num_attention_heads": 128}
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2-tied"] | sizes))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 6)
    argv = ["--dry-run", f"actor_rollout_ref.model.path={tmp_path}", f"data.train_files={tmp_path}/rows.jsonl"]
    argv += ["data.val_files=null", "data.train_batch_size=6"]
    with pytest.raises(SystemExit, match="2"):
        checked_config(argv, PPOConfig)
    share = "a process's share of this machine's memory (to plan for GPUs that are not here add --dry-run --gpu=H100)"
    assert share in capsys.readouterr().err


def test_the_plan_says_where_the_number_of_processes_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    for more, count in ([], 1), (["trainer.n_gpus_per_node=1"], 0), (["trainer.allocation_mode=hf:d1|fsdp:d1"], 0):
        with pytest.raises(SystemExit, match="0"):
            checked_config(["--dry-run", "--config-name=quickstart", *more], PPOConfig)
        printed = capsys.readouterr().out
        assert "1 node x 1 process for training" in printed
        assert printed.count("trainer.n_gpus_per_node is not set; verl's default is 8") == count


TOOLS = """
tools:
- class_name: verl.tools.gsm8k_tool.Gsm8kTool
  tool_schema: {type: function, function: {name: calc, description: d, parameters: {type: object, properties: {}}}}
"""


def test_a_dry_run_imports_the_classes_of_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    turns = "actor_rollout_ref.rollout.multi_turn"
    settings = [f"{turns}.enable=true", f"{turns}.tool_config_path={tmp_path}/tools.yaml"]
    with pytest.raises(SystemExit, match="2"):
        checked_config(["--dry-run", "--config-name=quickstart", *settings], PPOConfig)
    problem = f"{turns}.tool_config_path=verl.tools.gsm8k_tool.Gsm8kTool cannot be loaded: ModuleNotFoundError"
    assert problem in capsys.readouterr().err
