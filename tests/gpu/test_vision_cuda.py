"""Vision-language models on a GPU: engines and FSDP give the log-probabilities of transformers' own forward pass."""

import importlib.util
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.config.schema.rollout import EngineKwargsConfig, GenerationConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.protocol import IMAGES, DataProto
from rlsys.rollout.base import EngineContext
from rlsys.rollout.batch import generate_sequences
from rlsys.rollout.hf.engine import HFRollout
from tests.e2e.conftest import GPU_CACHE_BYTES
from tests.ranks import Answers, run_cases, run_ranks
from tests.tiny_vision import MODELS, random_model, reference, vision_rows, wide

pytestmark = pytest.mark.gpu
BACKEND = "cpu:gloo,cuda:nccl"
META = {"response_length": 6, "pad_token_id": 0, "temperature": 1.0, "ignore_eos": True, "seed": 3}


def apart(scores: torch.Tensor, rows: DataProto, family: str, *, has_twin: bool) -> float:
    """Largest difference to the log-probs of a float32 forward pass on the CPU."""
    expected = reference(random_model(MODELS[family], has_twin=has_twin), rows)
    return float((scores.cpu().float() - expected).abs().max())


def drawn(family: str) -> float:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    engine = HFRollout(random_model(MODELS[family], has_twin=True).cuda(), GenerationConfig(max_num_seqs=3))
    rows = vision_rows(MODELS[family]).repeat(2)
    prompts = rows.select(["prompts", "attention_mask"], [IMAGES])
    prompts.meta_info = dict(META)
    answers = generate_sequences(engine, prompts)
    answers.non_tensor_batch[IMAGES] = rows.non_tensor_batch[IMAGES]
    return apart(answers.tensors["rollout_log_probs"], answers, family, has_twin=True)


@cache
def drawn_by_each() -> Answers:
    return run_cases(1, {family: partial(drawn, family) for family in MODELS}, backend=BACKEND)


@pytest.mark.parametrize("family", MODELS)
def test_drawn_tokens_have_the_log_probs_of_the_cpu(family: str) -> None:
    (difference,) = drawn_by_each()[family]
    assert difference < 1e-4


def scored(family: str, dtype: str) -> float:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = vision_rows(MODELS[family])
    model = ModelConfig(override_config=MODELS[family], enable_gradient_checkpointing=False, use_remove_padding=True)
    shard = ShardConfig(seed=1).model_copy(update={"dtype": dtype, "model_dtype": "float32"})
    engine = FSDPEngine(model, TrainEngineOptions(training=MicroBatches(rows=4), device="cuda:0"), shard=shard)
    return apart(engine.forward(rows, ("log_probs",))["log_probs"], rows, family, has_twin=False)


LIMITS = {"float32": 1e-4, "bfloat16": 0.05}


@cache
def scored_by_each() -> Answers:
    cases = {(family, dtype): partial(scored, family, dtype) for family in MODELS for dtype in LIMITS}
    return run_cases(1, cases, backend=BACKEND)


@pytest.mark.parametrize(("dtype", "limit"), list(LIMITS.items()))
@pytest.mark.parametrize("family", MODELS)
def test_packed_rows_on_cuda_have_the_log_probs_of_the_cpu(family: str, dtype: str, limit: float) -> None:
    (difference,) = scored_by_each()[family, dtype]
    assert difference < limit


def served(path: Path, family: str) -> list[float]:
    """Mean differences of drawn and of scored log-probs under the first weights, and after two pushes in place."""
    from rlsys.rollout.vllm.engine import VLLMRollout
    from rlsys.weights.executors.in_process import LocalReshard
    from workers.colocated import learn_engine_layout

    config = wide(MODELS[family], head_dim=64)
    kwargs = EngineKwargsConfig(vllm={"kv_cache_memory_bytes": GPU_CACHE_BYTES})
    settings = GenerationConfig(
        seed=3, enforce_eager=True, gpu_memory_utilization=0.1, max_num_seqs=16, engine_kwargs=kwargs
    )
    engine = VLLMRollout(path, settings, EngineContext("cuda"))
    learn_engine_layout(engine.weights, keep=True)  # type: ignore[arg-type]
    differences = []
    for version, seed in enumerate((1, 2, 3)):
        model = random_model(config, seed=seed, has_twin=True)
        if version:
            pushed = random_model(config, seed=seed, has_twin=True).to(torch.bfloat16).cuda()
            LocalReshard(HFRollout(pushed), engine).push(version)  # type: ignore[arg-type]
        rows = vision_rows(config).repeat(2)
        prompts = rows.select(["prompts", "attention_mask"], [IMAGES])
        prompts.meta_info = dict(META)
        answers = generate_sequences(engine, prompts)
        answers.non_tensor_batch[IMAGES] = rows.non_tensor_batch[IMAGES]
        drawn = answers.tensors["rollout_log_probs"] - reference(model, answers)
        scored = engine.compute_log_prob(rows) - reference(model, rows)
        differences += [float(difference.abs().mean()) for difference in (drawn, scored)]
    assert engine.weight_layout().loader == ()
    engine.close()
    return differences


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_vllm_reads_images_with_the_weights_that_are_pushed(family: str, tmp_path: Path) -> None:
    random_model(wide(MODELS[family], head_dim=64), has_twin=True).save_pretrained(tmp_path)
    (differences,) = run_ranks(1, served, tmp_path, family, backend=BACKEND)
    assert max(differences) < 0.03, differences
