"""No key of any job is dead: real runs read it, or the code that only another engine or device runs does."""

import ast
import json
from functools import cache
from pathlib import Path
from shutil import copytree
from types import ModuleType

import pytest

from rlsys.config.introspect import leaves
from tests.config_reads import keys_read_by, schema_of
from tests.e2e.conftest import Toy
from trainer import main_dpo, main_eval, main_ppo, main_rm, main_sft

PAIRED = (main_rm, main_dpo)
ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT, ALGORITHM = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm."
CORRECTION = ALGORITHM + "rollout_correction."
READ_WHILE_LOADING = {
    "actor_rollout_ref.actor.clip_ratio": "the default of clip_ratio_low and clip_ratio_high",
    "actor_rollout_ref.hybrid_engine": "follows from the pools, and a contradiction is refused",
    "actor_rollout_ref.rollout.n_gpus_per_node": "with verl's rollout.nnodes becomes trainer.rollout_workers",
    **{f"{role}optim.optimizer_impl": "where optim.optimizer is, or refused" for role in (ACTOR, "critic.", "")},
    "trainer.project_name": "the middle of trainer.default_local_dir",
    "trainer.experiment_name": "the end of trainer.default_local_dir",
    "trainer.allocation_mode": "becomes trainer.n_gpus_per_node, trainer.rollout_workers and the parallel sizes",
}
SGLANG, VLLM = (
    "rlsys/rollout/sglang/arguments.py:server_arguments",
    "rlsys/rollout/vllm/engine_args.py:engine_arguments",
)
SERVERS, PUSH = "rlsys/fleet/external", "trainer/weight_push.py:connect_servers"
RAY = "trainer/backend.py:start_backend"
SIZES = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
READERS = {
    **{
        f"{ROLLOUT}{name}": SGLANG
        for name in (
            *("gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "cuda_graph_max_bs", "disable_log_stats"),
            *("cudagraph_capture_sizes", "enable_chunked_prefill", "enable_prefix_caching", "engine_kwargs.sglang"),
        )
    },
    f"{ROLLOUT}num_scheduler_steps": "rlsys/rollout/vllm/engine.py:_start",
    **{f"{ROLLOUT}{name}": VLLM for name in ("engine_kwargs.vllm", "quantization")},
    **{
        f"engine.megatron.{name}": "rlsys/models/megatron/parallel.py:from_config"
        for name in (*(f"{size}_parallel_size" for size in SIZES), "sequence_parallel", "override_transformer_config")
    },
    "engine.megatron.dtype": "rlsys/engines/megatron/engine.py:MegatronEngine.__init__",
    "engine.megatron.seed": "rlsys/engines/megatron/engine.py:MegatronEngine.__init__",
    "engine.megatron.full_determinism": "workers/build.py:_engine",
    f"{ROLLOUT}free_cache_engine": "trainer/assembly.py:residency_moves",
    **{f"{ROLLOUT}servers.{name}": f"{SERVERS}/settings.py:settings_of" for name in ("urls", "token_env")},
    **{
        f"{ROLLOUT}servers.{name}": f"{SERVERS}/engine.py:__init__"
        for name in ("policy", "max_concurrent", "max_retries")
    },
    f"{ROLLOUT}servers.timeout_s": f"{SERVERS}/server.py:_stream",
    f"{ROLLOUT}servers.model": f"{SERVERS}/backends.py:VLLMBackend.generate",
    **{f"{ROLLOUT}servers.{name}": PUSH for name in ("lora_name", "weights_dir")},
    f"{ROLLOUT}parity.policy": "trainer/ppo.py:parity_probe",
    f"{ROLLOUT}on_update": "rlsys/rollout/vllm/engine.py:_stop",
    f"{ROLLOUT}agent.max_tool_seconds": "rlsys/agent/session.py:_call",
    f"{ROLLOUT}multi_turn.max_parallel_calls": "rlsys/agent/session.py:call_tools",
    f"{ROLLOUT}agent.max_rows": "trainer/ppo.py:next_batch",
    "reward.reward_model.micro_batch_size_per_gpu": "rlsys/config/schema/algorithm.py:scoring",
    "reward.max_failed": "rlsys/rewards/manager.py:check_failures",
    "trainer.resume_changed": "trainer/run_folder.py:_compared",
    **{f"trainer.max_failed_{name}": "trainer/prompt_groups.py:fail" for name in ("in_a_row", "share")},
    **{f"reward.reward_model.{name}": "rlsys/config/pools.py:process_pools" for name in ("n_gpus_per_node", "nnodes")},
    **{f"ray_kwargs.ray_init.{name}": RAY for name in ("num_cpus", "address", "runtime_env")},
    "ray_kwargs.timeline_json_file": RAY,
}
"""Keys that other engines, GPUs, servers, Ray, several ranks, tools or failures alone read -> file and function."""
EXTENSIONS = """
class Rows:
    def __init__(self, data_files, tokenizer, config, processor, max_samples):
        import json
        self.rows = [json.loads(line) for file in data_files for line in open(file)]
        for row in self.rows:
            if "messages" in row:
                row |= {"prompt": row["messages"][0]["content"], "response": row["messages"][1]["content"]}
            elif "chosen" not in row:
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

class custom_reward_manager:
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **kwargs):
        self.compute_score = compute_score
    def __call__(self, data, return_dict=False):
        import torch
        rewards = torch.zeros(data.batch["responses"].shape)
        rewards[:, -1] = torch.arange(len(rewards)) % 3
        extra = {"even": [i % 2 for i in range(len(rewards))], "third": [i % 3 for i in range(len(rewards))]}
        return {"reward_tensor": rewards, "reward_extra_info": extra}
"""
GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(solution_str.encode())
    return {"score": total % 7 / 6, "even": total % 2, "third": total % 3}
"""


def ppo_runs(toy: Toy, folder: Path) -> list[list[str]]:
    """Overrides of one run each."""
    critic = ["algorithm.adv_estimator=gae", f"critic.model.path={toy.model}", "critic.shuffle=true"]
    teacher = copytree(toy.model, folder / "teacher")
    loss, extensions = f"{ACTOR}policy_loss.loss_mode=", folder / "extensions.py"
    return [
        [
            "trainer.save_freq=1",
            "trainer.total_training_steps=2",
            "global_profiler.steps=[2]",
            f"data.custom_cls.path={extensions}",
            "data.custom_cls.name=Rows",
            *(f"{loss}vanilla", "trainer.default_hdfs_dir=memory://every/key"),
        ],
        [
            *(*critic, f"{ACTOR}use_kl_loss=true", "critic.model.lora_rank=2", "trainer.val_before_train=true"),
            *(f"{ROLLOUT}val_kwargs.do_sample=true", f"{ACTOR}clip_ratio=0.1", f"{ROLLOUT}parity.freq=1"),
            *(
                f"{ROLLOUT}workflow=MultiTurnWorkflow",
                "reward.reward_model.enable=true",
                "reward.reward_model.rollout.name=hf",
            ),
            *(
                f"reward.reward_model.model_path={toy.model}",
                f"{ACTOR}optim.optimizer=Muon",
                "critic.optim.optimizer=Muon",
                f"{ACTOR}use_dynamic_bsz=false",
            ),
        ],
        [
            *(*critic, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
            f"{ACTOR}use_dynamic_bsz=true",
            *("algorithm.use_pf_ppo=true", f"{loss}clip_cov"),
        ],
        [
            *("reward.reward_model.enable=true", f"reward.reward_model.model_path={toy.judge}", f"{loss}kl_cov"),
            *("reward.reward_model.use_dynamic_bsz=true", f"reward.reward_model.input_tokenizer={toy.model}"),
            *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=seq_reward"),
        ],
        [
            *(
                "actor_rollout_ref.model.lora_rank=2",
                f"{CORRECTION}rollout_is=token",
                f"{CORRECTION}rollout_rs=token_k1",
            ),
            *(f"{CORRECTION}rollout_rs_threshold=0.5_2.0", "trainer.max_staleness=1", "trainer.device=cpu"),
            *("algorithm.reward_norm.mean_level=group", "algorithm.reward_norm.std_level=batch", f"{loss}sapo"),
            *("algorithm.adv_norm.mean_level=batch", "algorithm.adv_norm.std_level=batch"),
        ],
        [
            *(
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[even,third]",
                f"{loss}dro",
                "actor_rollout_ref.actor.policy_loss.dro_beta=0.5",
            ),
            *("reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={extensions}"),
        ],
        [
            *("reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"),
            *("reward.reward_kwargs.overlong_buffer_cfg.len=3", f"{CORRECTION}bypass_mode=true"),
            *("data.streaming=true", "data.shuffle_buffer_size=16"),
        ],
        [
            *("distillation.enabled=true", f"distillation.teacher_models.teacher_model.model_path={teacher}"),
            *("distillation.distillation_loss.use_policy_gradient=true", "distillation.distillation_loss.topk=4"),
            *("distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.nnodes=1"),
            *("distillation.n_gpus_per_node=1", f"{ACTOR}use_kl_loss=true"),
            f"actor_rollout_ref.ref.model.path={teacher}",
        ],
        ["--config-name=ppo_megatron_trainer", "trainer.device=cpu", *critic, f"{ACTOR}use_kl_loss=true"],
    ]


def supervised_runs(toy: Toy, folder: Path, job: ModuleType) -> list[list[str]]:
    chat = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "?"} if job in PAIRED else chat
    long = {"prompt": "1+1=", "response": "2" * 99, "chosen": "2" * 99, "rejected": "?"}
    for name, value in {"short": row, "long": long}.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(value)}\n" * 8)
    common = ["trainer.backend=local", f"model.path={toy.model}", f"data.val_files={folder}/short.jsonl"]
    common += ["data.train_batch_size=4", "data.micro_batch_size_per_gpu=2", "data.max_length=32"]
    common += ["trainer.test_freq=1", "trainer.save_freq=1", "trainer.total_training_steps=2"]
    custom = [f"data.custom_cls.path={folder}/extensions.py", "data.custom_cls.name=Rows", "model.lora_rank=2"]
    custom.append("data.use_dynamic_bsz=false")
    labelled = [{"prompt": "1+1=", "completion": text, "label": text == "2"} for text in "2?"]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, labelled * 4)))
    files = [f"data.{part}_files={folder}/labelled.jsonl" for part in ("train", "val")]
    columns = [] if job in PAIRED else ["data.messages_key=null"]
    runs = [
        [f"data.train_files={folder}/short.jsonl", "optim.optimizer=Muon", "data.streaming=true"],
        [f"data.train_files={folder}/short.jsonl", *custom, "global_profiler.steps=[1]"],
        [
            f"data.train_files={folder}/long.jsonl",
            f"data.val_files={folder}/long.jsonl",
            "data.truncation=right",
            *columns,
        ],
        *([["dpo.loss_type=kto", *files]] if job is main_dpo else []),
    ]
    return [
        [*common, *overrides, f"trainer.default_local_dir={folder}/{number}"] for number, overrides in enumerate(runs)
    ]


def evaluation_runs(toy: Toy, folder: Path) -> list[list[str]]:
    common = ["trainer.backend=local", f"actor_rollout_ref.model.path={toy.model}", f"data.val_files={toy.val}"]
    common += ["data.max_prompt_length=16", "data.max_response_length=4", f"{ROLLOUT}val_kwargs.do_sample=true"]
    common += ["reward.num_workers=1", f"{ROLLOUT}agent.num_workers=1"]
    manager = ["reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={folder}/extensions.py"]
    runs = [
        [
            *(f"data.custom_cls.path={folder}/extensions.py", "data.custom_cls.name=Rows"),
            f"reward.custom_reward_function.path={folder}/grader.py",
        ],
        [*manager, f"{ROLLOUT}workflow=MultiTurnWorkflow"],
        [
            *("reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"),
            "reward.reward_kwargs.overlong_buffer_cfg.len=3",
        ],
    ]
    return [
        [*common, *overrides, f"trainer.default_local_dir={folder}/{number}"] for number, overrides in enumerate(runs)
    ]


def runs_of(job: ModuleType, toy: Toy, folder: Path) -> list[list[str]]:
    """The arguments of every run of a job."""
    (folder / "extensions.py").write_text(EXTENSIONS)
    (folder / "grader.py").write_text(GRADER)
    if job is main_eval:
        return evaluation_runs(toy, folder)
    if job is not main_ppo:
        return supervised_runs(toy, folder, job)
    common = ("trainer.backend=local", f"reward.custom_reward_function.path={folder}/grader.py")
    short = ("trainer.total_training_steps=1", f"{ROLLOUT}agent.num_workers=1")
    return [
        toy.overrides(folder / f"ppo{number}", *common, *short, *overrides)
        for number, overrides in enumerate(ppo_runs(toy, folder))
    ]


@cache
def functions_of(file: str) -> dict[str, ast.AST]:
    """The functions of a file by name, methods also by "Class.method"."""
    functions: dict[str, ast.AST] = {}
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        functions |= {
            prefix + one.name: one for one in inside if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        }
    return functions


def is_read_by(key: str, reader: str) -> bool:
    """Whether the function of `reader` ("file:function") accesses the key, or dumps its section."""
    file, _, function = reader.partition(":")
    attributes = {node.attr for node in ast.walk(functions_of(file)[function]) if isinstance(node, ast.Attribute)}
    *_, section, name = key.split(".")
    return name in attributes or {section, "model_dump"} <= attributes


@pytest.mark.parametrize("job", [main_ppo, main_sft, main_rm, main_dpo, main_eval], ids=lambda job: job.__name__)
def test_every_key_is_read(toy: Toy, tmp_path: Path, job: ModuleType) -> None:
    read: set[str] = set()
    for argv in runs_of(job, toy, tmp_path):
        read |= keys_read_by(job, argv)
    keys = set(leaves(schema_of(job)))
    dead = sorted(keys - read - {*READ_WHILE_LOADING, *READERS})
    assert not dead, " ".join(dead)


@pytest.mark.parametrize("key", READERS)
def test_code_of_other_engines_reads_its_keys(key: str) -> None:
    assert is_read_by(key, READERS[key])
