"""FP8 weights in vLLM and SGLang on GPUs: the bits of vLLM's quantiser, pushes in place, whole runs on one and two."""

import json
import os
import random
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rlsys.config.schema.rollout import EngineKwargsConfig, GenerationConfig
from rlsys.models.quantized import FP8, SCALE, scale_shape
from rlsys.rollout.base import EngineContext
from rlsys.rollout.vllm.engine_args import float8_switches
from rlsys.types import Box, WeightLayout
from rlsys.weights.endpoints import WeightReceiver, WeightSender
from rlsys.weights.fp8 import MatrixBox, prepared_quantiser
from rlsys.weights.sharding_manager import ShardingManager
from tests.e2e.conftest import GPU_CACHE_BYTES, GPU_MEMORY, UNCOMPILED, Toy, toy, with_model  # noqa: F401
from tests.fp8_models import EXPERTS, LATENT, MATRICES
from tests.gpu.test_vllm_cuda import BACKEND, Trainer, apart, requests_of
from tests.ranks import run_ranks
from tests.unit.weights.test_executors import ThreadGroup
from trainer.main_ppo import main

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
LAYERS = 4
DENSE = {"num_hidden_layers": LAYERS, "tie_word_embeddings": True}
SIZES: dict[int | str, dict[str, Any]] = {
    128: {**DENSE, "hidden_size": 512, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 2},
    64: {**DENSE, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "experts": EXPERTS,
    "latent": LATENT,
}
"""Models by the blocks that they need, or with experts; the second is of SmolLM2-135M's widths."""
KINDS: dict[int | str, type[PretrainedConfig]] = {"experts": Qwen3MoeConfig, "latent": DeepseekV3Config}
BLOCKS = pytest.mark.parametrize("block", [128, 64])
ATTENTION = {"vllm": "TRITON_MLA", "sglang": "triton"}


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def quantised(parts: list[tuple[Tensor, Box]], shape: tuple[int, ...], block: int) -> tuple[list[Tensor], Tensor]:
    """The elements of the parts of a matrix, and its scales."""
    scales = torch.empty(scale_shape(shape, block), device="cuda")
    elements = [torch.empty(values.shape, dtype=FP8, device="cuda") for values, _ in parts]
    boxes = [MatrixBox(values, box, shape, scales, own) for (values, box), own in zip(parts, elements, strict=True)]
    prepared_quantiser(boxes, scales)(False)
    return elements, scales


@NEEDS_VLLM
@BLOCKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_quantises_as_vllm_does(dtype: torch.dtype, block: int) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    draw, unequal = random.Random(3), 0
    for number in range(24):
        unit = draw.choice([1, 16, 128])
        shape = unit * draw.randint(1, 700 // unit), unit * draw.randint(1, 700 // unit)
        matrix = torch.randn(shape, device="cuda") * 10.0 ** draw.randint(-6, 4)
        matrix[draw.randrange(shape[0]) :: 3] = draw.choice([0.0, -0.0, 1e-40, 1e30])
        matrix = matrix.to(dtype)
        elements, scales = per_block_cast_to_fp8(matrix.to(torch.bfloat16), [block, block])
        (own,), own_scales = quantised([(matrix, Box("w", (0, 0), shape))], shape, block)
        unequal += int((own.view(torch.uint8) != elements.view(torch.uint8)).sum())
        unequal += int((own_scales != scales).sum())
        row, column = (unit * draw.randint(0, size // unit) for size in shape)
        rows, columns = ((0, row), (row, shape[0])), ((0, column), (column, shape[1]))
        places = [(a, c, matrix[a:b, c:d]) for a, b in rows for c, d in columns if a < b and c < d]
        split, split_scales = quantised([(m, Box("w", (a, c), tuple(m.shape))) for a, c, m in places], shape, block)
        for (a, c, part), parts_own in zip(places, split, strict=True):
            wanted = own[a : a + part.shape[0], c : c + part.shape[1]]
            assert bits_of(parts_own) == bits_of(wanted), number
        assert torch.equal(split_scales, own_scales)
    assert not unequal


def model_of(seed: int, kind: int | str) -> Any:
    """Weights far from those of another seed."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": 500, "max_position_embeddings": 512, "eos_token_id": 2}
    config = KINDS.get(kind, Qwen2Config)(**common, **SIZES[kind])
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def save_in_blocks(seed: int, kind: int | str, path: Path) -> None:
    """An FP8 checkpoint in the published form, its matrices quantised by vLLM's own function."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    model, block = model_of(seed, kind), kind if isinstance(kind, int) else 128
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("proj.weight", "proj_with_mqa.weight"))]:
        elements, scales = per_block_cast_to_fp8(tensors[name].cuda(), [block, block])
        tensors |= {name: elements.cpu(), name + SCALE: scales.cpu()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(written["num_hidden_layers"])]
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    blocks |= {"modules_to_not_convert": routers}
    (path / "config.json").write_text(json.dumps({**written, "quantization_config": blocks}))


def engine_of(path: Path, quantization: str | None, load_format: Any) -> Any:
    """An engine in one process, whose kernels leave FP8 as it is loaded."""
    from rlsys.rollout.vllm.engine import VLLMRollout
    from workers.colocated import learn_engine_layout

    kwargs: dict[str, Any] = {"kv_cache_memory_bytes": GPU_CACHE_BYTES, "moe_backend": "triton"}
    if "kv_lora_rank" in (path / "config.json").read_text():
        kwargs["attention_backend"] = ATTENTION["vllm"]
    config = GenerationConfig(
        seed=3,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        max_num_seqs=16,
        quantization=quantization,  # type: ignore[arg-type]
        engine_kwargs=EngineKwargsConfig(vllm=kwargs),
    )
    engine = VLLMRollout(path, config, EngineContext("cuda", load_format=load_format))
    if load_format == "dummy":
        learn_engine_layout(engine.weights, keep=False)  # type: ignore[arg-type]
    return engine


def held_by(engine: Any) -> dict[str, bytes]:
    return {name: bits_of(tensor) for name, tensor in engine.weights.parameters().items()}


def pushed(path: Path, quantization: str | None, kind: int | str) -> list[dict[str, Any]]:
    """What an engine holds after each of two updates, how far its answers are from the model's, and the seconds."""
    engine, results = engine_of(path, quantization, "dummy"), []
    trainer = Trainer(model_of(1, kind).cuda())
    ends = ThreadGroup([WeightSender(trainer)]), ThreadGroup([WeightReceiver(engine)])  # type: ignore[arg-type]
    manager = ShardingManager(*ends, executor="ipc", deadline_s=120.0)
    manager.connect()
    for seed in (1, 2):
        model = model_of(seed, kind).cuda()
        trainer.rollout.model.load_state_dict(model.state_dict())
        seconds = [manager.push(seed).seconds for _ in range(3)]
        result = {"apart": apart(model, engine.generate(requests_of(8))), "held": held_by(engine)}
        result |= {"equal": len(manager.validate()), "seconds": min(seconds)}
        results.append(result | {"layout": engine.weight_layout(), "sent": manager.push(seed).num_bytes})
    manager.close()
    engine.close()
    return results


def loaded_by_vllm(path: Path, quantization: str | None) -> dict[str, bytes]:
    os.environ |= float8_switches()
    engine = engine_of(path, quantization, "auto")
    held = held_by(engine)
    engine.close()
    return held


@NEEDS_VLLM
@BLOCKS
def test_pushes_bring_the_bits_that_vllm_makes_of_a_checkpoint(block: int, tmp_path: Path) -> None:
    for seed in (1, 2):
        model_of(seed, block).save_pretrained(tmp_path / str(seed))
        save_in_blocks(seed, block, tmp_path / f"{seed} in FP8")
    fp8, plain = (run_ranks(1, pushed, tmp_path / "1", kind, block, backend=BACKEND)[0] for kind in ("fp8", None))
    for seed, result in enumerate(fp8, start=1):
        wanted = run_ranks(1, loaded_by_vllm, tmp_path / f"{seed} in FP8", None, backend=BACKEND)[0]
        assert_same(result["held"], wanted)
        if block == 128:
            assert_same(result["held"], run_ranks(1, loaded_by_vllm, tmp_path / str(seed), "fp8", backend=BACKEND)[0])
        assert_whole(result["layout"], block)
        print(f"update {seed}: log-probs {result['apart']:.4f} apart, in bfloat16 {plain[seed - 1]['apart']:.4f}")
        assert result["apart"] < 0.1
    for kind, result in (("fp8", fp8[1]), ("bfloat16", plain[1])):
        print(f"push in {kind}, blocks of {block}, {result['sent'] / 1e6:.1f} MB: {1e3 * result['seconds']:.2f} ms")


@NEEDS_VLLM
@pytest.mark.parametrize("kind", ["experts", "latent"])
def test_pushes_of_experts_bring_the_bits_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """The second of two updates against what vLLM holds of a published checkpoint, and what it makes of bfloat16."""
    model_of(2, kind).save_pretrained(tmp_path / "plain")
    save_in_blocks(2, kind, tmp_path / "fp8")
    result = run_ranks(1, pushed, tmp_path / "plain", "fp8", kind, backend=BACKEND)[0][1]
    assert_whole(result["layout"], kind)
    print(f"{kind}: log-probs {result['apart']:.4f} apart")
    assert result["apart"] < 0.1
    held = result["held"]
    assert_same(held, run_ranks(1, loaded_by_vllm, tmp_path / "fp8", None, backend=BACKEND)[0])
    made = run_ranks(1, loaded_by_vllm, tmp_path / "plain", "fp8", backend=BACKEND)[0]
    derived = [name for name in made if name.endswith(("W_UV", "W_UK_T"))]
    for name in derived:  # where vLLM quantises, it derives them by a product in FP8, which rounds once more
        ours, theirs = (torch.frombuffer(bytearray(one[name]), dtype=torch.bfloat16).float() for one in (held, made))
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-6)
    assert len(derived) == (4 if kind == "latent" else 0)
    assert_same({**held, **{name: made[name] for name in derived}}, made)


def assert_whole(layout: WeightLayout, kind: int | str) -> None:
    """All linear layers but routers are in FP8, and none is left to the engine's loader."""
    assert layout.loader == ()
    assert sum(dtype == "float8_e4m3fn" for dtype in layout.dtypes.values()) == MATRICES.get(str(kind), 7 * LAYERS)


def assert_same(held: Mapping[str, bytes], wanted: Mapping[str, bytes]) -> None:
    assert held.keys() == wanted.keys()
    assert not [name for name in wanted if held[name] != wanted[name]]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("gpus", "kind"), [(1, 64), (1, 128), (2, 128), (1, "experts"), (1, "latent"), (2, "copies")])
def test_a_run_serves_fp8(engine: str, gpus: int, kind: int | str, toy: Toy, tmp_path: Path) -> None:  # noqa: F811
    """Of copies each of two ranks has the attention whole and half of the experts."""
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    classes = {128: Qwen2Config, 64: LlamaConfig, **KINDS}
    copies, kind = (gpus, "experts") if kind == "copies" else (1, kind)
    model = with_model(toy, tmp_path / "model", classes[kind], **SIZES[kind])
    rollout = "actor_rollout_ref.rollout"
    argv = model.overrides(
        tmp_path / "out",
        *(f"{rollout}.name={engine}", f"{rollout}.quantization=fp8", *GPU_MEMORY[engine]),
        *(f"{rollout}.enforce_eager={kind != 64}", f"{rollout}.checkpoint_engine.backend=ipc"),
        *(f"actor_rollout_ref.actor.strategy={'megatron' if kind == 'latent' else 'fsdp'}",),
        *([f"+{rollout}.engine_kwargs.{engine}.attention_backend={ATTENTION[engine]}"] if kind == "latent" else []),
        *(f"trainer.n_gpus_per_node={gpus}", *([UNCOMPILED] if kind != 64 else [])),
        *(f"{rollout}.{sizes}_parallel_size={copies}" for sizes in ("data", "expert")),
        *(f"{rollout}.validate_weight=true", f"{rollout}.parity.freq=1", f"{rollout}.parity.policy=stop"),
        f"reward.custom_reward_function.path={model.grader}",
    )
    assert main(argv) == 0
