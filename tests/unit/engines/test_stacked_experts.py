"""Experts that transformers stacks: read, listed and written by the names they are saved by, on any number of ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlsys.config.schema.model import ModelConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.model_merger.convert import merge
from rlsys.weights.layout import shard_view
from tests.ranks import run_ranks

FILE = "model.safetensors"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=8,  # pyrefly: ignore
        num_experts=4,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def held(model: Path, out: Path) -> int:
    """Elements on this rank, after comparing every box and every whole tensor with the file, bitwise."""
    saved = load_file(model / FILE)
    engine = FSDPEngine(ModelConfig(path=str(model)))
    layout, local = engine.weight_layout(), engine.local_tensors()
    assert layout.full_shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for shard in layout.shards:
        part = tuple(slice(at, at + n) for at, n in zip(shard.box.start, shard.box.shape, strict=True))
        assert torch.equal(shard_view(local, shard), saved[shard.box.tensor][part]), shard
    whole = {name: tensor for bucket in engine.weights(1 << 12) for name, tensor in bucket}
    assert whole.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in whole.items())
    engine.save(out, "export")
    engine.save(out.with_name(f"{out.name}_resume"), "resume")
    return sum(shard_view(local, shard).numel() for shard in layout.shards)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_experts_come_and_go_by_the_names_they_are_saved_by(model: Path, tmp_path: Path, num_ranks: int) -> None:
    saved = load_file(model / FILE)
    num_elements = run_ranks(num_ranks, held, model, tmp_path / "export")
    assert sum(num_elements) == sum(tensor.numel() for tensor in saved.values())
    exported = load_file(tmp_path / "export" / FILE)
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def held_bytes(override_config: dict[str, object]) -> int:
    """Bytes of the parameters' memory on this rank."""
    storages = [
        t.untyped_storage() for t in FSDPEngine(ModelConfig(override_config=override_config)).local_tensors().values()
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_ranks_among_which_experts_do_not_divide_hold_parts_of_each() -> None:
    config = {**SIZES, "model_type": "qwen3_moe", "num_key_value_heads": 1, "head_dim": 8, "num_experts": 2}
    (whole,) = run_ranks(1, held_bytes, config)
    assert max(run_ranks(4, held_bytes, config)) < 1.1 * whole / 4


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}


@pytest.mark.parametrize(("kind", "own"), [("deepseek_v3", LATENT), ("dots1", {"head_dim": 8})])
def test_buffers_that_are_saved_come_and_go_and_are_merged(kind: str, own: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = {**own, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    own |= {"num_key_value_heads": 2, "first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **own))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(tmp_path / "model")
    run_ranks(2, held, tmp_path / "model", tmp_path / "out")
    merge(tmp_path / "out_resume", tmp_path / "merged", config_dir=tmp_path / "model")
    saved = load_file(tmp_path / "model" / FILE)
    assert saved["model.layers.1.mlp.gate.e_score_correction_bias"].any()
    for folder in ("out", "merged"):
        exported = load_file(tmp_path / folder / FILE)
        assert exported.keys() == saved.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        (
            "model.layers.1.mlp.experts.2.up_proj.weight",
            None,
            r"1 tensors are missing \(model.layers.1.mlp.experts.2.up",
        ),
        (
            "model.layers.0.mlp.experts.3.down_proj.weight",
            (16, 11),
            r"down_proj.weight is \(16, 11\), the model's \(16, 12\)",
        ),
    ],
)
def test_a_checkpoint_without_all_experts_is_refused(
    model: Path, tmp_path: Path, name: str, change: tuple[int, int] | None, why: str
) -> None:
    tensors = load_file(model / FILE)
    del tensors[name]
    if change is not None:
        tensors[name] = torch.zeros(change)
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(AssertionError, match=f"CheckpointError: these weights are those of a different model: .*{why}"):
        run_ranks(1, held, tmp_path, tmp_path / "out")
