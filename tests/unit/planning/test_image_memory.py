"""The memory of image encoders: by hand, and against what transformers builds and keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlsys.config import PPOConfig, load_config
from rlsys.models.hf import auto_model
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.models.vision import image_features, num_features
from rlsys.planning import footprint as fp
from rlsys.planning.advice import facts_of, memory_line
from rlsys.planning.image_encoder import plan_facts
from rlsys.planning.memory import Machine, plan_memory
from rlsys.planning.roles import Computing, MegatronRole, Pass
from rlsys.planning.sizes import choose_sizes
from tests.tiny_vision import MODELS, random_images, wide

GIB = 1 << 30
POLICY = "actor_rollout_ref"
TOWER = 32 * (2 * 1280 + 4 * 1280 * (1280 + 1) + 2 * 3420 * (1280 + 1) + 1280 * (3420 + 1)) + 1176 * 1280
MERGER = 1280 + 5120 * (5120 + 1)
PUBLISHED: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
    "vocab_size": 151936,
}
"""Qwen2.5-VL-3B."""
LARGER: dict[str, Any] = {
    **PUBLISHED,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vision_config": {**PUBLISHED["vision_config"], "out_hidden_size": 3584},
    "vocab_size": 152064,
}
"""7B."""


def config(*settings: str) -> PPOConfig:
    files = ("data.train_files=null", "data.val_files=null", f"{POLICY}.model.path=null")
    return load_config(["--config-name=gsm8k_grpo", *files, *settings])


@pytest.mark.parametrize(
    ("published", "parameters"),
    [(PUBLISHED, 3_754_622_976), (LARGER, 8_292_166_656)],
)
def test_parameters_of_published_models(published: dict[str, Any], parameters: int) -> None:
    facts = plan_facts(published, freeze_vision_tower=True)
    decoder, encoder = fp.decoder_of(facts), fp.encoder_of(facts)
    assert encoder.parameters == encoder.frozen == TOWER + MERGER + published["hidden_size"] * (5120 + 1)
    assert decoder.parameters == parameters
    assert (encoder.num_layers, encoder.hidden, encoder.ffn, encoder.patches, encoder.pixels) == (
        32,
        1280,
        3420,
        4,
        784,
    )
    assert fp.encoder_of(plan_facts(published)).frozen == 0


@pytest.mark.parametrize("name", MODELS)
def test_what_an_encoder_keeps_is_what_autograd_saves(name: str) -> None:
    shape = wide(MODELS[name])
    tower = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "depth": 4,
        "num_hidden_layers": 4,
        "fullatt_block_indexes": [3],
    }
    tower |= {"image_size": 64} if "image_size" in shape["vision_config"] else {"num_heads": 4}
    settings = AutoConfig.for_model(**{**shape, "vision_config": {**shape["vision_config"], **tower}})
    model = auto_model(settings).from_config(settings, attn_implementation="sdpa").train()
    decoder = fp.decoder_of(plan_facts(settings.to_dict()))
    assert decoder.parameters == sum(p.numel() for p in model.parameters())
    images = random_images(
        {"vision_config": settings.vision_config.to_dict()}, [(32, 32) if "num_heads" in tower else (1, 4)]
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for recompute in (False, True):
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            image_features(model, images.tensors)
        tokens = sum(num_features(settings, images.tensors))
        planned, _ = fp.image_bytes(decoder, tokens, c=4, trained=True, recompute=recompute)
        assert 0.9 < planned / sum(map(len, kept.values())) < 1.4


def held(published: dict[str, Any], *settings: str) -> dict[str, int]:
    """Bytes by owner when a job of 8 GPUs starts."""
    cfg = config("trainer.n_gpus_per_node=8", "trainer.device=cuda", f"{POLICY}.actor.use_kl_loss=false", *settings)
    facts = plan_facts(published, freeze_vision_tower=cfg.actor_rollout_ref.actor.freeze_vision_tower)
    return plan_memory(cfg, Machine("cuda", 80 * GIB, facts)).train[0].bytes


def test_a_frozen_encoder_has_no_gradients_and_no_moments() -> None:
    whole, encoder, frozen = 3_754_622_976, 668_684_288, f"{POLICY}.actor.freeze_vision_tower=true"
    sharded = held(PUBLISHED)
    assert (sharded["parameters"], sharded["optimizer"]) == (4 * whole // 8, 8 * whole // 8)
    half = held(PUBLISHED, frozen)
    assert (half["parameters"], half["optimizer"]) == (4 * whole // 8, 8 * (whole - encoder) // 8)
    cuts = [
        f"{POLICY}.actor.megatron.{name}_model_parallel_size={size}" for name, size in (("tensor", 2), ("pipeline", 2))
    ]
    first = held(LARGER, f"{POLICY}.actor.strategy=megatron", *cuts)
    still = held(LARGER, f"{POLICY}.actor.strategy=megatron", *cuts, frozen)
    assert first["parameters"] == still["parameters"]
    copied = fp.encoder_of(plan_facts(LARGER)).parameters
    assert first["gradients"] - still["gradients"] == 4 * copied
    assert first["masters"] - still["masters"] == 4 * copied // 2
    alone = held(
        {**LARGER, "vision_config": {**LARGER["vision_config"], "depth": 31}},
        f"{POLICY}.actor.strategy=megatron",
        *cuts,
    )
    assert first["parameters"] - alone["parameters"] == 2 * (TOWER - 1176 * 1280) // 32


@pytest.mark.parametrize(("settings", "tokens"), [((), 512), (("data.mm_processor_kwargs={max_pixels: 78400}",), 100)])
def test_the_largest_images_of_prompts_decide(settings: tuple[str, ...], tokens: int) -> None:
    cfg = config(
        f"{POLICY}.rollout.limit_images=1",
        f"{POLICY}.actor.use_dynamic_bsz=false",
        f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=2",
        f"{POLICY}.model.enable_gradient_checkpointing=true",
        *settings,
    )
    facts = plan_facts(PUBLISHED)
    text = {name: value for name, value in facts.items() if name != fp.ENCODER}
    both = [
        {stage.name: stage.bytes for stage in plan_memory(cfg, Machine("cuda", 80 * GIB, f)).train}
        for f in (facts, text)
    ]
    patches = 2 * tokens * 4
    images = 2 * tokens * 2 * 2048 + patches * 4 * 1176 + (32 + 4) * patches * 2 * 1280
    assert both[0]["update_actor"]["activations"] - both[1]["update_actor"]["activations"] == images


def test_only_megatrons_first_stage_has_images_in_flight_for_each_stage() -> None:
    sizes, how = ParallelSizes(tp=2, pp=2), Computing(2, "cuda", recompute=True)
    facts = plan_facts(LARGER)
    text = {name: value for name, value in facts.items() if name != fp.ENCODER}
    size, none = (Pass(tokens=4096, responses=1024, count=4, images=images) for images in (2048, 0))
    kept, encoding = fp.image_bytes(fp.decoder_of(facts), 2048, c=2, trained=True)
    made, reading = fp.image_bytes(fp.decoder_of(facts), 2048, c=2, trained=False)
    for pp_rank in (0, 1):
        ours, plain = (MegatronRole(f, how, sizes, 8, pp_rank) for f in (facts, text))
        more = ours.training(size)["activations"] - plain.training(none)["activations"]
        assert 2 * kept <= more <= 2 * kept + encoding if pp_rank == 0 else more == 0
        scored = ours.scoring(size)["activations"] - plain.scoring(none)["activations"]
        assert made <= scored <= made + reading if pp_rank == 0 else scored == 0


def test_sizes_of_a_vision_model_choose_themselves(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    cfg = load_config(
        [
            "--config-name=gsm8k_grpo",
            "data.train_files=null",
            "data.val_files=null",
            f"{POLICY}.model.path={tmp_path}",
            f"{POLICY}.rollout.name=vllm",
            "trainer.device=cuda",
        ]
    )
    machine = facts_of(cfg, "cuda", 80 * GIB)
    assert memory_line(cfg, machine).startswith("3754.6M parameters; GiB on a GPU: ")
    sizes, text = choose_sizes(cfg, (), machine)
    whole, rows, columns = fp.decoder_of(machine.actor), sizes[f"{POLICY}.rollout.max_num_seqs"], 512 + 1024
    drawn = sum(fp.image_bytes(whole, columns, c=2, trained=False)) + fp.drawing_bytes(whole, rows, c=2)
    needed = 2 * (whole.parameters + rows * columns * whole.cached) + drawn + 4 * GIB
    assert f"(all sequences need {needed / GIB:.1f} GiB)" in text
    assert {f"{POLICY}.actor.ppo_max_token_len_per_gpu", f"{POLICY}.rollout.gpu_memory_utilization"} <= sizes.keys()
    for odd in ({"model_type": "qwen3_vl_moe", "vision_config": {}}, {**MODELS["qwen3_vl"], "vision_config": 5}):
        (tmp_path / "config.json").write_text(json.dumps(odd))
        machine = facts_of(cfg, "cuda", 80 * GIB)
        assert memory_line(cfg, machine).startswith(f"cannot be planned: {odd['model_type']} has an image encoder")
        assert choose_sizes(cfg, (), machine) == ({}, "")
