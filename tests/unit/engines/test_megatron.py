"""MegatronEngine beyond the contract: what it refuses, what it writes, how its parts are cut."""

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.config.schema.model import ModelConfig, OptimConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.megatron.engine import MegatronEngine
from rlsys.engines.megatron.weights import flat_boxes
from rlsys.engines.micro_batches import MicroBatches, packs_of
from rlsys.interfaces import LossSum
from rlsys.models import host_offload
from rlsys.models.host_offload import HostOffload
from rlsys.models.megatron.adapters import LayerAdapters, add_adapters
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.contracts.train_engine import MODELS, TP2_EP2, megatron_section
from tests.engine_gradients import gradients
from tests.ranks import run_ranks
from tests.router_losses import LOSSES, no_loss, router_gradients, unpadded_rows
from tests.unit.engines.common import MODEL, nll, random_model, same, small_rows


def megatron(
    model: ModelConfig | None = None,
    *,
    sizes: ParallelSizes = ParallelSizes(),  # noqa: B008
    section: Mapping[str, Any] | None = None,
    head: Any = "lm",
    rows: int = 2,
) -> MegatronEngine:
    return MegatronEngine(
        model or random_model(),
        TrainEngineOptions(head=head, optim=OptimConfig(lr=1e-2), training=MicroBatches(rows=rows)),
        megatron=megatron_section(sizes, **{"seed": 1, **(section or {})}),
    )


def lora_model(**settings: Any) -> ModelConfig:
    return random_model(lora_rank=2, **settings)


def whole(engine: MegatronEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.weights(1 << 12) for name, tensor in bucket}


@pytest.mark.parametrize(
    ("model", "world", "options", "says"),
    [
        (MODEL, 3, {"sizes": ParallelSizes(tp=3)}, "4 attention heads are not divisible"),
        (MODEL, 4, {"sizes": ParallelSizes(pp=4)}, "2 layers cannot be split"),
        (MODEL, 2, {"sizes": ParallelSizes(ep=2)}, "expert_model_parallel_size=1"),
        (MODELS["qwen3-moe"], 3, {"sizes": ParallelSizes(ep=3)}, "4 experts are not divisible"),
        (MODELS["qwen3-moe"], 2, {"sizes": ParallelSizes(tp=2)}, "sequence_parallel=true"),
        ({**MODEL, "model_type": "gpt_neox"}, 1, {}, "no table for gpt_neox"),
        (MODEL, 1, {"section": {"fp8": "hybrid"}}, "needs Transformer Engine"),
        (MODEL, 1, {"section": {"fp8": "hybrid"}, "lora_rank": 2}, "remove fp8"),
        (MODEL, 1, {"section": {"override_transformer_config": {"fp8": "e4m3"}}}, "needs Transformer Engine"),
        (MODEL, 1, {"section": {"override_transformer_config": {"fp8_param": True}}}, "take fp8_param: remove it"),
        (MODEL, 1, {"lora_rank": 2, "target_modules": ("nothing",)}, "it has down_proj, gate_proj"),
        (MODEL, 1, {"section": {"override_transformer_config": {"no_such_setting": 1}}}, "no_such_setting"),
        (MODEL, 1, {"section": {"override_transformer_config": {"calculate_per_token_loss": False}}}, "remove it"),
        (MODEL, 1, {"section": {"override_transformer_config": {"mtp_num_layers": 1}}}, "does not take mtp_num_layers"),
        (MODEL, 1, {"section": {"override_transformer_config": {"qk_clip": True}}}, "does not take qk_clip"),
        (MODEL, 1, {"section": {"override_transformer_config": {"softmax_type": "off-by-one"}}}, "softmax_type"),
        (MODEL, 1, {"section": {"override_transformer_config": {"attention_dropout": 0.5}}}, "override_config has"),
        (
            MODEL,
            1,
            {"section": {"override_transformer_config": {"tensor_model_parallel_size": 2}}},
            "have keys of their own",
        ),
        (
            MODELS["qwen3-moe"],
            1,
            {"section": {"override_transformer_config": {"moe_router_enable_expert_bias": True}}},
            "moe_router_enable_expert_bias",
        ),
        (
            MODEL,
            2,
            {
                "sizes": ParallelSizes(pp=2),
                "section": {"override_transformer_config": {"pipeline_model_parallel_layout": "Et|tL"}},
            },
            "num_layers_in_last_pipeline_stage",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(model: Any, world: int, options: dict[str, Any], says: str) -> None:
    assert all(says in text for text in run_ranks(world, refused, model, options))


def refused(model: Any, options: dict[str, Any]) -> str:
    adapters = {name: value for name, value in options.items() if name in ModelConfig.model_fields}
    own = {name: value for name, value in options.items() if name not in adapters}
    with pytest.raises(ConfigError) as error:
        megatron(random_model(model, **adapters), **own)
    return str(error.value)


def test_settings_that_repeat_what_is_decided_are_taken() -> None:
    """As verl's configurations have them, whose lists are no tuples and whose types have names."""
    repeated = {"softmax_type": "vanilla", "params_dtype": "float32", "bf16": False, "calculate_per_token_loss": True}
    repeated |= {"tensor_model_parallel_size": 1, "sequence_parallel": False, "moe_layer_freq": 1, "qk_clip": None}
    windowed = {**MODELS["mistral"], "num_hidden_layers": 1}
    for model, own in ((windowed, {"window_size": [3, 0]}), (MODELS["qwen3-moe"], {})):
        (config,) = run_ranks(1, transformer_config_of, model, {**repeated, **own, "attention_backend": "fused"})
        assert (config.attention_backend.name, config.params_dtype) == ("fused", torch.float32)


def transformer_config_of(model: Any, overrides: dict[str, Any]) -> Any:
    return megatron(random_model(model), section={"override_transformer_config": overrides}).chunks[0].config


@pytest.mark.parametrize("more", [{}, {"recompute_method": None, "recompute_num_layers": None}])
def test_whole_layers_are_recomputed_one_by_one_where_nothing_says_how(more: dict[str, Any]) -> None:
    """As a dry run takes it; the second is how verl's configurations have it. Megatron itself refuses both."""
    (config,) = run_ranks(1, transformer_config_of, MODELS["qwen2-tied"], {"recompute_granularity": "full", **more})
    assert (config.recompute_method, config.recompute_num_layers) == ("uniform", 1)


def test_an_attention_backend_reaches_transformer_engine() -> None:
    assert run_ranks(1, attention_switches, "flash") == [["1", "0", "0"]]
    assert run_ranks(1, attention_switches, None) == [["1", "1", "1"]]


def test_flash_attention_that_is_not_installed_leaves_transformer_engine_the_others() -> None:
    assert run_ranks(1, attention_switches, "flash", False) == [["1", "1", "1"]]
    assert run_ranks(1, attention_switches, "fused", False) == [["0", "1", "0"]]


def attention_switches(backend: str | None, has_flash: bool = True) -> list[str | None]:
    """What Transformer Engine reads from the environment."""
    with patch("rlsys.models.megatron.build.HAS_FLASH_ATTENTION", has_flash):
        megatron(section={"override_transformer_config": {"attention_backend": backend}})
    return [os.environ.get(f"NVTE_{kind}_ATTN") for kind in ("FLASH", "FUSED", "UNFUSED")]


def test_selective_recomputation_takes_the_place_of_that_of_whole_layers() -> None:
    overrides = {"recompute_granularity": "selective"}
    ((plain,), (selective,)) = (run_ranks(1, losses_of_two_steps, given) for given in ({}, overrides))
    assert selective == pytest.approx(plain)


def losses_of_two_steps(overrides: dict[str, Any]) -> list[float]:
    engine = megatron(
        random_model(enable_gradient_checkpointing=True), section={"override_transformer_config": overrides}
    )
    return [(engine.forward_backward(small_rows(), nll)["loss"], engine.optim_step())[0] for _ in range(2)]


def test_adapters_refuse_settings_that_reach_past_them() -> None:
    chunk = SimpleNamespace(config=SimpleNamespace(use_transformer_engine_op_fuser=True))
    with pytest.raises(ConfigError, match="do not work with use_transformer_engine_op_fuser"):
        add_adapters([chunk], {"0.linear.weight": []})


def test_the_shim_replaces_nothing_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rlsys.models.megatron.shim")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finders, stream = list(sys.meta_path), torch.cuda.Stream
    assert not importlib.import_module("rlsys.models.megatron.shim").ON_CPU
    assert sys.meta_path == finders
    assert torch.cuda.Stream is stream


def exported(place: Path) -> dict[str, Tensor]:
    engine = megatron(sizes=ParallelSizes(tp=2))
    engine.forward_backward(small_rows(), nll)
    engine.optim_step()
    engine.save(place, "export")
    return whole(engine)


def test_an_export_is_what_transformers_loads(tmp_path: Path) -> None:
    (weights, _) = run_ranks(2, exported, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert same(weights, dict(loaded.named_parameters()))


def shared_router_gradients(sizes: ParallelSizes, overrides: dict[str, Any]) -> dict[str, Tensor]:
    section = {"override_transformer_config": overrides}
    engine = megatron(random_model(MODELS["qwen3-moe"]), sizes=sizes, section=section)
    engine.forward_backward(unpadded_rows(33, num=4, prompt=4, response=4), no_loss)
    return gradients(engine)


@pytest.mark.parametrize(
    "overrides",
    [
        {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss"},
        {"moe_aux_loss_coeff": [1.0], "moe_router_load_balancing_type": ["aux_loss"], "moe_z_loss_coeff": 0.1},
    ],
)
def test_losses_of_routers_weigh_the_same_however_tokens_are_shared(overrides: dict[str, Any]) -> None:
    (alone,) = run_ranks(1, shared_router_gradients, ParallelSizes(), overrides)
    assert any(gradient.norm() > 0.1 for gradient in alone.values())
    for sizes in (ParallelSizes(cp=2), ParallelSizes(tp=2, sequence_parallel=True)):
        for shared in run_ranks(2, shared_router_gradients, sizes, overrides):
            for name, gradient in alone.items():
                torch.testing.assert_close(shared[name], gradient, rtol=1e-4, atol=1e-5)


def router_loss(place: Path, count_rows: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the engine's z-loss of its routers, and of the mean of their squared logsumexp by transformers."""
    overrides = {"moe_z_loss_coeff": 0.1}
    engine = megatron(random_model(MODELS["qwen3-moe"]), section={"override_transformer_config": overrides})
    engine.save(place, "export")
    rows = small_rows()

    def loss(outputs: Any, micro_rows: Any) -> LossSum:
        none = no_loss(outputs, micro_rows)
        return LossSum(none.total, float(len(micro_rows))) if count_rows else none

    engine.forward_backward(rows, loss)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    logits = model(rows.tensors["input_ids"], output_router_logits=True).router_logits
    (0.1 * sum(layer.float().logsumexp(dim=-1).square().mean() for layer in logits)).backward()
    named = {name: p.grad for name, p in model.named_parameters() if name.endswith("gate.weight")}
    return gradients(engine), {name: gradient for name, gradient in named.items() if gradient is not None}


@pytest.mark.parametrize("count_rows", [False, True])
def test_losses_of_routers_are_means_over_tokens_whatever_is_counted(tmp_path: Path, count_rows: bool) -> None:
    ((ours, theirs),) = run_ranks(1, router_loss, tmp_path / "model", count_rows)
    assert len(theirs) == 2
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


def packings() -> int:
    section = {"override_transformer_config": LOSSES["z"]}
    engine = megatron(random_model(MODELS["qwen3-moe"]), section=section)
    with patch("rlsys.engines.megatron.engine.packs_of", wraps=packs_of) as packing:
        engine.forward_backward(small_rows(), nll)
    return packing.call_count


def test_losses_of_routers_count_tokens_without_packing_rows_again() -> None:
    assert run_ranks(1, packings) == [1]


def of_routers(sizes: ParallelSizes, loss: str, place: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    section = {"override_transformer_config": LOSSES[loss]}
    engine = megatron(random_model(MODELS["qwen3-moe"]), sizes=sizes, section=section, rows=8)
    return router_gradients(engine, place, loss)


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(ep=2), TP2_EP2], ids=["one", "ep2", "tp2ep2"])
def test_losses_of_routers_have_the_gradients_of_the_float64_reference(
    sizes: ParallelSizes, loss: str, tmp_path: Path
) -> None:
    for ours, theirs in run_ranks(max(sizes.ep, sizes.tp), of_routers, sizes, loss, tmp_path):
        assert len(theirs) == 2
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name].double(), gradient, rtol=1e-4, atol=1e-6)


def two_layouts() -> tuple[list[float], list[float]]:
    """An actor of two stages and a critic of two tensor-parallel ranks in the same processes, taking turns."""
    actor = megatron(sizes=ParallelSizes(pp=2))
    critic = megatron(head="scalar", sizes=ParallelSizes(tp=2, sequence_parallel=True))
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(2):
        for engine, output, kept in ((actor, "log_probs", losses[0]), (critic, "values", losses[1])):
            kept.append(engine.forward_backward(small_rows(), nll, outputs=(output,))["loss"])  # type: ignore[arg-type]
            engine.optim_step()
    return losses


def test_engines_of_different_sizes_share_processes() -> None:
    alone = run_ranks(1, plain_losses)[0]
    for results in run_ranks(2, two_layouts):
        for ours, theirs in zip(results, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def plain_losses() -> tuple[list[float], list[float]]:
    return tuple(
        [
            (engine.forward_backward(small_rows(), nll, outputs=(output,))["loss"], engine.optim_step())[0]
            for _ in range(2)
        ]
        for engine, output in ((megatron(), "log_probs"), (megatron(head="scalar"), "values"))
    )  # type: ignore[return-value]


def another_model(place: Path) -> str:
    megatron().save(place, "resume")
    other = megatron(random_model({**MODEL, "intermediate_size": 32}))
    before = whole(other)
    with pytest.raises(CheckpointError) as error:
        other.load(place)
    assert same(before, whole(other))
    return str(error.value)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    assert "is (24, 16), this model's (32, 16)" in run_ranks(1, another_model, tmp_path / "step")[0]


@given(shape=st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 9), st.integers(1, 9))), data=st.data())
def test_a_range_of_a_flattened_tensor_is_boxes(shape: tuple[int, ...], data: Any) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel() - 1))
    stop = data.draw(st.integers(start + 1, whole.numel()))
    flat, boxes = whole.flatten()[start:stop], list(flat_boxes(start, stop, shape))
    for begin, size, at in boxes:
        box = whole[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
        assert torch.equal(box.flatten(), flat[at : at + box.numel()])
    assert sum(torch.Size(size).numel() for _, size, _ in boxes) == stop - start
    assert len(boxes) <= 3


def test_offloaded_memory_is_restored_under_every_view() -> None:
    buffer = torch.randn(12)
    view, expected = buffer[4:8].view(2, 2), buffer.clone()
    offload = HostOffload()
    offload.offload("params", [buffer, view])
    offload.offload("params", [buffer])
    assert buffer.untyped_storage().nbytes() == 0
    offload.restore("params")
    offload.restore("params")
    assert torch.equal(buffer, expected)
    assert torch.equal(view.flatten(), expected[4:8])


def test_what_is_offloaded_fills_blocks_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_offload, "PINNED_BYTES", 16)
    tensors = [torch.randn(n) for n in (7, 1, 0, 9)]
    expected = [tensor.clone() for tensor in tensors]
    offload = HostOffload()
    offload.offload("params", tensors)
    pieces = [len(piece) for _, held in offload._offloaded["params"] for piece in held]
    assert pieces == [16, 12, 4, 16, 16, 4], "28, 4, 0 and 36 bytes"
    offload.restore("params")
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def test_an_export_restores_parameters_that_are_on_the_host(tmp_path: Path) -> None:
    engine = megatron()
    before = {name: tensor.clone() for bucket in engine.weights(1 << 20) for name, tensor in bucket}
    engine._offload.offload("params", engine._tensors_of("params"))  # as `move` does on a GPU
    engine.save(tmp_path / "export", "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name].float(), tensor.float()) for name, tensor in before.items())
    assert all(not tensor.untyped_storage().nbytes() for tensor in engine.held.local().values())


def test_offloaded_memory_is_restored_within_a_block_and_offloaded_after_it() -> None:
    buffer = torch.randn(12)
    expected, settled = buffer.clone(), list[int]()
    offload = HostOffload(lambda: settled.append(buffer.untyped_storage().nbytes()))
    offload.offload("optimizer", [buffer[4:8]])
    with offload.restored():
        assert torch.equal(buffer, expected)
        buffer += 1
    assert buffer.untyped_storage().nbytes() == 0
    offload.restore("optimizer")
    assert torch.equal(buffer, expected + 1)
    assert settled == [48, 48]


def merging(layer_only: bool) -> tuple[int, list[float], list[float]]:
    """Merged weights of two training steps, and what two of one stage that holds no adapter say."""
    targets = ("model.layers.1.mlp.up_proj",) if layer_only else ("all-linear",)
    engine = megatron(lora_model(target_modules=targets), sizes=ParallelSizes(pp=2 if layer_only else 1))
    count, merged = [0], LayerAdapters.merged

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return merged(*args)

    LayerAdapters.merged = counted  # type: ignore[method-assign]
    losses, norms = [], []
    for _ in range(2):
        losses.append(engine.forward_backward(small_rows(2), nll)["loss"])
        norms.append(engine.optim_step().grad_norm)
    return count[0], losses, norms


def test_merged_weights_are_not_kept_for_the_backward_pass() -> None:
    ((count, _, _),) = run_ranks(1, merging, False)
    assert count == 2 * 2 * 2 * 4  # steps, passes, layers, weights


def test_a_stage_without_adapters_passes_gradients_on() -> None:
    (first, losses, norms), (last, others, other_norms) = run_ranks(2, merging, True)
    assert (first, last) == (0, 2 * 2)
    assert losses == others
    assert norms == other_norms
    assert losses[1] < losses[0]
    assert all(norm > 0 for norm in norms)


def asks_for_fusion(lora_rank: int) -> tuple[bool, float]:
    section = {"override_transformer_config": {"gradient_accumulation_fusion": True}}
    engine = megatron(random_model(lora_rank=lora_rank), section=section)
    engine.forward_backward(small_rows(), nll)
    return engine.chunks[0].config.gradient_accumulation_fusion, engine.optim_step().grad_norm


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_plain_layers_do_not_fuse_gradients_whatever_is_asked(lora_rank: int) -> None:
    ((fuses, norm),) = run_ranks(1, asks_for_fusion, lora_rank)
    assert not fuses
    assert norm > 0


def half_precision_adapters() -> tuple[Tensor, Tensor, bool]:
    """In bfloat16 the engine computes with exactly the weights that it pushes."""
    section = {"dtype": "bfloat16"}
    engine = megatron(lora_model(), section=section)
    for _ in range(3):
        engine.forward_backward(small_rows(), nll)
        engine.optim_step()
    plain, layout = megatron(section=section), engine.weight_layout()
    held = plain.held.local()
    for name, tensor in engine.local_tensors().items():
        held[name].copy_(tensor)
    ours, theirs = (e.forward(small_rows(), ("log_probs",))["log_probs"] for e in (engine, plain))
    return ours, theirs, layout == plain.weight_layout()


def test_in_half_precision_the_pushed_weights_are_those_it_computes_with() -> None:
    ((ours, theirs, same_layout),) = run_ranks(1, half_precision_adapters)
    assert torch.equal(ours, theirs)
    assert same_layout


def half_precision_head() -> dict[str, float]:
    """A critic in bfloat16, whose head stays in float32: how far the engine's weights are from those it was given."""
    exact = whole(megatron(head="scalar"))
    held = whole(megatron(head="scalar", section={"dtype": "bfloat16"}))
    return {name: float((held[name].float() - tensor).abs().max()) for name, tensor in exact.items()}


def test_masters_are_those_of_their_parameters_whatever_their_type() -> None:
    (apart,) = run_ranks(1, half_precision_head)
    assert max(apart.values()) < 2**-8
