"""Draws on a GPU: those of the CPU, the same in any batch, and noted without keeping the device waiting."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.rollout.sampling.hook import RowSampler, SampleSpec
from rlsys.rollout.sampling.log import by_request
from rlsys.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PLAIN = ((0.7, 1.0, -1, 0), (1.0, 1.0, -1, 0), (0.0, 1.0, -1, 0))
KINDS = (*PLAIN, (0.7, 0.8, -1, 0), (1.0, 1.0, 40, 0), (1.0, 1.0, -1, 9))
"""Temperature, top_p, top_k and min_new_tokens; the kernel draws the plain ones."""
STEPS = 3


def rows_of(num: int, kinds: tuple[tuple[float, float, int, int], ...] = KINDS) -> list[SampleSpec]:
    params = [SamplingParams(1, *kinds[n % len(kinds)], seed=77 * n) for n in range(num)]
    return [SampleSpec(n, 5 + n, one, (1, 2)) for n, one in enumerate(params)]


def drawn(rows: list[SampleSpec], steps: list[Tensor], device: str) -> list[np.ndarray]:
    """What every row draws in these steps (N, V); each time the token must win the argmax, but for NaN."""
    sampler = RowSampler(3, torch.device(device))
    sampler.set_rows(rows)
    taken = []
    for step, logits in enumerate(steps):
        forced = logits.to(device, copy=True)
        sampler.force(forced, torch.tensor([row.prompt_length + step for row in rows], device=device))
        taken.append(forced.argmax(-1).tolist())
    if device == "cuda":
        torch.cuda.synchronize()
    answers = by_request(*sampler.log.take([row.number for row in rows]))
    for answer, tokens in zip(answers, zip(*taken, strict=True), strict=True):
        assert answer[:, 0].tolist() == list(tokens) or not answer[:, 3].all()
    return answers


def apart(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The largest difference of log-probabilities."""
    return float(np.abs(np.concatenate(first) - np.concatenate(second))[:, 1:3].max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [7, 1000, 49152, 151936])
def test_a_gpu_draws_what_a_cpu_draws(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    steps = [(torch.randn(60, size) * 4).to(dtype) for _ in range(STEPS)]
    steps[0][:, 0] = -torch.inf
    cpu, cuda = drawn(rows_of(60), steps, "cpu"), drawn(rows_of(60), steps, "cuda")
    assert [a[:, 0].tolist() for a in cpu] == [a[:, 0].tolist() for a in cuda]
    assert apart(cpu, cuda) < 5e-5  # a CPU's float32 sum over 150,000 tokens is off by 2e-5
    assert all(answer[:, 3].all() for answer in cuda)


def test_log_probabilities_are_those_of_the_full_distribution() -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(60, 151936) * 4, rows_of(60, PLAIN)
    heat = torch.tensor([row.params.temperature or 1.0 for row in rows], dtype=torch.float64)
    expected = (logits.double() / heat[:, None]).log_softmax(-1)
    for at, answer in enumerate(drawn(rows, [logits], "cuda")):
        assert answer[0, 1] == pytest.approx(float(expected[at, int(answer[0, 0])]), abs=2e-6)


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(24, 49152, device="cuda") * 4 for _ in range(STEPS)]
    plain = rows_of(24, PLAIN)
    mixed = [row if at % 2 else other for at, (row, other) in enumerate(zip(plain, rows_of(24), strict=True))]
    together, among_others = drawn(plain, steps, "cuda"), drawn(mixed, steps, "cuda")
    for at in range(1, 24, 2):
        [alone] = drawn([plain[at]], [step[at : at + 1] for step in steps], "cuda")
        assert alone.tolist() == together[at].tolist() == among_others[at].tolist()


def test_non_finite_logits_are_reported() -> None:
    logits = torch.randn(9, 1000)
    logits[2, 3], logits[5] = torch.nan, -torch.inf
    samples = drawn(rows_of(9, KINDS[:2]), [logits.clone(), logits], "cuda")
    assert [bool(answer[:, 3].all()) for answer in samples] == [at not in (2, 5) for at in range(9)]


def test_a_step_begun_ahead_ignores_requests_that_have_ended() -> None:
    """A step whose copy waits behind other work counts for those who draw on."""
    rows, device = rows_of(4, KINDS[:1]), torch.device("cuda")
    sampler = RowSampler(3, device)
    sampler.set_rows(rows)
    logits = torch.randn(4, 1000, device=device)
    at = torch.tensor([row.prompt_length for row in rows], device=device)
    sampler.force(logits.clone(), at)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    sampler.force(logits.clone(), at + 1)
    counts, _ = sampler.log.take([0, 1])
    assert counts.tolist() == [1, 1]
    torch.cuda.synchronize()
    assert sampler.log.take([0, 1, 2, 3])[0].tolist() == [0, 0, 2, 2]
