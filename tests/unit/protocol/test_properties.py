"""Properties of DataProto over arbitrary batches: rows, columns, padding, wire, disk."""

import contextlib
import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from rlsys.protocol import (
    DataProto,
    DataProtoFuture,
    WireError,
    collate_fn,
    fold_batch_dim,
    object_array,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from rlsys.protocol.columns import deep_equal
from rlsys.protocol.wire import decode

properties = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=6)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x"), np.bytes_(b"y"), np.uint8(7)])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=3).map(object_array)
        | st.sampled_from([np.arange(6.0).reshape(2, 3), np.array(["a", "bc"]), torch.arange(4), torch.tensor(2.5)])
    ),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn, num_rows: int) -> torch.Tensor:
    shape = (num_rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    numbers = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    tensor = numbers.to(draw(st.sampled_from(DTYPES)))
    return tensor.mT.contiguous().mT if tensor.ndim > 2 and draw(st.booleans()) else tensor


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 7, multiple_of: int = 1) -> DataProto:
    num_rows = draw(st.integers(min_rows, max_rows)) * multiple_of
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=5))
    cut = draw(st.integers(0, len(names)))
    batch = {name: draw(tensors(num_rows)) for name in names[:cut]}
    arrays = {
        name: np.arange(num_rows) * draw(st.sampled_from([1.0, 2]))
        if draw(st.booleans())
        else object_array(draw(st.lists(VALUES, min_size=num_rows, max_size=num_rows)))
        for name in names[cut:]
    }
    return DataProto.from_dict(batch, arrays, draw(st.dictionaries(NAMES, VALUES, max_size=2)))


def same(a: DataProto, b: DataProto, *, meta: bool = True) -> bool:
    """Equal rows, dtypes, shapes and values, by their printed form and not by the product's own comparison."""
    if (a.batch is None) != (b.batch is None) or len(a) != len(b):
        return False
    left, right = ({} if x.batch is None else dict(sorted(x.batch.items())) for x in (a, b))
    arrays_a, arrays_b = dict(sorted(a.non_tensor_batch.items())), dict(sorted(b.non_tensor_batch.items()))
    parts = [(left, right), (arrays_a, arrays_b), (a.meta_info, b.meta_info) if meta else (0, 0)]
    return all(untyped(one) == untyped(other) for one, other in parts)


def untyped(value: Any) -> Any:
    """Values with their types spelled out, comparable by ==."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, np.ndarray):
        items = value.ravel().tolist() if value.dtype == object else repr(value.tolist())
        return "array", str(value.dtype), value.shape, [untyped(item) for item in items]
    if isinstance(value, dict):
        return "dict", [(untyped(key), untyped(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [untyped(item) for item in value]
    return type(value).__name__, repr(value)


# ---- rows ----------------------------------------------------------------------------------------------------------


@properties
@given(batches(min_rows=1), st.integers(1, 5))
def test_chunks_concat_to_the_whole(data: DataProto, chunks: int) -> None:
    data = data.repeat(chunks)
    assert same(DataProto.concat(data.chunk(chunks)), data)


@properties
@given(batches(min_rows=1), st.integers(1, 3))
def test_received_rows_do_what_the_sent_ones_do_and_leave_their_memory_alone(data: DataProto, chunks: int) -> None:
    header, buffers = data.to_buffers()
    memory = [bytes(buffer) for buffer in buffers]
    for change in (
        lambda rows: DataProto.concat([rows] * 2),
        lambda rows: DataProtoFuture.concat([rows] * chunks).chunk(chunks)[-1].get(),
        lambda rows: rows.select_idxs([-1]),
        lambda rows: rows.repeat(chunks).chunk(chunks)[0],
        lambda rows: rows.union(rows[:]),
        lambda rows: DataProto.from_buffers(*rows.to_buffers()),
        copy.deepcopy,
        copy.copy,
    ):
        changed = change(DataProto.from_buffers(header, memory))
        assert same(changed, change(data))
        for tensor in () if changed.batch is None else changed.batch.values():
            tensor.zero_()
        assert memory == [bytes(buffer) for buffer in buffers]


@properties
@given(batches(min_rows=1), st.integers(1, 5))
def test_chunks_are_equal_and_in_order(data: DataProto, chunks: int) -> None:
    data = data.repeat(chunks)
    parts = data.chunk(chunks)
    size = len(data) // chunks
    assert all(same(part, data[i * size : (i + 1) * size]) for i, part in enumerate(parts))


@properties
@given(batches(min_rows=1), st.integers(2, 5))
def test_uneven_chunk_is_refused(data: DataProto, chunks: int) -> None:
    if len(data) % chunks:
        with pytest.raises(AssertionError, match="equal chunk"):
            data.chunk(chunks)


@properties
@given(batches(min_rows=1), st.integers(1, 9))
def test_padded_chunks_concat_to_the_whole(data: DataProto, chunks: int) -> None:
    data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(chunks)
    assert len(parts) == chunks
    assert same(DataProto.concat(parts), data)


@properties
@given(batches(min_rows=1), st.integers(1, 9))
def test_splits_concat_to_the_whole(data: DataProto, size: int) -> None:
    parts = data.split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert same(DataProto.concat(parts), data)


@properties
@given(batches(), st.randoms(use_true_random=False))
def test_reorder_is_undone_by_its_inverse(data: DataProto, random: Any) -> None:
    before = data[:]
    order = list(range(len(data)))
    random.shuffle(order)
    data.reorder(torch.tensor(order, dtype=torch.int64))
    data.reorder(torch.tensor(np.argsort(order), dtype=torch.int64))
    assert same(data, before)


@properties
@given(batches(min_rows=1), st.lists(st.integers(-1, 0) | st.integers(0, 0), max_size=6))
def test_select_idxs_agrees_with_numpy(data: DataProto, idxs: list[int]) -> None:
    chosen = data.select_idxs(idxs)
    assert len(chosen) == len(idxs)
    for key, array in data.non_tensor_batch.items():
        assert untyped(chosen.non_tensor_batch[key]) == untyped(array[np.array(idxs, dtype=int)])
    assert all(same(chosen[i : i + 1], data[idx:][:1]) for i, idx in enumerate(idxs))


@properties
@given(batches(), st.data())
def test_mask_and_indices_choose_the_same(data: DataProto, draw: st.DataObject) -> None:
    mask = draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))
    idxs = np.flatnonzero(np.array(mask, dtype=bool))
    assert same(data[np.array(mask, dtype=bool)], data[idxs])
    assert same(data[torch.tensor(mask, dtype=torch.bool)], data[torch.from_numpy(idxs)])


@properties
@given(batches(), st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none(), st.integers(1, 3) | st.none())
def test_slices_agree_with_indices(data: DataProto, start: int | None, end: int | None, step: int | None) -> None:
    assert same(data.slice(start, end, step), data.select_idxs(list(range(len(data)))[start:end:step]))


@properties
@given(batches(min_rows=1), st.integers(0, 4), st.booleans())
def test_repeat_has_every_row_that_often(data: DataProto, times: int, interleave: bool) -> None:
    rows = np.arange(len(data))
    expected = rows.repeat(times) if interleave else np.tile(rows, times)
    assert same(data.repeat(times, interleave), data[expected])


@properties
@given(batches(), st.data())
def test_sample_level_repeat_agrees_with_numpy(data: DataProto, draw: st.DataObject) -> None:
    times = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    assert same(
        data.sample_level_repeat(np.array(times, dtype=int)), data[np.arange(len(data)).repeat(np.array(times, int))]
    )


@properties
@given(batches(min_rows=1), st.integers(1, 9))
def test_unpad_undoes_pad(data: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert same(unpad_dataproto(padded, pad_size), data)


@properties
@given(batches(min_rows=1), st.integers(1, 9))
def test_padding_rows_cycle(data: DataProto, divisor: int) -> None:
    padded, _ = pad_dataproto_to_divisor(data, divisor)
    assert same(padded, data[np.arange(len(padded)) % len(data)])


@properties
@given(batches(min_rows=1), st.integers(0, 4), st.sampled_from(["first", "last"]))
def test_padding_repeats_the_candidate(data: DataProto, size: int, candidate: str) -> None:
    before, num_rows = data[:], len(data)
    data.padding(size, candidate)
    row = 0 if candidate == "first" else num_rows - 1
    assert same(data, before[np.r_[np.arange(num_rows), np.full(size, row)]])


@properties
@given(batches(min_rows=1, max_rows=3, multiple_of=4))
def test_unfold_undoes_fold(data: DataProto) -> None:
    before = data[:]
    assert same(unfold_batch_dim(fold_batch_dim(data, len(data) // 4)), before)
    assert same(data, before)


@properties
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_unfold_column_chunks_keeps_elements_in_order(num_rows: int, n_split: int, width: int) -> None:
    x = torch.arange(num_rows * n_split * width).view(num_rows, -1)
    data = DataProto.from_dict({"x": x, "y": torch.arange(num_rows)}, {"z": np.arange(num_rows)})
    unfolded = data.unfold_column_chunks(n_split, ["x"])
    assert unfolded.batch["x"].flatten().tolist() == x.flatten().tolist()
    assert unfolded.batch["y"].tolist() == unfolded.non_tensor_batch["z"].tolist()
    assert len(unfolded) == num_rows * n_split


@properties
@given(batches(min_rows=1))
def test_items_collate_to_the_batch(data: DataProto) -> None:
    if any(array.dtype != object for array in data.non_tensor_batch.values()):
        return
    if any(isinstance(v, np.ndarray) for array in data.non_tensor_batch.values() for v in array):
        return
    assert same(collate_fn([data[i] for i in range(len(data))]), data, meta=False)


@properties
@given(batches(min_rows=1, max_rows=3, multiple_of=2), st.integers(1, 3), st.integers(0, 5))
def test_iterator_gives_every_row_once_an_epoch(data: DataProto, epochs: int, seed: int) -> None:
    data.non_tensor_batch["row"] = np.arange(len(data))
    parts = list(data.make_iterator(2, epochs, seed=seed, dataloader_kwargs={"shuffle": True}))
    seen = [row for part in parts for row in part.non_tensor_batch["row"]]
    assert sorted(seen) == sorted(list(range(len(data))) * epochs)
    again = list(data.make_iterator(2, epochs, seed=seed, dataloader_kwargs={"shuffle": True}))
    assert all(same(a, b) for a, b in zip(parts, again, strict=True))


@properties
@given(batches(min_rows=2), st.integers(1, 6), st.integers(0, 5))
def test_concat_is_associative(data: DataProto, first: int, second: int) -> None:
    a, b, c = data[:first], data[first : first + second], data[first + second :]
    concat = DataProto.concat
    assert same(concat([a, b, c]), concat([concat([a, b]), c]))
    assert same(concat([a, b, c]), concat([a, concat([b, c])]))


@properties
@given(batches(min_rows=1), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 4))
def test_future_chunks_are_the_chunks_of_the_whole(data: DataProto, cuts: list[int], chunks: int) -> None:
    data = data.repeat(chunks)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(bounds)]
    future = DataProtoFuture.concat(parts)
    assert all(same(part.get(), whole) for part, whole in zip(future.chunk(chunks), data.chunk(chunks), strict=True))
    assert same(future.get(), data)


@properties
@given(batches(min_rows=1))
def test_chunks_of_future_chunks_compose(data: DataProto) -> None:
    data = data.repeat(6)
    nested = [inner.get() for outer in DataProtoFuture.concat(data.chunk(2)).chunk(3) for inner in outer.chunk(2)]
    assert same(DataProto.concat(nested), data)


# ---- columns -------------------------------------------------------------------------------------------------------


@properties
@given(batches(), st.data())
def test_union_undoes_pop(data: DataProto, draw: st.DataObject) -> None:
    before = data.select(deepcopy=True)
    tensor_keys = [] if data.batch is None else list(data.batch.keys())
    taken = draw.draw(st.lists(st.sampled_from(tensor_keys), unique=True)) if tensor_keys else []
    popped = data.pop(taken, list(data.non_tensor_batch), list(data.meta_info))
    assert not data.non_tensor_batch
    assert not data.meta_info
    assert same(data.union(popped), before)


@properties
@given(batches())
def test_union_with_itself_changes_nothing(data: DataProto) -> None:
    before = data.select(deepcopy=True)
    assert same(data.union(data.select(deepcopy=True)), before)


@properties
@given(batches(min_rows=1))
def test_union_refuses_other_values(data: DataProto) -> None:
    data.union(DataProto.from_dict({"new.x": torch.zeros(len(data))}))
    with pytest.raises(AssertionError, match="differ"):
        data.union(DataProto.from_dict({"new.x": torch.ones(len(data))}))


@properties
@given(batches(min_rows=1))
def test_failed_union_changes_nothing(data: DataProto) -> None:
    before = data.select(deepcopy=True)
    other = DataProto.from_dict({"new.x": torch.zeros(len(data) + 1)})
    with pytest.raises(AssertionError):
        data.union(other)
    assert same(data, before)


@properties
@given(batches())
def test_select_all_by_name_is_everything(data: DataProto) -> None:
    keys = None if data.batch is None else list(data.batch.keys())
    assert same(data.select(keys, list(data.non_tensor_batch), list(data.meta_info)), data)


@properties
@given(batches())
def test_select_and_pop_agree(data: DataProto) -> None:
    keys = [] if data.batch is None else list(data.batch.keys())[:1]
    arrays = list(data.non_tensor_batch)[:1]
    selected = data.select(keys, arrays, [])
    popped = data.pop(keys, arrays, [])
    assert selected.non_tensor_batch.keys() == popped.non_tensor_batch.keys()
    assert all(torch.equal(selected.batch[key], popped.batch[key]) for key in keys)


@properties
@given(batches(min_rows=1))
def test_rename_back_changes_only_the_order(data: DataProto) -> None:
    if data.batch is None:
        return
    before, keys = data.select(deepcopy=True), list(data.batch.keys())
    renamed = [f"new.{i}" for i in range(len(keys))]
    assert list(data.rename(keys, renamed).batch.keys()) == renamed
    assert same(data.rename(renamed, keys), before.select(keys))


@properties
@given(batches())
def test_to_tensordict_and_back(data: DataProto) -> None:
    data = data.select(None, [], [])
    assert same(DataProto.from_tensordict(data.to_tensordict()), data) or not data.batch


@properties
@given(batches())
def test_copies_are_equal_and_apart(data: DataProto) -> None:
    twin = copy.deepcopy(data)
    assert same(twin, data)
    for key in [] if data.batch is None else list(data.batch.keys()):
        twin.batch[key].zero_()
    assert copy.copy(data).batch is data.batch


@properties
@given(VALUES, VALUES)
def test_deep_equal_is_equality_of_type_and_value(a: Any, b: Any) -> None:
    assert deep_equal(a, copy.deepcopy(a))
    assert deep_equal(a, b) == deep_equal(b, a)
    if deep_equal(a, b):
        assert type(a) is type(b)


@properties
@given(st.data())
def test_deep_equal_sees_any_changed_number(draw: st.DataObject) -> None:
    row = draw.draw(st.integers(0, 5))
    for values in (torch.arange(6.0), np.arange(6), object_array(range(6)), list(range(6)), tuple(range(6))):
        other = copy.deepcopy(values) if not isinstance(values, tuple) else list(values)
        other[row] = 7
        changed = tuple(other) if isinstance(values, tuple) else other
        assert not deep_equal(values, changed)
        assert not deep_equal({"a": [values]}, {"a": [changed]})


# ---- wire and disk -------------------------------------------------------------------------------------------------


@properties
@given(batches())
def test_wire_round_trip(data: DataProto) -> None:
    assert same(DataProto.from_buffers(*data.to_buffers()), data)


@properties
@given(batches())
def test_wire_form_is_a_function_of_the_batch(data: DataProto) -> None:
    header, buffers = data.to_buffers()
    again, more = DataProto.from_buffers(header, buffers).to_buffers()
    assert again == header
    assert [bytes(buffer) for buffer in buffers] == [bytes(buffer) for buffer in more]


@properties
@given(batches(), st.integers(2, 5), st.booleans())
def test_pickle_round_trip(data: DataProto, protocol: int, out_of_band: bool) -> None:
    buffers: list[pickle.PickleBuffer] = []
    keep = buffers.append if out_of_band and protocol == 5 else None
    text = pickle.dumps(data, protocol, buffer_callback=keep)
    assert same(pickle.loads(text, buffers=buffers), data)


@properties
@given(batches(min_rows=1), st.integers(1, 4))
def test_operations_agree_on_received_batches(data: DataProto, times: int) -> None:
    received = DataProto.from_buffers(*data.to_buffers())
    assert same(received.repeat(times), data.repeat(times))
    assert same(DataProto.concat([received, received]), DataProto.concat([data, data]))
    assert same(received[::2], data[::2])
    assert same(pad_dataproto_to_divisor(received, 3)[0], pad_dataproto_to_divisor(data, 3)[0])


@properties
@given(batches())
def test_disk_round_trip(tmp_path: Path, data: DataProto) -> None:
    data.save_to_disk(tmp_path / "x.dp")
    assert same(DataProto.load_from_disk(tmp_path / "x.dp"), data)
    assert [path.name for path in tmp_path.iterdir()] == ["x.dp"]


@properties
@given(batches(min_rows=1), st.data())
def test_any_changed_byte_on_disk_is_noticed(tmp_path: Path, data: DataProto, draw: st.DataObject) -> None:
    path = tmp_path / "x.dp"
    data.save_to_disk(path)
    text = bytearray(path.read_bytes())
    text[draw.draw(st.integers(0, len(text) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    path.write_bytes(text)
    with pytest.raises(WireError, match=r"x\.dp"):
        DataProto.load_from_disk(path)


@properties
@given(batches(min_rows=1), st.data())
def test_any_truncation_on_disk_is_noticed(tmp_path: Path, data: DataProto, draw: st.DataObject) -> None:
    path = tmp_path / "x.dp"
    data.save_to_disk(path)
    text = path.read_bytes()
    path.write_bytes(text[: draw.draw(st.integers(0, len(text) - 1))])
    with pytest.raises(WireError, match=r"x\.dp"):
        DataProto.load_from_disk(path)


@properties
@given(st.binary(max_size=200))
def test_any_bytes_as_a_file_end_in_a_wire_error(tmp_path: Path, text: bytes) -> None:
    for prefix in (b"", b"RLSYSDP1", b"RLSYSDP3"):
        (tmp_path / "x.dp").write_bytes(prefix + text)
        with pytest.raises(WireError):
            DataProto.load_from_disk(tmp_path / "x.dp")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(max_rows=3), st.data())
def test_mutated_headers_decode_or_end_in_a_wire_error(data: DataProto, draw: st.DataObject) -> None:
    header, buffers = data.to_buffers()
    text = bytearray(header)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(text) - 1))
        length = draw.draw(st.integers(0, 4))
        text[at : at + length] = draw.draw(
            st.sampled_from(
                [
                    b"",
                    b"\x00",
                    b"\xff",
                    b"\xcf",
                    b"\xc0",
                    b"\xa1x",
                    b"\x90",
                    b"\x80",
                    b"\x91",
                    b"\xd4\x01\x90",
                    b"\xc7\x02\x0a\x91\x00",
                ]
            )
        )
    with contextlib.suppress(WireError):
        DataProto.from_buffers(bytes(text), buffers)


FIELDS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=5)
    | st.sampled_from(["tensor", "array", "int64", "<f8", "<U0"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=5)
        | st.builds(lambda tag, value: Ext(tag, msgspec.msgpack.encode(value)), st.integers(0, 12), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FIELDS, FIELDS, FIELDS, FIELDS, st.lists(st.binary(max_size=16), max_size=3))
def test_any_fields_as_a_header_decode_or_end_in_a_wire_error(
    rows: Any, batch: Any, columns: Any, meta: Any, buffers: list[bytes]
) -> None:
    fields = {"type": "DataProto/2", "num_rows": rows, "device": None, "batch": batch}
    fields |= {"non_tensor_batch": columns, "meta_info": meta}
    with contextlib.suppress(WireError):
        decode(msgspec.msgpack.encode(fields), buffers)
