"""HFRollout with images: log-probabilities as transformers' own forward pass has them, however prompts are read."""

from typing import Any

import pytest
import torch

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.protocol import IMAGES, DataProto
from rlsys.rollout.batch import generate_sequences
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import ModelRequest, SamplingParams
from tests.tiny_vision import MODELS, SIZES, VIDEOS, random_model, reference, vision_rows

META = {"response_length": 6, "pad_token_id": 0, "temperature": 1.0, "ignore_eos": True, "seed": 3}


def completed(family: str, **config: Any) -> tuple[Any, DataProto, DataProto]:
    """The engine and the answers to the prompts of `vision_rows`, twice each."""
    engine = HFRollout(random_model(MODELS[family], has_twin=True), GenerationConfig(**config))
    rows = vision_rows(MODELS[family], VIDEOS if family.startswith("qwen") else SIZES).repeat(2)
    prompts = rows.select(["prompts", "attention_mask"], [IMAGES])
    prompts.meta_info = dict(META)
    answers = generate_sequences(engine, prompts)
    answers.non_tensor_batch[IMAGES] = rows.non_tensor_batch[IMAGES]
    return engine, rows, answers


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 5, "max_num_seqs": 3}], ids=["at once", "in parts"])
def test_drawn_tokens_have_the_log_probs_of_transformers_own_forward(family: str, config: dict[str, int]) -> None:
    engine, rows, answers = completed(family, **config)
    torch.testing.assert_close(
        answers.tensors["rollout_log_probs"], reference(engine.model, answers), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(engine.compute_log_prob(rows), reference(engine.model, rows), rtol=0, atol=1e-5)
    engine.close()


def test_a_request_that_continues_draws_what_the_whole_one_would() -> None:
    engine, rows, _ = completed("qwen3_vl")
    image, prompt = rows.non_tensor_batch[IMAGES][0], rows.tensors["prompts"][0]
    ids = tuple(prompt[prompt > 0].tolist())
    (whole,) = engine.generate([ModelRequest(ids, SamplingParams(6, seed=5, ignore_eos=True), images=image)])
    more = SamplingParams(3, seed=5, ignore_eos=True)
    (rest,) = engine.generate([ModelRequest((*ids, *whole.output_tokens[:3]), more, images=image)])
    assert rest.output_tokens == whole.output_tokens[3:]
    torch.testing.assert_close(
        torch.tensor(rest.output_logprobs), torch.tensor(whole.output_logprobs[3:]), rtol=0, atol=1e-5
    )
    engine.close()


def test_equal_prompts_with_different_images_are_read_apart() -> None:
    engine, rows, _ = completed("qwen2_5_vl")
    prompt, image = rows.tensors["prompts"][1], rows.non_tensor_batch[IMAGES][1]
    other = vision_rows(MODELS["qwen2_5_vl"], [[], [(4, 6)]]).non_tensor_batch[IMAGES][1]
    ids, params = tuple(prompt[prompt > 0].tolist()), SamplingParams(1, seed=5)
    first, second = engine.generate([ModelRequest(ids, params, images=images) for images in (image, other)])
    assert first.output_logprobs != second.output_logprobs
    engine.close()
