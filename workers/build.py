"""From sections of the configuration to engines and loss settings: the one place where workers read both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from rlsys.config import RMConfig, SFTConfig
from rlsys.config.schema.actor import ActorRolloutRefConfig, CriticConfig
from rlsys.config.schema.algorithm import RewardModelConfig
from rlsys.config.schema.megatron import MegatronConfig, MegatronRoleConfig
from rlsys.config.schema.model import CheckpointConfig, ModelConfig, OptimConfig, ShardConfig
from rlsys.engines import rng
from rlsys.engines.fsdp.engine import FSDPEngine, FsdpOptions, Precision
from rlsys.engines.fsdp.optim import OptimSettings
from rlsys.engines.mesh import Parallel, ensure_process_group
from rlsys.engines.micro_batches import MicroBatches
from rlsys.models.flops import peak_flops
from rlsys.models.hf import ModelSource, read_config
from rlsys.models.lora import lora_settings
from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.options import ModelOptions
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.utils.errors import ConfigError
from workers.mfu import MfuMeter

if TYPE_CHECKING:
    from rlsys.engines.megatron.engine import MegatronEngine

    Engine = FSDPEngine | MegatronEngine


@dataclass(frozen=True)
class EngineRun:
    """Facts of the run that no section of the configuration has.

    `step_rows` are the rows of a step over all ranks, `rollout_n` those of each prompt; `actor_steps` and
    `critic_steps` are optimizer steps of the whole run.
    """

    device: str
    nccl_timeout_s: float
    step_rows: int = 1
    rollout_n: int = 1
    actor_steps: int = -1
    critic_steps: int = -1
    num_threads: int | None = None
    offload_on_sleep: bool = True
    """Whether rollout engines keep weights on the host while they sleep; else the next push brings them."""

    def place(self, *, full_determinism: bool = False) -> str:
        """Join the process group of the ranks, seed this rank's generators and return its device.

        `full_determinism` goes for all that this process computes from then on.
        """
        if full_determinism:
            rng.repeat_bitwise()
        if self.num_threads:
            torch.set_num_threads(self.num_threads)
        ensure_process_group(self.device, timeout_s=self.nccl_timeout_s)
        rng.seed_all(dist.get_rank())
        return self.device

    def compute_dtype(self, wanted: str) -> str:
        """bfloat16 on CUDA and float32 on CPU, unless a type is named."""
        if wanted != "auto":
            return wanted
        return "bfloat16" if self.device.startswith("cuda") else "float32"


def model_source(model: ModelConfig, *, seed: int) -> ModelSource:
    assert model.path is not None, "the start model is resolved before workers start"
    return ModelSource(
        path=model.path,
        seed=seed,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
    )


def make_mfu_meter(model: ModelConfig, engine: Any, run: EngineRun, *, lm_head: bool = True) -> MfuMeter:
    """The MFU meter of a rank of an engine."""
    ranks_per_row = dist.get_world_size() // engine.dp_size
    peak = peak_flops(torch.device(run.device)) * ranks_per_row
    return MfuMeter(read_config(model_source(model, seed=0)), peak, lm_head)


def optim_settings(optim: OptimConfig, *, grad_clip: float, total_steps: int) -> OptimSettings:
    return OptimSettings(
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        grad_clip=grad_clip,
        schedule=optim.lr_scheduler_type,
        warmup_steps=optim.lr_warmup_steps,
        warmup_ratio=optim.lr_warmup_steps_ratio,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
    )


def micro_batches(*, rows: int | None, dynamic: bool, max_tokens: int, share: int) -> MicroBatches:
    """By tokens, by a fixed number of rows, or the whole share of a rank at once."""
    return MicroBatches(max_tokens=max_tokens) if dynamic else MicroBatches(rows=rows or share)


def _engine(
    model: ModelConfig,
    shard: ShardConfig,
    run: EngineRun,
    *,
    head: Literal["lm", "scalar"] = "lm",
    optimizer: OptimSettings | None = None,
    training: MicroBatches,
    scoring: MicroBatches | None = None,
    sp_size: int = 1,
    checkpoint: CheckpointConfig | None = None,
) -> FSDPEngine:
    trained = optimizer is not None
    return FSDPEngine(
        model_source(model, seed=shard.seed),
        head=head,
        device=run.place(full_determinism=shard.full_determinism),
        optimizer=optimizer,
        training=training,
        scoring=scoring,
        precision=Precision(compute=run.compute_dtype(shard.dtype), master=shard.model_dtype),
        parallel=Parallel(fsdp_size=shard.fsdp_size, sp_size=sp_size),
        fsdp=FsdpOptions(
            reshard_after_forward=shard.reshard_after_forward,
            forward_prefetch=shard.forward_prefetch,
            cpu_offload=shard.offload_policy,
        ),
        packed=model.use_remove_padding,
        gradient_checkpointing=trained and model.enable_gradient_checkpointing,
        lora=lora_settings(model, seed=shard.seed) if trained else None,
        **_contents(checkpoint),
    )


def _contents(checkpoint: CheckpointConfig | None) -> dict[str, Any]:
    """What an engine saves and loads itself; a Hugging Face folder is written beside it."""
    if checkpoint is None:
        return {}
    parts = {"save_contents": checkpoint.save_contents, "load_contents": checkpoint.load_contents}
    return {name: [part for part in value if part != "hf_model"] for name, value in parts.items()}


def _megatron_engine(
    model: ModelConfig,
    megatron: MegatronRoleConfig,
    run: EngineRun,
    *,
    head: Literal["lm", "scalar"] = "lm",
    optimizer: OptimSettings | None = None,
    training: MicroBatches,
    scoring: MicroBatches | None = None,
    checkpoint: CheckpointConfig | None = None,
) -> MegatronEngine:
    from rlsys.engines.megatron.engine import MegatronEngine

    device = run.place(full_determinism=megatron.full_determinism)
    trained = isinstance(megatron, MegatronConfig)
    return MegatronEngine(
        model_source(model, seed=megatron.seed if trained else 0),
        head=head,
        device=device,
        optimizer=optimizer,
        training=training,
        scoring=scoring,
        sizes=ParallelSizes.from_config(megatron),
        options=ModelOptions(
            dtype=run.compute_dtype(megatron.dtype),
            recompute=trained and model.enable_gradient_checkpointing,
            fp8=megatron.fp8 if trained else None,
            overrides=megatron.override_transformer_config,
        ),
        lora=lora_settings(model, seed=megatron.seed) if trained else None,
        **_contents(checkpoint),
    )


def check_megatron_model(key: str, model: ModelConfig, megatron: MegatronRoleConfig) -> None:
    """ConfigError that names `key` unless Megatron knows the model and can cut it so; reads config.json only."""
    assert model.path is not None, "the start model is resolved before workers start"
    hf_config = json.loads((Path(model.path) / "config.json").read_text()) | model.override_config
    try:
        family_of(hf_config).check(hf_config, RankPlace(ParallelSizes.from_config(megatron)))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def build_actor_engine(cfg: ActorRolloutRefConfig, run: EngineRun) -> Engine:
    actor, rollout = cfg.actor, cfg.rollout
    common: dict[str, Any] = {
        "optimizer": optim_settings(actor.optim, grad_clip=actor.grad_clip, total_steps=run.actor_steps),
        "training": micro_batches(
            rows=actor.ppo_micro_batch_size_per_gpu,
            dynamic=actor.use_dynamic_bsz,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            share=run.step_rows,
        ),
        "scoring": micro_batches(
            rows=rollout.log_prob_micro_batch_size_per_gpu,
            dynamic=rollout.log_prob_use_dynamic_bsz,
            max_tokens=rollout.log_prob_max_token_len_per_gpu,
            share=run.step_rows,
        ),
        "checkpoint": actor.checkpoint,
    }
    if actor.strategy == "megatron":
        return _megatron_engine(cfg.model, actor.megatron, run, **common)
    return _engine(cfg.model, actor.fsdp_config, run, sp_size=actor.ulysses_sequence_parallel_size, **common)


def build_reference_engine(cfg: ActorRolloutRefConfig, run: EngineRun) -> Engine:
    ref = cfg.ref
    scoring = micro_batches(
        rows=ref.log_prob_micro_batch_size_per_gpu,
        dynamic=ref.log_prob_use_dynamic_bsz,
        max_tokens=ref.log_prob_max_token_len_per_gpu,
        share=run.step_rows,
    )
    if cfg.actor.strategy == "megatron":
        return _megatron_engine(cfg.model, ref.megatron, run, training=scoring)
    return _engine(cfg.model, ref.fsdp_config, run, training=scoring, sp_size=ref.ulysses_sequence_parallel_size)


def build_critic_engine(cfg: CriticConfig, run: EngineRun) -> Engine:
    common: dict[str, Any] = {
        "head": "scalar",
        "optimizer": optim_settings(cfg.optim, grad_clip=cfg.grad_clip, total_steps=run.critic_steps),
        "training": micro_batches(
            rows=cfg.ppo_micro_batch_size_per_gpu,
            dynamic=cfg.use_dynamic_bsz,
            max_tokens=cfg.ppo_max_token_len_per_gpu,
            share=run.step_rows,
        ),
        "scoring": micro_batches(
            rows=cfg.forward_micro_batch_size_per_gpu,
            dynamic=cfg.use_dynamic_bsz,
            max_tokens=cfg.forward_max_token_len_per_gpu,
            share=run.step_rows,
        ),
        "checkpoint": cfg.checkpoint,
    }
    if cfg.strategy == "megatron":
        return _megatron_engine(cfg.model, cfg.megatron, run, **common)
    return _engine(cfg.model, cfg.fsdp, run, sp_size=cfg.ulysses_sequence_parallel_size, **common)


def build_reward_engine(cfg: RewardModelConfig, run: EngineRun) -> FSDPEngine:
    assert cfg.model_path is not None
    return FSDPEngine(
        ModelSource(path=cfg.model_path, trust_remote_code=cfg.trust_remote_code),
        head="scalar",
        device=run.place(),
        training=micro_batches(
            rows=cfg.micro_batch_size_per_gpu,
            dynamic=cfg.use_dynamic_bsz,
            max_tokens=cfg.forward_max_token_len_per_gpu,
            share=run.step_rows,
        ),
        precision=Precision(compute=run.compute_dtype(cfg.dtype)),
    )


def build_supervised_engine(cfg: SFTConfig | RMConfig, run: EngineRun, *, value_head: bool) -> FSDPEngine:
    return _engine(
        cfg.model,
        cfg.engine,
        run,
        head="scalar" if value_head else "lm",
        optimizer=optim_settings(cfg.optim, grad_clip=cfg.optim.clip_grad, total_steps=run.actor_steps),
        training=micro_batches(
            rows=cfg.data.micro_batch_size_per_gpu,
            dynamic=cfg.data.use_dynamic_bsz,
            max_tokens=cfg.data.max_token_len_per_gpu,
            share=run.step_rows,
        ),
        sp_size=cfg.engine.ulysses_sequence_parallel_size,
        checkpoint=cfg.checkpoint,
    )
