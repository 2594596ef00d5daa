"""Keys of verl (and of AReaL and RLinf) that have no meaning here, or not yet: what each is told.

A key that would change results if it were ignored is refused; one that would not is accepted with a note. Values that
ask for what happens here anyway are accepted without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Elsewhere:
    """Why a key is not here and what to use; `agreed` are values that ask for what we do anyway."""

    why: str
    refuse: bool = False
    agreed: tuple[Any, ...] = ()


def _note(why: str, *agreed: Any) -> Elsewhere:
    return Elsewhere(why, agreed=(None, *agreed))


def _refuse(why: str, *agreed: Any) -> Elsewhere:
    return Elsewhere(why, refuse=True, agreed=(None, *agreed))


_ENGINES = "write it under rollout.engine_kwargs.vllm or .sglang, which take their engine's own arguments"
_VISION = "images, video and audio come with the vision workflow; this build trains on text"
_AGENT = "agents and tools come with the agent workflows; this build answers each prompt in one turn"
_PROFILER = "the timeline of every stage on every worker is always written; kernels are not profiled"
_HYDRA = "Hydra is not used here: the working folder and the log are left alone"
_QAT = "quantisation-aware training is not built here"
_MOE = "the routes of generated tokens are not replayed in training"
_FSDP1 = "FSDP2 has no such setting; layers are wrapped by the model's own blocks"
_CHUNKED = "log-probs and entropy are always computed in chunks, so there is nothing to switch"
_SIZES = "rollout.tensor_model_parallel_size alone cuts a copy of the model; for more copies: trainer.rollout_workers"

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"

_ENGINE_KEYS = {
    "load_format": _note("engines start without weights wherever a push brings them before the first answer"),
    "scheduling_policy": _note(_ENGINES),
    "skip_tokenizer_init": _note("engines take and give token ids; none has a tokenizer", True),
    "multi_stage_wake_up": _note("weights wake before a push and the cache after it, always", True),
    "prometheus": _note("metrics go to the trackers of trainer.logger"),
    "layered_summon": _note("weights go from shard to shard and are never gathered"),
    "limit_images": _note(_VISION),
    "mode": _note("engines are called one way only; sync and async mean the same", "sync", "async"),
    "logprobs_mode": _note(
        "both kinds are kept: rollout_log_probs of the full distribution, rollout_sampled_log_probs of the sampled one"
    ),
    "calculate_log_probs": _note("the log-probs seen while sampling are always kept", True),
    "over_sample_rate": _refuse(
        "prompts are not over-sampled; use algorithm.filter_groups with data.gen_batch_size", 0
    ),
    "pipeline_model_parallel_size": _refuse(_SIZES, 1),
    "pipeline_parallel_size": _refuse(_SIZES, 1),
    "data_parallel_size": _refuse(_SIZES, 1),
    "expert_parallel_size": _refuse(_SIZES, 1),
    "quantization": _refuse("rollouts compute in rollout.dtype; quantised ones are not built here"),
    "quantization_config_file": _refuse("rollouts compute in rollout.dtype; quantised ones are not built here"),
    "mtp": _refuse("tokens are drawn one at a time; multi-token prediction is not built here"),
    "disaggregation": _refuse("one engine reads prompts and writes answers; splitting the two is not built here"),
    "qat": _refuse(_QAT),
    "group_name": _note("worker groups are named by their role"),
    "enable_flash_infer_sampler": _note("tokens are drawn by rlsys, the same with every engine"),
    "model_arch": _note("read from the model's config.json"),
    "detokenize": _note("responses are token ids; text is made where it is needed", False),
    "distributed_executor_backend": _note("the processes of an engine are workers of trainer.backend"),
}

_PPO: dict[str, Elsewhere] = {
    "hydra": _note(_HYDRA),
    "transfer_queue": _note("batches travel between groups by reference already; there is no queue to set up"),
    "distillation": _note("distillation is not built here"),
    "distillation.enabled": _refuse("distillation is not built here", False),
    "skip": _note("there is no rollout cache; rollouts are kept with trainer.rollout_data_dir"),
    "trainer.use_v1": _note("there is one trainer", True, False),
    "trainer.v1": _note("there is one trainer; trainer.max_staleness=1 trains one step off"),
    "trainer.esi_redundant_time": _note("checkpoints are saved by trainer.save_freq", 0),
    "trainer.default_hdfs_dir": _refuse("checkpoints go to trainer.default_local_dir; mount the store there"),
    "trainer.del_local_ckpt_after_load": _refuse(
        "checkpoints are not deleted on load; keep fewer with trainer.max_actor_ckpt_to_keep", False
    ),
    "trainer.remove_previous_ckpt_in_save": _refuse("keep fewer with trainer.max_actor_ckpt_to_keep", False),
    "trainer.profile_steps": _note(_PROFILER),
    "trainer.npu_profile": _note(_PROFILER),
    "trainer.controller_nsight_options": _note(_PROFILER),
    "trainer.worker_nsight_options": _note(_PROFILER),
    "global_profiler": _note(_PROFILER),
    "data.dataloader_num_workers": _note("rows are tokenised once and read by position; there are no loader processes"),
    "data.use_shm": _note("files are read where they lie", False),
    "data.return_raw_input_ids": _refuse("prompts are tokenised with the actor's tokenizer only", False),
    "data.return_raw_chat": _note("batches always hold the messages as raw_prompt", True),
    "data.return_full_prompt": _note("the rollouts dump holds the full prompt", False),
    "data.return_multi_modal_inputs": _note(_VISION),
    "data.image_key": _refuse(_VISION, "images"),
    "data.video_key": _refuse(_VISION, "videos"),
    "data.audio_key": _refuse(_VISION, "audios"),
    "data.image_patch_size": _note(_VISION),
    "data.mm_processor_kwargs": _note(_VISION, {}),
    "data.tool_config_path": _refuse(_AGENT),
    "data.function_tool_path": _refuse(_AGENT),
    "data.sampler": _refuse("rows are drawn by seed, epoch and position; write a dataset: data.custom_cls", {}),
    "data.datagen": _refuse("rows come from files or from data.custom_cls", {}),
    f"{_MODEL}.use_shm": _note("weights are read where they lie", False),
    f"{_MODEL}.hf_config_path": _refuse(f"change single values with +{_MODEL}.override_config.<key>=<value>"),
    f"{_MODEL}.use_liger": _note("log-probs are computed in chunks, which saves the same memory", False),
    f"{_MODEL}.use_fused_kernels": _note("log-probs are computed in chunks, which saves the same memory", False),
    f"{_MODEL}.fused_kernel_options": _note("log-probs are computed in chunks, which saves the same memory"),
    f"{_MODEL}.enable_activation_offload": _note("use enable_gradient_checkpointing to save activation memory", False),
    f"{_MODEL}.exclude_modules": _refuse("name the modules that get adapters: target_modules"),
    f"{_MODEL}.tiled_mlp": _note("use enable_gradient_checkpointing to save activation memory"),
    f"{_MODEL}.mtp": _refuse("multi-token prediction is not trained here"),
    f"{_MODEL}.mtp.enable": _refuse("multi-token prediction is not trained here", False),
    f"{_MODEL}.lora": _refuse(f"these are Megatron's; write {_MODEL}.lora_rank, lora_alpha, target_modules"),
    f"{_ACTOR}.veomni": _refuse(f"only FSDP and Megatron are built: write {_ACTOR}.strategy=fsdp"),
    f"{_ACTOR}.rollout_n": _note(f"it is {_ROLLOUT}.n"),
    f"{_ACTOR}.calculate_sum_pi_squared": _note("computed whenever the estimator needs it", True, False),
    f"{_ACTOR}.freeze_vision_tower": _note(_VISION, False),
    f"{_ACTOR}.use_prefix_grouper": _note("packed sequences are not grouped by prefix; results are the same", False),
    f"{_ACTOR}.use_torch_compile": _note("kernels are not compiled; results are the same", True, False),
    f"{_ACTOR}.use_fused_kernels": _note(_CHUNKED, False),
    f"{_ACTOR}.entropy_from_logits_with_chunking": _note(_CHUNKED, True, False),
    f"{_ACTOR}.entropy_from_logits_chunk_size": _note(_CHUNKED),
    f"{_ACTOR}.entropy_checkpointing": _note(_CHUNKED, False),
    f"{_ACTOR}.pad_to_length": _note("sequences are packed, not padded", False),
    f"{_ACTOR}.profiler": _note(_PROFILER),
    f"{_ACTOR}.profile": _note(_PROFILER),
    f"{_ACTOR}.router_replay": _refuse(_MOE),
    f"{_ACTOR}.router_replay.mode": _refuse(_MOE, "disabled"),
    f"{_ACTOR}.qat": _refuse(_QAT),
    f"{_ACTOR}.qat.enable": _refuse(_QAT, False),
    "actor_rollout_ref.ref.strategy": _note("the reference runs on the actor's engine", "fsdp", "fsdp2", "megatron"),
    "actor_rollout_ref.ref.megatron.optimizer_offload": _note("there is no optimizer here", False),
    "actor_rollout_ref.ref.megatron.grad_offload": _note("there are no gradients here", False),
    "actor_rollout_ref.ref.megatron.seed": _note("nothing is drawn here"),
    "actor_rollout_ref.ref.rollout_n": _note(f"it is {_ROLLOUT}.n"),
    "actor_rollout_ref.ref.use_torch_compile": _note("kernels are not compiled; results are the same", True, False),
    "actor_rollout_ref.ref.entropy_from_logits_with_chunking": _note(_CHUNKED, True, False),
    "actor_rollout_ref.ref.entropy_from_logits_chunk_size": _note(_CHUNKED),
    "actor_rollout_ref.ref.entropy_checkpointing": _note(_CHUNKED, False),
    "actor_rollout_ref.ref.pad_to_length": _note("sequences are packed, not padded", False),
    "actor_rollout_ref.ref.profiler": _note(_PROFILER),
    "actor_rollout_ref.ref.router_replay": _refuse(_MOE),
    "actor_rollout_ref.ref.model": _refuse("the reference is the actor's model before training; start from that model"),
    f"{_ROLLOUT}.n_gpus_per_node": _refuse("give generation processes of its own: trainer.rollout_workers=N"),
    f"{_ROLLOUT}.nnodes": _refuse("give generation processes of its own: trainer.rollout_workers=N", 0),
    f"{_ROLLOUT}.agent": _note(_AGENT),
    f"{_ROLLOUT}.agent.default_agent_loop": _refuse(_AGENT, "single_turn_agent"),
    f"{_ROLLOUT}.agent.agent_loop_config_path": _refuse(_AGENT),
    f"{_ROLLOUT}.multi_turn": _note(_AGENT),
    f"{_ROLLOUT}.multi_turn.enable": _refuse(_AGENT, False),
    f"{_ROLLOUT}.multi_turn.tool_config_path": _refuse(_AGENT),
    f"{_ROLLOUT}.multi_turn.function_tool_path": _refuse(_AGENT),
    f"{_ROLLOUT}.trace": _note("answers are written to trainer.rollout_data_dir and to the rollouts browser"),
    f"{_ROLLOUT}.profiler": _note(_PROFILER),
    f"{_ROLLOUT}.enable_rollout_routing_replay": _refuse(_MOE, False),
    f"{_ROLLOUT}.moe_load_balance_metrics_interval": _note(_MOE, 0),
    f"{_ROLLOUT}.checkpoint_engine.engine_kwargs": _note("the executors have no further settings", {}),
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": _refuse(
        f"choose one of the executors: {_ROLLOUT}.checkpoint_engine.backend"
    ),
    f"{_ROLLOUT}.micro_batch_size": _refuse(f"write {_ROLLOUT}.max_num_seqs"),
    "critic.rollout_n": _note(f"it is {_ROLLOUT}.n"),
    "critic.profiler": _note(_PROFILER),
    "critic.model.use_shm": _note("weights are read where they lie", False),
    "critic.model.hf_config_path": _refuse("change single values with +critic.model.override_config.<key>=<value>"),
    "critic.model.lora": _refuse("these are Megatron's; write critic.model.lora_rank, lora_alpha, target_modules"),
    "critic.model.exclude_modules": _refuse("name the modules that get adapters: target_modules"),
    "critic.model.tiled_mlp": _note("use enable_gradient_checkpointing to save activation memory"),
    "critic.model.mtp": _note("multi-token prediction is not trained here"),
    "critic.model.use_liger": _note("the value head is small; there is nothing to fuse", False),
    "critic.model.use_fused_kernels": _note("the value head is small; there is nothing to fuse", False),
    "critic.model.fused_kernel_options": _note("the value head is small; there is nothing to fuse"),
    "critic.model.enable_activation_offload": _note("use enable_gradient_checkpointing", False),
    "algorithm.filter_groups.max_inflight_gen_batches": _note("one batch is generated at a time", 1),
    "algorithm.rollout_correction.debug_rollout_actor_probs": _note("turn bypass_mode off to compare log-probs", False),
    "reward.reward_model.rollout": _note("the reward model runs as a classifier in its own worker group"),
    "reward.reward_model.strategy": _note("the reward model runs forward only", "fsdp", "fsdp2"),
    "reward.reward_model.launch_reward_fn_async": _note("grading always overlaps with other work where it can"),
    "reward.reward_model.model.input_tokenizer": _refuse("the reward model must have the actor's tokenizer"),
    "reward.reward_model.model": _note("only reward.reward_model.model_path and trust_remote_code are looked at"),
    "reward.reward_model.megatron": _refuse("the reward model runs on FSDP2"),
    "reward.reward_model.profiler": _note(_PROFILER),
    "reward.reward_model.max_length": _note("sequences are not cut for the reward model"),
    "reward.reward_model.ulysses_sequence_parallel_size": _note("sequences are not split for the reward model", 1),
    "reward.reward_model.reward_loop_source": _refuse("write reward.reward_manager.{source,module}"),
    "reward.reward_model.reward_loop_module_path": _refuse("write reward.reward_manager.module.path"),
    "reward.reward_model.reward_loop_class_name": _refuse("write reward.reward_manager.module.name"),
    "reward.sandbox_fusion.url": _refuse("generated code runs in a local sandbox; call a remote one from your reward"),
    "reward.sandbox_fusion.max_concurrent": _note("reward.num_workers says how many answers are graded at once"),
    "ray_kwargs.ray_init.num_gpus": _refuse("Ray counts the GPUs; hide some with CUDA_VISIBLE_DEVICES"),
    "actor.ppo_n_minibatches": _refuse(f"write {_ACTOR}.ppo_mini_batch_size = train_batch_size / minibatches"),
    "actor.use_decoupled_loss": _refuse("write algorithm.rollout_correction.rollout_is=token", False),
    "actor.behav_imp_weight_cap": _refuse("write algorithm.rollout_correction.rollout_is_threshold"),
    "actor.overlong_reward_penalty": _refuse("write reward.reward_kwargs.overlong_buffer_cfg", False),
    "async_training": _refuse("write trainer.max_staleness=1 (and trainer.rollout_workers=N)", False),
    "sglang": _refuse(_ENGINES),
    "vllm": _refuse(_ENGINES),
}

_OPTIM = {
    "optimizer": _refuse("AdamW is the only optimizer", "AdamW"),
    "optimizer_impl": _refuse("AdamW is torch's", "torch.optim"),
    "override_optimizer_config": _refuse("write optim.{lr,betas,weight_decay}", {}),
    "total_training_steps": _note("the schedule follows trainer.total_training_steps and the data", -1),
    "zero_indexed_step": _note("the schedule starts at step 0", True),
    "num_cycles": _refuse("cosine falls once from lr to min_lr_ratio", 0.5),
    "lr_warmup_init": _refuse("warm-up starts at 0", 0, 0.0),
    "lr_decay_style": _refuse("write lr_scheduler_type", "constant"),
}

_FSDP = {
    "wrap_policy": _note(_FSDP1),
    "use_orig_params": _note(_FSDP1),
    "use_torch_compile": _note("kernels are not compiled; results are the same", True, False),
    "use_no_sync_for_gradient_accumulation": _note(
        "gradients are reduced once a step where memory allows", True, False
    ),
    "entropy_from_logits_with_chunking": _note(_CHUNKED, True, False),
    "entropy_from_logits_chunk_size": _note(_CHUNKED),
    "entropy_checkpointing": _note(_CHUNKED, False),
    "pad_to_length": _note("sequences are packed, not padded", False),
    "pad_to_length_bucket": _note("sequences are packed, not padded"),
    "forward_only": _note("known from the role", True, False),
    "strategy": _note("known from the role", "fsdp", "fsdp2"),
    "qat": _refuse(_QAT),
    "qat.enable": _refuse(_QAT, False),
    "turbo_config": _note("there is no FSDP-Turbo here"),
    "mixed_precision": _refuse("write fsdp_config.dtype; gradients are reduced in float32"),
    "optimizer_offload": _note("there is no optimizer here", False),
    "ulysses_sequence_parallel_size": _note("it is the role's own ulysses_sequence_parallel_size", 1),
}

_MEGATRON = {
    "use_mbridge": _note("families of models are tables of their own: docs/extend.md", True, False),
    "vanilla_mbridge": _note("families of models are tables of their own: docs/extend.md", True, False),
    "use_dist_checkpointing": _note("checkpoints are always sharded and load into any layout", False),
    "dist_checkpointing_path": _refuse("name the Hugging Face folder: actor_rollout_ref.model.path"),
    "dist_checkpointing_prefix": _note("names are those of Hugging Face", ""),
    "dist_ckpt_optim_fully_reshardable": _note("checkpoints load into any layout", True, False),
    "distrib_optim_fully_reshardable_mem_efficient": _note("nothing is gathered to save", True, False),
    "use_distributed_optimizer": _note("the optimizer is always spread over the data-parallel ranks", True),
    "use_remove_padding": _note("rows are always packed", True),
    "forward_only": _note("known from the role", True, False),
    "load_weight": _note("weights are always loaded", True),
    "strategy": _note("known from the role", "megatron"),
    "override_ddp_config": _refuse("gradients are summed in float32, once a step", {}),
    "override_mcore_model_config": _refuse("write override_transformer_config", {}),
    "extra": _refuse("write override_transformer_config", {}),
    "mixed_precision": _refuse("write dtype; masters and gradients are in float32"),
}

_CHECKPOINT = {
    "async_save": _note("checkpoints are written before the next step starts", False),
    "strict": _note("loading is always strict", True),
}

_SUPERVISED: dict[str, Elsewhere] = {
    "hydra": _note(_HYDRA),
    "engine.param_offload": _note("one model has nobody to make room for; see engine.offload_policy", False),
    "engine.optimizer_offload": _note("one model has nobody to make room for; see engine.offload_policy", False),
    "profiler": _note(_PROFILER),
    "trainer.profile_interval": _note(_PROFILER, [-1, -1]),
    "trainer.default_hdfs_dir": _refuse("checkpoints go to trainer.default_local_dir; mount the store there"),
    "data.pad_mode": _note("sequences are packed without padding", "no_padding"),
    "data.balance_dp_token": _note("trainer.balance_batch does that", False),
    "data.use_shm": _note("files are read where they lie", False),
    "data.num_workers": _note("rows are tokenised once and read by position; there are no loader processes"),
    "data.micro_batch_size": _refuse("write data.micro_batch_size_per_gpu"),
    "data.tools_key": _refuse(_AGENT, "tools"),
    "data.enable_thinking_key": _refuse("write +data.apply_chat_template_kwargs.enable_thinking", "enable_thinking"),
    "data.enable_thinking_default": _refuse("write +data.apply_chat_template_kwargs.enable_thinking", "none"),
    "data.ignore_input_ids_mismatch": _note("conversations are tokenised as a whole", False),
    "data.chat_template": _refuse("write model.custom_chat_template"),
    "data.multiturn": _refuse("write data.messages_key"),
    "model.use_shm": _note("weights are read where they lie", False),
    "model.use_liger": _note("log-probs are computed in chunks, which saves the same memory", False),
    "model.use_fused_kernels": _note(_CHUNKED, False),
    "model.exclude_modules": _refuse("name the modules that get adapters: target_modules"),
    "model.strategy": _note("there is FSDP2 only", "fsdp", "fsdp2"),
    "model.hf_config_path": _refuse("change single values with +model.override_config.<key>=<value>"),
}

_EVAL: dict[str, Elsewhere] = {
    "hydra": _note(_HYDRA),
    "data.response_key": _refuse("trainer.main_eval writes the answers itself; it does not grade given ones"),
    "data.reward_model_key": _refuse("the column is reward_model, as in training", "reward_model"),
}


def _within(sections: tuple[str, ...], keys: dict[str, Elsewhere]) -> dict[str, Elsewhere]:
    return {f"{section}.{key}": entry for section in sections for key, entry in keys.items()}


def known_elsewhere(job: str) -> dict[str, Elsewhere]:
    """The table {key prefix: what it is told} of a job, named by its schema."""
    if job in ("SFTConfig", "RMConfig"):
        return (
            _within(("engine",), _FSDP)
            | _within(("optim",), _OPTIM)
            | _within(("checkpoint",), _CHECKPOINT)
            | _SUPERVISED
        )
    if job == "EvalConfig":
        return _within((_ROLLOUT,), _ENGINE_KEYS) | _EVAL
    fsdp = (f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    return (
        _within(fsdp, _FSDP)
        | _within((f"{_ACTOR}.megatron", "actor_rollout_ref.ref.megatron", "critic.megatron"), _MEGATRON)
        | _within((f"{_ACTOR}.optim", "critic.optim"), _OPTIM)
        | _within((f"{_ACTOR}.checkpoint", "critic.checkpoint"), _CHECKPOINT)
        | _within((_ROLLOUT,), _ENGINE_KEYS)
        | _PPO
    )


def look_up(path: str, table: dict[str, Elsewhere]) -> Elsewhere | None:
    """The entry of the longest prefix of `path`, or None."""
    prefix = path
    while prefix:
        if prefix in table:
            return table[prefix]
        prefix = prefix.rpartition(".")[0]
    return None
