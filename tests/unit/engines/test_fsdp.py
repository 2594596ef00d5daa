"""What FSDPEngine refuses, and its options that change nothing but memory and time."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from rlsys.config.schema.model import ShardConfig
from rlsys.models.attention import kv_repeats
from rlsys.utils.errors import ConfigError
from tests.engine_gradients import gradients
from tests.ranks import run_ranks
from tests.unit.engines.common import MODEL, nll, random_model, same, small_engine, small_rows, train, whole

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": random_model(use_remove_padding=False), "sp_size": 2}, "use_remove_padding=true"),
    (
        {"model": random_model({**MODEL, "num_attention_heads": 1, "num_key_value_heads": 1}), "sp_size": 2},
        "the model has 1",
    ),
    ({"model": random_model({**MODEL, "model_type": "phi", "attention_dropout": 0.0})}, "bias to its logits"),
    (
        {"model": random_model({**MODEL, "num_key_value_heads": 1}), "shard": ShardConfig(tensor_parallel_size=2)},
        "tensor_parallel_size=2: it does not divide num_key_value_heads=1; set 1",
    ),
    ({"shard": ShardConfig(tensor_parallel_size=2, fsdp_size=1)}, "or tensor_parallel_size=2 it"),
]


def refuse(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        small_engine(**options)
    return str(caught.value)


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_that_would_compute_something_else_are_refused(options: dict[str, Any], message: str) -> None:
    assert all(message in raised for raised in run_ranks(2, refuse, options))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "repeats"), [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (6, 3, 2, 2), (4, 1, 4, 4)]
)
def test_key_value_heads_are_repeated_until_they_divide(heads: int, kv_heads: int, ranks: int, repeats: int) -> None:
    assert kv_repeats(heads, kv_heads, ranks) == repeats
    assert kv_heads * repeats % ranks == 0


def two_steps(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = small_engine(**options)
    for _ in range(2):
        assert train(engine).applied
    return whole(engine)


def test_memory_options_do_not_change_a_digit() -> None:
    (plain, _) = run_ranks(2, two_steps, {})
    for options in (
        {"reshard_after_forward": False},
        {"forward_prefetch": True},
        {"offload_policy": True},
    ):
        for weights in run_ranks(2, two_steps, {"shard": ShardConfig(seed=1, **options)}):
            assert same(plain, weights)


def unknown_output() -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match=r"gives log_probs, entropy, .*, not values"):
        engine.forward(small_rows(), ("values",))


def test_an_output_of_the_other_head_is_refused() -> None:
    run_ranks(1, unknown_output)


def sharded_after_forward() -> bool:
    engine = small_engine()
    engine.forward(small_rows(), ("log_probs",))
    return all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())


def test_nothing_stays_gathered_after_forward() -> None:
    assert all(run_ranks(2, sharded_after_forward))


def bfloat16() -> tuple[torch.dtype, float, set[torch.dtype]]:
    exact, half = small_engine(), small_engine(shard=ShardConfig(seed=1, dtype="bfloat16"))
    difference = whole(exact)
    near = float(
        (
            half.forward(small_rows(), ("log_probs",))["log_probs"]
            - exact.forward(small_rows(), ("log_probs",))["log_probs"]
        )
        .abs()
        .max()
    )
    half.forward_backward(small_rows(), nll)
    dtypes = {gradient.dtype for gradient in gradients(half).values()}
    assert half.optim_step().applied
    assert not same(difference, whole(half))
    return next(iter(whole(half).values())).dtype, near, dtypes


def test_bfloat16_computes_over_float32_masters() -> None:
    ((master, near, gradients),) = run_ranks(1, bfloat16)
    assert master == torch.float32
    assert gradients == {torch.float32}
    assert 1e-6 < near < 0.05


def half_masters() -> tuple[set[torch.dtype], set[str]]:
    engine = small_engine(shard=ShardConfig(dtype="bfloat16", model_dtype="bfloat16"), optim=None)
    return {tensor.dtype for tensor in whole(engine).values()}, set(engine.weight_layout().dtypes.values())


def test_a_frozen_model_can_be_kept_in_bfloat16() -> None:
    assert run_ranks(1, half_masters) == [({torch.bfloat16}, {"bfloat16"})]
