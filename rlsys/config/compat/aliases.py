"""Other spellings of the same settings: verl's older keys, AReaL's names and the seeds' vocabulary.

A spelling maps to its key by prefix, the longest first, so a whole section moves with one line. Both spellings of a
setting may be given where the values agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"

VERL = {
    "model_engine": f"{_ACTOR}.strategy",
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.custom_reward_function": "reward.custom_reward_function",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.model.trust_remote_code": "reward.reward_model.trust_remote_code",
    "reward_model.model.fsdp_config.model_dtype": "reward.reward_model.dtype",
    "reward.reward_model.model.path": "reward.reward_model.model_path",
    "reward_model": "reward.reward_model",
    "sandbox_fusion": "reward.sandbox_fusion",
    "critic.model.fsdp_config": "critic.fsdp",
    "critic.fsdp_config": "critic.fsdp",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": f"{_ACTOR}.fsdp_config.dtype",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.fsdp": f"{_ACTOR}.fsdp_config",
    f"{_ACTOR}.policy_loss.tau_pos": f"{_ACTOR}.tau_pos",
    f"{_ACTOR}.policy_loss.tau_neg": f"{_ACTOR}.tau_neg",
    f"{_ACTOR}.use_remove_padding": f"{_MODEL}.use_remove_padding",
    "actor_rollout_ref.ref.fsdp": "actor_rollout_ref.ref.fsdp_config",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{_ROLLOUT}.response_length": "data.max_response_length",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    "data.tokenizer": f"{_MODEL}.tokenizer_path",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "trainer.ray_wait_register_center_timeout": "trainer.deadlines.start_s",
    "ray_init": "ray_kwargs.ray_init",
    "ray_init.timeline_json_file": "ray_kwargs.timeline_json_file",
}

_SERVERS = f"{_ROLLOUT}.servers"
INFERENCE = {
    f"inference.{kind}.{name}": key
    for kind in ("vllm", "sglang")
    for name, key in {
        "api_base": f"{_SERVERS}.urls",
        "max_tokens": "data.max_response_length",
        "temperature": f"{_ROLLOUT}.temperature",
        "top_p": f"{_ROLLOUT}.top_p",
        "timeout": f"{_SERVERS}.timeout_s",
        "max_retries": f"{_SERVERS}.max_retries",
    }.items()
}
"""The keys of those who run a server of their own beside the training."""

AREAL = INFERENCE | {
    f"{_ACTOR}.eps_clip": f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.eps_clip_higher": f"{_ACTOR}.clip_ratio_high",
    f"{_ACTOR}.c_clip": f"{_ACTOR}.clip_ratio_c",
    f"{_ACTOR}.max_grad_norm": f"{_ACTOR}.grad_clip",
    f"{_ROLLOUT}.group_size": f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.n_samples": f"{_ROLLOUT}.n",
    "algorithm.group_size": f"{_ROLLOUT}.n",
    "algorithm.discount": "algorithm.gamma",
    "algorithm.gae_lambda": "algorithm.lam",
    "actor.path": f"{_MODEL}.path",
    "actor.eps_clip": f"{_ACTOR}.clip_ratio",
    "actor.eps_clip_higher": f"{_ACTOR}.clip_ratio_high",
    "actor.c_clip": f"{_ACTOR}.clip_ratio_c",
    "actor.group_size": f"{_ROLLOUT}.n",
    "actor.discount": "algorithm.gamma",
    "actor.gae_lambda": "algorithm.lam",
    "actor.kl_ctl": "algorithm.kl_ctl",
    "actor.reward_bias": "algorithm.reward_bias",
    "actor.reward_scaling": "algorithm.reward_scaling",
    "actor.reward_clip": "algorithm.reward_clip",
    "actor.reward_norm": "algorithm.reward_norm",
    "actor.adv_norm": "algorithm.adv_norm",
    "actor.group_reward_norm": "algorithm.group_reward_norm",
    "actor.group_adv_norm": "algorithm.group_adv_norm",
    "actor.mask_no_eos_with_zero": "algorithm.mask_no_eos_with_zero",
    "actor.temperature": f"{_ROLLOUT}.temperature",
    "gconfig.n_samples": f"{_ROLLOUT}.n",
    "gconfig.max_new_tokens": "data.max_response_length",
    "gconfig.temperature": f"{_ROLLOUT}.temperature",
    "gconfig.top_p": f"{_ROLLOUT}.top_p",
    "gconfig.top_k": f"{_ROLLOUT}.top_k",
    "allocation_mode": "trainer.allocation_mode",
    "rollout.max_head_offpolicyness": "trainer.max_staleness",
}

RLINF = {
    f"{_ROLLOUT}.rollout_backend": f"{_ROLLOUT}.name",
    f"{_ROLLOUT}.model_dir": f"{_MODEL}.path",
    f"{_ROLLOUT}.tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.max_running_requests": f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.sglang": f"{_ROLLOUT}.engine_kwargs.sglang",
    f"{_ROLLOUT}.sglang.use_torch_compile": f"{_ROLLOUT}.engine_kwargs.sglang.enable_torch_compile",
    f"{_ROLLOUT}.vllm": f"{_ROLLOUT}.engine_kwargs.vllm",
    f"{_ROLLOUT}.vllm.enable_chunked_prefill": f"{_ROLLOUT}.enable_chunked_prefill",
    f"{_ROLLOUT}.vllm.enable_prefix_caching": f"{_ROLLOUT}.enable_prefix_caching",
    f"{_ROLLOUT}.vllm.enable_flash_infer_sampler": f"{_ROLLOUT}.enable_flash_infer_sampler",
}
"""The keys by which engines are switched in RLinf's configuration."""

SUPERVISED = {
    "model.partial_pretrain": "model.path",
    "model.fsdp_config": "engine",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "data.tokenizer": "model.tokenizer_path",
    "data.trust_remote_code": "model.trust_remote_code",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "use_remove_padding": "model.use_remove_padding",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "trainer.seed": "data.seed",
    "ray_init": "ray_kwargs.ray_init",
}

EVAL = {
    "data.path": "data.val_files",
    "data.data_source_key": "data.reward_fn_key",
    "custom_reward_function": "reward.custom_reward_function",
    "rollout": _ROLLOUT,
    "model": _MODEL,
    "data.tokenizer": f"{_MODEL}.tokenizer_path",
    "data.trust_remote_code": f"{_MODEL}.trust_remote_code",
    "ray_init": "ray_kwargs.ray_init",
} | RLINF

GLOBAL_MICRO_BATCHES = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "reward.reward_model.micro_batch_size": "reward.reward_model.micro_batch_size_per_gpu",
}
"""Sizes over all ranks, of old: divided by the number of training ranks."""


def _inference_backend(value: Any) -> dict[str, Any]:
    return {f"{_ROLLOUT}.name": f"{value}_remote"}


def _kl_ctl(value: Any) -> dict[str, Any]:
    return {"algorithm.kl_ctrl.kl_coef": value, "algorithm.use_kl_in_reward": value not in (0, 0.0, None, False)}


def _norm(section: str, level: str) -> Callable[[Any], dict[str, Any]]:
    def expand(value: Any) -> dict[str, Any]:
        chosen = level if value is True else None if value in (False, None) else value
        return {f"{section}.mean_level": chosen, f"{section}.std_level": chosen}

    return expand


EXPANSIONS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "algorithm.kl_ctl": _kl_ctl,
    "inference.backend": _inference_backend,
    "algorithm.reward_norm": _norm("algorithm.reward_norm", "batch"),
    "algorithm.adv_norm": _norm("algorithm.adv_norm", "batch"),
    "algorithm.group_reward_norm": _norm("algorithm.reward_norm", "group"),
    "algorithm.group_adv_norm": _norm("algorithm.adv_norm", "group"),
}
"""Settings that say several of ours at once."""


def table_for(job: str) -> dict[str, str]:
    """The spellings of a job, named by its schema."""
    if job in ("SFTConfig", "RMConfig"):
        return SUPERVISED
    return EVAL if job == "EvalConfig" else VERL | AREAL | RLINF


def canonical(path: str, table: Mapping[str, str]) -> str:
    """The key that a spelling stands for; a path without another spelling is returned as it is."""
    for _ in range(4):
        prefix = path
        while prefix and prefix not in table:
            prefix = prefix.rpartition(".")[0]
        if not prefix:
            return path
        path = table[prefix] + path[len(prefix) :]
    return path


def canonical_references(text: str, table: Mapping[str, str]) -> str:
    """The text with the other spellings inside its ${...} replaced by the keys."""
    return re.sub(r"\$\{([A-Za-z_][\w.]*)\}", lambda m: "${" + canonical(m[1], table) + "}", text)
