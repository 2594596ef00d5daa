"""vLLM on a GPU: log-probs as transformers gives them, weights in place by the learned layout, sleep and wake."""

import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlsys.config.schema.rollout import EngineKwargsConfig, GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.telemetry.memory import snapshot
from rlsys.types import ModelRequest, ModelResponse, SamplingParams, TransferReport
from rlsys.weights.executors.in_process import LocalReshard
from tests.e2e.conftest import GPU_CACHE_BYTES, Toy, toy, two_stages  # noqa: F401
from tests.ranks import run_ranks
from trainer.main_ppo import main

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")]
BACKEND = "cpu:gloo,cuda:nccl"


def model_of(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=500, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, **sizes)
    config.tie_word_embeddings = True
    return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def requests_of(num: int) -> list[ModelRequest]:
    params = SamplingParams(24, temperature=0.8, ignore_eos=True)
    return [ModelRequest((5, 6, 7 + i), params, rid=str(i)) for i in range(num)]


def apart(model: Any, answers: list[ModelResponse]) -> float:
    """Mean difference of the answers' log-probs to the model's."""
    differences = []
    for answer in answers:
        ids = torch.tensor([answer.input_tokens + answer.output_tokens], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(answer.input_tokens) - 1 : -1].float()
        expected = torch.log_softmax(logits / 0.8, -1).cpu()
        chosen = expected.gather(1, torch.tensor(answer.output_tokens)[:, None])[:, 0]
        differences.append((chosen - torch.tensor(answer.output_logprobs)).abs().mean().item())
    return sum(differences) / len(differences)


class Trainer:
    """A whole model on the device, as one trainer rank holds it."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.rollout = HFRollout(model)

    def weight_layout(self) -> Any:
        return self.rollout.weight_layout()

    def local_tensors(self) -> Any:
        return self.rollout.local_tensors()


def serve(path: Path, first_one: bool, runner: str) -> dict[str, Any]:
    """The life of an engine; the first one begins steps ahead and keeps its weights while it sleeps."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner
    from rlsys.rollout.vllm.engine import VLLMRollout
    from workers.colocated import learn_engine_layout

    first, second, offload_on_sleep = model_of(0).cuda(), model_of(1).cuda(), first_one
    kwargs = EngineKwargsConfig(vllm={"async_scheduling": first_one, "kv_cache_memory_bytes": 8 * GPU_CACHE_BYTES})
    config = GenerationConfig(
        seed=3, enforce_eager=True, gpu_memory_utilization=0.1, max_num_seqs=16, engine_kwargs=kwargs
    )
    engine = VLLMRollout(path, config, EngineContext("cuda", offload_on_sleep=offload_on_sleep))
    result: dict[str, Any] = {"before": apart(first, engine.generate(requests_of(8))), "drawn": drawn(engine)}
    learn_engine_layout(engine.weights, keep=True)  # type: ignore[arg-type]
    result["kept"] = apart(first, engine.generate(requests_of(8)))
    report: TransferReport | Any = LocalReshard(Trainer(second), engine).push(7)  # type: ignore[arg-type]
    answers = engine.generate(requests_of(8))
    result["pushed"], result["bytes"] = apart(second, answers), report.num_bytes
    result["loader"] = engine.weight_layout().loader
    free_before, before = torch.cuda.mem_get_info()[0], snapshot()
    free = torch.accelerator.get_memory_info()
    with patch("torch.accelerator.get_memory_info", side_effect=[free, (0, free[1])]):  # another process takes it all
        engine.sleep(["weights", "kv_cache"])
    result["freed"] = torch.cuda.mem_get_info()[0] - free_before
    result["held"] = before.cuda_bytes - snapshot().cuda_bytes
    engine.wake(["weights"])
    result["quarantined"] = engine.health()["quarantined"]
    if not offload_on_sleep:
        LocalReshard(Trainer(second), engine).push(7)  # type: ignore[arg-type]
    engine.wake(["kv_cache"])
    result["same"] = [a.output_tokens for a in engine.generate(requests_of(8))] == [a.output_tokens for a in answers]
    result["version"] = answers[0].version
    engine.close()
    return result


def drawn(engine: Any) -> list[tuple[tuple[int, ...], str]]:
    """More answers than the engine draws together, of several lengths and ends."""
    stops = tuple(range(100, 160))
    requests = [
        ModelRequest(
            (5, 6, 7 + i % 5), SamplingParams(4 + i % 9, stop_token_ids=stops, ignore_eos=True, seed=i), rid=str(i)
        )
        for i in range(40)
    ]
    return [(answer.output_tokens, answer.stop_reason.value) for answer in engine.generate(requests)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What engines did, each in a process of its own, whose start takes most of the time: the third has runner 2."""
    path = tmp_path_factory.mktemp("model")
    model_of(0).save_pretrained(path)
    engines = ((True, "0"), (False, "0"), (True, "1"))
    return [run_ranks(1, serve, path, *engine, backend=BACKEND)[0] for engine in engines]


def test_steps_begun_ahead_change_no_token(served: list[dict[str, Any]]) -> None:
    ahead, plain, second = (result["drawn"] for result in served)
    for other in (plain, second):
        assert sum(a == b for a, b in zip(ahead, other, strict=True)) >= 38, "bf16 may round a draw apart, not more"
    assert {why for _, why in ahead} == {"stop", "length"}
    assert all(tokens[-1] in range(100, 160) for tokens, why in ahead if why == "stop")
    assert not any(token in range(100, 160) for tokens, _ in ahead for token in tokens[:-1])


@pytest.mark.parametrize("engine", [0, 1, 2])
def test_vllm_serves_what_is_pushed(served: list[dict[str, Any]], engine: int) -> None:
    result, offload_on_sleep = served[engine], engine != 1
    assert result["before"] < 0.03
    assert result["kept"] < 0.03
    assert result["pushed"] < 0.03
    assert result["loader"] == ()
    assert result["version"] == 7
    assert result["same"]
    assert result["quarantined"] is not offload_on_sleep


def test_sleep_gives_the_gpu_what_the_ledger_counts(served: list[dict[str, Any]]) -> None:
    """The GPU's free memory is that of all processes: the middle of three engines, since another test may allocate."""
    freed = sorted(result["freed"] for result in served)
    held = sorted(result["held"] / result["freed"] for result in served)
    assert freed[1] > 4 << 30
    assert held[1] == pytest.approx(1.0, rel=0.05)


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_run_serves_in_two_stages(enforce_eager: bool, toy: Toy, tmp_path: Path) -> None:  # noqa: F811
    argv = two_stages(toy, tmp_path, "vllm", enforce_eager=enforce_eager)
    assert main(argv) == 0
