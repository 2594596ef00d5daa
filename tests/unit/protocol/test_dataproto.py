"""DataProto where arbitrary small batches do not reach: settings, large rows, devices, printing."""

import copy
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlsys.protocol import DataProto, DataProtoConfig, object_array, union_numpy_dict, union_tensor_dict
from rlsys.protocol.columns import HUGE_BYTES, deep_equal, join_rows
from rlsys.protocol.rows import fold_batch_dim, unfold_batch_dim
from tests.timing import scaled_s


@pytest.fixture
def _padding_off() -> Iterator[None]:
    yield
    DataProtoConfig.auto_padding = False


@pytest.mark.parametrize("name", ["VERL_AUTO_PADDING", "RLSYS_AUTO_PADDING"])
@pytest.mark.parametrize(("value", "on"), [("TRUE", True), ("true", True), ("1", True), ("0", False), ("", False)])
def test_padding_is_enabled_by_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str, on: bool) -> None:
    monkeypatch.setenv(name, value)
    assert DataProtoConfig.auto_padding is on
    assert DataProto().is_padding_enabled() is on


@pytest.mark.usefixtures("_padding_off")
def test_padding_is_enabled_by_config_or_by_batch() -> None:
    assert not DataProto().is_padding_enabled()
    assert DataProto.from_dict({"x": torch.zeros(3)}, auto_padding=True).is_padding_enabled()
    DataProtoConfig.auto_padding = True
    assert [len(part) for part in DataProto.from_dict({"x": torch.zeros(3)}).chunk(2)] == [2, 1]
    with pytest.raises(AssertionError, match="bool"):
        DataProtoConfig.auto_padding = 1


def test_padding_flag_does_not_change_the_given_meta() -> None:
    meta = {"t": 1}
    DataProto.from_dict({"x": torch.zeros(3)}, meta_info=meta, auto_padding=True)
    assert meta == {"t": 1}


def large(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(2 * HUGE_BYTES // 8).view(64, -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_large_rows_are_taken_and_joined_as_small_ones(dtype: torch.dtype) -> None:
    x = large(dtype)
    data = DataProto.from_dict({"x": x})
    order = torch.randperm(64)
    assert torch.equal(data[order].batch["x"], x[order])
    assert torch.equal(data[[-1, 0, -64]].batch["x"], x[[63, 0, 0]])
    assert torch.equal(data.repeat(2).batch["x"], x.repeat_interleave(2, 0))
    assert torch.equal(DataProto.concat(data.chunk(4)).batch["x"], x)


def test_large_rows_keep_their_gradient() -> None:
    x = large(torch.float32).requires_grad_()
    DataProto.concat(DataProto.from_dict({"x": x}).chunk(2))[[0, 0]].batch["x"].sum().backward()
    assert x.grad is not None
    assert x.grad[:2, 0].tolist() == [2, 0]


def test_large_rows_of_other_dtypes_promote_as_torch_does() -> None:
    parts = [DataProto.from_dict({"x": large(dtype)}) for dtype in (torch.float32, torch.int64)]
    assert DataProto.concat(parts).batch["x"].dtype == torch.float32


@pytest.mark.parametrize("row", [64, -65])
def test_rows_outside_are_refused(row: int) -> None:
    for data in (DataProto.from_dict({"x": large()}), DataProto.from_dict(None, {"n": np.arange(64)})):
        with pytest.raises(IndexError):
            data.select_idxs([0, row])


@pytest.mark.parametrize("mask", [[True], [True] * 3])
def test_masks_of_another_length_are_refused(mask: list[bool]) -> None:
    with pytest.raises(IndexError):
        DataProto.from_dict({"x": torch.zeros(2)})[mask]


def test_object_array_keeps_lists_of_equal_length() -> None:
    column = object_array([[1, 2], [3, 4]])
    assert column.shape == (2,)
    assert column[1] == [3, 4]
    assert object_array(np.ones((2, 3))).shape == (2,)
    assert object_array([]).shape == (0,)


def test_device_of_the_batch_stays() -> None:
    data = DataProto(TensorDict({"x": torch.zeros(4)}, 4, device="cpu"))
    for other in (data[:2], data[[0, 1]], data.repeat(2), DataProto.concat([data, data]), copy.deepcopy(data)):
        assert other.batch is not None
        assert other.batch.device == torch.device("cpu")
    assert DataProto.from_dict({"x": torch.zeros(4)}).batch.device is None


def test_print_size(capsys: pytest.CaptureFixture[str]) -> None:
    DataProto.from_dict({"x": torch.zeros(2**20)}, {"n": np.zeros(2**20)}).print_size("batch")
    assert capsys.readouterr().out == f"batch, Size of tensordict: {2**-8} GB, size of non_tensor_batch: {2**-7} GB\n"


def test_unions_are_in_place_and_all_or_nothing() -> None:
    first = TensorDict({"a": torch.zeros(2)}, 2)
    assert union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, 2)) is first
    with pytest.raises(AssertionError, match="'a' differ"):
        union_tensor_dict(first, TensorDict({"c": torch.ones(2), "a": torch.ones(2)}, 2))
    assert set(first.keys()) == {"a", "b"}
    with pytest.raises(AssertionError, match="batch sizes"):
        union_tensor_dict(first, TensorDict({"c": torch.ones(3)}, 3))
    arrays = {"a": np.array([{"x": float("nan")}])}
    assert union_numpy_dict(arrays, {"a": np.array([{"x": float("nan")}]), "b": np.ones(1)}) is arrays
    with pytest.raises(AssertionError, match="'b' differ"):
        union_numpy_dict(arrays, {"b": np.zeros(1)})


def test_union_shares_and_does_not_write() -> None:
    x = torch.zeros(2)
    data = DataProto.from_dict({"y": torch.ones(2)}).union(DataProto.from_dict({"x": x}))
    assert data.batch["x"].data_ptr() == x.data_ptr()


def test_protocol_needs_no_ray() -> None:
    code = "import sys, rlsys.protocol, rlsys.batching; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled_s(120), check=False).returncode == 0


def test_it_is_shown_by_columns_however_many_rows_it_has() -> None:
    rows = DataProto.from_dict(
        {"responses": torch.zeros(3000, 8, dtype=torch.int64)},
        non_tensors={"uid": np.array([f"{n}" * 50 for n in range(3000)], dtype=object)},
        meta_info={"temperature": 1.0, "global_token_num": list(range(3000))},
    )
    lines = repr(rows).splitlines()
    assert lines[0] == "DataProto of 3000 rows"
    assert lines[1].split() == ["responses", "int64", "(3000,", "8)", "on", "cpu"]
    assert lines[2].split()[:3] == ["uid", "object", "(3000,)"]
    assert lines[3].split() == ["meta_info['temperature']", "1.0"]
    assert lines[4].split()[:2] == ["meta_info['global_token_num']", "[0,"]
    assert len(lines) == 5
    assert max(map(len, lines)) < 140
    assert repr(DataProto()) == "DataProto of 0 rows"


CYCLE: list[object] = [1]
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("a", "b", "is_equal"),
    [
        (1, 1.0, False),
        (True, 1, False),
        (1.5, 1.5, True),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": [float("nan")]}, {"a": [float("nan")]}, True),
        ([1, 2], [1, 3], False),
        ([1], (1,), False),
        (torch.ones(2), np.ones(2, np.float32), False),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), False),
        (np.ones(2), np.ones(2).astype(object), False),
        (np.ones(2), np.ones(1), False),
        (CYCLE, [1, CYCLE], True),
    ],
)
def test_deep_equality(a: object, b: object, is_equal: bool) -> None:
    assert deep_equal(a, b) is deep_equal(b, a) is is_equal


def test_folding_keeps_trailing_dimensions_and_the_device() -> None:
    data = DataProto.from_dict({"x": torch.arange(24).view(4, 3, 2)}, {"name": np.array(list("abcd"), dtype=object)})
    assert data.to("cpu").batch.device == torch.device("cpu")
    folded = fold_batch_dim(data, 2)
    assert (folded.batch["x"].shape, folded.batch.device) == ((2, 2, 3, 2), torch.device("cpu"))
    assert folded.non_tensor_batch["name"].tolist() == [["a", "b"], ["c", "d"]]
    assert torch.equal(unfold_batch_dim(folded).batch["x"], data.batch["x"])


def test_large_rows_are_joined_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(12.0).view(2, 3, 2)
    parts = {"same": [x, x + 20], "types": [x, x.double()], "learnt": [x.clone().requires_grad_(), x]}
    expected = {name: torch.cat(each) for name, each in parts.items()}
    monkeypatch.setattr("rlsys.protocol.columns.HUGE_BYTES", 1)
    for name, each in parts.items():
        joined = join_rows(each)
        assert (joined.dtype, joined.requires_grad) == (expected[name].dtype, name == "learnt")
        assert torch.equal(joined, expected[name])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        join_rows([x, x[:, :2]])


@pytest.mark.parametrize("other", [1, [1, 2], np.array([1, 3])])
def test_entries_that_differ_in_kind_are_conflicts(other: object) -> None:
    rows = {"x": torch.zeros(2)}
    parts = [DataProto.from_dict(rows, meta_info={"size": value}) for value in (np.array([1, 2]), other)]
    for order in (parts, parts[::-1]):
        with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'size'"):
            DataProto.concat(order)
