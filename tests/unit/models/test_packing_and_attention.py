"""Finding real tokens, laying them out, and exact attention within each sequence of a pack."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlsys.models.attention import Packing, packed_attention
from rlsys.models.packing import (
    empty_rows,
    left_aligned,
    padded_each,
    padded_to,
    sequence_ends,
    token_rows,
)
from rlsys.utils.errors import ConfigError

CPU = torch.device("cpu")


def rows_of(prompts: list[int], responses: list[int], prompt_width: int, response_width: int) -> dict[str, Tensor]:
    columns = torch.arange(prompt_width + response_width)
    lengths = torch.tensor(prompts)[:, None], torch.tensor(responses)[:, None]
    mask = (columns >= prompt_width - lengths[0]) & (columns < prompt_width + lengths[1])
    ids = (1 + torch.arange(mask.numel()).view(mask.shape)) * mask
    return {
        "input_ids": ids,
        "responses": ids[:, prompt_width:],
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
    }


@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5),
    spare=st.tuples(st.integers(0, 2), st.integers(1, 3)),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_found_and_put_back(lengths: list[tuple[int, int]], spare: tuple[int, int]) -> None:
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    width = max(prompts) + spare[0], max(responses) + spare[1]
    batch = rows_of(prompts, responses, *width)
    rows = token_rows(batch)
    assert rows.lengths == tuple(p + r for p, r in lengths)
    assert torch.equal(rows.scatter(rows.targets), batch["responses"])
    assert torch.equal(rows.at, rows.before + 1)
    sequences = rows.token_ids.split(rows.lengths)
    for row, (prompt, response) in enumerate(lengths):
        assert torch.equal(sequences[row], batch["input_ids"][row][batch["attention_mask"][row].bool()])
        assert torch.equal(rows.position_ids.split(rows.lengths)[row], torch.arange(prompt + response))
    ids, positions, mask, places = left_aligned(rows)
    assert torch.equal(ids.flatten()[places], rows.token_ids)
    assert torch.equal(positions.flatten()[places], rows.position_ids)
    assert torch.equal(mask.sum(1), torch.tensor(rows.lengths))


def test_a_response_without_a_prompt_is_refused() -> None:
    for num in (2, 3):
        with pytest.raises(ValueError, match=r"rows \[1\] have a response but an empty prompt"):
            token_rows(rows_of([2, 0], [1, num], 2, 3))


def test_an_empty_row_is_left_out_and_the_teachers_tokens_go_with_the_targets() -> None:
    batch = rows_of([2, 0, 1], [1, 0, 2], 2, 3)
    batch["teacher_ids"] = torch.arange(3 * 3 * 2, dtype=torch.int32).view(3, 3, 2)
    rows = token_rows(batch)
    assert rows.lengths == (3, 3)
    assert rows.topk_ids is not None
    assert rows.topk_ids.tolist() == [[0, 1], [12, 13], [14, 15]]


def test_ends_of_sequences_begin_with_0() -> None:
    ends = sequence_ends([3, 2], CPU)
    assert (ends.tolist(), ends.dtype) == ([0, 3, 5], torch.int32)


def test_rows_of_nothing_are_an_idle_pack_of_their_shape() -> None:
    rows = token_rows(rows_of([0, 0], [0, 0], 2, 3))
    assert (rows.shape, rows.num_tokens, len(rows.targets)) == ((2, 3), 2, 0)
    assert [x.tolist() for x in (rows.token_ids, rows.position_ids, rows.columns)] == [[0, 0], [0, 1], [-1, -1]]
    assert torch.equal(rows.scatter(torch.zeros(0)), torch.zeros(2, 3))


def test_padding_is_a_sequence_of_its_own() -> None:
    rows = padded_to(token_rows(rows_of([2, 3], [1, 2], 3, 2)), 12)
    assert rows.lengths == (3, 5, 4)
    assert torch.equal(rows.position_ids[-4:], torch.arange(4))
    assert padded_to(empty_rows(CPU), 2).lengths == (2,)
    row = token_rows(rows_of([2], [1], 2, 1))
    assert padded_to(row, 4).lengths == (3, 1)
    long = padded_to(row, 8)
    assert long.lengths == (3, 3, 2)
    assert long.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert long.columns.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_padding_of_each_sequence_moves_what_points_at_tokens() -> None:
    rows = token_rows(rows_of([2, 3], [1, 2], 3, 2))
    padded = padded_each(rows, 4)
    assert padded.lengths == (4, 8)
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    assert padded.token_ids.tolist() == [*rows.token_ids[:3].tolist(), 0, *rows.token_ids[3:].tolist(), 0, 0, 0]
    assert torch.equal(padded.token_ids[padded.at], rows.targets)
    assert torch.equal(padded.at, padded.before + 1)
    assert padded.columns[padded.columns >= 0].tolist() == rows.columns.tolist()
    assert (padded.columns == -1).nonzero()[:, 0].tolist() == [3, 9, 10, 11]
    assert padded_each(padded, 4) is padded


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """(1, tokens, heads, dim) in float64, with loops."""
    outs, start = [], 0
    groups = query.shape[1] // key.shape[1]
    for length in lengths:
        q, k, v = (x[0, :, start : start + length].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        for i in range(length):
            for j in range(length):
                if j > i or (window is not None and i - j >= window):
                    scores[:, i, j] = -math.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], dim=-1)
        outs.append(torch.softmax(scores, dim=-1)[..., :length] @ v)
        start += length
    return torch.cat(outs, dim=1).transpose(0, 1)[None]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 2.0, 5.0])], ids=["plain", "sinks"])
def test_packed_attention_is_causal_within_each_sequence(
    kv_heads: int, window: int | None, sinks: Tensor | None
) -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 7, 2]
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, kv_heads, kv_heads))
    packing = Packing(lengths, CPU)
    options = {"sliding_window": window, "s_aux": sinks}
    out, weights = packed_attention(nn.Module(), query, key, value, None, packing=packing, **options)
    assert weights is None
    expected = one_by_one(query, key, value, lengths, window, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_sequence_has_the_same_digits_whatever_it_is_packed_with() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 9, 8)
    alone, _ = packed_attention(nn.Module(), x, x, x, None, packing=Packing([9], CPU))
    both = torch.cat([torch.randn(1, 2, 5, 8), x, torch.randn(1, 2, 3, 8)], dim=2)
    packed, _ = packed_attention(nn.Module(), both, both, both, None, packing=Packing([5, 9, 3], CPU))
    assert torch.equal(packed[:, 5:14], alone)


@pytest.mark.parametrize("odd", [{"softcap": 30.0}, {"packing": None}, {"dropout": 0.1}])
def test_what_packed_attention_does_not_do_it_refuses(odd: dict[str, object]) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ConfigError, match=next(iter(odd))):
        packed_attention(nn.Module(), x, x, x, None, **{"packing": Packing([4], CPU), **odd})
