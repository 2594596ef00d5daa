"""The main job with real vLLM rollouts: weights reach the engine after every step, and answers are of those weights."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlsys.config import load_config
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.vllm.engine import VLLMRollout
from rlsys.types import Finish, ModelRequest, SamplingParams
from rlsys.utils.errors import RolloutError
from tests.e2e.conftest import Toy, with_model
from tests.ranks import run_ranks
from tests.vllm_runner import SWITCHES, interpret_kernels
from trainer.main_ppo import main
from workers.build import EngineRun
from workers.rollout import VLLMRolloutWorker

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def wide(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The toy with heads of 32, the smallest that vLLM's CPU attention has."""
    return with_model(
        toy,
        tmp_path_factory.mktemp("wide"),
        Qwen2Config,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def run(toy: Toy, out: Path, *more: str) -> list[dict[str, Any]]:
    argv = toy.overrides(
        out,
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.validate_weight=true",
        f"reward.custom_reward_function.path={toy.grader}",
        "trainer.device=cpu",
        *more,
    )
    assert main(argv) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, Any]]) -> None:
    """Weights moved at every step, and the engine's log-probs stayed those of the trainer."""
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert [line["weights/version"] for line in lines] == [1, 2, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in lines), "the rollouts have other weights"


def test_fsdp_trains_beside_vllm_in_one_process_and_again_after_that(wide: Toy, tmp_path: Path) -> None:
    for number in range(2):
        check(run(wide, tmp_path / str(number), "trainer.backend=local"))


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_two_fsdp_ranks_train_beside_one_vllm_that_they_serve_together(cut: str, wide: Toy, tmp_path: Path) -> None:
    sizes = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.{cut}_model_parallel_size=2", "ray_kwargs.ray_init.num_cpus=2")
    check(run(wide, tmp_path, "trainer.backend=ray", *sizes))


def cache_blocks(folder: Path) -> tuple[int, int]:
    """The layers of this rank's stage of two, and the blocks of its cache."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid()), "LOCAL_RANK": "0"}
    sizes = {"enforce_eager": True, "max_model_len": 64, "pipeline_model_parallel_size": 2}
    engine = VLLMRollout(folder, GenerationConfig(**sizes), EngineContext())
    names = {name.split(".")[2] for name, _ in engine._model().named_parameters() if ".layers." in name}
    blocks = engine.engine.vllm_config.cache_config.num_gpu_blocks
    engine.close()
    return len(names), blocks


@pytest.mark.slow
def test_stages_of_unlike_size_have_caches_of_as_many_blocks(wide: Toy, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    config = AutoConfig.from_pretrained(wide.model, **layers)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (first, blocks), (last, others) = run_ranks(2, cache_blocks, tmp_path)
    assert {first, last} == {1, 2}
    assert blocks == others > 0


def test_megatron_tp2_trains_and_vllm_serves_in_processes_of_their_own(wide: Toy, tmp_path: Path) -> None:
    sizes = (
        "trainer.n_gpus_per_node=2",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        "trainer.rollout_workers=1",
        "ray_kwargs.ray_init.num_cpus=3",
    )
    check(run(wide, tmp_path, "--config-name=ppo_megatron_trainer", "trainer.backend=ray", *sizes))


def test_settings_reach_vllms_real_arguments(wide: Toy, tmp_path: Path) -> None:
    settings = (
        *("max_num_seqs=7", "max_num_batched_tokens=96", "max_model_len=64", "seed=5", "dtype=float32", "name=vllm"),
        *("enable_prefix_caching=false", "enforce_eager=true", "disable_log_stats=false", "tensor_parallel_size=1"),
        *("cudagraph_capture_sizes=[4,2]", "cuda_graph_max_bs=4", "vllm.max_logprobs=3"),
    )
    argv = wide.overrides(tmp_path, *(f"{ROLLOUT}.{setting}" for setting in settings), "trainer.device=cpu")
    cfg = load_config(argv).actor_rollout_ref
    worker = VLLMRolloutWorker(cfg.model, cfg.rollout, EngineRun(device="cpu", nccl_timeout_s=60.0), "auto")
    engine: Any = worker.build_engine(str(wide.model), EngineContext())
    try:
        vllm_config = engine.engine.vllm_config
        assert (vllm_config.scheduler_config.max_num_seqs, vllm_config.scheduler_config.max_num_batched_tokens) == (
            7,
            96,
        )
        model = vllm_config.model_config
        assert (model.max_model_len, model.seed, model.enforce_eager, model.max_logprobs) == (64, 5, True, 3)
        assert vllm_config.cache_config.enable_prefix_caching is False
        assert engine.engine.log_stats is True
        assert vllm_config.parallel_config.tensor_parallel_size == 1
        assert vllm_config.compilation_config.max_cudagraph_capture_size == 4
    finally:
        engine.close()


def test_the_engine_of_an_fp8_checkpoint_waits_for_bfloat16(wide: Toy, tmp_path: Path) -> None:
    copytree(wide.model, tmp_path / "fp8")
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({**written, "quantization_config": quantised}))
    rollout = GenerationConfig(enforce_eager=True, max_model_len=64, dtype="float32")
    engine: Any = VLLMRollout(tmp_path / "fp8", rollout, EngineContext(load_format="dummy"))
    try:
        assert engine.engine.vllm_config.model_config.quantization is None
        assert {parameter.dtype for parameter in engine._model().parameters()} == {torch.float32}
    finally:
        engine.close()


Answer = tuple[tuple[int, ...], tuple[float, ...], Finish | None]


def answers_by_steps(path: Path, counts: tuple[int, ...]) -> list[dict[str, Answer]]:
    """What an engine answers with so many steps a schedule, while its weights are updated again and again."""
    interpret_kernels()
    answers = []
    for steps in counts:
        config = GenerationConfig(
            enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=64, num_scheduler_steps=steps
        )
        engine, drawn = VLLMRollout(path, config, EngineContext()), dict[str, Answer]()
        new = [request_of(row) for row in range(20)]
        while len(drawn) < 20 or not all(reason for *_, reason in drawn.values()):
            for delta in engine.exchange(new, wait_s=0.1):
                tokens, logprobs, _ = drawn.get(delta.rid, ((), (), None))
                drawn[delta.rid] = tokens + delta.tokens, logprobs + delta.logprobs, delta.finish
            new = []
            engine.begin_update()
            engine.finish_update(0)
        engine.close()
        answers.append(drawn)
    return answers


def request_of(row: int) -> ModelRequest:
    params = SamplingParams(1 + 7 * row % 31, seed=row, ignore_eos=row % 2 > 0, stop_token_ids=(7, 8, 9))
    return ModelRequest(tuple(range(3, 4 + 5 * row % 37)), params, rid=str(row))


@pytest.fixture
def runner_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPoolExecutor]:
    """A process in which `interpret_kernels` works."""
    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def test_several_steps_a_schedule_draw_the_same_tokens(wide: Toy, runner_2: ProcessPoolExecutor) -> None:
    first, *others = runner_2.submit(answers_by_steps, wide.model, (1, 3, 8)).result(300)
    assert {why for *_, why in first.values()} == {Finish.STOP, Finish.LENGTH}
    assert others == [first, first]


def failure_of_a_step(path: Path) -> str:
    """What an engine says whose runner fails in the third step, the second one of a schedule."""
    interpret_kernels()
    engine: Any = VLLMRollout(path, GenerationConfig(enforce_eager=True, max_model_len=64), EngineContext())
    steps = engine.engine.model_executor.driver_worker.worker.model_runner.execute_model.__self__
    whole, broken = [steps._execute] * 2, Mock(side_effect=RuntimeError("out of tape"))
    steps._execute = lambda *given: (whole.pop() if whole else broken)(*given)
    with pytest.raises(RolloutError) as failure:
        engine.generate([request_of(2)])
    assert broken.called
    return str(failure.value)


def test_a_step_that_fails_says_why(wide: Toy, runner_2: ProcessPoolExecutor) -> None:
    assert "out of tape" in runner_2.submit(failure_of_a_step, wide.model).result(300)


def routes_of(path: Path, config: GenerationConfig) -> list[tuple[tuple[int, ...], np.ndarray]]:
    interpret_kernels()
    engine = VLLMRollout(path, config, EngineContext())
    answers = engine.generate([request_of(row) for row in range(20)])
    engine.close()
    return [(answer.output_tokens, answer.routed_experts) for answer in answers]


def test_runner_2_returns_the_routes_of_the_model(tmp_path: Path, runner_2: ProcessPoolExecutor) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"num_hidden_layers": 2, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, max_position_embeddings=64, **sizes)).eval()
    model.save_pretrained(tmp_path)
    config = GenerationConfig(
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=64,
        dtype="float32",
        enable_rollout_routing_replay=True,
    )
    returned = runner_2.submit(routes_of, tmp_path, config).result(300)
    reference = HFRollout(model, config, EngineContext())
    expected = reference.generate([request_of(row) for row in range(20)])
    for answer, (tokens, routes) in zip(expected, returned, strict=True):
        assert answer.output_tokens == tokens
        np.testing.assert_array_equal(np.sort(np.asarray(answer.routed_experts)), np.sort(routes))
    reference.close()
