"""DataProto does what verl 0.9.1 does: its outcomes, recorded by running verl, for every method and odd argument.

To record again: `PYTHONPATH=. <python with verl> tests/unit/protocol/test_as_verl.py` writes verl_outcomes.json.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

RECORD = Path(__file__).with_name("verl_outcomes.json")
NAN = float("nan")
Scenario = Callable[[ModuleType, Any], Any]

FIXED_HERE = {
    "rename two": "renaming several tensors fails in verl",
    "rename missing with none": "renaming without tensors is a KeyError here",
    "union non-tensors only": "verl cannot union without tensors",
    "union into non-tensors only": "verl cannot union without tensors",
    "union nan tensor": "NaN equals NaN in tensors too",
    "reorder by list": "verl takes only tensors",
    "reorder by array": "verl takes only tensors",
    "reorder non-tensors only": "verl cannot reorder without tensors",
    "sample_level_repeat one number": "verl repeats by it, then fails for tensors and not for arrays",
    "chunk 3 padded": "verl has too few chunks; the last ones are empty here",
    "chunk 5 padded": "verl has too few chunks; the last ones are empty here",
    "fold": "verl also folds the arrays of its input",
    "fold and unfold": "verl also folds the arrays of its input",
    "unfold_column_chunks no keys": "verl fails where there are arrays",
    "iterator non-tensors only": "verl cannot iterate without tensors",
    "info non-tensors only": "verl fails without tensors",
}


def rows(module: ModuleType, num: int = 4, *, tensors: bool = True, arrays: bool = True, **meta: Any) -> Any:
    return module.DataProto.from_dict(
        {"a": torch.arange(num * 2).view(num, 2), "f": torch.arange(num).float()} if tensors else None,
        {"s": list("abcdefgh"[:num]), "i": np.arange(num), "o": [[k, k + 1] for k in range(num)]} if arrays else None,
        meta or {"t": 1},
    )


def column(module: ModuleType, values: Any, **more: Any) -> Any:
    return module.DataProto.from_dict({"x": torch.as_tensor(values)}, **more)


def with_metrics(module: ModuleType, *metrics: Any) -> Any:
    return module.DataProto.concat([rows(module, metrics=value) for value in metrics])


def padded(data: Any) -> Any:
    data.meta_info["_verl_auto_padding"] = True
    return data


SCENARIOS: dict[str, Scenario] = {
    "len": lambda m, d: len(d),
    "empty": lambda m, d: [m.DataProto(), len(m.DataProto())],
    "from_dict sizes differ": lambda m, d: m.DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}),
    "from_dict array size differs": lambda m, d: column(m, [1, 2], non_tensors={"b": [1, 2, 3]}),
    "from_dict array is a scalar": lambda m, d: column(m, [1, 2], non_tensors={"b": 5}),
    "from_dict non_tensors is a list": lambda m, d: column(m, [1, 2], non_tensors=[1]),
    "from_dict no batch dims": lambda m, d: column(m, [1, 2], num_batch_dims=0),
    "from_dict two batch dims": lambda m, d: column(m, [[1], [2]], num_batch_dims=2),
    "from_dict two batch dims with arrays": lambda m, d: column(
        m, [[1], [2]], non_tensors={"b": [1]}, num_batch_dims=2
    ),
    "from_dict nothing": lambda m, d: m.DataProto.from_dict(),
    "from_dict ragged lists": lambda m, d: column(m, [1, 2], non_tensors={"b": [[1], [1, 2]]}),
    "from_dict auto padding": lambda m, d: column(m, [1], auto_padding=True),
    "from_single_dict": lambda m, d: m.DataProto.from_single_dict({"a": torch.zeros(2), "b": np.zeros(2)}, {"x": 1}),
    "from_single_dict list": lambda m, d: m.DataProto.from_single_dict({"a": [1]}),
    "array is a list": lambda m, d: m.DataProto(batch=None, non_tensor_batch={"a": [1]}),
    "tensordict and back": lambda m, d: m.DataProto.from_tensordict(rows(m, arrays=False).to_tensordict()),
    "tensordict with arrays": lambda m, d: m.DataProto.from_tensordict(d.select(["a"], ["s", "o"]).to_tensordict()),
    **{
        f"getitem {item!r}": lambda m, d, item=item: d[item]
        for item in (
            *(0, -1, np.int64(1), 9, (0, 1), "a", 1.5, None),
            *(slice(0, 2), slice(None, None, 2), slice(-2, None), slice(3, 1), slice(None, None, -1)),
            *([0], [0, -1], [True, False, True, True], [], [9], np.array([2, 0]), np.array([True, False, False, True])),
            *(torch.tensor([3, 3]), torch.tensor([-1]), torch.tensor([False, True, True, True]), torch.tensor(0)),
        )
    },
    "item without arrays": lambda m, d: rows(m, arrays=False)[1],
    "item without tensors": lambda m, d: rows(m, tensors=False)[1],
    "slice shares meta": lambda m, d: d[:1].meta_info is d.meta_info,
    "select": lambda m, d: d.select(),
    "select some": lambda m, d: d.select(["a"], ["s"], []),
    "select none": lambda m, d: d.select([], [], []),
    "select missing tensor": lambda m, d: d.select(["z"]),
    "select missing others": lambda m, d: d.select(None, ["z"], ["z"]),
    "select shares": lambda m, d: [
        getattr(d.select(), name) is getattr(d, name) for name in ("batch", "non_tensor_batch", "meta_info")
    ],
    "select deepcopy": lambda m, d: d.select(deepcopy=True).meta_info is d.meta_info,
    "pop": lambda m, d: d.pop(["a"], ["s"], ["t"]),
    "pop nothing": lambda m, d: d.pop(),
    "pop missing tensor": lambda m, d: d.pop(["z"]),
    "pop missing array": lambda m, d: d.pop([], ["z"]),
    "pop missing meta": lambda m, d: d.pop([], [], ["z"]),
    "rename": lambda m, d: d.rename("a", "b"),
    "rename list": lambda m, d: d.rename(["a"], ["b"]),
    "rename two": lambda m, d: d.rename(["a", "f"], ["b", "g"]),
    "rename tuple": lambda m, d: d.rename(("a",), ("b",)),
    "rename lengths": lambda m, d: d.rename(["a"], ["b", "c"]),
    "rename nothing": lambda m, d: d.rename(),
    "rename missing": lambda m, d: d.rename("z", "b"),
    "rename missing with none": lambda m, d: rows(m, tensors=False).rename("z", "b"),
    "rename onto another": lambda m, d: d.rename("a", "f"),
    "union": lambda m, d: d.union(column(m, torch.zeros(4), non_tensors={"y": list("wxyz")}, meta_info={"u": 2})),
    "union is in place": lambda m, d: d.union(column(m, torch.zeros(4))) is d,
    "union with itself": lambda m, d: d.union(d),
    "union equal": lambda m, d: d.union(rows(m)),
    "union other values": lambda m, d: d.union(m.DataProto.from_dict({"f": torch.ones(4)})),
    "union other dtype": lambda m, d: d.union(m.DataProto.from_dict({"a": torch.arange(8).view(4, 2).int()})),
    "union other length": lambda m, d: d.union(column(m, torch.zeros(5))),
    "union other meta": lambda m, d: d.union(column(m, torch.zeros(4), meta_info={"t": 2})),
    "union other array": lambda m, d: d.union(column(m, torch.zeros(4), non_tensors={"s": list("zzzz")})),
    "union other array dtype": lambda m, d: d.union(column(m, torch.zeros(4), non_tensors={"i": np.arange(4.0)})),
    "union nan object": lambda m, d: column(m, [1], non_tensors={"n": [NAN]}).union(
        column(m, [1], non_tensors={"n": [NAN]})
    ),
    "union nan array": lambda m, d: column(m, [1], non_tensors={"n": np.array([NAN])}).union(
        column(m, [1], non_tensors={"n": np.array([NAN])})
    ),
    "union nan tensor": lambda m, d: column(m, [NAN]).union(column(m, [NAN])),
    "union non-tensors only": lambda m, d: d.union(m.DataProto.from_dict(None, {"y": list("wxyz")})),
    "union into non-tensors only": lambda m, d: rows(m, tensors=False).union(column(m, torch.zeros(4))),
    "reorder": lambda m, d: d.reorder(torch.tensor([3, 1, 0, 2])),
    "reorder fewer": lambda m, d: d.reorder(torch.tensor([3, 3])),
    "reorder by list": lambda m, d: d.reorder([3, 1, 0, 2]),
    "reorder by array": lambda m, d: d.reorder(np.array([3, 1, 0, 2])),
    "reorder non-tensors only": lambda m, d: rows(m, tensors=False).reorder(torch.tensor([1, 0])),
    **{f"repeat {args}": lambda m, d, args=args: d.repeat(*args) for args in ((), (3,), (2, False), (1, True), (0,))},
    "repeat non-tensors": lambda m, d: rows(m, tensors=False).repeat(2, interleave=False),
    **{
        f"sample_level_repeat {times!r}": lambda m, d, times=times: d.sample_level_repeat(times)
        for times in ([1, 2, 0, 1], (2, 2, 2, 2), torch.tensor([1, 0, 0, 3]), np.array([0, 1, 0, 1]), "ab")
    },
    "sample_level_repeat 2-d": lambda m, d: d.sample_level_repeat(torch.ones(2, 2).long()),
    "sample_level_repeat too few": lambda m, d: rows(m, arrays=False).sample_level_repeat([1, 2]),
    "sample_level_repeat one number": lambda m, d: rows(m, tensors=False).sample_level_repeat([2]),
    "unfold_column_chunks": lambda m, d: d.unfold_column_chunks(2, ["a"]),
    "unfold_column_chunks arrays": lambda m, d: d.unfold_column_chunks(2, ["a", "o"]),
    "unfold_column_chunks no keys": lambda m, d: d.unfold_column_chunks(2),
    **{f"chunk {num}": lambda m, d, num=num: d.chunk(num) for num in (1, 2, 3, 4, 5, 8)},
    **{f"chunk {num} padded": lambda m, d, num=num: padded(d).chunk(num) for num in (1, 2, 3, 5)},
    "chunk 3 padded of 5": lambda m, d: padded(rows(m, 5)).chunk(3),
    "chunk 3 padded non-tensors": lambda m, d: padded(rows(m, 4, tensors=False)).chunk(3),
    **{f"split {size}": lambda m, d, size=size: d.split(size) for size in (1, 2, 3, 9, 0)},
    "concat": lambda m, d: m.DataProto.concat([d, rows(m, 2)]),
    "concat one": lambda m, d: m.DataProto.concat([d]),
    "concat none": lambda m, d: m.DataProto.concat([]),
    "concat other meta": lambda m, d: m.DataProto.concat([d, rows(m, t=2)]),
    "concat more meta": lambda m, d: m.DataProto.concat([d, rows(m, u=2)]),
    "concat metrics": lambda m, d: with_metrics(m, {"x": 1, "y": 2}, {"x": 3, "y": 4}),
    "concat metrics lists": lambda m, d: with_metrics(m, [{"x": 1}, {"x": 5}], {"x": 3}),
    "concat metrics none": lambda m, d: with_metrics(m, None, {"x": 3}),
    "concat metrics other keys": lambda m, d: with_metrics(m, {"y": 1}, {"x": 3}),
    "concat metrics fewer keys": lambda m, d: with_metrics(m, {"x": 1, "y": 1}, {"x": 3}),
    "concat other tensors": lambda m, d: m.DataProto.concat([d, column(m, [1, 2])]),
    "concat other arrays": lambda m, d: m.DataProto.concat([d, rows(m, arrays=False)]),
    "concat other arrays reversed": lambda m, d: m.DataProto.concat([rows(m, arrays=False), d]),
    "concat other widths": lambda m, d: m.DataProto.concat([column(m, torch.ones(2, 3)), column(m, torch.ones(2, 4))]),
    **{
        f"iterator {kwargs}": lambda m, d, kwargs=kwargs: [
            part.select(["a", "f"], ["s", "o"]) for part in d.make_iterator(2, 2, seed=3, dataloader_kwargs=kwargs)
        ]
        for kwargs in (None, {"shuffle": True}, {"shuffle": False, "drop_last": True}, {"sampler": [3, 2, 1, 0]})
    },
    "iterator non-tensors only": lambda m, d: len(list(rows(m, tensors=False).make_iterator(2, 1))),
    "iterator shares meta": lambda m, d: [part.meta_info is d.meta_info for part in d.make_iterator(2, 1)],
    "iterator uneven": lambda m, d: d.make_iterator(3, 1),
    "iterator wrong kwargs": lambda m, d: d.make_iterator(2, 1, dataloader_kwargs=[1]),
    **{f"padding {args}": lambda m, d, args=args: d.padding(*args) for args in ((2, "first"), (2, "last"), (1,), (0,))},
    **{f"pad to {num}": lambda m, d, num=num: list(m.pad_dataproto_to_divisor(d, num)) for num in (1, 2, 3, 7, 11)},
    "pad a list": lambda m, d: m.pad_dataproto_to_divisor([1], 2),
    "pad nothing": lambda m, d: list(m.pad_dataproto_to_divisor(d[:0], 2)),
    "unpad": lambda m, d: [m.unpad_dataproto(d, 0), m.unpad_dataproto(d, 3)],
    "padding enabled": lambda m, d: [d.is_padding_enabled(), column(m, [1], auto_padding=True).is_padding_enabled()],
    "fold": lambda m, d: m.fold_batch_dim(d, 2),
    "fold unevenly": lambda m, d: m.fold_batch_dim(d, 3),
    "fold and unfold": lambda m, d: m.unfold_batch_dim(m.fold_batch_dim(d, 2)),
    "collate": lambda m, d: m.collate_fn([d[2], d[0]]),
    "info": lambda m, d: d.get_data_info(),
    "info non-tensors only": lambda m, d: len(rows(m, tensors=False).get_data_info()),
    "to": lambda m, d: d.to("cpu") is d,
    "future chunks share futures": lambda m, d: [part.futures for part in m.DataProtoFuture.concat([1, 2]).chunk(2)],
}


def plain(value: Any) -> Any:
    """JSON for a result, with the types and shapes that matter."""
    kind = type(value).__name__
    if kind in ("DataProto", "DataProtoItem"):
        batch = None if value.batch is None else {key: plain(value.batch[key]) for key in sorted(value.batch.keys())}
        length = len(value) if kind == "DataProto" else None
        return [kind, length, batch, plain(value.non_tensor_batch), plain(value.meta_info)]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), plain(value.tolist())]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), plain(value.tolist())]
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value.item() if isinstance(value, np.generic) else value


def outcome(module: ModuleType, scenario: Scenario) -> Any:
    """[result, the batch afterwards] or the name of the error."""
    data = rows(module)
    try:
        return plain([scenario(module, data), data])
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in FIXED_HERE])
def test_same_outcome_as_verl(name: str) -> None:
    recorded = json.loads(RECORD.read_text())
    assert outcome(importlib.import_module("rlsys.protocol"), SCENARIOS[name]) == recorded[name]


@pytest.mark.parametrize("name", FIXED_HERE)
def test_differs_from_verl_where_we_say_so(name: str) -> None:
    recorded = json.loads(RECORD.read_text())
    assert outcome(importlib.import_module("rlsys.protocol"), SCENARIOS[name]) != recorded[name]


if __name__ == "__main__":
    verl = importlib.import_module("verl.protocol")
    lines = [f"{json.dumps(name)}: {json.dumps(outcome(verl, scenario))}" for name, scenario in SCENARIOS.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} outcomes", file=sys.stderr)
