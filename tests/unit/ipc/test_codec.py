"""The codec: which values cross between processes, with which types, and what hostile bytes can do."""

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from rlsys.ipc.codec import Tag, allow_records, decode, encode
from rlsys.ipc.framing import WireError, receive, send
from rlsys.types import Box


class Message(Struct, tag="message"):
    value: Any


class Other(Struct, tag="other"):
    number: int


@dataclass(frozen=True)
class Allowed:
    name: str
    boxes: tuple[Box, ...]
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class NotAllowed:
    text: str


allow_records(Box, Allowed)
BOXES = st.builds(Box, st.text(), st.tuples(st.integers()), st.tuples(st.integers()))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | BOXES
        | st.builds(Allowed, st.text(), st.lists(BOXES).map(tuple))
    ),
    max_leaves=20,
)


def crossed(value: Any) -> Any:
    body, buffers = encode(Message(value))
    return decode(body, [bytearray(buffer) for buffer in buffers], Message).value


def body_of(value: Any) -> bytes:
    return msgspec.msgpack.encode({"type": "message", "value": value})


@given(VALUES)
def test_values_cross_unchanged(value: Any) -> None:
    assert crossed(value) == value


def test_arrays_and_tensors_cross_bitwise() -> None:
    half = torch.randn(3, 5).bfloat16()
    arrays = [np.arange(4, dtype=np.uint64) + 2**63, np.zeros((0, 4))]
    got_half, got_scalar, got_empty, (first, second) = crossed([half.t(), torch.tensor(2.5), torch.empty(0, 3), arrays])
    assert torch.equal(got_half, half.t())
    assert got_half.dtype is torch.bfloat16
    assert got_scalar.shape == ()
    assert got_empty.shape == (0, 3)
    np.testing.assert_array_equal(first, arrays[0])
    assert (second.shape, second.dtype) == ((0, 4), np.float64)


def test_records_cross_with_their_tensors() -> None:
    record = crossed(Allowed("a", (Box("b", (0,), (2,)),), torch.arange(3)))
    assert record.boxes == (Box("b", (0,), (2,)),)
    assert record.weights.tolist() == [0, 1, 2]


def test_types_that_were_not_allowed_are_refused() -> None:
    with pytest.raises(TypeError, match=r"value: a .*NotAllowed"):
        encode(Message(NotAllowed("x")))
    with pytest.raises(TypeError, match=r"value 'key': a .*set"):
        encode(Message({"key": [{1, 2}]}))
    record = msgspec.msgpack.Ext(Tag.RECORD.value, msgspec.msgpack.encode(["NotAllowed", {"text": "x"}]))
    with pytest.raises(WireError, match="record 'NotAllowed'"):
        decode(body_of(record), [], Message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor": 5, "start": [0], "shape": [1]}, "Expected `str`"),
        ({"tensor": "a", "start": ["0"], "shape": [1]}, "Expected `int`"),
        ({"tensor": "a", "start": [0]}, "missing required field `shape`"),
    ],
)
def test_the_fields_of_records_are_checked(fields: dict[str, Any], message: str) -> None:
    record = msgspec.msgpack.Ext(Tag.RECORD.value, msgspec.msgpack.encode(["Box", fields]))
    with pytest.raises(WireError, match=message):
        decode(body_of(record), [], Message)


def test_only_the_expected_message_is_built() -> None:
    body, _ = encode(Other(3))
    assert decode(body, [], Message | Other) == Other(3)
    with pytest.raises(WireError, match="other"):
        decode(body, [], Message)
    with pytest.raises(WireError, match="Expected `int`"):
        decode(msgspec.msgpack.encode({"type": "other", "number": "3"}), [], Other)


@pytest.mark.parametrize("depth", [500, 5000, 100_000])
def test_deep_nesting_ends_in_a_wire_error(depth: int) -> None:
    nested = b"\xc0"
    for _ in range(min(depth, 5000)):
        nested = b"\xc9" + (len(nested) + 1).to_bytes(4, "big") + bytes([Tag.TUPLE]) + b"\x91" + nested
    bodies = [b"\x82\xa4type\xa7message\xa5value" + value for value in (b"\x91" * depth + b"\xc0", nested)]
    for body in bodies:
        with contextlib.suppress(WireError):
            decode(body, [], Message)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.lists(st.binary(max_size=16), max_size=2), st.integers(0, 12))
def test_any_bytes_decode_or_end_in_a_wire_error(data: bytes, buffers: list[bytes], code: int) -> None:
    for body in (data, body_of(msgspec.msgpack.Ext(code, data))):
        with contextlib.suppress(WireError):
            decode(body, buffers, Message)


# ---- framing -------------------------------------------------------------------------------------------------------


def parts_of(message: Message) -> list[bytes | memoryview]:
    body, buffers = encode(message)
    return [body, *buffers]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((1).to_bytes(4, "big") + (1 << 62).to_bytes(8, "big"), "over the limit of 1048576"),
        (b"\xff" * 8, "4294967295 parts"),
        (bytes(8), "0 parts"),
    ],
)
def test_frames_over_the_limits_are_refused(data: bytes, message: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        with pytest.raises(WireError, match=message):
            receive(theirs, max_bytes=1 << 20)


def test_frames_are_complete_however_they_arrive() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, parts_of(Message([1, "a"])))
        send(ours, parts_of(Message(None)))
        stream = theirs.recv(1 << 16)
        for byte in stream:
            ours.sendall(bytes([byte]))
        got = [decode(parts[0], parts[1:], Message).value for parts in (receive(theirs, max_bytes=99) for _ in "12")]
        assert got == [[1, "a"], None]


def test_large_tensors_cross_a_socket_and_are_writable() -> None:
    ours, theirs = socket.socketpair()
    tensor = torch.arange(1 << 18)
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, parts_of(Message([tensor, tensor]))))
        sender.start()
        body, *buffers = receive(theirs, max_bytes=1 << 30)
        first, second = decode(body, buffers, Message).value
        sender.join()
        assert torch.equal(first, tensor)
        assert first.data_ptr() == second.data_ptr(), "one object is sent once"
        first.add_(1)
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs, max_bytes=1 << 30)
