"""HFRollout's own ways: admission, prefill in parts, shared prompts, a growing cache, architectures, loading."""

import random
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import ConfigError, RolloutError, WeightTransferError
from tests.timing import scaled_s

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "initializer_range": 0.3,
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](deepcopy(config)).eval()


def engine_of(**options: Any) -> HFRollout:
    return HFRollout(model_of(LlamaConfig(**SIZES)), GenerationConfig(**options))


def requests_of(num: int, *, longest: int = 40, max_new_tokens: int = 30, seed: int = 0) -> list[ModelRequest]:
    """Prompts and completions of all lengths; some end early by stop ids."""
    rng = random.Random(seed)
    return [
        ModelRequest(
            tuple(rng.randrange(3, 80) for _ in range(rng.randint(1, longest))),
            SamplingParams(
                rng.randint(1, max_new_tokens),
                temperature=rng.choice([0.0, 0.7, 1.0, 1.4]),
                top_k=rng.choice([-1, 30]),
                seed=i,
            ),
            rid=str(i),
        )
        for i in range(num)
    ]


def tokens_of(responses: list[ModelResponse]) -> list[tuple[int, ...]]:
    return [response.output_tokens for response in responses]


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(1, 8192), (3, 64), (7, 16), (256, 5), (16, 1)])
def test_limits_change_the_order_of_work_and_nothing_else(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    requests = requests_of(25)
    expected = tokens_of(engine_of().generate(requests))
    engine = engine_of(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    widest = [0, 0]

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        rows, columns = kwargs["input_ids"].shape
        widest[0] = max(widest[0], rows)
        widest[1] = max(widest[1], rows * columns if columns > 1 else 0)

    engine.model.register_forward_pre_hook(watch, with_kwargs=True)
    assert tokens_of(engine.generate(requests)) == expected
    assert widest[0] <= max_num_seqs
    assert widest[1] <= max_num_batched_tokens


def test_the_cache_grows_and_forgets_while_rows_come_and_go() -> None:
    requests = [
        replace(request, gconfig=replace(request.gconfig, max_new_tokens=330 if i % 5 == 0 else 70, ignore_eos=True))
        for i, request in enumerate(requests_of(12))
    ]
    together = engine_of(max_num_seqs=4).generate(requests)
    alone = engine_of()
    for request, response in zip(requests[::4], together[::4], strict=True):
        assert response.output_tokens == alone.generate([request])[0].output_tokens
        assert len(response.output_tokens) == request.gconfig.max_new_tokens


def test_equal_prompts_are_run_once() -> None:
    engine = engine_of()
    seen = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [tuple(range(3, 13)), tuple(range(20, 26))]
    requests = [ModelRequest(prompts[i % 2], SamplingParams(9, seed=i, ignore_eos=True)) for i in range(8)]
    responses = engine.generate(requests)
    assert seen == [(2, 10)] + [(8, 1)] * 8
    assert tokens_of(responses) == [engine_of().generate([request])[0].output_tokens for request in requests]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=16),
        Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),  # pyrefly: ignore
        MistralConfig(**SIZES, sliding_window=None),
        Gemma2Config(**SIZES, head_dim=16, sliding_window=2048, query_pre_attn_scalar=16),
    ],
    ids=lambda config: config.model_type,
)
def test_architectures_agree_with_transformers(config: Any) -> None:
    reference = model_of(config)
    reference.set_attn_implementation("eager")
    for response in HFRollout(model_of(config)).generate(requests_of(6)):
        ids = torch.tensor([response.input_tokens + response.output_tokens])
        greedy = response.sampled_logprobs[0] == 0.0
        params = requests_of(6)[int(response.rid)].gconfig
        assert greedy == params.greedy
        logits = reference(ids).logits[0, len(response.input_tokens) - 1 : -1] / (params.temperature or 1.0)
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=1e-4, rtol=0)


def test_what_the_cache_cannot_hold_is_refused() -> None:
    sliding = model_of(MistralConfig(**SIZES, sliding_window=64))
    with pytest.raises(RolloutError, match="max_model_len to at most the model's window of 64"):
        HFRollout(sliding)
    assert HFRollout(sliding, GenerationConfig(max_model_len=64)).generate([ModelRequest((3, 4), SamplingParams(5))])


def test_rows_with_broken_logits_are_named() -> None:
    engine = engine_of()
    engine.begin_update()
    engine.load([("model.embed_tokens.weight", torch.full((80, 32), torch.nan))])
    engine.finish_update(1)
    with pytest.raises(RolloutError, match="not finite for request broken"):
        engine.generate([ModelRequest((3, 4), SamplingParams(4), rid="broken")])


def test_the_model_length_ends_a_completion() -> None:
    engine = engine_of(max_model_len=20)
    response = engine.generate([ModelRequest(tuple(range(3, 18)), SamplingParams(50, ignore_eos=True))])[0]
    assert (len(response.output_tokens), response.stop_reason) == (5, Finish.LENGTH)


def test_random_weights_are_not_served(tmp_path: Path) -> None:
    model = model_of(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    real, dummy = (
        HFRollout.from_path(tmp_path),
        HFRollout.from_path(tmp_path, context=EngineContext(load_format="dummy")),
    )
    request = [ModelRequest((5, 6), SamplingParams(8, seed=1))]
    with pytest.raises(WeightTransferError, match="quarantine"):
        dummy.generate(request)
    dummy.load(list(real.local_tensors().items()))
    dummy.finish_update(3)
    assert tokens_of(dummy.generate(request)) == tokens_of(real.generate(request))
    assert real.weight_layout().aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    dummy.begin_update()
    dummy.load([("lm_head.weight", torch.zeros(80, 32))])
    assert not dummy.local_tensors()["model.embed_tokens.weight"].any()


def test_a_folder_without_all_tensors_is_refused_and_not_filled_at_random(tmp_path: Path) -> None:
    reward_model = LlamaForSequenceClassification(LlamaConfig(**SIZES))
    reward_model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"1 tensors are missing \(lm_head\.weight"):
        HFRollout.from_path(tmp_path)


def test_a_closed_engine_says_so() -> None:
    engine = engine_of()
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate([ModelRequest((3,), SamplingParams(2))])


def test_a_broken_request_does_not_reach_the_others() -> None:
    engine = engine_of()
    good = ModelRequest((5,), SamplingParams(2, ignore_eos=True), rid="good")
    deltas = engine.exchange([ModelRequest((500,), SamplingParams(2), rid="bad"), good], wait_s=scaled_s(10))
    by_rid = {delta.rid: delta for delta in deltas}
    assert by_rid["bad"].refused
    assert "vocabulary" in by_rid["bad"].error
    assert (len(by_rid["good"].tokens), by_rid["good"].finish) == (2, Finish.LENGTH)


def test_a_step_that_never_ends_does_not_hold_up_an_exchange_and_fails_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, release = engine_of(), threading.Event()
    engine.model.register_forward_pre_hook(lambda *args: release.wait(scaled_s(20)) and None)
    monkeypatch.setattr("rlsys.rollout.base.STEP_WAIT_S", 0.2)
    started_s = time.monotonic()
    assert engine.exchange([ModelRequest((5,), SamplingParams(2))], wait_s=0.1) == []
    with pytest.raises(WeightTransferError, match=r"did not stop within 0\.2 s"):
        engine.begin_update()
    assert time.monotonic() - started_s < scaled_s(5)
    release.set()
    engine.begin_update()
    engine.finish_update(1)
    deltas = engine.exchange(wait_s=scaled_s(10))
    assert {version for delta in deltas for version in delta.versions} <= {0, 1}
    engine.close()


@pytest.mark.parametrize("num_key_value_heads", [2, 4])
def test_short_rows_beside_a_long_one_are_what_they_are_alone(num_key_value_heads: int) -> None:
    model = model_of(LlamaConfig(**SIZES | {"num_key_value_heads": num_key_value_heads}))
    long = replace(requests_of(1)[0], input_ids=tuple(3 + n % 70 for n in range(1500)))
    requests = [long, *requests_of(6, longest=5)[1:]]
    alone = [HFRollout(model, GenerationConfig()).generate([one])[0] for one in requests]
    together = HFRollout(model, GenerationConfig()).generate(requests)
    assert tokens_of(together) == tokens_of(alone)
    for one, other in zip(together, alone, strict=True):
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-5)
