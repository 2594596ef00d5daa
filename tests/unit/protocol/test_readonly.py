"""Received tensors compute like any other and refuse every way of writing to them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlsys.protocol import DataProto, ReadOnlyError
from rlsys.protocol.readonly import is_readonly, readonly

VALUES = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]


@pytest.fixture
def source() -> torch.Tensor:
    return torch.tensor(VALUES)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "+=": lambda x: x.__iadd__(1),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "setitem mask": lambda x: x.__setitem__(x > 3, 1.0),
    "setitem of a row": lambda x: x[1].__setitem__(0, 1.0),
    "fill_ of a slice": lambda x: x[1:].fill_(0),
    "zero_ of a transpose": lambda x: x.T.zero_(),
    "zero_ of a view": lambda x: x.view(-1)[::2].zero_(),
    "zero_ of a reinterpretation": lambda x: x.view(torch.int32).zero_(),
    "zero_ of a chunk": lambda x: x.chunk(2)[1].zero_(),
    "zero_ of an unsafe chunk": lambda x: x.unsafe_chunk(2)[1].zero_(),
    "zero_ of an unbound row": lambda x: x.unbind()[0].zero_(),
    "zero_ while iterating": lambda x: [row.zero_() for row in x],
    "zero_ of detach": lambda x: x.detach().zero_(),
    "zero_ of data": lambda x: x.data.zero_(),
    "set data": lambda x: setattr(x, "data", torch.zeros(4, 3)),
    "zero_ of contiguous": lambda x: x.contiguous().zero_(),
    "zero_ of to": lambda x: x.to("cpu", torch.float32).zero_(),
    "zero_ of expand": lambda x: x[None].expand(2, 4, 3).zero_(),
    "zero_ of diagonal": lambda x: x.diagonal().zero_(),
    "zero_ as plain subclass": lambda x: x.as_subclass(torch.Tensor).zero_(),
    "zero_ as parameter": lambda x: torch.nn.Parameter(x, requires_grad=False).zero_(),
    "copy_": lambda x: x.copy_(torch.ones(4, 3)),
    "out=": lambda x: torch.add(torch.ones(4, 3), 1, out=x),
    "out= of two": lambda x: torch.sort(torch.ones(4, 3), out=(x, torch.zeros(4, 3, dtype=torch.int64))),
    "relu inplace": lambda x: torch.nn.functional.relu(x, inplace=True),
    "dropout inplace": lambda x: torch.nn.functional.dropout(x, 0.5, inplace=True),
    "clamp_": lambda x: torch.clamp_(x, 0, 1),
    "masked_fill_": lambda x: x.masked_fill_(x > 1, 0),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), 1.0),
    "normal_": lambda x: x.normal_(),
    "init": lambda x: torch.nn.init.zeros_(x),
    "resize_": lambda x: x.resize_(2, 2),
    "set_": lambda x: x.set_(torch.zeros(3)),
    "foreach": lambda x: torch._foreach_add_([torch.zeros(2), x], 1.0),
    "apply_": lambda x: x.apply_(lambda _: 0.0),
    "map_": lambda x: x.map_(x, lambda _, b: b),
    "optimizer": lambda x: torch.optim.SGD([_with_grad(x)], lr=1.0).step(),
    "adam": lambda x: torch.optim.AdamW([_with_grad(x)], lr=1.0, foreach=True).step(),
    "clip_grad": lambda x: torch.nn.utils.clip_grad_norm_([_holder_of_grad(x)], 0.1),
    "dlpack": lambda x: torch.from_dlpack(x).zero_(),
    "tensordict zero_": lambda x: TensorDict({"x": x}, 4).zero_(),
    "tensordict slice": lambda x: TensorDict({"x": x}, 4)[1:].fill_("x", 0.0),
    "tensordict setitem": lambda x: TensorDict({"x": x}, 4).__setitem__(
        slice(0, 1), TensorDict({"x": torch.ones(1, 3)}, 1)
    ),
    "tensordict set_": lambda x: TensorDict({"x": x}, 4).set_("x", torch.ones(4, 3)),
    "tensordict update_": lambda x: TensorDict({"x": x}, 4).update_({"x": torch.ones(4, 3)}),
    "numpy": lambda x: x.numpy().__setitem__(0, 1),
    "asarray": lambda x: np.asarray(x).__setitem__(0, 1),
    "numpy ufunc": lambda x: np.add(x.numpy(), 1, out=x.numpy()),
}


def _with_grad(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_().grad = torch.ones_like(x)
    return x


def _holder_of_grad(x: torch.Tensor) -> torch.Tensor:
    holder = torch.zeros(4, 3, requires_grad=True)
    holder.grad = x
    return holder


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_refused_and_changes_nothing(name: str, source: torch.Tensor) -> None:
    with pytest.raises((ReadOnlyError, ValueError, RuntimeError)):
        WRITES[name](readonly(source))
    assert source.tolist() == VALUES


def test_the_error_says_what_to_do(source: torch.Tensor) -> None:
    with pytest.raises(ReadOnlyError, match=r"aten.add_.Tensor writes to its argument 'self'.*writable\(\).*clone\(\)"):
        readonly(source).add_(1)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x + 1) * 2 - x / 3,
    "index": lambda x: x[torch.tensor([2, 0])],
    "mask": lambda x: x[x > 2],
    "cat": lambda x: torch.cat([x, torch.ones(1, 3), x]),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 3, x, torch.zeros(())),
    "gather": lambda x: x.gather(1, torch.zeros(4, 1, dtype=torch.int64)),
    "matmul": lambda x: x @ x.T,
    "sort": lambda x: x.sort(descending=True).values,
    "cumsum": lambda x: x.cumsum(0),
    "to dtype": lambda x: x.to(torch.float64),
    "clone": lambda x: x.clone(),
    "embedding": lambda x: torch.nn.functional.embedding(x.long(), torch.eye(12)),
    "log_softmax": lambda x: x.log_softmax(-1),
    "as out of": lambda x: torch.zeros(4, 3).copy_(x),
    "added into": lambda x: torch.ones(4, 3).add_(x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0),
    "tensordict cat": lambda x: torch.cat([TensorDict({"x": x}, 4), TensorDict({"x": x}, 4)])["x"],
    "deepcopy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "writable": lambda x: x.writable() if is_readonly(x) else x.clone(),
}


@pytest.mark.parametrize("name", READS)
def test_results_are_plain_equal_and_writable(name: str, source: torch.Tensor) -> None:
    result = READS[name](readonly(source))
    assert type(result) is torch.Tensor
    assert torch.equal(result, READS[name](source))
    result.zero_()
    assert source.tolist() == VALUES


def test_python_values_and_printing(source: torch.Tensor) -> None:
    guarded = readonly(source)
    assert guarded.tolist() == VALUES
    assert guarded[1, 2].item() == 5.0
    assert float(guarded.sum()) == 66.0
    assert torch.equal(guarded, source)
    assert "read-only tensor" in repr(guarded)
    assert np.asarray(guarded, dtype=np.float64).dtype == np.float64
    assert guarded.shape == source.shape
    assert guarded.data_ptr() == source.data_ptr()


def test_gradients_flow_past_it(source: torch.Tensor) -> None:
    weight = torch.ones(3, requires_grad=True)
    (readonly(source) * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == source.sum(0).tolist()


def test_views_of_views_stay_guarded(source: torch.Tensor) -> None:
    assert is_readonly(readonly(source)[1:].view(-1)[2:].unfold(0, 2, 1))
    assert not is_readonly(readonly(source).T.reshape(12))


def test_dataproto_changes_references_of_received_batches(source: torch.Tensor) -> None:
    sent = DataProto.from_dict({"x": source, "y": torch.arange(4)}, {"n": np.arange(4.0)}, {"t": 1})
    received = DataProto.from_buffers(*sent.to_buffers())
    received.union(DataProto.from_dict({"z": torch.ones(4)}))
    received.rename("y", "w")
    received.reorder(torch.tensor([3, 2, 1, 0]))
    popped = received.pop(["z"])
    received.padding(1, "first")
    received.batch["x"] = received.batch["x"] * 2
    assert received.batch["w"].tolist() == [3, 2, 1, 0, 3]
    assert popped.batch["z"].tolist() == [1, 1, 1, 1]
    assert source.tolist() == VALUES


def test_writable_copies_once(source: torch.Tensor) -> None:
    received = DataProto.from_dict({"x": source}, {"n": np.arange(4.0)}, {"m": [readonly(torch.ones(2))]}).readonly()
    assert received.writable() is received
    received.batch["x"].zero_()
    received.non_tensor_batch["n"][0] = 7
    received.meta_info["m"][0].zero_()
    address = received.batch["x"].data_ptr()
    assert received.writable().batch["x"].data_ptr() == address != source.data_ptr()
    assert source.tolist() == VALUES


def test_readonly_shares_memory(source: torch.Tensor) -> None:
    data = DataProto.from_dict({"x": source}, {"n": np.arange(4.0)})
    guarded = data.readonly()
    assert guarded.batch["x"].data_ptr() == source.data_ptr()
    with pytest.raises(ReadOnlyError):
        guarded.batch["x"].add_(1)
    with pytest.raises(ValueError, match="read-only"):
        guarded.non_tensor_batch["n"][0] = 1
    data.batch["x"].add_(1)
    assert guarded.batch["x"][0, 0] == 1


def test_received_number_arrays_are_read_only() -> None:
    received = DataProto.from_buffers(*DataProto.from_dict(None, {"n": np.arange(4.0)}).to_buffers())
    with pytest.raises(ValueError, match="read-only"):
        received.non_tensor_batch["n"][0] = 1
