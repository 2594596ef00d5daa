"""Group filters, the overlong penalty, resampling, and AReaL's normalisation against loops over groups."""

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.filters import informative_groups, overlong_penalty, pf_ppo_rows
from rlsys.algorithms.groups import normalize, num_groups
from rlsys.config.schema.algorithm import NormConfig, OverlongConfig, PFPPOConfig


def test_groups_with_equal_rewards_are_dropped_exactly() -> None:
    """0.1 three times has a float deviation that is not 0; the spread is."""
    metric = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 5.0], dtype=torch.float64)
    ids = torch.tensor([0, 1, 0, 1, 0, 2])
    assert informative_groups(metric, ids).tolist() == [False, True, False, True, False, True]


def test_overlong_penalty_by_hand() -> None:
    lengths = torch.tensor([0, 80, 90, 100, 110])
    got = overlong_penalty(lengths, OverlongConfig(len=20, penalty_factor=2.0), max_length=100)
    assert got.tolist() == pytest.approx([0, 0, -1, -2, -3])


def test_pf_ppo_resamples_by_reward() -> None:
    scores = torch.tensor([0.0, 1.0, 3.0, 1.0])
    power = PFPPOConfig()
    rows = pf_ppo_rows(scores.repeat(500), power, seed=1)
    drawn = torch.bincount(rows % 4, minlength=4) / len(rows)
    assert drawn.tolist() == pytest.approx([0, 1 / 11, 9 / 11, 1 / 11], abs=0.03)
    assert torch.equal(rows, pf_ppo_rows(scores.repeat(500), power, seed=1))
    size = PFPPOConfig(weight_pow=1.0)
    assert torch.equal(pf_ppo_rows(-scores, size, seed=1), pf_ppo_rows(scores, size, seed=1))
    extremes = pf_ppo_rows(scores.repeat(500), PFPPOConfig(reweight_method="max_min")) % 4
    assert (torch.bincount(extremes, minlength=4) / 2000).tolist() == pytest.approx([0.5, 0, 0.5, 0], abs=0.04)
    best = (pf_ppo_rows(scores.repeat(500), PFPPOConfig(reweight_method="max_random")) % 4 == 2).double().mean()
    assert best.item() == pytest.approx(4 / 7, abs=0.04)
    with pytest.raises(ValueError, match="reweight_method"):
        PFPPOConfig(reweight_method="max")  # pyrefly: ignore[bad-argument-type]


def loop(values: Tensor, mask: Tensor, ids: Tensor, settings: NormConfig) -> Tensor:
    """AReaL's normalisation, one group at a time."""
    values, counted = values.double(), mask.bool()
    out = torch.zeros_like(values)
    everyone = [torch.arange(len(ids))]
    groups = [(ids == g).nonzero()[:, 0] for g in ids.unique()]
    mean = torch.zeros_like(values)
    for rows in [] if settings.mean_level is None else everyone if settings.mean_level == "batch" else groups:
        for i in rows:
            for t in range(values.shape[1]):
                pool = values[rows][counted[rows]]
                if settings.mean_leave1out:
                    mean[i, t] = (pool.sum() - values[i, t]) / (len(pool) - 1) if len(pool) > 1 else 0
                elif len(pool):
                    mean[i, t] = pool.mean()
    centred = (values - mean) * counted
    if settings.std_level is None:
        return centred
    for rows in everyone if settings.std_level == "batch" else groups:
        pool = centred[rows][counted[rows]]
        degrees = len(pool) - int(settings.std_unbiased)
        std = (pool.square().sum() / degrees).sqrt() if degrees > 0 else torch.tensor(1.0)
        out[rows] = centred[rows] / (std + settings.eps)
    return out


@pytest.mark.parametrize("mean_level", [None, "batch", "group"])
@pytest.mark.parametrize("std_level", [None, "batch", "group"])
@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
def test_normalisation_equals_a_loop(
    mean_level: str | None, std_level: str | None, leave1out: bool, unbiased: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.tensor([0, 1, 0, 2, 1, 0])
    values = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=draw) > 0.3
    settings = NormConfig(
        mean_level=mean_level,  # pyrefly: ignore[bad-argument-type]
        std_level=std_level,  # pyrefly: ignore[bad-argument-type]
        mean_leave1out=leave1out,
        std_unbiased=unbiased,
    )
    got = normalize(values, settings, group_ids=ids, mask=mask)
    torch.testing.assert_close(got, loop(values, mask, ids, settings))
    scores = values[:, 0]
    got = normalize(scores, settings, group_ids=ids)
    expected = loop(scores.unsqueeze(1), torch.ones(6, 1), ids, settings)[:, 0]
    torch.testing.assert_close(got, expected)


def test_a_group_without_tokens_is_0_and_not_nan() -> None:
    values, mask, ids = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[1], [1], [0]]), torch.tensor([0, 0, 1])
    for leave1out, lead in ((False, 1), (True, 2)):
        settings = NormConfig(mean_level="group", std_level=None, mean_leave1out=leave1out)
        assert normalize(values, settings, group_ids=ids, mask=mask).tolist() == [[-lead], [lead], [0]]


def test_an_empty_batch_has_no_groups() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert num_groups(none) == 0
    assert informative_groups(torch.empty(0), none).tolist() == []


def test_a_group_of_one_is_left_in_peace() -> None:
    group = NormConfig(mean_level="group", std_level="group", mean_leave1out=True)
    assert normalize(torch.tensor([3.0]), group, group_ids=torch.tensor([0])).item() == pytest.approx(3, rel=1e-4)
    plain = NormConfig(mean_level="group", std_level="group")
    assert normalize(torch.tensor([3.0]), plain, group_ids=torch.tensor([0])).item() == 0
    with pytest.raises(ValueError, match="std_level"):
        NormConfig(std_level="row")  # pyrefly: ignore[bad-argument-type]
