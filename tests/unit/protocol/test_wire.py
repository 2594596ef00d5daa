"""The wire form: which types travel, what a receiver may do with them, how bad headers are refused."""

import contextlib
import copy
import pickle
import random
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.msgpack import Ext

from rlsys.ipc.codec import Tag
from rlsys.protocol import DataProto, ImageInputs, WireError, object_array
from rlsys.types import Finish


def crossed(data: DataProto) -> DataProto:
    return DataProto.from_buffers(*data.to_buffers())


def batch_of(**tensors: torch.Tensor) -> DataProto:
    return DataProto.from_dict(tensors)


def column_of(values: list[Any]) -> Any:
    return crossed(DataProto.from_dict(None, {"c": object_array(values)})).non_tensor_batch["c"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).T.contiguous().T,
        torch.arange(12).view(4, 3)[:, ::2][:3],
        torch.randn(3, 2).bfloat16(),
        torch.tensor([True, False, True]),
        torch.empty(3, 0),
        torch.randn(3, requires_grad=True),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(3, 2).to(torch.float8_e4m3fn),
        torch.tensor([0, 2**63 + 1, 5], dtype=torch.uint64),
    ],
    ids=str,
)
def test_every_kind_of_tensor_crosses(tensor: torch.Tensor) -> None:
    received = crossed(batch_of(x=tensor)).batch["x"]
    assert received.dtype == tensor.dtype
    assert received.tolist() == tensor.tolist()
    assert not received.requires_grad


def test_processed_images_cross() -> None:
    image = ImageInputs(("sha",), (np.arange(3, dtype=np.uint8),), {"pixel_values": torch.randn(4, 6)})
    (first,), (second, third) = column_of([(image,), (image, image)])
    assert first.shas == ("sha",)
    assert first.pictures[0].tolist() == [0, 1, 2]
    for one in (first, second, third):
        assert torch.equal(one.tensors["pixel_values"], image.tensors["pixel_values"])


def test_batch_of_no_rows_and_no_columns() -> None:
    assert crossed(DataProto()).batch is None
    assert len(crossed(batch_of(x=torch.empty(0, 5)))) == 0
    assert len(crossed(batch_of(x=torch.zeros(4)).select([]))) == 4


@pytest.mark.parametrize(
    "value",
    [
        *(1, -(2**80), 1.5, float("inf"), True, None, "x", "\ud800", b"\x00\xff", (1, (2, [3])), [], {}, ()),
        *({"$": "tuple", "v": [1]}, {1: "a", None: "b", (1, 2): "c"}, {"a": {"b": [b"c", (None,)]}}),
        *(np.float32(0.1), np.int8(-3), np.bool_(False), np.str_(""), np.bytes_(b"\x01"), np.datetime64("2026-01-02")),
        *(np.float64(0.1), np.complex64(1 + 2j)),
    ],
    ids=repr,
)
def test_types_of_objects_survive(value: Any) -> None:
    received = column_of([value])[0]
    assert type(received) is type(value)
    assert received == value


def test_arrays_and_tensors_inside_objects_travel_as_buffers() -> None:
    pixels, grid = torch.rand(4, 3), np.arange(6, dtype=np.int32).reshape(2, 3)
    data = DataProto.from_dict(
        None, {"mm": object_array([{"pixels": pixels, "grid": grid, "names": np.array(["a"])}] * 8)}
    )
    header, buffers = data.to_buffers()
    assert len(buffers) == 3
    received = DataProto.from_buffers(header, buffers).non_tensor_batch["mm"]
    assert torch.equal(received[5]["pixels"], pixels)
    assert received[0]["grid"].dtype == np.int32
    assert received[0]["grid"].tolist() == grid.tolist()
    assert received[0]["names"].tolist() == ["a"]


def test_string_enum_arrives_as_its_string() -> None:
    assert column_of([Finish.STOP])[0] == Finish.STOP


@pytest.mark.parametrize(
    "value", [{1, 2}, date(2026, 1, 1), object(), lambda: 0, 1j, range(3), torch.float32], ids=repr
)
def test_other_types_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=f"non_tensor_batch 'odd': a .*{type(value).__name__}"):
        DataProto.from_dict(None, {"odd": object_array([{"deep": [value]}])}).to_buffers()
    with pytest.raises(TypeError, match="meta_info 'odd'"):
        DataProto(meta_info={"odd": value}).to_buffers()


def test_circles_and_deep_nesting_are_refused_by_name() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(TypeError, match="meta_info 'loop'"):
        DataProto(meta_info={"loop": circle}).to_buffers()


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)],
)
def test_other_layouts_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="batch 'x'"):
        batch_of(x=tensor).to_buffers()


def test_structured_arrays_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="non_tensor_batch 'r'"):
        DataProto.from_dict(None, {"r": np.zeros(2, dtype="i4,f4")}).to_buffers()


def test_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.arange(1000)
    header, buffers = batch_of(x=tensor).to_buffers()
    received = DataProto.from_buffers(header, buffers).batch["x"]
    assert received.data_ptr() == tensor.data_ptr()


def test_a_slice_sends_only_its_rows() -> None:
    data = batch_of(x=torch.zeros(1000, 10))
    assert sum(buffer.nbytes for buffer in data[10:20].to_buffers()[1]) == 10 * 10 * 4


def test_misaligned_memory_is_copied() -> None:
    header, (buffer,) = batch_of(x=torch.arange(4)).to_buffers()
    shifted = memoryview(b"\0" + bytes(buffer))[1:]
    assert DataProto.from_buffers(header, [shifted]).batch["x"].tolist() == [0, 1, 2, 3]


def tampered(change: Any) -> tuple[bytes, list[Any]]:
    data = DataProto.from_dict({"x": torch.arange(4).view(2, 2)}, {"s": np.array([1.0, 2.0])}, {"t": (1,)})
    header, buffers = data.to_buffers()
    fields = msgspec.msgpack.decode(header, ext_hook=msgspec.msgpack.Ext)
    held: list[Any] = [bytes(buffer) for buffer in buffers]
    change(fields, held)
    return msgspec.msgpack.encode(fields), held


def ext(tag: int, value: Any) -> Ext:
    return Ext(int(tag), msgspec.msgpack.encode(value))


def x(*memory: Any, tag: Tag = Tag.TENSOR) -> Callable[[dict[str, Any], list[Any]], None]:
    return lambda fields, _: fields["batch"].update(x=ext(tag, memory))


def s(*memory: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    return lambda fields, _: fields["non_tensor_batch"].update(s=ext(Tag.ARRAY, memory))


def t(value: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    return lambda fields, _: fields["meta_info"].update(t=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (x(0, "int64", [2, 3]), "bytes for shape"),
        (x(0, "int64", [2, -2]), "TENSOR: Expected `int` >= 0"),
        (x(0, "int64", [2, True]), "TENSOR: Expected `int`"),
        (x(0, "int64", [2, 2.5]), "TENSOR: Expected `int`"),
        (x(0, "int64", [0, 1 << 60]), "TENSOR: Expected `int`"),
        (x(0, "int64", [0, 1 << 30, 1 << 30]), "too large a shape"),
        (x(0, "int64", [1] * 40), "TENSOR: Expected `array` of length <= 32"),
        (x(0, "int32", [2, 2]), "bytes for shape"),
        (x(0, "Tensor", [2, 2]), "not the dtype of a tensor"),
        (x(0, "<i8", [2, 2], tag=Tag.ARRAY), "Expected `Tensor`, got `numpy.ndarray`"),
        (x(0, "int64", tag=Tag.TENSOR), "TENSOR: Expected `array` of at least length 3"),
        (s(1, "|O", [2]), "not the dtype"),
        (s(1, "<f8,<f8", [2]), "not the dtype"),
        (s(1, "<U0", [2]), "not the dtype"),
        (s(1, "<U2", [2]), "not of this dtype"),
        (s(7, "<f8", [2]), "not the number of a buffer"),
        (s(-1, "<f8", [2]), "ARRAY: Expected `int` >= 0"),
        (s(0, "<f8", [4]), "1 buffers are not named by the message"),
        (lambda f, b: f["batch"].update({1: f["batch"]["x"]}), "Expected `str`"),
        (
            lambda f, b: f["non_tensor_batch"].update(r=ext(Tag.OBJECTS, [[3], [1, 2, 3]])),
            r"columns with \[2, 3\] rows",
        ),
        (lambda f, b: f.update(num_rows=3), "rows in a batch of 3"),
        (lambda f, b: f.update(num_rows=None), "number of rows"),
        (lambda f, b: f.update(num_rows=1 << 50, batch={}, non_tensor_batch={}), "num_rows"),
        (lambda f, b: f.update(device="cuda:0"), "device"),
        (lambda f, b: f.update(type="DataProto/1"), "DataProto/1"),
        (lambda f, b: f.update(more=1), "more"),
        (lambda f, b: f.pop("meta_info"), "missing required field `meta_info`"),
        (t(ext(Tag.TUPLE, 5)), "TUPLE"),
        (t(ext(Tag.SCALAR, ["<f4", b"123"])), "SCALAR"),
        (t(ext(Tag.PAIRS, [[[1], 2]])), "PAIRS"),
        (t(ext(Tag.OBJECTS, [[3], [1]])), "came with 1 entries"),
        (t(Ext(Tag.SURROGATES.value, b"\xff")), "SURROGATES"),
        (t(Ext(99, b"")), "extension 99"),
        (lambda f, b: b.append(b"more"), "not named by the message"),
        (lambda f, b: b.__setitem__(0, b[0][:-1]), "bytes for shape"),
        (lambda f, b: b.__setitem__(0, "text"), "bytes-like object is required"),
    ],
)
def test_the_error_for_a_bad_header_names_the_fault(change: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        DataProto.from_buffers(*tampered(change))


@pytest.mark.parametrize("header", [b"", b"{", b"\xff", b"\x90", b"\x01", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"])
def test_headers_that_are_not_messagepack(header: bytes) -> None:
    with pytest.raises(WireError):
        DataProto.from_buffers(header, [])


def test_memory_that_is_no_bool_is_refused() -> None:
    header, _ = batch_of(x=torch.tensor([True, False])).to_buffers()
    with pytest.raises(WireError, match="bool"):
        DataProto.from_buffers(header, [b"\x01\x02"])


def test_wire_errors_are_value_errors() -> None:
    assert issubclass(WireError, ValueError)


def test_pickled_batches_are_writable_and_copied_where_their_memory_is_read_only() -> None:
    data = batch_of(x=torch.zeros(3))
    for protocol in (2, 4, 5):
        pickle.loads(pickle.dumps(data, protocol)).batch["x"].add_(1)
    buffers: list[pickle.PickleBuffer] = []
    received = pickle.loads(pickle.dumps(data, 5, buffer_callback=buffers.append), buffers=buffers)
    assert received.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    out_of_band = [bytes(buffer.raw()) for buffer in buffers]
    pickle.loads(pickle.dumps(data, 5, buffer_callback=lambda _: False), buffers=out_of_band).batch["x"].add_(1)
    assert np.frombuffer(out_of_band[0], np.float32).tolist() == [0, 0, 0]


def test_received_rows_share_with_their_parts_and_names_what_the_sent_ones_share() -> None:
    tensor = torch.ones(4, 1 << 20)
    header, buffers = batch_of(x=tensor, same=tensor, y=torch.ones(4)).to_buffers()
    received = DataProto.from_buffers(header, [bytes(buffer) for buffer in buffers])
    received[1:2].batch["x"].zero_()
    received.select(["y"]).batch["y"][3] = 5
    assert received.batch["same"][:, 0].tolist() == [1, 0, 1, 1]
    assert received.batch["y"].tolist() == [1, 1, 1, 5]
    received.batch = None
    assert len(received) == 0


def test_pickle_calls_nothing_but_the_decoder() -> None:
    names = {
        str(arg) for op, arg, _ in __import__("pickletools").genops(pickle.dumps(batch_of(x=torch.ones(2)), 5)) if arg
    }
    assert {name for name in names if name.startswith(("rlsys", "torch", "numpy", "builtins"))} == {
        "rlsys.protocol.data"
    }


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch.dp"
    batch_of(x=torch.zeros(3)).save_to_disk(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        batch_of(x=torch.ones(3)).save_to_disk(path)
    monkeypatch.undo()
    assert DataProto.load_from_disk(path).batch["x"].tolist() == [0, 0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch.dp"]


def test_loaded_batches_are_writable_and_aligned(tmp_path: Path) -> None:
    batch_of(x=torch.zeros(3), y=torch.zeros(3, dtype=torch.bool)).save_to_disk(str(tmp_path / "b"))
    loaded = DataProto.load_from_disk(str(tmp_path / "b"))
    loaded.batch["x"].add_(1)
    assert loaded.batch["x"].data_ptr() % loaded.batch["x"].element_size() == 0


def test_files_that_are_missing_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "none")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": list(range(99))}))
    with pytest.raises(WireError, match="does not hold a DataProto"):
        DataProto.load_from_disk(tmp_path / "pickle")


def test_a_file_of_an_older_version_names_the_ways_to_continue(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"RLSYSDP1" + bytes(64))
    with pytest.raises(WireError, match=r"old: .* written by another version .*trainer\.resume_mode=disable"):
        DataProto.load_from_disk(tmp_path / "old")


def test_deepcopy_of_a_received_batch_is_private() -> None:
    received = crossed(batch_of(x=torch.zeros(3)))
    twin = copy.deepcopy(received)
    twin.batch["x"].add_(1)
    assert received.batch["x"].tolist() == [0, 0, 0]


@pytest.mark.slow
def test_decoder_survives_many_mutations() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(4).view(2, 2), "m": torch.tensor([True, False])},
        {"s": np.array(["a", "b"]), "o": object_array([{"a": (1, b"x")}, {1: torch.ones(2)}])},
        {"t": np.float32(2), "d": {"k": [None, 1.5]}},
    )
    header, buffers = data.to_buffers()
    held = [bytes(buffer) for buffer in buffers]
    rng = random.Random(0)
    tokens = [bytes([0xC7, 2, tag, 0x91, 1]) for tag in Tag]
    tokens += [b"\xc0", b"\x80", b"\x90", b"\x91", b"\xcf", b"\xa1", b"\xff"]
    for _ in range(200_000):
        text = bytearray(header)
        for _ in range(rng.randint(1, 4)):
            at, cut = rng.randrange(len(text)), rng.randint(0, 6)
            text[at : at + cut] = rng.choice(tokens) if rng.random() < 0.7 else rng.randbytes(cut)
        chosen = held if rng.random() < 0.8 else [rng.randbytes(rng.randint(0, 40)) for _ in held]
        with contextlib.suppress(WireError):
            DataProto.from_buffers(bytes(text), chosen)
