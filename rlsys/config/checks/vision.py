"""Whether what the configuration chooses can take the images of a vision-language model."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.config.checks.files import model_facts
from rlsys.config.checks.findings import wrong
from rlsys.config.schema.jobs import GradedJob, PPOConfig
from rlsys.config.vocabulary import GRIDS, TILES

IMAGE_ENGINES = ("hf", "vllm", "sglang", "vllm_remote", "sglang_remote")
PATCH = 14
POLICY = "actor_rollout_ref"


def check_vision(cfg: GradedJob) -> Iterator[str]:
    """Engines and roles beside a vision-language model, and settings of images beside a model of text."""
    engine = cfg.actor_rollout_ref.rollout.name
    facts = model_facts(cfg.actor_rollout_ref.model.path)
    if not facts or facts.get("model_type") not in (*GRIDS, *TILES):
        if facts and isinstance(cfg, PPOConfig) and cfg.actor_rollout_ref.actor.freeze_vision_tower:
            yield wrong(cfg, f"{POLICY}.actor.freeze_vision_tower", "images of this model are not taken", "false")
        return
    if engine not in IMAGE_ENGINES:
        yield wrong(cfg, f"{POLICY}.rollout.name", "it is not given images here", IMAGE_ENGINES[0])
    elif engine.startswith("sglang") and (lacks := _lacks_in_sglang(facts)):
        yield wrong(cfg, f"{POLICY}.rollout.name", lacks, engine.replace("sglang", "vllm"))
    if not isinstance(cfg, PPOConfig):
        return
    if cfg.actor_rollout_ref.actor.strategy == "megatron" and cfg.actor_rollout_ref.model.lora_rank:
        why = f"Megatron adapts models of text only; set it to 0, or {POLICY}.actor.strategy=fsdp"
        yield wrong(cfg, f"{POLICY}.model.lora_rank", why)
    if cfg.actor_rollout_ref.rollout.servers.lora_name:
        why = "servers may apply adapters to the language model alone; leave it out, and merged weights are pushed"
        yield wrong(cfg, f"{POLICY}.rollout.servers.lora_name", why)
    if cfg.use_critic:
        yield wrong(cfg, "algorithm.adv_estimator", "a vision-language model cannot be trained as a critic", "grpo")


def _lacks_in_sglang(facts: Mapping[str, Any]) -> str:
    """What SGLang does not do for a vision-language model, "" if it draws for it."""
    if facts["model_type"] in TILES:
        return "SGLang has no models of this family"
    patch = facts.get("vision_config", {}).get("patch_size", PATCH)
    if facts["model_type"] == "qwen2_5_vl" and patch != PATCH:
        return f"SGLang takes images of Qwen2.5-VL in patches of {PATCH} pixels only; the model's have {patch}"
    return ""
