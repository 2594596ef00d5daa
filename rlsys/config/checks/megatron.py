"""Whether Megatron's parallel sizes fit the ranks; the engine checks that they fit the model."""

from collections.abc import Iterator
from importlib.util import find_spec

from rlsys.config.checks.files import model_facts
from rlsys.config.checks.findings import ACTOR, CRITIC, REF, Note, note, wrong
from rlsys.config.engines import decoder_sizes, is_dense
from rlsys.config.pools import resolve_pools
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import PPOConfig, SupervisedConfig, TrainedConfig
from rlsys.config.schema.megatron import HAS_FLASH_ATTENTION, MegatronConfig, MegatronShardConfig
from rlsys.config.schema.model import ModelConfig
from rlsys.utils.fields import wrong_fields

SETTINGS = (("core/transformer/transformer_config.py", "*Config"), ("core/model_parallel_config.py", "*Config"))
"""Files of Megatron-Core, and the classes in them, that have the settings of TransformerConfig."""


def check_megatron(cfg: PPOConfig | SupervisedConfig) -> Iterator[str]:
    """The roles that run on Megatron."""
    if isinstance(cfg, SupervisedConfig):
        if cfg.engine.strategy == "megatron":
            ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
            yield from _role(cfg, "engine", cfg.engine, "model", cfg.model, ranks)
        return
    policy, ranks = cfg.actor_rollout_ref, resolve_pools(cfg).train_ranks
    if policy.actor.strategy == "megatron":
        yield from _role(cfg, ACTOR, policy.actor, "actor_rollout_ref.model", policy.model, ranks)
        if cfg.use_reference:
            yield from _sizes(cfg, f"{REF}.megatron", policy.ref.megatron, ranks)
        if cfg.distillation.enabled:
            own = resolve_pools(cfg).teacher_ranks or ranks
            key = f"{REF}.megatron" if cfg.teacher_policy is policy else "distillation.teacher_models.*.inference"
            yield from _sizes(cfg, key, cfg.teacher_policy.ref.megatron, own)
    if policy.actor.router_replay.mode != "disabled" and is_dense(decoder_sizes(model_facts(policy.model.path))):
        yield wrong(cfg, f"{ACTOR}.router_replay.mode", "the model has no experts, so there are no routes", "disabled")
    if cfg.use_critic and cfg.critic.strategy == "megatron":
        yield from _role(cfg, CRITIC, cfg.critic, "critic.model", cfg.critic.model, ranks)


def _role(cfg: Section, role: str, section: TrainedConfig, key: str, model: ModelConfig, ranks: int) -> Iterator[str]:
    yield from _sizes(cfg, f"{role}.megatron", section.megatron, ranks)
    if model.lora_rank and isinstance(section.megatron, MegatronConfig) and section.megatron.fp8 is not None:
        yield wrong(cfg, f"{key}.lora_rank", f"fp8 would round merged adapters; set {role}.megatron.fp8=null")
    if not model.use_remove_padding:
        yield note(cfg, f"{key}.use_remove_padding", "Megatron always packs sequences")


def _sizes(cfg: Section, key: str, section: MegatronShardConfig, ranks: int) -> Iterator[str]:
    tensor, stages = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    context, experts = section.context_parallel_size, section.expert_model_parallel_size
    expert_tensor = section.expert_tensor_parallel_size or tensor
    dense = f"tensor {tensor} x pipeline {stages}"
    sparse = f"expert tensor {expert_tensor} x expert {experts} x pipeline {stages}"
    products = (
        ("pipeline_model", stages, tensor, dense) if ranks % stages else ("tensor_model", tensor, stages, dense),
        ("context", context, tensor * stages, f"{dense} x context {context}"),
        ("expert_model", experts, expert_tensor * stages, sparse),
    )
    for name, size, rest, product in products:
        if ranks % (size * rest):
            fits = next((smaller for smaller in range(size, 1, -1) if ranks % (smaller * rest) == 0), 1)
            why = f"{product} = {size * rest} does not divide the {ranks} processes"
            yield wrong(cfg, f"{key}.{name}_parallel_size", why, fits, value=size)
            break
    overrides, own = section.override_transformer_config, f"{key}.override_transformer_config"
    for name, why in (wrong_fields("megatron", SETTINGS, overrides) or {}).items():
        yield f"{own}.{name}: Megatron-Core {why}"
    if (backend := overrides.get("attention_backend") or "auto") not in ("auto", "flash", "fused", "unfused"):
        yield f"{own}.attention_backend = {backend}: set it to auto, flash, fused or unfused"
    elif backend == "flash" and find_spec("transformer_engine") and not HAS_FLASH_ATTENTION:
        yield Note(f"{own}.attention_backend = flash: flash-attn is not installed; auto is used instead")
    is_beside = key in (f"{REF}.megatron", f"{CRITIC}.megatron")  # in the processes of the actor
    if is_beside and isinstance(cfg, PPOConfig) and cfg.actor_rollout_ref.actor.strategy == "megatron":
        actors = cfg.actor_rollout_ref.actor.megatron.override_transformer_config.get("attention_backend") or "auto"
        if actors != backend:
            yield f"{own}.attention_backend = {backend}: set it to {actors}, which the actor has in the same process"
    if experts > 1 and tensor > 1 and not section.sequence_parallel:
        yield wrong(cfg, f"{key}.sequence_parallel", "experts and matrices are both sharded over ranks", True)
    if (section.virtual_pipeline_model_parallel_size or 1) > 1 and stages == 1:
        why = f"there is only one stage; set {key}.pipeline_model_parallel_size=2"
        yield wrong(cfg, f"{key}.virtual_pipeline_model_parallel_size", why)
