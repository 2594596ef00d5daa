"""Images on Megatron: log-probs and gradients of transformers' own model, whatever the layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.megatron.engine import MegatronEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.models.hf import saved_names
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.models.vision import is_tower
from rlsys.protocol import DataProto
from rlsys.rollout.hf.engine import HFRollout
from rlsys.utils.errors import ConfigError
from tests.contracts.train_engine import megatron_section
from tests.engine_gradients import gradients
from tests.ranks import run_ranks
from tests.tiny_vision import MODELS, random_model, reference, vision_rows
from tests.unit.engines.common import nll, same, whole

CONFIGS = {
    name: {**config, "text_config": {**config["text_config"], "num_hidden_layers": 4}}
    for name, config in MODELS.items()
}
LAYOUTS = {
    "one": ParallelSizes(),
    "tp": ParallelSizes(tp=2),
    "sp": ParallelSizes(tp=2, sequence_parallel=True),
    "pp": ParallelSizes(pp=2),
    "cp": ParallelSizes(cp=2),
    "dp": ParallelSizes(),
    "tp-pp": ParallelSizes(tp=2, pp=2, sequence_parallel=True),
}
WORLDS = {"one": 1, "tp-pp": 4}
QUICK = {("qwen3_vl", "pp", True), ("qwen2_5_vl", "sp", False)}


def engine_of(config: Mapping[str, Any], layout: str = "one", **options: Any) -> MegatronEngine:
    model = ModelConfig(
        override_config=dict(config),
        enable_gradient_checkpointing=options.pop("recompute", False),
        **options.pop("model", {}),
    )
    section = megatron_section(LAYOUTS[layout], seed=1)
    options |= {"optim": OptimConfig(lr=1e-2), "training": MicroBatches(rows=1)}
    return MegatronEngine(model, TrainEngineOptions(**options), megatron=section)


def stepped(config: dict[str, Any], layout: str, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of this rank's rows and gradients of all."""
    engine = engine_of(config, layout, **options)
    rows = vision_rows(config)
    share = len(rows) // engine.dp_size
    rows = rows[engine.dp_rank * share : (engine.dp_rank + 1) * share]
    scores = engine.forward(rows, ("log_probs",))["log_probs"]
    engine.forward_backward(rows, nll)
    return scores, gradients(engine)


def expected_of(config: dict[str, Any], rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    """By transformers, in float64."""
    model = random_model(config).double()
    with torch.enable_grad():
        scores = reference.__wrapped__(model, rows)
        (-(scores * rows.tensors["response_mask"]).sum() / rows.tensors["response_mask"].sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return scores.detach(), saved_names(model, grads)


def cases() -> list[Any]:
    return [
        pytest.param(family, layout, again, marks=[] if (family, layout, again) in QUICK else [pytest.mark.slow])
        for family in CONFIGS
        for layout in LAYOUTS
        for again in (False, True)
        if not again or layout in ("one", "sp", "pp")
    ]


@pytest.mark.parametrize(("family", "layout", "recompute"), cases())
def test_log_probs_and_gradients_are_those_of_transformers(family: str, layout: str, recompute: bool) -> None:
    config = CONFIGS[family]
    scores, grads = expected_of(config, vision_rows(config))
    ranks = run_ranks(WORLDS.get(layout, 2), stepped, config, layout, {"recompute": recompute})
    ours = torch.cat([own for own, _ in ranks]) if layout == "dp" else ranks[0][0]
    torch.testing.assert_close(ours.double(), scores, rtol=0, atol=5e-5)
    for _, own in ranks:
        assert own.keys() == grads.keys()
        for name, expected in grads.items():
            torch.testing.assert_close(own[name].double(), expected, rtol=1e-4, atol=2e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def trained(config: dict[str, Any], folder: Path, layout: str, frozen: bool) -> tuple[bool, dict[str, Tensor]]:
    """Whether an engine that is loaded between two steps, from a checkpoint of another layout, takes the second step as
    the first engine does; and the weights."""
    rows, options = vision_rows(config), {"freeze_vision_tower": frozen, "recompute": True}
    engine = engine_of(config, layout, **options)
    for step in range(2):
        if step:
            engine.save(folder / "checkpoint", "resume")
            engine.save(folder / "hf", "export")
        engine.forward_backward(rows, nll)
        assert engine.optim_step().applied
    other = engine_of(config, layout, **options)
    other.load(folder / "checkpoint")
    assert same(whole(other), dict(HFRollout.from_path(folder / "hf").local_tensors()))
    other.forward_backward(rows, nll)
    other.optim_step()
    return same(whole(engine), whole(other)), whole(engine)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2_5_vl", "tp-pp"), ("qwen3_vl", "sp"), ("smolvlm", "pp"), ("idefics3", "one")]
)
@pytest.mark.slow
def test_a_resumed_engine_continues_bit_for_bit_and_an_export_is_what_transformers_loads(
    family: str, layout: str, frozen: bool, tmp_path: Path
) -> None:
    config = CONFIGS[family]
    ranks = run_ranks(WORLDS.get(layout, 2), trained, config, tmp_path, layout, frozen)
    assert all(repeated for repeated, _ in ranks)
    model = random_model(config)
    before = saved_names(model, dict(model.named_parameters()))
    moved = {name for name, tensor in ranks[0][1].items() if not torch.equal(tensor, before[name])}
    towers = {name for name in ranks[0][1] if is_tower(name)}
    assert towers
    assert moved == ranks[0][1].keys() - (towers if frozen else set())


def test_adapters_and_layers_of_later_stages_are_refused() -> None:
    config: Any = CONFIGS["qwen3_vl"]
    (why,) = run_ranks(1, refused, config, "one", {"model": {"lora_rank": 2}})
    assert "lora_rank=0, or strategy=fsdp" in why
    short = {**config, "text_config": {**config["text_config"], "num_hidden_layers": 2}}
    whys = run_ranks(2, refused, short, "pp", {})
    assert "added to the first 2 layers, the first stage has 1" in whys[0]


def refused(config: dict[str, Any], layout: str, options: dict[str, Any]) -> str:
    try:
        engine_of(config, layout, **options)
    except ConfigError as error:
        return str(error)
    return ""
