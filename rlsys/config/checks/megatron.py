"""Whether Megatron is installed and its parallel sizes fit the ranks; the engine checks that they fit the model."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from rlsys.config.checks.findings import note, wrong
from rlsys.config.pools import resolve_pools
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.schema.megatron import MegatronConfig, MegatronRoleConfig
from rlsys.config.schema.model import ModelConfig

ACTOR, CRITIC, REF, MODEL = (
    "actor_rollout_ref.actor",
    "critic",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
)


def check_megatron(cfg: PPOConfig) -> Iterator[str]:
    """The roles that run on Megatron."""
    policy, critic = cfg.actor_rollout_ref, cfg.critic
    ranks = resolve_pools(cfg).train_ranks
    if policy.actor.strategy == "megatron":
        yield from _installed(f"{ACTOR}.strategy")
        yield from _sizes(f"{ACTOR}.megatron", policy.actor.megatron, ranks)
        yield from _model(
            MODEL, ACTOR, policy.model, policy.actor.megatron, policy.actor.ulysses_sequence_parallel_size
        )
        if cfg.use_reference:
            yield from _sizes(f"{REF}.megatron", policy.ref.megatron, ranks)
    if cfg.use_critic and critic.strategy == "megatron":
        if policy.actor.strategy != "megatron":
            yield from _installed(f"{CRITIC}.strategy")
        yield from _sizes(f"{CRITIC}.megatron", critic.megatron, ranks)
        yield from _model("critic.model", CRITIC, critic.model, critic.megatron, critic.ulysses_sequence_parallel_size)


def _installed(key: str) -> Iterator[str]:
    if importlib.util.find_spec("megatron") is None:
        yield wrong(key, "megatron", f"Megatron-Core is not installed; pip install -e '.[megatron]', or set {key}=fsdp")


def _sizes(key: str, section: MegatronRoleConfig, ranks: int) -> Iterator[str]:
    tensor, stages = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    context, experts = section.context_parallel_size, section.expert_model_parallel_size
    if ranks % (tensor * stages):
        why = f"x pipeline {stages} does not divide the {ranks} training processes"
        yield wrong(f"{key}.tensor_model_parallel_size", tensor, f"{why}; set {key}.tensor_model_parallel_size=1")
    elif ranks % (tensor * stages * context):
        why = f"x tensor {tensor} x pipeline {stages} does not divide the {ranks} training processes"
        yield wrong(f"{key}.context_parallel_size", context, f"{why}; set {key}.context_parallel_size=1")
    expert_tensor = section.expert_tensor_parallel_size or tensor
    if ranks % (expert_tensor * experts * stages):
        why = f"x expert tensor {expert_tensor} x pipeline {stages} does not divide the {ranks} training processes"
        yield wrong(f"{key}.expert_model_parallel_size", experts, f"{why}; set {key}.expert_model_parallel_size=1")
    if experts > 1 and tensor > 1 and not section.sequence_parallel:
        why = "experts and matrices are both sharded over ranks"
        yield wrong(f"{key}.sequence_parallel", False, f"{why}; set {key}.sequence_parallel=true")
    if (virtual := section.virtual_pipeline_model_parallel_size) is not None and virtual > 1 and stages == 1:
        virtual_key = f"{key}.virtual_pipeline_model_parallel_size"
        yield wrong(virtual_key, virtual, f"there is only one stage; set {key}.pipeline_model_parallel_size=2")


def _model(key: str, role: str, model: ModelConfig, megatron: MegatronConfig, sequence: int) -> Iterator[str]:
    if model.lora_rank and megatron.fp8 is not None:
        why = f"adapters are merged into weights, which fp8 would round; set {role}.megatron.fp8=null"
        yield wrong(f"{key}.lora_rank", model.lora_rank, why)
    if sequence > 1:
        why = "Megatron splits sequences by context_parallel_size"
        yield wrong(f"{role}.ulysses_sequence_parallel_size", sequence, f"{why}; remove it")
    if not model.use_remove_padding:
        yield note(f"{key}.use_remove_padding", False, "Megatron always packs sequences")
