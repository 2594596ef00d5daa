"""FP8 weights by the engines' own loaders, on a CPU: parameters stay loadable, and take what trainers quantise."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from rlsys.config.engines import float8_block
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.models.hf import saved_config
from rlsys.models.quantized import SCALE
from rlsys.rollout.base import EngineContext
from rlsys.rollout.engine_weights import EngineWeights
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.hf_files import hf_tensors
from rlsys.weights.fp8 import Fp8Weights, float8_shapes
from rlsys.weights.layout import shard_view, view_of
from rlsys.weights.plan import make_plan
from tests.e2e.conftest import Toy, with_model
from tests.fp8_models import EXPERTS, LATENT, MATRICES
from tests.ranks import run_ranks
from workers.colocated import learn_engine_layout

DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
"""What SGLang's latent attention for CPUs needs."""
CASES = [
    pytest.param(Qwen2Config, DENSE, 128, 14, id="dense"),
    pytest.param(Qwen3MoeConfig, EXPERTS, 128, MATRICES["experts"], id="experts"),
    pytest.param(DeepseekV3Config, LATENT | {"rope_parameters": YARN}, 128, MATRICES["latent"], id="latent attention"),
    pytest.param(LlamaConfig, DENSE | SMOLLM2, 64, 14, id="blocks of 64"),
    pytest.param(
        Qwen3MoeConfig, EXPERTS | {"moe_intermediate_size": 192}, 64, MATRICES["experts"], id="experts in blocks of 64"
    ),
]
ENGINES = [
    pytest.param(name, marks=[mark, pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")])
    for name, mark in (("vllm", pytest.mark.vllm), ("sglang", pytest.mark.sglang))
]


def take_any_kernel() -> None:
    """Have vLLM build FP8 layers on a CPU for which it has no kernels, and forget loaders as its kernels do."""
    import vllm.model_executor.layers.quantization.fp8 as layers
    from vllm.model_executor.utils import replace_parameter

    def process(self: Any, layer: Any) -> None:
        for name in [name for name, _ in layer.named_parameters(recurse=False) if "weight" in name]:
            replace_parameter(layer, name, getattr(layer, name).data)

    layers.init_fp8_linear_kernel = lambda **_: None
    layers.select_fp8_moe_backend = lambda **_: (None, None)
    layers.Fp8LinearMethod.process_weights_after_loading = process
    layers.Fp8MoEMethod.process_weights_after_loading = process


def loaded_by_vllm(path: Path) -> set[str]:
    """The matrices that vLLM has in blocks of FP8."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    from rlsys.rollout.vllm.engine_args import float8_arguments
    from rlsys.rollout.vllm.packed_weights import keep_loadable

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    take_any_kernel()
    text = saved_config(path).to_dict()
    arguments = float8_arguments(text, GenerationConfig(), is_pushed=True) | {"moe_backend": "auto"}
    engine_args = EngineArgs(
        str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32, enforce_eager=True, **arguments
    )
    config = engine_args.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1)
        model = initialize_model(config)
        for layer in model.modules():
            if type(method := getattr(layer, "quant_method", None)).__name__.startswith("Fp8"):
                method.process_weights_after_loading(layer)
        keep_loadable(model)
        return written_as_loaded(model, path)


def loaded_by_sglang(path: Path) -> set[str]:
    """The same of SGLang, without the packing for a CPU's kernels."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from rlsys.rollout.sglang.arguments import SINGLE_RANK, server_arguments
    from rlsys.rollout.sglang.scheduler_hooks import derive_again, name_scales

    fp8.Fp8LinearMethod.process_weights_after_loading = lambda self, layer: None
    fp8.Fp8MoEMethod.process_weights_after_loading = lambda self, layer: None
    on_gpu, on_cpu = (
        server_arguments(path, config, EngineContext(device, "dummy"), max_model_len=32, replica=SINGLE_RANK)
        for device, config in (("cuda", GenerationConfig(quantization="fp8")), ("cpu", GenerationConfig()))
    )
    changed = {name: value for name, value in on_gpu.items() if name.endswith(("backend", "override_args"))}
    args = ServerArgs(**on_cpu | {"dtype": "bfloat16"} | {n: v for n, v in changed.items() if n not in on_cpu})
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=PortArgs.init_new(args).nccl_port)
    bootstrap.init_layer_runtime(model_config=config)
    model = get_model(
        model_config=config, load_config=LoadConfig(load_format="dummy"), device_config=DeviceConfig("cpu")
    )
    attention = [layer for layer in model.modules() if getattr(layer, "k_scale_float", None) is not None]
    for layer in attention:
        for scale in (layer.k_scale, layer.v_scale):
            scale.zero_()  # as sleep drops it
    derive_again(model)
    scales = {float(scale) for layer in attention for scale in (layer.k_scale, layer.v_scale)}
    assert scales <= {1.0}, "the cache is not scaled"
    name_scales(model)
    return written_as_loaded(model, path)


def written_as_loaded(model: Any, path: Path) -> set[str]:
    """The matrices in FP8; a plan must write what the engine's loader makes of the same elements and scales."""
    tensors, aliases = hf_tensors(path, dtype="bfloat16")
    weights = EngineWeights(tensors, aliases, lambda: model, lambda: None)
    learn_engine_layout(weights, keep=False)
    layout = weights.layout(rank=0, host="")
    trainer = Fp8Weights(HFRollout.from_path(path), float8_shapes([layout]))  # type: ignore[arg-type]
    given, held = trainer.local_tensors(), weights.tensors()
    for copy in make_plan([trainer.weight_layout()], [layout]).copies:
        source = view_of(given[copy.source_local], copy.source_start, copy.shape)
        view_of(held[copy.local], copy.local_start, copy.shape).copy_(source)
    written = {name: tensor.clone() for name, tensor in weights.parameters().items()}
    by_name = {shard.box.tensor: shard_view(given, shard) for shard in trainer.weight_layout().shards}
    weights.load([(name, by_name[name]) for name in layout.full_shapes])
    assert not layout.loader
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.parameters().items())
    return {name for name in float8_shapes([layout]) if not name.endswith(SCALE)}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "sizes", "block", "num_matrices"), CASES)
def test_engines_load_what_is_quantised(
    kind: type[PretrainedConfig],
    sizes: dict[str, Any],
    block: int,
    num_matrices: int,
    engine: str,
    toy: Toy,
    tmp_path: Path,
) -> None:
    path = with_model(toy, tmp_path, kind, **sizes).model
    assert float8_block(saved_config(path).to_dict(), GenerationConfig()) == block
    matrices = run_ranks(1, loaded_by_vllm if engine == "vllm" else loaded_by_sglang, path)[0]
    assert len(matrices) == num_matrices
    assert all(name.endswith(("proj.weight", "proj_with_mqa.weight")) for name in matrices)
