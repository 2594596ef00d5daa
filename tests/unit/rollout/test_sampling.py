"""The sampler against hand-computed distributions, float64 and the chi-square test."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.rollout.sampling.hook import SampleSpec
from rlsys.rollout.sampling.sample import BatchSampling, combine_seeds, row_keys, sample_tokens, signed, uniforms
from rlsys.types import SamplingParams


def how(
    num_rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, seeds: list[int] | None = None
) -> BatchSampling:
    return BatchSampling(
        keys=row_keys(7, seeds or list(range(num_rows))),
        temperature=torch.full((num_rows,), temperature),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64),
        top_k=torch.full((num_rows,), top_k),
        scaled=True,
        any_greedy=temperature == 0,
        any_top_p=top_p < 1,
        max_top_k=top_k,
    )


def splitmix(value: int) -> int:
    """SplitMix64's finaliser in Python integers."""
    mask = (1 << 64) - 1
    value &= mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_uniforms_are_splitmix_of_key_and_position(key: int, position: int) -> None:
    expected = (splitmix(key + position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53
    assert uniforms(torch.tensor([key]), torch.tensor([position])).item() == expected


def test_seeds_differ_by_value_and_order() -> None:
    keys = {combine_seeds(*parts).item() for parts in [(1, 2), (2, 1), (1,), (2,), (0, 1), (1, 0), (-1, 1)]}
    assert len(keys) == 7
    assert combine_seeds(3, torch.tensor([5, 6]))[1] == combine_seeds(3, 6)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic over its degrees of freedom, which is about 1 for a fair sample."""
    expected = probs * counts.sum()
    return (((counts - expected) ** 2 / expected).sum() / (len(probs) - 1)).item()


@pytest.mark.parametrize("vocabulary", [5, 64, 200])
def test_frequencies_are_the_probabilities(vocabulary: int) -> None:
    num = 40_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    drawn = sample_tokens(logits.expand(num, -1), torch.arange(num), how(num, temperature=0.8, seeds=[3] * num))
    counts = torch.bincount(drawn.tokens, minlength=vocabulary).double()
    probs = torch.softmax(logits.double() / 0.8, -1)
    assert chi_square(counts, probs) < 1 + 5 * math.sqrt(2 / (vocabulary - 1))
    torch.testing.assert_close(drawn.full_logprobs.double(), probs.log()[drawn.tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.sampled_logprobs, drawn.full_logprobs, atol=1e-5, rtol=0)


def test_neighbouring_positions_and_seeds_are_uncorrelated() -> None:
    grid = uniforms(row_keys(0, range(400))[:, None], torch.arange(400)[None])
    assert abs(grid.mean() - 0.5) < 0.005
    for a, b in [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])]:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.01


def reference_truncated(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The sampled distribution in float64 by sorting, one row at a time."""
    probs = torch.softmax(logits.double() / temperature, -1)
    if top_k > 0:
        probs[probs < probs.sort(descending=True).values[min(top_k, len(probs)) - 1]] = 0
    order = probs.sort(descending=True).values / probs.sum()
    kept = int((order.cumsum(0) - order < top_p).sum())
    probs[probs / probs.sum() < order[max(kept, 1) - 1]] = 0
    return probs / probs.sum()


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([3, 63, 64, 65, 1000]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([-1, 1, 2, 20, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6, 0.9999]),
    seed=st.integers(0, 10_000),
)
def test_truncation_equals_the_sorted_reference(
    vocabulary: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    positions = torch.arange(4) + seed
    drawn = sample_tokens(logits, positions, how(4, temperature=temperature, top_k=top_k, top_p=top_p))
    for row in range(4):
        probs = reference_truncated(logits[row], temperature, top_k, top_p)
        token = drawn.tokens[row]
        assert probs[token] > 0
        assert abs(probs[token].log() - drawn.sampled_logprobs[row]) < 1e-3
        uniform = uniforms(row_keys(7, [row]), positions[row : row + 1]).item()
        below, above = probs.cumsum(0)[token] - probs[token], probs.cumsum(0)[token]
        assert below - 1e-4 <= uniform <= above + 1e-4


def test_top_p_looks_beyond_the_first_candidates() -> None:
    flat = torch.zeros(1, 5000) + torch.linspace(0, 1e-3, 5000)
    drawn = sample_tokens(flat, torch.zeros(1, dtype=torch.int64), how(1, top_p=0.5))
    assert drawn.sampled_logprobs.item() == pytest.approx(math.log(1 / 2500), abs=1e-2)


def test_greedy_rows_take_the_best_token_among_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    mixed = how(2, temperature=0.0)
    mixed.temperature[1] = 100.0
    seen = {tuple(sample_tokens(logits, torch.full((2,), at), mixed).tokens.tolist()) for at in range(60)}
    assert seen == {(1, 0), (1, 1), (1, 2)}
    drawn = sample_tokens(logits, torch.zeros(2, dtype=torch.int64), mixed)
    assert drawn.full_logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())
    assert drawn.sampled_logprobs[0] == 0


@pytest.mark.parametrize("banned", [None, torch.tensor([[0], [-1], [0], [-1]])])
def test_rows_of_different_parameters_do_not_touch_each_other(banned: torch.Tensor | None) -> None:
    logits, positions = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)), torch.arange(4) + 5
    each = [{"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5, "top_k": 20}]
    alone = [how(4, **settings) for settings in each]
    columns = {
        name: torch.stack([getattr(one, name)[row] for row, one in enumerate(alone)])
        for name in ("keys", "temperature", "top_p", "top_k")
    }
    mixed = BatchSampling(**columns, scaled=True, any_greedy=True, any_top_p=True, max_top_k=20)
    together = sample_tokens(logits, positions, mixed, banned)
    assert together.finite.tolist() == [True] * 4
    for row, one in enumerate(alone):
        drawn = sample_tokens(logits, positions, one, banned)
        assert together.tokens[row] == drawn.tokens[row]
        torch.testing.assert_close(together.full_logprobs[row], drawn.full_logprobs[row])
        torch.testing.assert_close(together.sampled_logprobs[row], drawn.sampled_logprobs[row])


def test_rows_without_probabilities_are_reported() -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [0.0, -math.inf]])
    banned = torch.tensor([[-1, -1], [-1, -1], [0, 0]])
    drawn = sample_tokens(logits, torch.arange(3), how(3), banned)
    assert drawn.finite.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-1, -1),
        (1 << 63, -(1 << 63)),
        ((1 << 63) - 1, (1 << 63) - 1),
        (-(1 << 63) - 1, (1 << 63) - 1),
        ((1 << 65) + 5, 5),
    ],
)
def test_seeds_of_any_size_are_taken_modulo_2_to_the_64(value: int, expected: int) -> None:
    assert signed(value) == expected


def test_banned_tokens_are_never_drawn_and_the_rest_is_renormalised() -> None:
    logits, positions = torch.tensor([[5.0, 1.0, 0.0]]).expand(200, -1), torch.arange(200)
    banned = torch.full((200, 2), -1)
    banned[:100] = torch.tensor([0, 0])
    drawn = sample_tokens(logits, positions, how(200), banned)
    assert 0 not in drawn.tokens[:100].tolist()
    assert 0 in drawn.tokens[100:].tolist()
    probs = torch.softmax(torch.tensor([1.0, 0.0]), -1)
    torch.testing.assert_close(drawn.sampled_logprobs[:100], probs.log()[drawn.tokens[:100] - 1])
    full = torch.log_softmax(logits[0], -1)
    torch.testing.assert_close(drawn.full_logprobs, full[drawn.tokens])
    greedy = sample_tokens(logits, positions, how(200, temperature=0.0), banned)
    assert greedy.tokens.tolist() == [1] * 100 + [0] * 100


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_distribution_are_reported(bad: float) -> None:
    logits = torch.zeros(3, 70)
    logits[1, 69] = bad
    drawn = sample_tokens(logits, torch.zeros(3, dtype=torch.int64), how(3, top_k=5, top_p=0.9))
    assert drawn.finite.tolist() == [True, False, True]
    assert drawn.tokens.max() < 70


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((500, 130), -math.inf)
    logits[:, [3, 64, 129]] = 0.0
    drawn = sample_tokens(logits, torch.arange(500), how(500, seeds=[0] * 500))
    assert set(drawn.tokens.tolist()) == {3, 64, 129}
    assert drawn.finite.all()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(8, seed=(1 << 63) + 5), (5 - (1 << 63), 0x3FF0000000000000, 12, 1)),
        (SamplingParams(8, seed=-3, temperature=0.0), (-3, 0, 12, 1)),
        (SamplingParams(8, seed=7, temperature=0.5, top_k=4), (7, 0x3FE0000000000000, 12, 0)),
        (SamplingParams(8, seed=7, top_p=0.9), (7, 0x3FF0000000000000, 12, 0)),
    ],
)
def test_a_request_is_four_words_for_the_kernel(params: SamplingParams, words: tuple[int, ...]) -> None:
    assert SampleSpec(1, 12, params).words == words
