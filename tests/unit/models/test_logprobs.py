"""Chunked token statistics against float64 autograd over all logits, and their memory."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.models.logprobs import VocabularyPart, log_prob_slope, moments_of, token_stats
from tests.ranks import run_ranks

OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float | None = None
) -> dict[str, Tensor]:
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    scores = torch.log_softmax(logits / temperature, dim=-1)
    probs = scores.exp()
    picked = scores.gather(1, targets[:, None])[:, 0]
    return {"log_probs": picked, "entropy": -(probs * scores).sum(-1), "sum_pi_squared": (probs**2).sum(-1)}


def case(num: int, hidden_size: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, hidden_size, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocab, hidden_size, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, vocab, (num,), generator=draw)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


@given(
    num=st.integers(0, 9),
    vocab=st.integers(2, 17),
    chunk=st.integers(1, 60),
    temperature=st.floats(0.2, 3.0),
    seed=st.integers(0, 999),
    wanted=st.sets(st.sampled_from(OUTPUTS[1:])),
    softcap=st.sampled_from([None, 0.5, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_unchunked_ones(
    num: int, vocab: int, chunk: int, temperature: float, seed: int, wanted: set[str], softcap: float | None
) -> None:
    hidden, weight, targets = case(num, 4, vocab, seed)
    names = ("log_probs", *sorted(wanted))
    options = {"temperature": temperature, "softcap": softcap}
    stats = token_stats(hidden, weight, targets, outputs=names, chunk_elements=chunk, **options)
    expected = plain(hidden, weight, targets, **options)
    assert set(stats) == set(names)
    for name in names:
        torch.testing.assert_close(stats[name], expected[name], rtol=1e-9, atol=1e-12)
    factors = {name: torch.randn(num, dtype=torch.float64) for name in names}
    for results in (stats, expected):
        hidden.grad = weight.grad = None
        torch.stack([(results[name] * factors[name]).sum() for name in names]).sum().backward()
        results["d_hidden"], results["d_weight"] = hidden.grad, weight.grad
    torch.testing.assert_close(stats["d_hidden"], expected["d_hidden"], rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(stats["d_weight"], expected["d_weight"], rtol=1e-8, atol=1e-11)


@given(num=st.integers(0, 6), vocab=st.integers(3, 17), chunk=st.integers(1, 60), named=st.booleans())
@settings(max_examples=40, deadline=None)
def test_log_probs_of_several_tokens_and_their_gradients(num: int, vocab: int, chunk: int, named: bool) -> None:
    hidden, weight, targets = case(num, 4, vocab, seed=vocab + num)
    scores = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)
    ids = torch.randint(0, vocab, (num, 3)) if named else scores.topk(3).indices
    which = {"topk_ids": ids} if named else {"topk": 3}
    wanted = ("log_probs", "entropy", "topk_log_probs")
    stats = token_stats(hidden, weight, targets, temperature=0.7, outputs=wanted, chunk_elements=chunk, **which)
    assert torch.equal(stats["topk_ids"].long(), ids)
    picked = torch.cat([stats["log_probs"][:, None], stats["topk_log_probs"]], dim=1)
    expected = scores.gather(1, torch.cat([targets[:, None], ids], dim=1))
    torch.testing.assert_close(picked, expected)
    factors = torch.randn(num, 4, dtype=torch.float64)
    grads = (torch.autograd.grad((values * factors).sum(), (hidden, weight)) for values in (picked, expected))
    for grad, other in zip(*grads, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("output", OUTPUTS)
def test_one_output_alone_has_its_own_gradient(output: str) -> None:
    hidden, weight, targets = case(6, 5, 11, seed=1)
    grads = []
    chunked = token_stats(hidden, weight, targets, outputs=OUTPUTS, chunk_elements=22)
    for results in (chunked, plain(hidden, weight, targets, 1.0)):
        grads.append(torch.autograd.grad(results[output].sum(), (hidden, weight)))
    for grad, expected in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected)


def test_results_are_float32_and_near_float64_when_the_model_is_bfloat16() -> None:
    hidden, weight, targets = case(20, 16, 50, seed=2, dtype=torch.bfloat16)
    stats = token_stats(hidden, weight, targets, outputs=OUTPUTS)
    expected = plain(hidden.double(), weight.double(), targets, 1.0)
    for name in OUTPUTS:
        assert stats[name].dtype == torch.float32
        torch.testing.assert_close(stats[name].double(), expected[name], rtol=0.02, atol=0.05)
    stats["log_probs"].sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_the_gradient_of_a_bfloat16_head_adds_up_in_float32() -> None:
    """One row a chunk: sums in bfloat16 would be off by 1.2 %."""
    hidden, weight, targets = case(512, 16, 50, seed=2, dtype=torch.bfloat16)
    token_stats(hidden, weight, targets, chunk_elements=50)["log_probs"].sum().backward()
    wide = weight.detach().double().requires_grad_()
    plain(hidden.detach().double(), wide, targets, 1.0)["log_probs"].sum().backward()
    assert (weight.grad.double() - wide.grad).norm() < 0.004 * wide.grad.norm()


def test_frozen_layers_before_the_head_get_no_gradient() -> None:
    hidden, weight, targets = case(3, 4, 7, seed=3)
    token_stats(hidden.detach(), weight, targets)["log_probs"].sum().backward()
    (expected,) = torch.autograd.grad(plain(hidden, weight, targets, 1.0)["log_probs"].sum(), weight)
    torch.testing.assert_close(weight.grad, expected)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = case(3, 4, 7, seed=3)
    token_stats(hidden, weight.detach(), targets)["log_probs"].sum().backward()
    assert hidden.grad is not None


def test_what_is_compiled_on_a_gpu_has_the_moments_and_the_slope_of_autograd() -> None:
    scores, _, column = case(5, 11, 11, seed=6)
    d_rows = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    log_norm, mean, squares = moments_of(scores, True)
    probs = torch.softmax(scores, dim=-1)
    torch.testing.assert_close(mean, (probs * scores).sum(-1))
    torch.testing.assert_close(squares, probs.square().sum(-1))
    (alone,) = moments_of(scores, False)
    assert torch.equal(alone, log_norm)
    picked = torch.log_softmax(scores, dim=-1).gather(1, column[:, None])[:, 0]
    (expected,) = torch.autograd.grad((d_rows * picked).sum(), scores)
    slope = log_prob_slope(scores.detach(), log_norm.detach(), column, d_rows, d_rows, torch.float32)
    torch.testing.assert_close(slope, expected.float())
    others = log_prob_slope(scores.detach(), log_norm.detach(), column, d_rows, 0 * d_rows, torch.float64)
    torch.testing.assert_close(others, -d_rows[:, None] * probs.detach())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_stats(*case(1, 2, 3, seed=4), temperature=temperature)


def test_never_more_logits_than_a_chunk() -> None:
    num, vocab, chunk = 64, 1000, 8000
    hidden, weight, targets = case(num, 4, vocab, seed=5, dtype=torch.float32)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            largest = max(largest, result.numel() if isinstance(result, Tensor) else 0)
            return result

    with Watch():
        results = token_stats(hidden, weight, targets, outputs=OUTPUTS, chunk_elements=chunk)
        torch.stack([value.sum() for value in results.values()]).sum().backward()
    assert largest == chunk < num * vocab


def by_part(starts: list[int]) -> dict[str, Tensor]:
    """Values, and gradients as a sum over the ranks, of a vocabulary that begins at `starts` on each rank."""
    rank = dist.get_rank()
    hidden, weight, targets = case(7, 4, 13, seed=3)
    begin, end = starts[rank], [*starts, 13][rank + 1]
    own = weight.detach()[begin:end].clone().requires_grad_()
    part = VocabularyPart(begin, dist.group.WORLD)
    wanted = (*OUTPUTS, "topk_log_probs")
    stats = token_stats(hidden, own, targets, temperature=0.7, outputs=wanted, chunk_elements=10, part=part, topk=8)
    torch.stack([(number + 0.5) * stats[name].sum() for number, name in enumerate(OUTPUTS)]).sum().backward()
    dist.all_reduce(hidden.grad)
    return {**{name: value.detach() for name, value in stats.items()}, "d_hidden": hidden.grad, "d_weight": own.grad}


@pytest.mark.parametrize("starts", [[0, 6], [0, 0, 9], [0, 5, 13]])
def test_a_vocabulary_in_parts_gives_what_the_whole_gives(starts: list[int]) -> None:
    hidden, weight, targets = case(7, 4, 13, seed=3)
    expected = plain(hidden, weight, targets, 0.7)
    torch.stack([(number + 0.5) * expected[name].sum() for number, name in enumerate(OUTPUTS)]).sum().backward()
    likely = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1).topk(8)
    expected |= {"topk_log_probs": likely.values, "topk_ids": likely.indices.double()}
    ranks = run_ranks(len(starts), by_part, starts)
    for rank in ranks:
        for name in expected:
            torch.testing.assert_close(rank[name], expected[name].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank["d_hidden"], hidden.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank["d_weight"] for rank in ranks]), weight.grad, rtol=1e-10, atol=1e-12)
