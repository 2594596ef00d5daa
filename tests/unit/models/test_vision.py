"""Vision-language models: packed rows against transformers' own forward pass, row by row, in float64."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig

from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.models.vision import pack_images
from rlsys.protocol import IMAGES, DataProto
from tests.engine_gradients import gradients
from tests.ranks import run_ranks
from tests.tiny_vision import (
    IMAGE,
    MODELS,
    QWEN3,
    QWEN25,
    QWEN35,
    SIZES,
    VIDEO,
    VIDEOS,
    random_model,
    random_video,
    reference,
    vision_rows,
)
from tests.unit.engines.common import nll, same, whole


def engine_of(config: dict[str, Any], rows: int = 4, *, lora: int = 0, sp_size: int = 1, **options: Any) -> FSDPEngine:
    model = ModelConfig(
        override_config=config, enable_gradient_checkpointing=False, lora_rank=lora, **options.pop("model", {})
    )
    shard = ShardConfig(seed=1).model_copy(update={"dtype": "float64", "model_dtype": "float64"})
    options |= {"optim": OptimConfig(lr=1e-2), "training": MicroBatches(rows=rows)}
    return FSDPEngine(model, TrainEngineOptions(**options), shard=shard, sp_size=sp_size)


def some(*families: str) -> list[Any]:
    """All families, those that are not named in the slow suite."""
    return [pytest.param(one, marks=[] if one in families else [pytest.mark.slow]) for one in MODELS]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *(("qwen3_vl", VIDEOS), ("qwen2_5_vl", VIDEOS), ("smolvlm", SIZES)),
        *(pytest.param(one, SIZES, marks=pytest.mark.slow) for one in MODELS),
    ],
)
def test_packed_rows_have_the_log_probs_of_transformers_own_forward(family: str, sizes: Any) -> None:
    rows = vision_rows(MODELS[family], sizes).repeat(2)
    expected = reference(random_model(MODELS[family]).double(), rows)
    for packed in (True, False):
        (scores,) = run_ranks(1, scored, MODELS[family], rows, packed)
        torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-6)


def scored(config: dict[str, Any], rows: DataProto, packed: bool) -> Tensor:
    return engine_of(config, model={"use_remove_padding": packed}).forward(rows, ("log_probs",))["log_probs"]


@pytest.mark.parametrize("sizes", [SIZES, VIDEOS], ids=["images", "videos"])
def test_padded_rows_of_gated_delta_layers_have_the_log_probs_of_transformers(sizes: Any) -> None:
    rows = vision_rows(QWEN35, sizes).repeat(2)
    expected = reference(random_model(QWEN35).double(), rows)
    (scores,) = run_ranks(1, scored, QWEN35, rows, False)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-6)


def grads(config: dict[str, Any], rows: int, sp_size: int = 1, **options: Any) -> dict[str, Tensor]:
    engine = engine_of(config, rows, sp_size=sp_size, **options)
    batch = vision_rows(config, SIZES if "image_size" in config["vision_config"] else VIDEOS).repeat(2)
    share = len(batch) // engine.dp_size
    batch = batch[engine.dp_rank * share : (engine.dp_rank + 1) * share]
    engine.forward_backward(batch, nll)
    return gradients(engine)


def test_gradients_of_gated_delta_layers_depend_not_on_the_ranks() -> None:
    padded = {"model": {"use_remove_padding": False}}
    (expected,) = run_ranks(1, partial(grads, QWEN35, 4, **padded))
    assert any("visual" in name for name in expected)
    for other in run_ranks(2, partial(grads, QWEN35, 1, **padded)):
        for name, tensor in expected.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", some("qwen3_vl"))
def test_gradients_depend_neither_on_the_packs_nor_on_the_ranks(family: str) -> None:
    (expected,) = run_ranks(1, grads, MODELS[family], 4)
    assert any("vision" in name or "visual" in name for name in expected)
    for world, rows, sp in ((1, 1, 1), (2, 1, 1), (2, 4, 2)):
        (other, _) = (*run_ranks(world, grads, MODELS[family], rows, sp), None)[:2]
        assert other.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


TOWER = ("model.visual.", "model.vision_model.")


def trained_names(config: dict[str, Any], options: dict[str, Any]) -> set[str]:
    return set(grads(config, 4, **options))


@pytest.mark.parametrize("family", some("qwen3_vl"))
def test_a_frozen_tower_and_excluded_modules_are_not_trained(family: str) -> None:
    (trained,) = run_ranks(1, trained_names, MODELS[family], {"freeze_vision_tower": True})
    assert trained
    assert not any(name.startswith(TOWER) for name in trained)
    (adapted,) = run_ranks(1, trained_names, MODELS[family], {"lora": 2, "freeze_vision_tower": True})
    assert any("lora_A" in name for name in adapted)
    assert not any(name.startswith(TOWER) for name in adapted)
    lora = {"lora": 2, "model": {"exclude_modules": r".*(visual|vision_model)\..*"}}
    (adapted,) = run_ranks(1, trained_names, MODELS[family], lora)
    assert any("lora_A" in name for name in adapted)
    assert not any(name.startswith(TOWER) for name in adapted)


def resumed(config: dict[str, Any], folder: Path) -> bool:
    """Whether an engine that is loaded between two steps takes the second one as the first engine does."""
    rows, engine = vision_rows(config), engine_of(config)
    for step in range(2):
        if step:
            engine.save(folder / "checkpoint", "resume")
        engine.forward_backward(rows, nll)
        assert engine.optim_step().applied
    other = engine_of(config)
    other.load(folder / "checkpoint")
    other.forward_backward(rows, nll)
    other.optim_step()
    return same(whole(engine), whole(other))


@pytest.mark.parametrize("family", some("smolvlm"))
def test_a_resumed_engine_continues_bit_for_bit(family: str, tmp_path: Path) -> None:
    assert run_ranks(1, resumed, MODELS[family], tmp_path) == [True]


def test_a_row_without_its_image_is_refused() -> None:
    rows = vision_rows(MODELS["qwen3_vl"])
    rows.non_tensor_batch[IMAGES] = rows.non_tensor_batch[IMAGES][[3, 2, 1, 0]]
    with pytest.raises(AssertionError, match="image tokens in a row for"):
        run_ranks(1, scored, MODELS["qwen3_vl"], rows, True)


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=3), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_features_of_packed_grids_stand_where_each_row_alone_has_them(grids: Any, order: Any) -> None:
    sizes = [[(2 * height, 2 * width) for height, width in row] for row in grids]
    order.shuffle(sizes)
    rows = vision_rows(QWEN3, sizes)
    model = random_model(QWEN3)
    tokens = [
        ids[mask] for ids, mask in zip(rows.tensors["input_ids"], rows.tensors["attention_mask"] == 1, strict=True)
    ]
    images, lengths = rows.non_tensor_batch[IMAGES].tolist(), list(map(len, tokens))
    packed, positions = pack_images(model.config, torch.cat(tokens), lengths, images)
    twice, _ = pack_images(model.config, torch.cat([*tokens, *tokens]), [*lengths, *lengths], [*images, *images])
    for name, tensor in packed.tensors.items():  # encoded once
        torch.testing.assert_close(twice.tensors[name], tensor)
    torch.testing.assert_close(twice.numbers, packed.numbers.repeat(2))
    first = 0
    for ids, own, length in zip(tokens, images, lengths, strict=True):
        alone, its_positions = pack_images(model.config, ids, [length], [own])
        here = (packed.places >= first) & (packed.places < first + length)
        torch.testing.assert_close(packed.places[here] - first, alone.places)
        torch.testing.assert_close(positions[:, first : first + length], its_positions)
        assert (ids[alone.places] == IMAGE).all()
        first += length


def test_text_behind_a_video_continues_from_its_largest_position() -> None:
    """Three steps of 2 x 1 features, 3 positions apart; whole positions are taken of 8/7."""
    config = AutoConfig.for_model(**QWEN25)
    ids = torch.tensor([5, *[VIDEO] * 6, 5, 5])
    packed, positions = pack_images(config, ids, [9], [(random_video(QWEN25, (3, 4, 2), seconds=0.75),)])
    assert packed.places.tolist() == [1, 2, 3, 4, 5, 6]
    assert positions.tolist() == [[0, 1, 1, 4, 4, 7, 7, 8, 9], [0, 1, 2, 1, 2, 1, 2, 8, 9], [0, 1, 1, 1, 1, 1, 1, 8, 9]]
    fine = pack_images(config, ids, [9], [(random_video(QWEN25, (3, 4, 2), seconds=2 / 7),)])[1]
    assert fine[0].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 5]
