"""HFRollout on CUDA: the same answers as on CPU, memory that is given back, weights that arrive."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.protocol import DataProto
from rlsys.rollout.base import EngineContext
from rlsys.rollout.batch import from_responses
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import Box, ModelRequest, SamplingParams, Shard, WeightLayout
from rlsys.utils.errors import RolloutError, WeightTransferError
from rlsys.weights.endpoints import WeightEndpoint, WeightReceiver, WeightSender
from rlsys.weights.sharding_manager import ShardingManager
from rlsys.weights.verify import layout_checksums
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
BACKEND = "cpu:gloo,cuda:nccl"


def model_of(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config)


def requests_of(num: int) -> list[ModelRequest]:
    """Short and long prompts, plain, truncated and greedy sampling."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 40, "temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0.0}]
    return [
        ModelRequest(
            tuple(3 + (7 * i + j) % 900 for j in range(1 + 5 * (i % 9))), SamplingParams(40, seed=i, **kinds[i % 4])
        )
        for i in range(num)
    ]


def same_answers() -> tuple[float, float, float]:
    """The share of equal completions, and the largest differences of sampled and of scored log-probabilities."""
    cpu = HFRollout(model_of(), GenerationConfig(seed=5)).generate(requests_of(40))
    engine = HFRollout(model_of().cuda(), GenerationConfig(seed=5, max_num_seqs=16, max_num_batched_tokens=64))
    cuda = engine.generate(requests_of(40))
    same = [a.output_tokens == b.output_tokens for a, b in zip(cpu, cuda, strict=True)]
    apart = [
        abs(x - y)
        for a, b, equal in zip(cpu, cuda, same, strict=True)
        if equal
        for x, y in zip(a.output_logprobs + a.sampled_logprobs, b.output_logprobs + b.sampled_logprobs, strict=True)
    ]
    plain = [answer for i, answer in enumerate(cuda) if i % 4 in (0, 2)]
    rows = from_responses(_prompts(plain), plain)
    scores = engine.compute_log_prob(rows)
    return sum(same) / len(same), max(apart), float((scores - rows.batch["rollout_log_probs"]).abs().max())


def _prompts(answers: list[Any]) -> DataProto:
    width = max(len(answer.input_tokens) for answer in answers)
    pads = [width - len(answer.input_tokens) for answer in answers]
    prompts = torch.tensor([(0,) * pad + answer.input_tokens for pad, answer in zip(pads, answers, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
    meta = {"response_length": 40, "pad_token_id": 0}
    return DataProto.from_dict({"prompts": prompts, "attention_mask": mask}, meta_info=meta)


def test_cuda_answers_as_the_cpu_does() -> None:
    ((same, apart, scored),) = run_ranks(1, same_answers, backend=BACKEND)
    assert same > 0.9
    assert apart < 1e-3
    assert scored < 1e-3


def sleep_and_wake() -> tuple[int, int, bool]:
    HFRollout(model_of().cuda()).generate(requests_of(4))
    gc.collect()
    libraries = torch.cuda.memory_allocated()
    engine = HFRollout(model_of().cuda())
    before = engine.generate(requests_of(4))
    held = torch.cuda.memory_allocated() - libraries
    engine.sleep(["weights", "kv_cache"])
    asleep = torch.cuda.memory_allocated() - libraries
    for refused in (lambda: engine.generate(requests_of(1)), engine.local_tensors):
        with pytest.raises((RolloutError, WeightTransferError), match="sleep"):
            refused()
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    after = engine.generate(requests_of(4))
    return held, asleep, [a.output_tokens for a in before] == [a.output_tokens for a in after]


def test_sleep_gives_the_memory_back() -> None:
    ((held, asleep, same),) = run_ranks(1, sleep_and_wake, backend=BACKEND)
    assert asleep < 0.1 * held
    assert same


class Trainer:
    """Float32 parameters on the device, as one trainer rank holds them."""

    def __init__(self, host: str) -> None:
        self.tensors = {name: p.detach().cuda() for name, p in model_of(1).named_parameters()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        shards = tuple(Shard(Box(n, (0,) * len(s), s), n, (0,) * len(s)) for n, s in shapes.items())
        self.layout = WeightLayout(0, host, shards, shapes, dict.fromkeys(shapes, "float32"))

    def weight_layout(self) -> WeightLayout:
        return self.layout

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors


class InlineGroup:
    """One rank in this process, called as a WorkerGroup is."""

    world_size = 1

    def __init__(self, endpoint: WeightEndpoint) -> None:
        self.endpoint = endpoint

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Any:
        result = getattr(self.endpoint, method)(*args)
        return SimpleNamespace(get=lambda deadline_s=None: result)

    def execute_all_async(self, method: str, *args: Any) -> list[Any]:
        return [self.execute_rank_async(0, method, *args)]


def push() -> bool:
    rollout = HFRollout(model_of(2).cuda().bfloat16(), context=EngineContext(load_format="dummy"))
    trainer: Any = Trainer(rollout.host)
    source, destination = InlineGroup(WeightSender(trainer)), InlineGroup(WeightReceiver(rollout))
    manager = ShardingManager(source, destination, executor="shm")
    manager.connect()
    manager.push(1)
    assert all(check.equal for check in manager.validate())
    on_cpu = {name: tensor.cpu() for name, tensor in trainer.tensors.items()}
    bf16 = dict.fromkeys(on_cpu, "bfloat16")
    checksums = [
        layout_checksums(trainer.layout, trainer.tensors, bf16),
        layout_checksums(trainer.layout, on_cpu, bf16),
        layout_checksums(rollout.weight_layout(), rollout.local_tensors()),
    ]
    return checksums[0] == checksums[1] == checksums[2] and rollout.health()["version"] == 1


def test_weights_reach_an_engine_on_the_device() -> None:
    assert run_ranks(1, push, backend=BACKEND) == [True]
