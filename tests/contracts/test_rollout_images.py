"""What an engine owes prompts with images: log-probs as transformers' own forward pass has them, after a push too."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.interfaces import RolloutEngine
from rlsys.protocol import IMAGES, DataProto
from rlsys.rollout.base import EngineContext
from rlsys.rollout.batch import generate_sequences
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import ModelRequest, SamplingParams
from tests.contracts.rollout_engine import Driver
from tests.tiny_vision import MODELS, SIZES, VIDEOS, random_model, reference, vision_rows, wide

META = {"response_length": 6, "pad_token_id": 0, "temperature": 1.0, "ignore_eos": True, "seed": 3}
LIMIT = 1e-4
"""As for text: tests/contracts/rollout_engine.py."""


@dataclass
class Bench:
    """An engine that serves `random_model(config, seed=1)`."""

    engine: RolloutEngine
    config: dict[str, Any]

    def drawn(self, rows: DataProto) -> DataProto:
        """Answers to the prompts of the rows."""
        prompts = rows.select(["prompts", "attention_mask"], [IMAGES])
        prompts.meta_info = dict(META)
        answers = generate_sequences(self.engine, prompts)
        answers.non_tensor_batch[IMAGES] = rows.non_tensor_batch[IMAGES]
        return answers

    def check(self, seed: int) -> None:
        """The engine draws and scores as the model of this seed does."""
        sizes = SIZES if "image_size" in self.config["vision_config"] else [*SIZES, *VIDEOS]
        model, rows = random_model(self.config, seed=seed, has_twin=True), vision_rows(self.config, sizes).repeat(2)
        answers = self.drawn(rows)
        expected = reference(model, answers)
        torch.testing.assert_close(answers.tensors["rollout_log_probs"], expected, rtol=0, atol=LIMIT)
        torch.testing.assert_close(self.engine.compute_log_prob(rows), reference(model, rows), rtol=0, atol=LIMIT)

    def push(self, seed: int, version: int) -> None:
        model = HFRollout(random_model(self.config, seed=seed, has_twin=True))
        self.engine.begin_update()
        self.engine.load(list(model.local_tensors().items()))
        self.engine.finish_update(version)


def engine_over(name: str, path: Path, config: GenerationConfig) -> RolloutEngine:
    if name == "vllm":
        from rlsys.rollout.vllm.engine import VLLMRollout

        return VLLMRollout(path, config, EngineContext())
    from rlsys.rollout.sglang.engine import SGLangRollout

    return SGLangRollout(path, config, EngineContext())


FAMILIES = {"vllm": ("qwen2_5_vl", "qwen3_vl", "smolvlm"), "sglang": ("qwen2_5_vl", "qwen3_vl")}
MARKS = {
    name: [getattr(pytest.mark, name), pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")]
    for name in FAMILIES
}
CASES = [pytest.param((name, family), marks=MARKS[name]) for name in FAMILIES for family in FAMILIES[name]]


@pytest.fixture(params=CASES, scope="module", ids="-".join)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    name, family = request.param
    config, path = wide(MODELS[family]), tmp_path_factory.mktemp(family)
    random_model(config, seed=1, has_twin=True).save_pretrained(path)
    Qwen2VLImageProcessorPil(patch_size=4).save_pretrained(path)  # nothing in it may change what the engine reads
    engine = engine_over(name, path, GenerationConfig(seed=11, enforce_eager=True, max_num_seqs=8))
    yield Bench(engine, config)
    engine.close()


def test_log_probs_with_images_are_the_models_after_each_push_of_the_tower(bench: Bench) -> None:
    bench.check(seed=1)
    for version, seed in enumerate((2, 3), 1):
        bench.push(seed, version)
        bench.check(seed)
    bench.push(1, 3)


def test_requests_with_images_run_and_wait_over_a_push(bench: Bench) -> None:
    bench.engine.config = bench.engine.config.model_copy(update={"on_update": "keep"})  # type: ignore[attr-defined]
    rows = vision_rows(bench.config)
    prompt, images = rows.tensors["prompts"][0], rows.non_tensor_batch[IMAGES][0]
    ids, params = tuple(prompt[prompt > 0].tolist()), SamplingParams(200, ignore_eos=True)
    requests = [ModelRequest(ids, params, rid=f"{n}", images=images) for n in range(20)]
    driver = Driver(bench.engine)
    driver.exchange(requests)
    bench.push(1, 4)
    responses = driver.finish()
    assert [len(response.output_tokens) for response in responses] == [200] * 20
    assert {version for response in responses for version in response.output_versions} >= {4}


def test_equal_prompts_with_different_images_are_read_apart(bench: Bench) -> None:
    rows = vision_rows(bench.config)
    prompt = rows.tensors["prompts"][0]
    ids = tuple(prompt[prompt > 0].tolist())
    image = rows.non_tensor_batch[IMAGES][0]
    other = vision_rows(bench.config, [[], [(4, 6)]]).non_tensor_batch[IMAGES][1]
    requests = [
        ModelRequest(ids, SamplingParams(1, seed=5), rid=f"{n}", images=i) for n, i in enumerate((image, other))
    ]
    first, second = bench.engine.generate(requests)
    assert first.output_logprobs != second.output_logprobs


def test_fewer_placeholders_than_features_are_refused_and_the_engine_serves_on(bench: Bench) -> None:
    rows = vision_rows(bench.config)
    prompt, image = rows.tensors["prompts"][0], rows.non_tensor_batch[IMAGES][0]
    ids = prompt[prompt > 0].tolist()
    (delta,) = bench.engine.exchange([ModelRequest(tuple(ids[:4]), SamplingParams(1), images=image)], wait_s=0.1)
    assert delta.refused
    assert "image tokens in a row" in delta.error
    assert len(bench.engine.generate([ModelRequest(tuple(ids), SamplingParams(1), images=image)])) == 1
