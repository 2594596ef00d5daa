"""MFU by hand: a small model, two rows, a fake clock."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from rlsys.models.flops import MfuMeter, peak_flops
from rlsys.protocol import DataProto
from rlsys.utils.gpus import data_sheet_flops

MODEL = LlamaConfig(
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=24,
    vocab_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# A block multiplies each token by 2*16*16 (q, o) + 2*16*8 (k, v) + 3*16*24 (MLP) = 1920 weights.
# Rows of 2 + 3 and 3 + 1 tokens: 9 tokens; 15 + 10 = 25 pairs of a token and one it sees, 4 * 16 FLOPs each.
BLOCKS = 2 * (2 * 9 * 1920 + 25 * 4 * 16)
HEAD = 2 * (3 + 1) * 16 * 40


@pytest.fixture
def rows() -> DataProto:
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]])
    return DataProto.from_dict({"attention_mask": mask, "responses": torch.zeros(2, 4, dtype=torch.long)})


def mfu(rows: DataProto, *, model: object = MODEL, lm_head: bool = True, epochs: int | None = None) -> dict[str, float]:
    """MFU of work that takes 2 s on a device of 1e5 FLOP/s."""
    ticks = iter([10.0, 12.0])
    with MfuMeter(model, 1e5, lm_head, clock=lambda: next(ticks))("x", rows, epochs=epochs) as used:
        assert used == {}
    return used


def test_mfu_by_hand(rows: DataProto) -> None:
    assert mfu(rows) == {"perf/mfu/x": pytest.approx((72_320 + 5_120) / 2e5)}
    assert (BLOCKS, HEAD) == (72_320, 5_120)
    assert mfu(rows, epochs=2) == {"perf/mfu/x": pytest.approx(6 * 77_440 / 2e5)}
    assert mfu(rows, lm_head=False, epochs=1) == {"perf/mfu/x": pytest.approx(3 * 72_320 / 2e5)}


def test_a_model_whose_flops_are_unknown_still_trains(rows: DataProto) -> None:
    assert mfu(rows, model=SimpleNamespace(n_embd=16)) == {}


def test_the_name_with_most_words_in_common_says_what_a_device_can() -> None:
    whole, card = data_sheet_flops("NVIDIA H100 80GB HBM3"), data_sheet_flops("NVIDIA H100 PCIe")
    assert whole
    assert card
    assert card < whole
    assert data_sheet_flops("NVIDIA H20") != data_sheet_flops("NVIDIA H200")
    assert data_sheet_flops("NVIDIA A100-SXM4-80GB") == data_sheet_flops("a100")
    assert data_sheet_flops("NVIDIA GTX 1080") is None


def test_the_cpu_is_measured_once() -> None:
    assert 1e8 < peak_flops(torch.device("cpu")) == peak_flops(torch.device("cpu")) < 1e13
