"""FP8 and MXFP4 checkpoints as published: read as transformers dequantises them, trained, merged; refused if odd."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlsys.config.schema.megatron import MegatronConfig
from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.megatron.engine import MegatronEngine
from rlsys.model_merger.convert import compare, merge, split
from rlsys.model_merger.formats import SplitLayout
from rlsys.models.hf import in_memory, open_model_dir, read_config, read_whole
from rlsys.models.quantized import unscaled
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.utils.errors import CheckpointError
from tests.ranks import run_ranks
from workers.build import check_model

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 elements and the scale of each block of 128 x 128, its largest element over 448."""
    scales = torch.zeros(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    elements = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for row, column in ((r, c) for r in range(scales.shape[0]) for c in range(scales.shape[1])):
        block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
        scales[row, column] = weight[block].abs().max() / 448
        elements[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return elements, scales


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 with FP8 layers, and norms, embedding and head in bfloat16, as FP8 checkpoints are published."""
    path = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES, num_key_value_heads=1, head_dim=128, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if "_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensor.float())
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "quantization_config": FP8}))
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    """The weights as transformers dequantises them."""
    tensors, dequantise = load_file(folder / "model.safetensors"), Fp8Dequantize(None)
    return {
        name: dequantise._dequantize_one(tensor, tensors[f"{name}_scale_inv"], torch.bfloat16)
        if f"{name}_scale_inv" in tensors
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.weights(1 << 20) for name, tensor in bucket}


def test_weights_are_those_that_transformers_dequantises(folder: Path, expected: dict[str, Tensor]) -> None:
    read = {name: read_whole(tensor) for name, tensor in open_model_dir(folder).items()}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_box_is_that_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    elements, scales = quantised(torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])))
    source = unscaled(in_memory({"w": elements, "w_scale_inv": scales}), {"quantization_config": FP8})["w"]
    wide = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True)]
    box = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
    assert torch.equal(source.read(start, sizes), (elements.float() * wide).bfloat16()[box])


def held_by(folder: Path, megatron: bool, tp: int = 2) -> dict[str, Tensor]:
    model = ModelConfig(path=str(folder))
    if megatron:
        sizes = MegatronConfig(tensor_model_parallel_size=tp, expert_model_parallel_size=2 // tp)
        return weights_of(MegatronEngine(model, megatron=sizes))
    return weights_of(FSDPEngine(model, shard=ShardConfig(model_dtype="bfloat16")))


@pytest.mark.parametrize("megatron", [False, True], ids=["fsdp", "megatron"])
def test_both_engines_train_what_was_published(folder: Path, expected: dict[str, Tensor], megatron: bool) -> None:
    check_model("actor", ModelConfig(path=str(folder)), MegatronConfig() if megatron else ShardConfig())
    for held in run_ranks(2, held_by, folder, megatron):
        assert held.keys() == expected.keys()
        assert all(torch.equal(tensor.float(), expected[name].float()) for name, tensor in held.items())


def test_the_rollout_waits_for_bfloat16(folder: Path, expected: dict[str, Tensor]) -> None:
    engine = HFRollout.from_path(folder, context=EngineContext(load_format="dummy"))
    assert {name: tuple(tensor.shape) for name, tensor in engine.local_tensors().items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert {tensor.dtype for tensor in engine.local_tensors().values()} == {torch.float32}


def test_it_is_merged_into_a_bfloat16_model_and_split(
    folder: Path, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    merge(folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    split(folder, tmp_path / "ranks", SplitLayout(tp=2))
    merge(tmp_path / "ranks", tmp_path / "back")
    assert compare(tmp_path / "back", folder) == compare(tmp_path / "merged", folder) == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(model.get_input_embeddings().weight, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "changed",
    [{"quant_method": "gptq", "bits": 4}, {**FP8, "weight_block_size": None}],
    ids=["gptq", "one scale"],
)
def test_other_quantisations_are_refused_by_name(folder: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    written = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": changed}))
    with pytest.raises(
        CheckpointError, match=f"is quantised .{changed['quant_method']}.: only mxfp4 and fp8 with a scale"
    ):
        read_config(ModelConfig(path=str(tmp_path)))


def test_scales_that_do_not_fit_are_named() -> None:
    elements, scales = quantised(torch.ones(200, 100))
    with pytest.raises(CheckpointError, match=r"w_scale_inv is \(1, 1\): not a scale for each \(128, 128\)"):
        unscaled(in_memory({"w": elements, "w_scale_inv": scales[:1]}), {})
    with pytest.raises(CheckpointError, match="v_scale_inv scales a tensor that is not there"):
        unscaled(in_memory({"w": elements, "v_scale_inv": scales}), {})
    with pytest.raises(CheckpointError, match="w_blocks is there without w_scales"):
        unscaled(in_memory({"w_blocks": elements}), {})


def packed_stack(experts: int, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4 elements, all sixteen of them, and scales."""
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(118, 126, blocks.shape[:3], generator=draw, dtype=torch.uint8)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_box_of_mxfp4_experts_is_that_of_transformers(data: st.DataObject) -> None:
    blocks, scales = packed_stack(3, 10, 96)
    source = unscaled(in_memory({"w_blocks": blocks, "w_scales": scales}), {})["w"]
    assert (source.shape, source.dtype) == ((3, 96, 10), "BF16")
    start = [data.draw(st.integers(0, size - 1)) for size in source.shape]
    sizes = [data.draw(st.integers(1, size - at)) for size, at in zip(source.shape, start, strict=True)]
    box = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
    assert torch.equal(source.read(start, sizes), convert_moe_packed_tensors(blocks, scales)[box])


@pytest.mark.parametrize("megatron", [False, True], ids=["fsdp", "megatron"])
def test_both_engines_train_mxfp4_experts(tmp_path: Path, megatron: bool) -> None:
    sizes = {**SIZES, "num_local_experts": 4, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    config = AutoConfig.for_model("gpt_oss", **sizes, num_key_value_heads=1, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    stored = dict(expected)
    for name in [name for name in stored if name.endswith(("up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        packed = packed_stack(experts, columns, rows)
        stored |= zip((f"{name}_blocks", f"{name}_scales"), packed, strict=True)
        expected[name] = convert_moe_packed_tensors(*packed)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": {"quant_method": "mxfp4"}}))
    for held in run_ranks(2, held_by, tmp_path, megatron, 1):
        assert held.keys() == expected.keys()
        assert all(torch.equal(tensor.float(), expected[name].float()) for name, tensor in held.items())
