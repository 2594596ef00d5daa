"""Cutting a pack for context parallelism, and putting the parts together again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.models.context import own_among, own_spans, own_tokens, pack_multiple, whole_order
from rlsys.models.packing import padded_each, padded_to, token_rows
from tests.unit.models.test_packing_and_attention import rows_of

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths of a pack's sequences, and how many ranks share them."""
    size = draw(SIZES)
    return [2 * size * n for n in draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))], size


def test_two_ranks_hold_the_outer_and_the_inner_halves() -> None:
    """The example of Transformer Engine's documentation: sequences of 8 and 4 tokens on two ranks."""
    assert own_tokens([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert own_tokens([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    assert own_tokens([3, 2], 0, 1).tolist() == [0, 1, 2, 3, 4]


@given(packs())
@settings(deadline=None)
def test_the_parts_make_up_the_pack(pack: tuple[list[int], int]) -> None:
    lengths, size = pack
    whole = torch.randint(0, 1000, (sum(lengths),))
    parts = [whole[own_tokens(lengths, rank, size)] for rank in range(size)]
    assert {len(part) for part in parts} == {len(whole) // size}
    assert torch.equal(torch.cat(parts)[whole_order(lengths, size)], whole)


@given(packs())
@settings(deadline=None)
def test_causal_attention_is_as_much_work_on_every_rank(pack: tuple[list[int], int]) -> None:
    lengths, size = pack
    pairs = {
        sum(at - span.first + 1 for span in own_spans(lengths, rank, size) for at in range(span.start, span.stop))
        for rank in range(size)
    }
    assert pairs == {sum(n * (n + 1) // 2 for n in lengths) // size}


@given(packs(), st.data())
@settings(deadline=None)
def test_every_wanted_token_is_found_on_one_rank(pack: tuple[list[int], int], data: st.DataObject) -> None:
    lengths, size = pack
    wanted = data.draw(st.lists(st.integers(0, sum(lengths) - 1), unique=True))
    places = torch.tensor(wanted, dtype=torch.long)
    seen = torch.zeros(len(wanted), dtype=torch.long)
    for rank in range(size):
        numbers, here = own_among(places, lengths, rank, size)
        assert torch.equal(own_tokens(lengths, rank, size)[here], places[numbers])
        seen[numbers] += 1
    assert (seen == 1).all()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4),
    size=st.sampled_from([2, 3, 4]),
    each=st.sampled_from([1, 2, 3, 16]),
    more=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_padded_packs_can_be_shared_and_predict_what_they_did(
    lengths: list[tuple[int, int]], size: int, each: int, more: int
) -> None:
    plain = token_rows(rows_of([p for p, _ in lengths], [r for _, r in lengths], 4, 5))
    rows, multiple = padded_each(plain, 2 * size), pack_multiple(each, size)
    rows = padded_to(rows, -(-(rows.num_tokens + more) // multiple) * multiple)
    for rank in range(size):
        assert len(own_tokens(rows.lengths, rank, size)) % each == 0
    assert torch.equal(rows.token_ids[rows.at], plain.targets)
    assert torch.equal(rows.token_ids[rows.before], plain.token_ids[plain.before])
    for before, padded in zip(plain.token_ids.split(plain.lengths), rows.token_ids.split(rows.lengths), strict=False):
        assert torch.equal(padded[: len(before)], before)
        assert not padded[len(before) :].any()
    assert sum(rows.lengths) == rows.num_tokens == len(rows.position_ids)


def test_a_length_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks cannot share a row of 6 tokens: pad it to a multiple of 4"):
        list(own_spans([8, 6], 0, 2))


def test_one_rank_needs_no_halves() -> None:
    assert [pack_multiple(*pair) for pair in [(1, 1), (3, 1), (1, 2), (2, 2), (3, 2), (16, 4)]] == [1, 3, 4, 4, 12, 64]
