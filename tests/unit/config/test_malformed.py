"""Malformed settings: each ends with exit code 2 and a message that names the key and what to write, no traceback."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.config import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig, load_config, main_config
from rlsys.config.compat.reader import compat_table
from rlsys.config.introspect import leaves
from rlsys.config.plan import plan_text
from rlsys.config.schema.base import Section
from rlsys.utils.errors import ConfigError

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
C = "algorithm.rollout_correction"
MEGATRON = f"{A}.megatron"


ODD_MODELS = {
    "layers": {"num_hidden_layers": "four"},
    "flat": {"hidden_size": 0},
    "endless": {"vocab_size": 9, "eos_token_id": [3, 9]},
    "narrow": {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
    "seven": {
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
    },
    "sparse": {"text_config": {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128}},
    "six": {"text_config": {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 6}},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8},
    "kimi": {"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64},
    "qwen35": {"model_type": "qwen3_5", "text_config": {"linear_num_value_heads": 32}},
    "uneven": {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1120},
}


@dataclass(frozen=True)
class Bad:
    """Arguments, and the words that must stand in the message."""

    argv: tuple[str, ...]
    says: tuple[str, ...]
    schema: type[Section] = PPOConfig


AHEAD = ("trainer.max_staleness=4", "trainer.rollout_workers=1")


def bad(argv: str | list[str], *says: str, schema: type[Section] = PPOConfig) -> Bad:
    return Bad((argv,) if isinstance(argv, str) else tuple(argv), says, schema)


UNREADABLE = [
    bad(f"{M}.custom_chat_template=mine.jinja", "must be the text of a Jinja template", "$(cat FILE)"),
    bad("trainer.nnodes", "trainer.nnodes", "key=value"),
    bad("=3", "=3", "is not a key"),
    bad("data..seed=1", "data..seed", "is not a key"),
    bad("data seed=1", "data seed", "names joined by dots"),
    bad("data.train_files=[a,b", "data.train_files", "']' is missing"),
    bad("data.train_files=[a,]", "data.train_files", "after the last comma"),
    bad("data.train_files=[,a]", "data.train_files", "a value is missing"),
    bad("data.train_files=a,b", "data.train_files", "['a', ...]"),
    bad("data.train_files='a", "data.train_files", "closing '"),
    bad("data.train_files='a' b", "data.train_files", "left over"),
    bad(f"{M}.override_config={{a}}", f"{M}.override_config", "{name: value"),
    bad(f"{M}.override_config={{a: 1", f"{M}.override_config", "'}' is missing"),
    bad("data.train_files=" + "[" * 100, "data.train_files", "brackets"),
    bad("data.seed=" + "9" * 5000, "data.seed"),
    bad("--confg-name=dapo", "--confg-name", "did you mean --config-name"),
    bad("--config-name", "--config-name", "needs a value", "--config-name=ppo_trainer"),
    bad(["--dry-run", "--gpu"], "--gpu needs a value", "--gpu=H100"),
    bad("--config=./none.yaml", "--config-name=./none.yaml", "no such preset"),
    bad("--data.seed=1", "no dashes: data.seed=1"),
    bad("--gpu=H100", "--gpu=H100", "--dry-run --gpu=H100"),
    bad(["--dry-run", "--gpu=H1000"], "--gpu=H1000", "H100, H800"),
    bad("-x", "unknown option -x", "--help"),
    bad("--config-name=dappo", "dappo", "did you mean dapo"),
    bad("--config-name=nothing_like_it", "nothing_like_it", "quickstart"),
    bad("--config-path=./nowhere", "--config-path", "folder not found"),
    bad("--multirun", "--multirun", "options are"),
]

UNKNOWN = [
    bad("data.train_batch_sise=4", "data.train_batch_sise", "did you mean data.train_batch_size"),
    bad("trainer.nnode=1", "trainer.nnode", "trainer.nnodes"),
    bad("trainer.total_epoch=1", "trainer.total_epoch", "trainer.total_epochs"),
    bad(f"{A}.lr=1e-6", f"{A}.lr", f"{A}.optim.lr"),
    bad(f"{A}.ppo_mini_batch_siz=4", "ppo_mini_batch_siz", f"{A}.ppo_mini_batch_size"),
    bad("actor.ppo_mini_batch_size=4", "actor.ppo_mini_batch_size", f"{A}.ppo_mini_batch_size"),
    bad(f"{R}.temprature=1", f"{R}.temprature", f"{R}.temperature"),
    bad("algorithm.adv_estimater=grpo", "adv_estimater", "algorithm.adv_estimator"),
    bad("algorithm.kl_ctrl.coef=1", "algorithm.kl_ctrl.coef", "algorithm.kl_ctrl.kl_coef"),
    bad("critic.cliprange=0.5", "critic.cliprange", "critic.cliprange_value"),
    bad("reward.custom_reward_function.file=x", "no such key; --help reward.custom_reward_function lists"),
    bad(f"{A}.load_wait=true", f"no such key; --help {A} lists"),
    bad("custom_reward_function.pth=x", "custom_reward_function.pth", "path"),
    bad("zzz=1", "zzz", "no such key; --help"),
    bad("enable_rollout_tracing=1", "enable_rollout_tracing", "no such key; --help"),
    bad("max_steps=5", "max_steps", "trainer.total_training_steps"),
    bad("trainer.output_dir=x", "trainer.output_dir", "trainer.default_local_dir"),
    bad("run_name=x", "run_name", "trainer.experiment_name"),
    bad("learning_rate=1e-6", "learning_rate", f"{A}.optim.lr"),
    bad("learning_rate=1e-6", "learning_rate", "optim.lr", schema=SFTConfig),
    bad("temp=1", "temp", f"{R}.temperature"),
    bad("model.path=x", "model.path", f"{M}.path"),
    bad("data.seed =3", "'data.seed ' is not a key"),
    bad("data=1", "data = 1", "section", "data."),
    bad("critic=null", "critic = null", "section"),
    bad("data.seed.x=1", "data.seed.x", "data.seed is a single value"),
    bad("data.seed={a: 1}", "data.seed", "single value"),
    bad("+data.seeed=1", "data.seeed", "data.seed"),
    bad("++data.seeed=1", "data.seeed", "data.seed"),
    bad("~data.seeed", "~data.seeed", "data.seed"),
    bad("data={train_batch_sise: 4}", "data.train_batch_sise", "data.train_batch_size"),
    bad("trainer.project-name=x", "trainer.project-name", "trainer.project_name"),
    bad("Data.seed=1", "Data.seed", "data.seed"),
]

ADDING = [
    bad(f"~{M}.override_config.a", f"{M}.override_config.a", "does not exist"),
    bad([f"{M}.override_config.a=1", f"~{M}.override_config.a.b"], f"{M}.override_config.a.b", "does not exist"),
    bad("~data.train_batch_size=7", "takes no value", "~data.train_batch_size"),
]

TYPES = [
    bad("data.train_batch_size=many", "data.train_batch_size = many", "whole number, at least 1"),
    bad("data.train_batch_size=1.5", "data.train_batch_size = 1.5", "whole number"),
    bad("data.train_batch_size=true", "data.train_batch_size = true", "whole number"),
    bad("data.train_batch_size=null", "data.train_batch_size = null", "whole number"),
    bad("data.train_batch_size=[4]", "data.train_batch_size = [4]", "whole number"),
    bad("data.train_batch_size='4'", "data.train_batch_size", "whole number"),
    bad("data.train_batch_size=", "data.train_batch_size", "whole number"),
    bad("data.shuffle=yes", "data.shuffle = yes", "true or false"),
    bad("data.shuffle=1", "data.shuffle = 1", "true or false"),
    bad("data.shuffle=null", "data.shuffle = null", "true or false"),
    bad("trainer.project_name=null", "trainer.project_name = null", "text"),
    bad("trainer.project_name=''", "trainer.project_name", "text"),
    bad("trainer.project_name=[a]", "trainer.project_name = [a]", "text"),
    bad("trainer.logger={a: 1}", "trainer.logger", "single value"),
    bad("trainer.logger=3.5", "trainer.logger", "text, or a list"),
    bad("data.train_files=[1.5,true]", "data.train_files", "path"),
    bad("data.train_files=''", "data.train_files", "path"),
    bad(f"{A}.optim.lr=fast", f"{A}.optim.lr = fast", "a number"),
    bad(f"{A}.optim.lr=true", f"{A}.optim.lr = true", "a number"),
    bad(f"{A}.optim.betas=0.9", f"{A}.optim.betas = 0.9", "2 in a list"),
    bad(f"{A}.optim.betas=[0.9]", f"{A}.optim.betas", "2 in a list"),
    bad(f"{A}.optim.betas=[0.9,0.99,1]", f"{A}.optim.betas", "2 in a list"),
    bad(f"{A}.optim.betas=[0.9,1.5]", f"{A}.optim.betas", "at most 1"),
    bad(f"{M}.override_config=3", f"{M}.override_config = 3", "{a: 1}"),
    bad("trainer.deadlines.call_s=soon", "trainer.deadlines.call_s", "a number, more than 0"),
]

RANGES = [
    bad("data.train_batch_size=0", "data.train_batch_size = 0", "at least 1"),
    bad("data.train_batch_size=-8", "data.train_batch_size = -8", "at least 1"),
    bad("data.train_batch_size=99999999999999", "data.train_batch_size", "at most 1000000000"),
    bad("data.max_prompt_length=0", "data.max_prompt_length", "at least 1"),
    bad("data.max_response_length=-1", "data.max_response_length", "at least 1"),
    bad("data.seed=-1", "data.seed = -1", "at least 0"),
    bad("data.val_max_samples=-2", "data.val_max_samples", "-1 or a whole number, at least 1"),
    bad(f"{A}.optim.lr=-1e-6", f"{A}.optim.lr", "at least 0"),
    bad(f"{A}.optim.lr=nan", f"{A}.optim.lr = nan", "a number"),
    bad(f"{A}.optim.lr=inf", f"{A}.optim.lr = inf", "a number"),
    bad(f"{A}.optim.lr=100", f"{A}.optim.lr = 100", "at most 10"),
    bad(f"{A}.optim.weight_decay=-0.1", "weight_decay", "at least 0"),
    bad(f"{A}.optim.lr_warmup_steps_ratio=1.5", "lr_warmup_steps_ratio", "at most 1"),
    bad(f"{A}.clip_ratio=-0.2", f"{A}.clip_ratio = -0.2", "at least 0"),
    bad(f"{A}.clip_ratio_c=1.0", f"{A}.clip_ratio_c", "more than 1"),
    bad(f"{A}.grad_clip=-1", f"{A}.grad_clip", "at least 0"),
    bad(f"{A}.ppo_epochs=0", f"{A}.ppo_epochs", "at least 1"),
    bad(f"{A}.kl_loss_coef=-1", f"{A}.kl_loss_coef", "at least 0"),
    bad(f"{A}.tau_neg=0", f"{A}.tau_neg", "more than 0"),
    bad(f"{R}.temperature=-1", f"{R}.temperature", "more than 0"),
    bad(f"{R}.val_kwargs.temperature=-1", f"{R}.val_kwargs.temperature", "at least 0"),
    bad(f"{R}.top_p=0", f"{R}.top_p", "more than 0"),
    bad(f"{R}.top_p=1.1", f"{R}.top_p", "at most 1"),
    bad(f"{R}.n=0", f"{R}.n = 0", "at least 1"),
    bad(f"{M}.lora_rank=-4", f"{M}.lora_rank", "at least 0"),
    bad("algorithm.gamma=1.01", "algorithm.gamma", "at most 1"),
    bad("algorithm.lam=-0.1", "algorithm.lam", "at least 0"),
    bad("algorithm.kl_ctrl.horizon=0", "horizon", "at least 1"),
    bad("critic.cliprange_value=0", "critic.cliprange_value", "more than 0"),
    bad("reward.timeout_s=0", "reward.timeout_s", "more than 0"),
    bad("reward.timeout_s=inf", "reward.timeout_s", "a number"),
    bad("reward.num_workers=-1", "reward.num_workers", "at least 0"),
    bad("reward.num_workers=0", "reward.num_workers", "trainer.backend=local"),
    bad("reward.max_failed=1.1", "reward.max_failed", "at most 1"),
    bad("reward.sandbox_fusion.memory_limit_mb=1", "memory_limit_mb", "at least 16"),
    bad("trainer.nnodes=0", "trainer.nnodes = 0", "at least 1"),
    bad("trainer.total_epochs=0", "trainer.total_epochs", "at least 1"),
    bad("trainer.save_freq=-2", "trainer.save_freq", "at least -1"),
    bad("trainer.max_staleness=-1", "trainer.max_staleness", "at least 0"),
    bad("actor_rollout_ref.nccl_timeout=-5", "nccl_timeout", "more than 0"),
]

CHOICES = [
    bad("data.truncation=rigt", "data.truncation = rigt", "error, left, right, middle", "set data.truncation=right"),
    bad("data.bad_rows=ignore", "data.bad_rows", "refuse, skip"),
    bad(f"{A}.strategy=deepspeed", f"{A}.strategy", "fsdp, fsdp2, megatron"),
    bad("engine.strategy=deepspeed", "engine.strategy", "fsdp, fsdp2, megatron", schema=SFTConfig),
    bad(
        [f"{A}.strategy=megatron", f"{A}.megatron.fp8=hybrid", "trainer.device=cpu"],
        f"{A}.megatron.fp8",
        "on GPUs only",
    ),
    bad(f"{A}.megatron.fp8=e5m2", f"{A}.megatron.fp8", "e4m3, hybrid"),
    bad(f"{R}.name=trtllm", f"{R}.name = trtllm", "hf"),
    bad(f"{R}.name=hff", f"{R}.name", f"set {R}.name=hf"),
    bad(f"{R}.dtype=int8", f"{R}.dtype", "bfloat16"),
    bad(f"{A}.fsdp_config.model_dtype=fp8", "model_dtype", "float32, bfloat16"),
    bad(f"{A}.loss_agg_mode=token_mean", f"{A}.loss_agg_mode", "set " + f"{A}.loss_agg_mode=token-mean"),
    bad(f"{A}.kl_loss_type=k4", f"{A}.kl_loss_type", "low_var_kl"),
    bad(f"{A}.optim.lr_scheduler_type=cosin", "lr_scheduler_type", "lr_scheduler_type=cosine"),
    bad(f"{A}.checkpoint.save_contents=[model,optim]", "save_contents", "optimizer"),
    bad("algorithm.kl_ctrl.type=adaptiv", "algorithm.kl_ctrl.type", "adaptive"),
    bad("algorithm.kl_penalty=k9", "algorithm.kl_penalty", "low_var_kl"),
    bad("algorithm.reward_norm.mean_level=prompt", "algorithm.reward_norm.mean_level", "batch, group"),
    bad(f"{C}.rollout_is=tokens", f"{C}.rollout_is", "token, sequence"),
    bad(f"{C}.loss_type=pg", f"{C}.loss_type", "reinforce"),
    bad("trainer.device=gpu", "trainer.device", "auto, cpu, cuda"),
    bad("trainer.device=npu", "trainer.device", "Ascend"),
    bad("trainer.backend=slurm", "trainer.backend", "ray, local"),
    bad("trainer.resume_mode=always", "trainer.resume_mode", "auto, disable, resume_path"),
    bad("trainer.logger=[console,wandbb]", "trainer.logger", "wandbb", "wandb"),
    bad("trainer.logger=swanlab", "trainer.logger", "choose from console"),
    bad("algorithm.adv_estimator=grp", "algorithm.adv_estimator", "set algorithm.adv_estimator=grpo"),
    bad(f"{A}.policy_loss.loss_mode=gmpo", "loss_mode", "geo_mean"),
    bad(f"{A}.policy_loss.loss_mode=clip-cv", "loss_mode", "clip_cov"),
    bad("reward.reward_manager.name=collabllm", "reward.reward_manager.name", "naive, dapo"),
    bad("reward.reward_kwargs.max_resp_length=8", "reward.reward_kwargs.max_resp_length", "and max_resp_len only"),
    bad("reward.reward_kwargs.metric_weights.a=1", "reward.reward_kwargs.metric_weights", "name=naive has"),
    bad("reward.reward_kwargs.overlong_buffer_cfg.length=1", "overlong_buffer_cfg.length", "overlong_buffer_cfg.len?"),
]

DEVICES = ("trainer.device=cpu", "trainer.n_gpus_per_node=2")
FOREIGN = [
    bad(f"{A}.megatron.mixed_precision={{param_dtype: bf16}}", "mixed_precision", "set dtype"),
    bad(f"{A}.megatron.dist_checkpointing_path=x", "dist_checkpointing_path", "model.path"),
    bad(f"{R}.pipeline_parallel_size=2", "pipeline_parallel_size", "set rollout.pipeline_model_parallel_size"),
    bad(f"{R}.pipeline_model_parallel_size=2", f"{R}.pipeline_model_parallel_size", "in one process", "use vllm"),
    bad(
        [f"{R}.name=sglang", *(f"{R}.{size}_parallel_size=2" for size in ("pipeline_model", "data")), *DEVICES],
        f"{R}.pipeline_model_parallel_size = 2: with SGLang only where {R}.data_parallel_size=1",
        "use vllm",
    ),
    bad(
        [f"{R}.name=vllm", *(f"{R}.{size}_model_parallel_size=2" for size in ("tensor", "pipeline")), *DEVICES],
        f"{R}.pipeline_model_parallel_size = 2: the 2 rollout processes",
        "copies of the model on 4 each; set a divisor of 1",
    ),
    bad(
        [f"{R}.data_parallel_size=2", *DEVICES], f"{R}.data_parallel_size", "the hf engine runs a model in one process"
    ),
    bad(
        [f"{R}.name=sglang", f"{R}.data_parallel_size=2", f"{M}.path=mixtral", "trainer.n_gpus_per_node=2"],
        f"{R}.data_parallel_size",
        "the model's attention (mixtral) has one copy",
        "use vllm",
    ),
    bad([f"{R}.name=sglang", f"{R}.data_parallel_size=2", *DEVICES], "data_parallel_size", "expert_parallel_size=2"),
    bad([f"{R}.name=hf", f"{M}.path=qwen35"], f"{R}.name = hf: it has no cache for gated delta", f"set {R}.name=vllm"),
    bad(
        f"{R}.engine_kwargs.sglang.enable_dp_attention_local_control_broadcast=true",
        "enable_dp_attention_local_control_broadcast",
        "all ranks stop at the same step",
    ),
    bad([f"{R}.name=vllm", f"{R}.data_parallel_size=2", *DEVICES], f"{R}.data_parallel_size", "expert_parallel_size=2"),
    bad(
        [f"{R}.name=vllm", "trainer.device=cuda", *(f"{R}.{size}_parallel_size=2" for size in ("data", "expert"))],
        f"{R}.data_parallel_size",
        "the 1 rollout processes cannot hold copies of the model on 2 each; set a divisor of 1",
    ),
    bad(f"{R}.engine_kwargs.vllm.data_parallel_size=2", "engine_kwargs.vllm.data_parallel_size", "set rollout.data"),
    bad(f"{R}.engine_kwargs.vllm.enable_expert_parallel=true", "enable_expert_parallel", "expert_parallel_size"),
    bad(f"{R}.expert_parallel_size=2", f"{R}.expert_parallel_size", "the hf engine runs a model in one process"),
    bad(
        [f"{R}.name=sglang", f"{R}.expert_parallel_size=2", "trainer.device=cuda"],
        f"{R}.expert_parallel_size",
        f"among the 1 processes of a copy; set a divisor of 1, or a larger {R}.tensor_model_parallel_size",
    ),
    bad(
        [
            *(f"{R}.name=sglang", "trainer.n_gpus_per_node=4", "trainer.device=cuda", f"{R}.expert_parallel_size=4"),
            *(f"{R}.{cut}_model_parallel_size=2" for cut in ("tensor", "pipeline")),
        ],
        f"{R}.expert_parallel_size = 4: sglang divides whole experts among the 2 processes",
    ),
    bad(
        [
            f"{R}.name=vllm",
            *DEVICES,
            f"{R}.tensor_model_parallel_size=2",
            f"{R}.expert_parallel_size=2",
        ],
        f"{R}.expert_parallel_size",
        "kernels of vllm for CPUs",
    ),
    bad(
        [f"{R}.name=vllm", f"{M}.path=seven", "trainer.n_gpus_per_node=3", f"{R}.tensor_model_parallel_size=3"],
        f"{R}.tensor_model_parallel_size = 3: 28 attention heads, 4 key-value heads, 18944 MLP channels",
        "3 equal parts; set one of 1, 2, 4\n",
    ),
    bad(
        [f"{R}.name=sglang", f"{M}.path=sparse", "trainer.n_gpus_per_node=6", f"{R}.tensor_model_parallel_size=6"],
        "32 attention heads, 4 key-value heads: these cannot be cut into 6 equal parts; set one of 1, 2, 4, 8, 16, 32",
        schema=EvalConfig,
    ),
    bad(
        [f"{R}.name=vllm", f"{M}.path=seven", *(f"{R}.{size}_parallel_size=2" for size in ("tensor_model", "expert"))],
        f"{R}.expert_parallel_size = 2: the model has no experts; set {R}.expert_parallel_size=1",
    ),
    bad(
        [
            *(f"{R}.name=sglang", f"{M}.path=six", "trainer.n_gpus_per_node=4", "trainer.device=cuda"),
            *(f"{R}.expert_parallel_size=4", f"{R}.tensor_model_parallel_size=4"),
        ],
        f"{R}.expert_parallel_size = 4: 6 experts cannot be divided evenly among 4 processes; set one of 1, 2, 3, 6",
    ),
    bad(
        [f"{R}.name=vllm", f"{M}.path=seven", "trainer.n_gpus_per_node=29", f"{R}.pipeline_model_parallel_size=29"],
        f"{R}.pipeline_model_parallel_size = 29: the model has 28 layers, and each stage needs one; set at most 28",
    ),
    bad("data.sampler.class_name=Mine", "data.sampler.class_path=<file>", "its file is not set"),
    *(
        bad(f"{R}.{key}", f"{R}.{key.partition('=')[0]}", "punish repetition in the reward function")
        for key in ("repetition_penalty=1.05", "val_kwargs.repetition_penalty=1.05", "frequency_penalty=0.1")
    ),
    bad(f"{R}.engine_kwargs.sglang.preferred_sampling_params={{a: 1}}", "preferred_sampling_params", "temperature"),
    bad(f"{R}.engine_kwargs.vllm.override_generation_config={{a: 1}}", "override_generation_config", "temperature"),
    bad(f"{R}.engine_kwargs.vllm.quantization=fp8", "engine_kwargs.vllm.quantization", "rollout.quantization=fp8"),
    *(
        bad(f"{R}.engine_kwargs.{key}", f"engine_kwargs.{key.partition('=')[0]}", why)
        for key, why in {
            "vllm.logits_processors=[mine]": "samples the tokens itself",
            "vllm.worker_cls=mine": "a worker of the job",
            "vllm.enable_eplb=true": "where it was at the start",
            "vllm.prefill_context_parallel_size=2": "does not place",
            "vllm.data_parallel_size_local=2": "set rollout.data_parallel_size",
            "vllm.data_parallel_rank=1": "over nodes too",
            "vllm.data_parallel_backend=ray": "over nodes too",
            "vllm.data_parallel_external_lb=true": "least loaded replica",
            "vllm.runner=pooling": "engines generate",
            "sglang.is_embedding=true": "engines generate",
            "sglang.enable_eplb=true": "where it was at the start",
            "sglang.init_expert_location=a.json": "where it was at the start",
            "sglang.ep_num_redundant_experts=2": "to one place",
            "sglang.attn_cp_size=2": "does not place",
            "sglang.moe_dp_size=2": "does not place",
            "sglang.disaggregation_mode=prefill": "disaggregation",
            "sglang.quantization=fp8": "rollout.quantization=fp8",
            "sglang.torchao_config=int8wo": "rollout.quantization=fp8",
        }.items()
    ),
    bad([f"{R}.quantization=fp8", f"{R}.name=hf"], f"{R}.quantization", "only vllm serves it"),
    bad([f"{R}.quantization=fp8", f"{R}.name=sglang"], "sglang beside a trainer", schema=EvalConfig),
    bad([f"{R}.quantization=fp8", f"{R}.name=vllm", "trainer.device=cpu"], f"{R}.quantization", "on GPUs"),
    bad([f"{R}.quantization=fp8", f"{R}.name=vllm_remote"], f"{R}.quantization", "of the job", "=null"),
    bad([f"{R}.quantization=fp8", f"{R}.name=vllm", f"{M}.path=uneven"], "are 1120 wide", "multiples of 64", "=null"),
    bad(f"{R}.engine_kwargs.sglang.dp_size=2", "engine_kwargs.sglang.dp_size", "set rollout.data_parallel_size"),
    bad(f"{R}.engine_kwargs.sglang.tp_size=2", "engine_kwargs.sglang.tp_size", "tensor_model_parallel_size"),
    bad(f"{R}.engine_kwargs.sglang.nnodes=2", "engine_kwargs.sglang.nnodes", "over nodes too"),
    bad(f"{R}.engine_kwargs.vllm.distributed_executor_backend=mp", "distributed_executor_backend", "places"),
    bad(f"{R}.engine_kwargs.vllm.speculative_config={{method: mtp}}", "speculative_config", "one at a time"),
    bad(f"{R}.quantization=torchao", f"{R}.quantization", "fp8"),
    bad(f"{R}.quantization_config_file=a.json", "quantization_config_file", "no other format"),
    bad("data.audio_key=clips", "data.audio_key", "trains on text, images and videos"),
    bad(f"{A}.optim.num_cycles=1", "num_cycles", "falls once"),
    bad("distillation.enabled=true", "there is no teacher", "teacher_models.teacher_model.model_path=<model>"),
    bad("distillation.distillation_loss.loss_mode=k1", "gradient ignores the teacher", "use_policy_gradient=true"),
    bad(["distillation.enabled=true", "distillation.teacher_models.math.key=m"], "no model; set", "math.model_path"),
    bad(
        ["distillation.enabled=true", *(f"distillation.teacher_models.{name}.model_path=." for name in ("a", "b"))],
        "several teachers need different keys",
        "distillation.teacher_models.b.key=<value>",
    ),
    bad(
        [
            "distillation.enabled=true",
            *(f"distillation.teacher_models.{at}.model_path=." for at in ("a", "teacher_model")),
        ],
        "verl drops this name beside others",
    ),
    bad(
        [
            *(f"{A}.strategy=megatron", "distillation.enabled=true", "distillation.nnodes=1"),
            "distillation.teacher_models.math.model_path=.",
            "distillation.teacher_models.math.inference.tensor_model_parallel_size=3",
        ],
        "teacher_models.*.inference.tensor_model_parallel_size = 3: tensor 3 x pipeline 1 = 3 does not divide the 8",
    ),
    bad(["data.train_batch_size=6", f"{A}.ppo_mini_batch_size=2", "trainer.n_gpus_per_node=3"], "set a multiple of 3"),
    bad("distillation.distillation_loss.policy_loss_mode=gspo", "policy_loss_mode = gspo", "must be vanilla"),
    bad("trainer.default_hdfs_dir=s4://x", "trainer.default_hdfs_dir", "Protocol not known: s4"),
    bad("trainer.default_hdfs_dir=copies", "trainer.default_hdfs_dir", "s3://BUCKET/RUN"),
    bad(
        "trainer.default_local_dir=s3://x/run",
        "trainer.default_local_dir",
        "to copy checkpoints set trainer.default_hdfs_dir",
    ),
    bad("trainer.del_local_ckpt_after_load=true", "del_local_ckpt_after_load", "max_actor_ckpt_to_keep"),
    bad(f"{A}.router_replay.mode=R2", "router_replay.mode", "only Megatron"),
    bad(
        [f"{A}.strategy=megatron", f"{A}.router_replay.mode=R2", f"{M}.path=seven"],
        f"{A}.router_replay.mode = R2: the model has no experts",
        f"set {A}.router_replay.mode=disabled",
    ),
    bad(
        [f"{A}.strategy=megatron", f"{A}.megatron.pipeline_model_parallel_size=3"],
        f"{A}.megatron.pipeline_model_parallel_size = 3: tensor 1 x pipeline 3 = 3 does not divide the 1",
        f"set {A}.megatron.pipeline_model_parallel_size=1",
    ),
    bad(
        ["engine.strategy=megatron", "engine.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"],
        "engine.strategy = megatron: Megatron splits matrices by engine.megatron.tensor_model_parallel_size",
        "set engine.tensor_parallel_size=1",
        schema=SFTConfig,
    ),
    bad(
        [f"{A}.strategy=megatron", f"{A}.router_replay.mode=R3"],
        f"{A}.router_replay.mode = R3: it replays routes of the rollout; set {R}.enable_rollout_routing_replay=true",
    ),
    bad(
        f"{R}.enable_rollout_routing_replay=true",
        f"{A}.router_replay.mode = disabled: routes of the rollout are only replayed with R3",
        f"set {R}.enable_rollout_routing_replay=false",
    ),
    bad(
        [f"{R}.enable_rollout_routing_replay=true", f"{R}.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
        f"{R}.enable_rollout_routing_replay = true: stages return the experts of their own layers",
    ),
    bad("trainer.allocation_mode=5", "trainer.allocation_mode", "'5'", "takes letters with sizes"),
    bad(
        ["trainer.allocation_mode=hf:d8+fsdp:d16", "cluster.n_nodes=2", "cluster.n_gpus_per_node=8"],
        "'hf:d8+fsdp:d16' needs 24 processes, and cluster.n_nodes x cluster.n_gpus_per_node are 16",
    ),
    bad(f"{A}.optim.optimizer=Lion", f"{A}.optim.optimizer", "AdamW, AdamW8bit, Muon"),
    bad(f"{A}.optim.optimizer=AdamW8bit", f"set {A}.optim.optimizer_impl=bitsandbytes.optim"),
    bad(f"{A}.optim.optimizer_impl=bitsandbytes.optim", f"set {A}.optim.optimizer_impl=torch.optim"),
    bad([f"{A}.strategy=megatron", f"{A}.optim.optimizer=Muon"], f"{A}.optim.optimizer", "set strategy=fsdp"),
    bad(
        [f"{A}.optim.optimizer=Muon", f"{A}.optim.override_optimizer_config.optimizer_cpu_offload=true"],
        f"{A}.optim.override_optimizer_config.optimizer_cpu_offload",
        "only AdamW steps on the host",
    ),
    bad("+optim.override_optimizer_config.bf16_stochastic_round=true", "bf16_stochastic_round", schema=SFTConfig),
    bad("reward.sandbox_fusion.url=sandbox:8080", "reward.sandbox_fusion.url", "http"),
    bad("ray_kwargs.ray_init.num_gpus=8", "num_gpus", "CUDA_VISIBLE_DEVICES"),
    bad(f"{M}.lora.dropout=0.1", f"{M}.lora.dropout", "no dropout"),
    bad(f"{M}.override_config.moe_config.freeze_moe_router=true", "freeze_moe_router", "routers are trained"),
    bad(f"{M}.override_config={{moe_config: {{freeze_moe_router: true}}}}", "moe_config", "routers are trained"),
    bad(f"{A}.optim.total_training_steps=100", "optim.total_training_steps", "trainer.total_training_steps"),
    bad("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode", "trainer_mode=separate_async"),
    bad(f"{A}.megatron.use_megatron_fsdp=true", "use_megatron_fsdp", "strategy=fsdp"),
    bad("actor.ppo_n_minibatches=5", "ppo_n_minibatches", f"{A}.ppo_mini_batch_size"),
    bad("async_training=true", "trainer.max_staleness", "trainer.rollout_workers=1"),
]

SPELLINGS = [
    bad([f"{A}.clip_ratio=0.2", f"{A}.eps_clip=0.3"], "clip_ratio = 0.2", "eps_clip = 0.3", "set one"),
    bad(["reward.num_workers=2", "reward_model.num_workers=3"], "reward_model.num_workers", "set one"),
    bad([f"{R}.n=4", f"{R}.group_size=8"], f"{R}.n = 4", "group_size = 8", "set one"),
    bad(["algorithm.kl_ctl=0.1", "algorithm.use_kl_in_reward=false"], "algorithm.kl_ctl", "use_kl_in_reward"),
    bad([f"{A}.eps_clip=-1"], f"{A}.eps_clip", f"{A}.clip_ratio", "at least 0"),
    bad(["trainer.n_gpus_per_node=2", f"{A}.ppo_micro_batch_size=3"], "ppo_micro_batch_size = 3", "evenly by 1 x 2"),
    bad(
        [f"{A}.ppo_micro_batch_size=4", f"{A}.ppo_micro_batch_size_per_gpu=2"],
        "ppo_micro_batch_size = 4",
        "set one",
    ),
    bad("critic.model.fsdp_config.fsdp_sice=1", "fsdp_sice", "fsdp_size"),
]

REFERENCES = [
    bad("data.val_batch_size=${data.nothing}", "data.val_batch_size", "data.nothing"),
    bad(["data.seed=${actor_rollout_ref.rollout.seed}", f"{R}.seed=${{data.seed}}"], "data.seed", "itself"),
    bad("data.seed=${", "data.seed"),
    bad("data.seed=${no_such_resolver:1}", "data.seed", "no_such_resolver"),
    bad("data.seed=${oc.env:RLSYS_SURELY_NOT_SET}", "data.seed", "RLSYS_SURELY_NOT_SET"),
    bad("data.seed=${trainer.project_name}", "data.seed = rlsys", "whole number"),
    bad("trainer.project_name=???", "trainer.project_name", "must be set"),
    bad(["reward.reward_model.enable=true", "reward.reward_model.rollout.name=???"], "rollout.name", "must be set"),
]

BATCHES = [
    bad(f"{A}.ppo_mini_batch_size=64", f"{A}.ppo_mini_batch_size = 64", f"set {A}.ppo_mini_batch_size=48"),
    bad(f"{A}.ppo_mini_batch_size=20", "does not divide data.train_batch_size=48", "ppo_mini_batch_size=16"),
    bad("data.train_batch_size=32", f"{A}.ppo_mini_batch_size = 48", "data.train_batch_size=32"),
    bad("trainer.n_gpus_per_node=7", f"{A}.ppo_mini_batch_size", "7 data-parallel ranks", "multiple of 7"),
    bad(
        [f"{A}.use_dynamic_bsz=false", f"{A}.ppo_micro_batch_size_per_gpu=1000"],
        f"{A}.ppo_micro_batch_size_per_gpu = 1000",
        "only 384 samples",
    ),
    bad(f"{A}.ppo_max_token_len_per_gpu=20", f"{A}.ppo_max_token_len_per_gpu = 20", "=32 or more"),
    bad(f"{R}.log_prob_max_token_len_per_gpu=31", "log_prob_max_token_len_per_gpu", "=32 or more"),
    bad("data.max_response_length=9000", f"{A}.ppo_max_token_len_per_gpu", "9024 tokens does not fit"),
    bad(
        [f"{A}.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8"],
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu = 8",
        "=32",
    ),
    bad(["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=8"], "critic.ppo_max_token_len_per_gpu"),
    bad(["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=36"], "critic.ppo_mini_batch_size", "=24"),
    bad(f"{A}.ulysses_sequence_parallel_size=2", f"{A}.ulysses_sequence_parallel_size", "1 training processes"),
    bad([f"{A}.fsdp_config.fsdp_size=2", "trainer.n_gpus_per_node=3"], f"{A}.fsdp_config.fsdp_size", "fsdp_size=-1"),
    bad(
        [f"{A}.fsdp_config.tensor_parallel_size=2", "trainer.n_gpus_per_node=3"],
        "tensor_parallel_size",
        "ranks of a copy=3",
    ),
    bad(
        [f"{A}.fsdp_config.{name}=2" for name in ("tensor_parallel_size", "fsdp_size")]
        + ["trainer.n_gpus_per_node=6"]
        + [f"{A}.ulysses_sequence_parallel_size=2"],
        "tensor_parallel_size",
        "ranks for each of a sequence=3",
    ),
    bad(f"{A}.fsdp_config.fsdp_size=0", f"{A}.fsdp_config.fsdp_size", "-1 or a whole number"),
    bad("data.gen_batch_size=96", "data.gen_batch_size = 96", "filter_groups"),
    bad("data.train_max_samples=0", "data.train_max_samples", "-1 or a whole number"),
    bad("data.train_max_samples=10", "data.train_max_samples = 10", "fewer rows than data.train_batch_size=48"),
    bad(
        ["trainer.n_gpus_per_node=2", f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=false"],
        f"{M}.use_remove_padding",
        "only when packed",
    ),
]

ALGORITHMS = [
    bad(
        [f"{R}.n=1", "algorithm.adv_estimator=grpo_passk"],
        f"algorithm.adv_estimator = grpo_passk: it compares several answers to one prompt; set {R}.n=8",
    ),
    bad([f"{R}.n=1", "algorithm.adv_estimator=opo"], f"{R}.n", "adv_estimator = opo"),
    bad(
        [f"{R}.n=1", "algorithm.adv_estimator=remax", "algorithm.group_adv_norm=true"],
        f"{R}.n",
        "adv_norm.mean_level = group",
    ),
    bad([*AHEAD, "algorithm.adv_estimator=remax"], "trainer.max_staleness", "remax are not generated ahead"),
    bad(["algorithm.adv_estimator=gae", "critic.enable=false"], "critic.enable", "needs values"),
    bad("algorithm.pf_ppo.reweight_method=min", "reweight_method", "max_min"),
    bad([f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=0.5"], f"{C}.rollout_rs_threshold", "at least 1"),
    bad([f"{C}.rollout_rs=seq_max_k2", f"{C}.rollout_rs_threshold=0.5_2"], f"{C}.rollout_rs_threshold", "one upper"),
    bad("trainer.critic_warmup=2", "trainer.critic_warmup", "there is no critic"),
    bad(
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.type = adaptive",
        "its penalty is off",
    ),
    bad(f"{A}.clip_ratio_low=1.5", f"{A}.clip_ratio_low", "0 to 1"),
    bad(f"{A}.policy_loss.clip_cov_lb=9", "clip_cov_lb", "clip_cov_ub"),
    bad(f"{A}.loss_scale_factor=100", f"{A}.loss_agg_mode", "seq-mean-token-sum-norm"),
    bad(f"{C}.loss_type=reinforce", f"{C}.loss_type", "bypass_mode=true"),
    bad(
        [f"{C}.bypass_mode=true", f"{C}.loss_type=reinforce", f"{A}.policy_loss.loss_mode=gspo"], "loss_mode", "vanilla"
    ),
    bad([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=-2"], f"{C}.rollout_is_threshold", "above 0"),
    bad([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=5.0_0.5"], f"{C}.rollout_is_threshold", "low_high"),
    bad([f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=nan"], f"{C}.rollout_is_threshold", "above 0"),
    bad(f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs", "needs a bound"),
    bad([f"{C}.rollout_rs=token_k7", f"{C}.rollout_rs_threshold=2"], f"{C}.rollout_rs", "token_k1"),
    bad(
        [f"{C}.rollout_rs='token_k1,token_k2'", f"{C}.rollout_rs_threshold='1,2,3'"],
        "rollout_rs_threshold",
        "2 measures",
    ),
    bad(f"{C}.rollout_rs_threshold=2", f"{C}.rollout_rs_threshold", "nothing to bound"),
    bad("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric", "metric=seq_reward"),
    bad(
        ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", f"{R}.n=1"],
        f"{R}.n",
        "filter_groups.enable = true",
    ),
    bad("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys", "[correct,format]"),
    bad("algorithm.gdpo_reward_keys=[a]", "algorithm.gdpo_reward_keys", "only gdpo"),
    bad(
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"],
        "algorithm.gdpo_reward_weights",
        "1 weights for 2 keys",
    ),
    bad("algorithm.reward_scaling=0", "algorithm.reward_scaling", "=1"),
    bad("algorithm.reward_clip=0", "algorithm.reward_clip", "more than 0"),
    bad("reward.reward_kwargs.overlong_buffer_cfg.enable=true", "overlong_buffer_cfg.len", "from 1"),
    bad(
        ["reward.reward_kwargs.overlong_buffer_cfg.enable=true", "reward.reward_kwargs.overlong_buffer_cfg.len=4"],
        "overlong_buffer_cfg.enable",
        "reward.reward_manager.name=dapo",
    ),
    bad(
        [
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward.reward_kwargs.overlong_buffer_cfg.len=4",
            "reward.reward_manager.name=dapo",
            "reward.reward_kwargs.max_resp_len=100",
        ],
        "reward.reward_kwargs.max_resp_len",
        "set 8",
    ),
    bad(
        ["reward_model.enable=true", "reward_model.model.path=./causal"],
        "reward.reward_model.model_path",
        "without a score head",
    ),
    bad("reward.reward_model.enable=true", "reward.reward_model.model_path", "folder of the reward model"),
    bad(
        [
            "reward_model.enable=true",
            "reward_model.model.path=./model",
            "reward_model.enable_resource_pool=true",
        ],
        "reward.reward_model.nnodes",
        "=1",
    ),
    bad(f"{R}.temperature=0", f"{R}.temperature", "more than 0"),
    bad(f"{R}.do_sample=false", f"{R}.do_sample", "would be the same"),
    bad(f"{R}.top_k=-2", f"{R}.top_k", "-1 or a whole number"),
]

RUNS = [
    bad("trainer.project_name=a/b", "trainer.project_name", "becomes a folder"),
    bad("trainer.experiment_name=' '", "trainer.experiment_name", "becomes a folder"),
    bad(f"{R}.max_model_len=20", f"{R}.max_model_len = 20", "max_model_len=32"),
    bad("trainer.experiment_name=..", "trainer.experiment_name", "becomes a folder"),
    bad(["trainer.backend=local", "trainer.n_gpus_per_node=2"], "trainer.n_gpus_per_node", "trainer.backend=ray"),
    bad(["trainer.backend=local", "trainer.rollout_workers=1"], "trainer.rollout_workers", "one process"),
    bad("trainer.resume_mode=resume_path", "trainer.resume_from_path", "global_step_N"),
    bad("trainer.resume_from_path=./c/global_step_3", "trainer.resume_from_path", "resume_mode=resume_path"),
    bad(
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=./c"],
        "trainer.resume_from_path",
        "ends in global_step_<N>",
    ),
    bad(
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=./c/global_step_3"],
        "trainer.resume_from_path",
        "folder not found",
    ),
    bad(["ray_kwargs.ray_init.address=auto", "ray_kwargs.ray_init.num_cpus=4"], "num_cpus", "running cluster"),
    bad("trainer.max_staleness=1", "trainer.max_staleness", "trainer.rollout_workers=1"),
    bad(["trainer.max_staleness=65", "trainer.rollout_workers=1"], "trainer.max_staleness", "at most 64"),
    bad("trainer.sync_freq=2", "trainer.max_staleness", "set trainer.max_staleness=1"),
    bad(["trainer.sync_freq=2", "trainer.max_staleness=2"], "trainer.max_staleness", "trainer.rollout_workers=1"),
    bad([*AHEAD, "trainer.lookahead=4"], "trainer.lookahead", "max_staleness=4", "set trainer.lookahead=3"),
    bad(
        [*AHEAD, "trainer.lookahead=2", "trainer.sync_freq=4"],
        "no prompts with",
        "trainer.sync_freq=4",
        "set trainer.lookahead=1",
    ),
    bad(
        [f"{R}.name=vllm_remote", "trainer.max_staleness=1", "trainer.reproducible=true"],
        "trainer.reproducible = true: external servers batch requests as they arrive; set trainer.reproducible=false",
    ),
    bad(
        [f"{R}.name=vllm_remote", f"{R}.checkpoint_engine.backend=shm"],
        f"{R}.checkpoint_engine.backend = shm: external servers take weights from files",
        f"set {R}.checkpoint_engine.backend=auto",
    ),
    bad([*AHEAD, "trainer.reproducible=true", "trainer.sync_freq=2"], "trainer.reproducible", "trainer.sync_freq=1"),
    bad(
        [*AHEAD, "trainer.reproducible=true", "actor_rollout_ref.rollout.name=vllm"],
        "trainer.reproducible",
        "full_determinism=true",
    ),
    bad("async_training.staleness_threshold=many", "async_training.staleness_threshold", "trainer.max_staleness"),
    bad("async_training.trigger_parameter_sync_step=4", "trainer.max_staleness", "trainer.sync_freq=4"),
    bad("actor.prox_logp_method=loglinear", "actor.prox_logp_method", "recomputed"),
    bad(["actor.use_decoupled_loss=true", "actor.behav_imp_weight_cap=-1"], f"{C}.rollout_is_threshold", "above 0"),
    bad(f"{R}.min_replicas=2", f"{R}.min_replicas", "0 processes that only generate", "trainer.rollout_workers"),
    bad(
        [f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2", "trainer.rollout_workers=4", f"{R}.min_replicas=1"],
        f"{R}.min_replicas",
        "tensor_model_parallel_size=1",
    ),
    bad("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.hybrid_engine", "trainer.rollout_workers=0"),
    bad(["trainer.rollout_workers=1", "actor_rollout_ref.hybrid_engine=true"], "actor_rollout_ref.hybrid_engine"),
    bad(["trainer.rollout_workers=1", f"{R}.checkpoint_engine.backend=local"], "checkpoint_engine.backend", "auto"),
    bad([f"{R}.name=sglang", f"{R}.checkpoint_engine.backend=local"], "checkpoint_engine.backend", "auto"),
    bad(f"{R}.checkpoint_engine.backend=nccl", "checkpoint_engine.backend", "trainer.rollout_workers=1"),
    bad(
        [f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2", "trainer.nnodes=2", "trainer.n_gpus_per_node=3"],
        f"{R}.tensor_model_parallel_size",
        "straddle nodes of 3 processes",
    ),
    bad(["trainer.val_only=true", "data.train_files=./rows.jsonl"], "trainer.val_only", "data.val_files"),
    bad(f"{A}.checkpoint.load_contents=[model,hf_model]", f"{A}.checkpoint.load_contents", "hf_model"),
    bad(f"{A}.checkpoint.save_contents=[model,model]", f"{A}.checkpoint.save_contents", "listed twice"),
    bad("trainer.allocation_mode=hf:d2", "trainer.allocation_mode", "hf:d2+fsdp:d2"),
    bad("trainer.allocation_mode=hf:d2p2+fsdp:d2", "trainer.allocation_mode", "no pipeline parallelism"),
    bad(f"{R}.tensor_model_parallel_size=0", f"{R}.tensor_model_parallel_size"),
    bad(f"{R}.tensor_model_parallel_size=2", f"{R}.tensor_model_parallel_size", "one process", "=1"),
    bad(
        [f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2", "trainer.rollout_workers=3"],
        f"{R}.tensor_model_parallel_size",
        "divisor of 3",
    ),
    bad("trainer.allocation_mode=hf:d2+nemo:d2", "trainer.allocation_mode", "unknown engine 'nemo'", "fsdp"),
    *(
        bad(["engine=megatron", "trainer.n_gpus_per_node=2", *argv], *says, schema=SFTConfig)
        for argv, says in [
            (
                ["engine.tensor_model_parallel_size=3"],
                ("engine.megatron.tensor_model_parallel_size = 3", "2 processes"),
            ),
            (["engine.ulysses_sequence_parallel_size=2"], ("ulysses_sequence_parallel_size", "context_parallel_size")),
            (
                ["engine.context_parallel_size=2", "data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=500"],
                ("data.max_token_len_per_gpu = 500", "=512"),
            ),
        ]
    ),
    *(
        bad(["model_engine=megatron", "trainer.n_gpus_per_node=2", *argv], *says)
        for argv, says in [
            (
                [f"{MEGATRON}.tensor_model_parallel_size=3"],
                (f"{MEGATRON}.tensor_model_parallel_size = 3", "2 processes"),
            ),
            ([f"{MEGATRON}.pipeline_model_parallel_size=4"], ("pipeline 4", "2 processes", "parallel_size=2")),
            (
                [f"{MEGATRON}.expert_model_parallel_size=4"],
                (f"{MEGATRON}.expert_model_parallel_size = 4", "x expert 4 x pipeline", "does not divide the", "set"),
            ),
            ([f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"], ("one stage", "pipeline_model_parallel_size=2")),
            (
                [f"{MEGATRON}.context_parallel_size=4"],
                (f"{MEGATRON}.context_parallel_size = 4", "2 processes", f"{MEGATRON}.context_parallel_size=2"),
            ),
            ([f"{A}.ulysses_sequence_parallel_size=2"], ("ulysses_sequence_parallel_size", "context_parallel_size")),
            ([f"{M}.lora_rank=8", f"{MEGATRON}.fp8=hybrid"], (f"{M}.lora_rank = 8", f"{MEGATRON}.fp8=null")),
        ]
    ),
    bad(["trainer.allocation_mode=hf:d1+fsdp:d2t2", "trainer.n_gpus_per_node=8"], "trainer.n_gpus_per_node=4"),
    bad(
        ["trainer.allocation_mode=hf:d1+fsdp:d4", "trainer.n_gpus_per_node=3"],
        "trainer.n_gpus_per_node = 3",
        "trainer.n_gpus_per_node=2",
    ),
    bad(["trainer.allocation_mode=hf:d1+fsdp:d3", "trainer.nnodes=2"], "trainer.allocation_mode", "2 nodes"),
]

FILES = [
    bad("data.train_files=./nowhere.parquet", "data.train_files", "file not found"),
    bad("data.train_files=./row.jsonl", "data.train_files = ./row.jsonl", "has rows.jsonl"),
    bad("data.train_files=[]", "data.train_files", "empty list"),
    bad("algorithm.adv_estimator=GRPO", "unknown name; set algorithm.adv_estimator=grpo; choose from"),
    bad("data.train_files=./notes.txt", "data.train_files = ./notes.txt", ".parquet"),
    bad("data.train_files=./empty.jsonl", "data.train_files = ./empty.jsonl", "empty"),
    bad("data.train_files=[./rows.jsonl,./rows.jsonl]", "data.train_files", "listed twice"),
    bad(["data.train_files=./rows.jsonl", "data.val_files=./gone.csv"], "data.val_files", "file not found"),
    bad(f"{M}.path=./nowhere", f"{M}.path", "folder not found"),
    bad(f"{M}.path=Qwen3-8B", f"{M}.path", "or a model of the hub as org/name"),
    bad("data.train_files=nosuch://bucket/x.parquet", "data.train_files", "Protocol not known: nosuch"),
    bad("data.train_files=memory://bucket/x.txt", "data.train_files", "rows are read from .parquet"),
    bad("data.train_files=./folder", "data.train_files", "save_to_disk"),
    bad("--config-name=smollm2", "data/mix/train.parquet", "scripts/prepare_data.py --out data/mix", "smollm2.py"),
    bad(f"{M}.path=./rows.jsonl", f"{M}.path", "it is a file, not a folder"),
    bad(["--config-name=quickstart", f"{M}.path=./folder"], f"{M}.path", "config.json"),
    bad(["--config-name=quickstart", f"{M}.path=./model"], f"{M}.path", "supports 16 tokens"),
    bad(f"{M}.path=./layers", f"{M}.path = ./layers", "num_hidden_layers='four' must be a whole number"),
    bad(f"{M}.path=./flat", f"{M}.path = ./flat", "hidden_size=0 must be a whole number, at least 1"),
    bad(f"{M}.path=./endless", f"{M}.path = ./endless", "eos_token_id=9 is outside the vocabulary of 9 tokens"),
    bad(f"{M}.tokenizer_path=/nowhere/tok", f"{M}.tokenizer_path", "folder not found"),
    bad([f"{M}.lora_rank=8", f"{M}.lora_adapter_path=./gone"], f"{M}.lora_adapter_path", "folder not found"),
    bad(f"{M}.external_lib=surely_not_a_module", f"{M}.external_lib", "PYTHONPATH"),
    bad("custom_reward_function.path=./gone.py", "reward.custom_reward_function.path", "file not found"),
    bad("custom_reward_function.path=./graders", "reward.custom_reward_function.path", "has graders.py"),
    bad("custom_reward_function.path=./broken.py", "reward.custom_reward_function.path", "not valid Python, line 1"),
    bad(
        ["custom_reward_function.path=./graders.py", "custom_reward_function.name=score"],
        "reward.custom_reward_function.name",
        "compute_score",
    ),
    bad("+reward.custom_reward_function.reward_kwargs.a=1", "reward_kwargs", "custom_reward_function.path"),
    bad("data.custom_cls.path=./graders.py", "data.custom_cls.name", "set data.custom_cls.name=<class>"),
    bad("data.custom_cls.name=Rows", "data.custom_cls.path", "Rows"),
    bad(["data.custom_cls.path=./graders.py", "data.custom_cls.name=Rows"], "data.custom_cls.name", "compute_score"),
    bad("reward.reward_manager.source=importlib", "reward.reward_manager.module.path", "it loads a file"),
    bad("trainer.default_local_dir=./notes.txt/out", "trainer.default_local_dir", "notes.txt is a file"),
    bad(
        ["trainer.rollout_data_dir=o", "trainer.validation_data_dir=o"], "trainer.validation_data_dir", "the same names"
    ),
    bad(f"trainer.default_local_dir=./{'x' * 256}", "trainer.default_local_dir", "more than 255 bytes"),
    bad("trainer.default_local_dir=~no-such-user/out", "trainer.default_local_dir", "must be a path"),
    bad("trainer.rollout_data_dir=./notes.txt", "trainer.rollout_data_dir", "is a file"),
]

OTHER_JOBS = [
    bad("data.train_batch_size=0", "data.train_batch_size", "at least 1", schema=SFTConfig),
    bad(f"{A}.megatron.use_megatron_fsdp=true", "use_megatron_fsdp", "strategy=fsdp"),
    bad("actor_rollout_ref.model.mtp.enable_train=true", "mtp.enable_train", "mtp.detach_encoder=true"),
    bad("trainer.v1.trainer_mode=colocate_async", "trainer_mode", "separate_async"),
    bad([f"{A}.ppo_mini_batch_size=5", "data.train_batch_size=12"], f"{A}.ppo_mini_batch_size", "12"),
    bad("data.streaming=true", "data.streaming", "trainer.total_training_steps", schema=SFTConfig),
    bad(["data.streaming=true", "dpo.loss_type=kto"], "dpo.loss_type", "data.streaming=false", schema=DPOConfig),
    bad("data.max_lenght=9", "data.max_lenght", "data.max_length", schema=SFTConfig),
    bad(
        "data.max_token_len_per_gpu=9",
        "data.max_token_len_per_gpu",
        "set data.max_token_len_per_gpu=1024",
        schema=SFTConfig,
    ),
    bad("trainer.n_gpus_per_node=3", "data.train_batch_size = 256", "multiple of 3", schema=SFTConfig),
    bad(
        ["data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=999"],
        "data.micro_batch_size_per_gpu",
        "256",
        schema=SFTConfig,
    ),
    bad("model.partial_pretrain=./nowhere", "model.path", "folder not found", schema=SFTConfig),
    bad(["engine.fsdp_size=2", "trainer.n_gpus_per_node=3"], "engine.fsdp_size", "-1", schema=SFTConfig),
    bad("engine.ulysses_sequence_parallel_size=2", "engine.ulysses_sequence_parallel_size", "=1", schema=SFTConfig),
    bad("optim.clip_grad=-1", "optim.clip_grad", "at least 0", schema=SFTConfig),
    bad("data.chosen_kei=x", "data.chosen_kei", "data.chosen_key", schema=RMConfig),
    bad("algorithm.gamma=1", "algorithm.gamma", "no such key", schema=RMConfig),
    bad("data.path=./gone.parquet", "data.val_files", "file not found", schema=EvalConfig),
    bad("data.response_key=x", "data.response_key", "main_eval", schema=EvalConfig),
    bad("trainer.output_path=./folder", "trainer.output_path", "a folder, not a file", schema=EvalConfig),
    bad("trainer.output_path=./notes.txt/x", "trainer.output_path", "notes.txt is a file", schema=EvalConfig),
    bad("rollout.name=trtllm", f"{R}.name", "hf", schema=EvalConfig),
    bad(
        [f"{R}.quantization=fp8", f"{R}.name=vllm", f"{M}.path=narrow"],
        *("are 192, 576 wide", "no multiples of 128", "of which vLLM makes them of a checkpoint"),
        schema=EvalConfig,
    ),
]

YAML = {
    "tab": ("data:\n\tseed: 1\n", "line 2", "as YAML"),
    "colon": ("data: seed: 1\n", "line 1", "as YAML"),
    "list": ("- data\n", "list", "keys and values"),
    "text": ("hello\n", "hello", "no such key"),
    "twice": ("data:\n  seed: 1\n  seed: 2\n", "seed", "line 3"),
    "typo": ("data:\n  train_batch_sise: 1\n", "data.train_batch_sise", "data.train_batch_size"),
    "flat": ("data.sed: 1\n", "data.sed", "data.seed"),
    "null_section": ("trainer:\n", "trainer = null", "section"),
    "type": ("trainer:\n  nnodes: two\n", "trainer.nnodes = two", "whole number"),
    "bytes": ("trainer:\n  project_name: !!binary aGVsbG8=\n", "trainer.project_name", "quotes"),
    "parent": ("defaults: [no_such_preset]\n", "no_such_preset", "choose from"),
    "group": ("defaults:\n- actor@actor: dp\n", "defaults", "config groups"),
    "defaults_text": ("defaults: dapo\n", "defaults", "a list"),
    "circle": ("defaults: [circle]\n", "circle -> circle", ""),
    "both": ("reward_model:\n  num_workers: 3\nreward:\n  num_workers: 4\n", "reward.num_workers", "set one"),
    "reference": ("data:\n  seed: ${data.nothing}\n", "data.seed", "data.nothing"),
    "grammar": ("data:\n  seed: ${\n", "data.seed", ""),
    "anchor": ("data: *nothing\n", "line 1", "undefined alias"),
}

TABLE = [
    *UNREADABLE,
    *UNKNOWN,
    *ADDING,
    *TYPES,
    *RANGES,
    *CHOICES,
    *FOREIGN,
    *SPELLINGS,
    *REFERENCES,
    *BATCHES,
    *ALGORITHMS,
    *RUNS,
    *FILES,
    *OTHER_JOBS,
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files the table speaks of."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "broken.py").write_text("def compute_score(:\n")
    (tmp_path / "graders.py").write_text("def compute_score(**kwargs):\n    return 1.0\n")
    (tmp_path / "folder").mkdir()
    for name, facts in ODD_MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(facts))
    (tmp_path / "model").mkdir()
    (tmp_path / "causal").mkdir()
    (tmp_path / "causal" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLSYS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def message(argv: list[str], schema: type[Section], capsys: pytest.CaptureFixture[str]) -> str:
    """What a job says on stderr; it must leave with 2 and keep stdout empty."""
    with pytest.raises(SystemExit) as left:
        main_config(argv, schema)
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert printed.out == ""
    return printed.err


def check_words(text: str, says: tuple[str, ...]) -> None:
    for word in says:
        assert word in text, text
    for jargon in ("Traceback", "pydantic", "https://", "omegaconf", "input_type", "Input should"):
        assert jargon not in text, text


@pytest.mark.parametrize(
    "argv",
    [
        [f"{M}.path=seven", "trainer.n_gpus_per_node=4", f"{R}.tensor_model_parallel_size=4"],
        [f"{M}.path=seven", "trainer.n_gpus_per_node=28", f"{R}.pipeline_model_parallel_size=28"],
        [
            *(f"{M}.path=sparse", "trainer.n_gpus_per_node=8"),
            *(f"{R}.tensor_model_parallel_size=8", f"{R}.expert_parallel_size=8"),
        ],
        [
            *(f"{M}.path=kimi", "trainer.n_gpus_per_node=8", f"{R}.name=sglang"),
            *(f"{R}.data_parallel_size=8", f"{R}.expert_parallel_size=8"),
        ],
    ],
)
def test_parallel_sizes_that_suit_the_model_are_taken(argv: list[str]) -> None:
    sizes = ["trainer.device=cuda", "data.train_batch_size=1792", "critic.ppo_mini_batch_size=1792"]
    assert load_config([f"{R}.name=vllm", *argv, *sizes, f"{A}.ppo_mini_batch_size=1792", "data.train_files=null"])


def test_the_table_is_long_enough() -> None:
    assert len({case.argv for case in TABLE}) + len(YAML) >= 150


@pytest.mark.parametrize("case", TABLE, ids=lambda case: " ".join(case.argv)[:70])
def test_malformed_settings_are_reported(case: Bad, capsys: pytest.CaptureFixture[str]) -> None:
    check_words(message(list(case.argv), case.schema, capsys), case.says)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"expert": 12}, "expert_model_parallel_size=8"),
        ({"pipeline": 7}, "pipeline_model_parallel_size=4"),
        ({"pipeline": 2, "tensor": 3}, "tensor_model_parallel_size=2"),
        ({"pipeline": 2, "expert": 64}, "expert_model_parallel_size=32"),
    ],
)
def test_a_size_that_does_not_divide_is_answered_with_the_next_that_does(
    sizes: dict[str, int], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = [
        "model_engine=megatron",
        "trainer.nnodes=8",
        "trainer.n_gpus_per_node=8",
        "data.train_batch_size=64",
        f"{A}.ppo_mini_batch_size=64",
    ]
    given = [f"{MEGATRON}.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    printed = message([*counts, *given], PPOConfig, capsys).strip()
    assert printed.endswith(f"does not divide the 64 processes; set {MEGATRON}.{says}")
    assert "settings are wrong" not in printed


@pytest.mark.parametrize("name", YAML)
def test_malformed_files_are_reported(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, *says = YAML[name]
    (folder / f"{name}.yaml").write_text(text)
    check_words(message([f"--config-path={folder}", f"--config-name={name}"], PPOConfig, capsys), (*says,))


def test_bytes_that_are_not_text_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.yaml").write_bytes(b"data:\n  seed: \xff\xfe\n")
    check_words(message(["--config-name=./x.yaml"], PPOConfig, capsys), ("x.yaml", "'utf-8' codec"))


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ("TRL", ("output_dir", "per_device_train_batch_size", "num_train_epochs", "bf16")),
        ("OpenRLHF", ("pretrain", "actor_num_gpus_per_node", "micro_train_batch_size", "zero_stage")),
    ],
)
def test_a_file_of_another_trainer_is_cut_after_15_problems_and_recognized(
    trainer: str, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs.yaml").write_text("".join(f"{key}: 1\n" for key in (*keys, *(f"key{i}" for i in range(20)))))
    text = message(["--config-name=./theirs.yaml"], PPOConfig, capsys)
    check_words(text, ("24 settings are wrong", "and 9 more", f"it looks like a file of {trainer}"))
    assert text.count("  - ") == 15


def test_misspelt_keys_do_not_make_a_file_that_of_another_job(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("total_epoch", "save_frq", "tets_freq", "projct_name", "experimnt_name", "nnode", "logge", "devise")
    Path("typos.yaml").write_text("trainer:\n" + "".join(f"  {name}: 1\n" for name in names))
    text = message(["--config-name=./typos.yaml"], PPOConfig, capsys)
    check_words(text, (f"{len(names)} settings are wrong", "trainer.save_frq (typos.yaml): no such key; did you mean"))
    assert "of the names are no keys" not in text


@pytest.mark.parametrize("preset", ["quickstart", "smollm2_ppo"])
def test_a_file_of_another_job_is_recognized(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = message([f"--config-name={preset}"], EvalConfig, capsys)
    check_words(text, ("of the names are no keys of this job", "it looks like a file of another job or trainer"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (f"{A}.load_wait", ()),
        (f"{R}.layer_map.qkv_layer_name", ()),
        ("trainer.total_step", ("trainer.total_training_steps", "trainer.total_epochs")),
        (f"{A}.clip_ratio_hi", (f"{A}.clip_ratio_high", f"{A}.clip_ratio")),
    ],
)
def test_only_likely_keys_are_suggested(
    written: str, meant: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = message([f"{written}=1"], PPOConfig, capsys)
    assert ("did you mean" in text) == bool(meant), text
    check_words(text, meant)


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data.sed=1", "trainer.nnodes=0", "data.truncation=no", f"{R}.dtype=int8", "data.train_files=a,b"]
    text = message([*argv, f"{R}.name=hff", "algorithm.adv_estimator=grpp"], PPOConfig, capsys)
    keys = ("data.sed", "trainer.nnodes", "data.truncation", f"{R}.dtype", f"{R}.name", "algorithm.adv_estimator")
    check_words(text, ("7 settings are wrong", *keys, "comma"))


def test_more_than_15_problems_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    text = message([f"key{number}=1" for number in range(20)], PPOConfig, capsys)
    check_words(
        text, ("20 settings are wrong", "key14", "and 5 more", "20 of the names are no keys", "another job or trainer")
    )
    assert "key15" not in text
    assert text.count("  - ") == 15


def test_a_wrong_value_is_reported_once_and_not_for_the_keys_that_follow_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = message([f"{A}.ppo_mini_batch_size=-1"], PPOConfig, capsys)
    assert text.count("must be") == 1
    assert "critic" not in text


COMPAT = compat_table(PPOConfig)
KEYS = st.sampled_from([*leaves(PPOConfig), *COMPAT.aliases, *COMPAT.expansions, "critic", "data", "nothing.here"])
NUMBERS = st.sampled_from(["0", "1", "-1", "2", "1e9", "nan", "inf", "1" * 30, "0.5", "1e-400", "1e400"])
WORDS = st.sampled_from(
    ["null", "true", "''", "fsdp", "group", "./rows.jsonl", "./model", "${data.seed}", "${.x}", "[]"]
)
DICTS = st.sampled_from(["{}", "{a: 1}", "{path: ./model}", "[1,[2]]", "hf:d2+fsdp:d2", "'0.5_2'", "token_k1", "[a,a]"])


CHOSEN = st.lists(st.tuples(st.sampled_from(["", "", "+", "++", "~"]), KEYS, NUMBERS | WORDS | DICTS), max_size=4)
CHECKS = [HealthCheck.function_scoped_fixture]


def load_or_report(chosen: list[tuple[str, str, str]]) -> None:
    argv = [f"{op}{key}={value}" for op, key, value in chosen]
    try:
        cfg = load_config(argv)
    except ConfigError as error:
        check_words(str(error), ())
    else:
        assert plan_text(cfg)


@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
@given(CHOSEN)
def test_any_mixture_of_settings_loads_or_is_refused(chosen: list[tuple[str, str, str]]) -> None:
    load_or_report(chosen)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=3000, deadline=None, suppress_health_check=CHECKS)
@given(CHOSEN)
def test_many_mixtures_of_settings_load_or_are_refused(chosen: list[tuple[str, str, str]]) -> None:
    load_or_report(chosen)
