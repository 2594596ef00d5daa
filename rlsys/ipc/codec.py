"""Values as a MessagePack body and raw buffers: what crosses between processes and what is stored of a DataProto.

A message is a `msgspec.Struct`; its class is what `decode` accepts, so a peer can only send what a type allows. Fields
of type Any keep Python's types: None, bool, int, float, str, bytes, list and str-keyed dicts are plain MessagePack, all
others are extensions (`Tag`). Tensors and number arrays are buffers beside the body, not copied. Records are rebuilt if
`allow_records` named their class. Any other type is a TypeError. Malformed bytes are a WireError.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Ext
from torch import Tensor

from rlsys.ipc.framing import Buffer, WireError

PLAIN = {str, int, float, bool, bytes, type(None)}
NUMBER_KINDS = "biufcSUmM"
"""numpy's kinds of dtype whose arrays are plain memory: numbers, fixed-width strings and times."""
INTEGERS = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64"
FLOATS = "float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in f"{INTEGERS} {FLOATS}".split()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
M = TypeVar("M", bound=Struct)
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 48)], ...], Meta(max_length=32)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)  # warns once per process that read-only memory can be written


class Tag(IntEnum):
    """The extension types of the body."""

    TUPLE = 1
    PAIRS = 2  # a dict with other keys than str
    SURROGATES = 3  # a str that is not UTF-8
    LONG = 4  # an int of more than 64 bits
    SCALAR = 5
    NP_STR = 6
    NP_BYTES = 7
    OBJECTS = 8
    ARRAY = 9
    TENSOR = 10
    RECORD = 11


class _Memory(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An array or tensor in buffer number `index`."""

    index: Annotated[int, Meta(ge=0)]
    dtype: str
    shape: Shape


_records: dict[str, type] = {}


def allow_records(*types: type) -> None:
    """Let these frozen dataclasses cross; the receiver checks their fields. Both sides must call it."""
    for record in types:
        if not is_dataclass(record) or _records.setdefault(record.__name__, record) is not record:
            raise ValueError(f"{record} is not a dataclass, or its name is taken by another allowed record")


def encode(message: Struct) -> tuple[bytes, list[memoryview]]:
    """(body, buffers) of a message; TypeError naming the field (and key) of a value that cannot cross."""
    try:
        return _Encoder(exact=False).encode(message)
    except (UnicodeEncodeError, OverflowError):
        return _Encoder(exact=True).encode(message)


class _Encoder:
    """Packs one message. With `exact`, every str and int is checked for what MessagePack cannot hold."""

    def __init__(self, *, exact: bool) -> None:
        self._plain = PLAIN - {str, int} if exact else PLAIN
        self._buffers: list[memoryview] = []
        self._stored: dict[int, tuple[Tensor | np.ndarray, Ext]] = {}

    def encode(self, message: Struct) -> tuple[bytes, list[memoryview]]:
        packed = {"type": message.__struct_config__.tag} if message.__struct_config__.tag else {}
        packed |= {name: self._pack_field(name, value) for name, value in msgspec.structs.asdict(message).items()}
        return msgspec.msgpack.encode(packed), self._buffers

    def _pack_field(self, name: str, value: Any) -> Any:
        if type(value) is dict and set(map(type, value)) <= {str}:
            return {self._at(name, key): self._at(f"{name} '{key}'", item) for key, item in value.items()}
        return self._at(name, value)

    def _at(self, where: str, value: Any) -> Any:
        try:
            return self._pack(value)
        except RecursionError as error:
            raise TypeError(f"{where}: nested too deeply or in a circle") from error
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from error

    def _pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in self._plain:
            return value
        if kind is list:
            return self._pack_list(value)
        if kind is dict:
            return self._pack_dict(value)
        if kind is tuple:
            return _nested(Tag.TUPLE, self._pack_list(value))
        if kind in (str, int):
            return _exactly(value)
        if isinstance(value, np.generic):
            return _pack_scalar(value)
        if isinstance(value, np.ndarray) and value.dtype == object:
            return _nested(Tag.OBJECTS, [value.shape, self._pack_list(value.ravel().tolist())])
        if isinstance(value, Tensor | np.ndarray):
            return self._store(value)
        if isinstance(value, StrEnum | IntEnum):
            return value.value
        if _records.get(kind.__name__) is kind:
            named = {field.name: self._pack(getattr(value, field.name)) for field in fields(kind)}
            return _nested(Tag.RECORD, [kind.__name__, named])
        if isinstance(value, Mapping):
            return self._pack_dict(dict(value))
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent; send plain values or arrays")

    def _pack_list(self, items: Sequence[Any]) -> Sequence[Any]:
        return items if set(map(type, items)) <= self._plain else [self._pack(item) for item in items]

    def _pack_dict(self, items: dict[Any, Any]) -> Any:
        if set(map(type, items)) - {str} or str not in self._plain:
            return _nested(Tag.PAIRS, [[self._pack(key), self._pack(item)] for key, item in items.items()])
        return {key: self._pack(item) for key, item in items.items()}

    def _store(self, value: Tensor | np.ndarray) -> Ext:
        """Put the memory of an array or tensor among the buffers, once for each object."""
        if id(value) not in self._stored:
            tag, dtype, memory = _tensor_memory(value) if isinstance(value, Tensor) else _array_memory(value)
            ext = _nested(tag, [len(self._buffers), dtype, list(value.shape)])
            self._stored[id(value)] = value, ext  # the value too: while it lives, no other has its id
            self._buffers.append(memory)
        return self._stored[id(value)][1]


def _nested(tag: Tag, value: Any) -> Ext:
    return Ext(tag.value, msgspec.msgpack.encode(value))


def _exactly(value: str | int) -> Any:
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Ext(Tag.LONG.value, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    try:
        value.encode()
    except UnicodeEncodeError:
        return Ext(Tag.SURROGATES.value, value.encode("utf-8", "surrogatepass"))
    return value


def _pack_scalar(value: np.generic) -> Ext:
    if isinstance(value, np.str_):
        return Ext(Tag.NP_STR.value, value.encode("utf-8", "surrogatepass"))
    if isinstance(value, np.bytes_):
        return Ext(Tag.NP_BYTES.value, bytes(value))
    if value.dtype.kind not in NUMBER_KINDS:
        raise TypeError(f"a numpy {value.dtype} scalar cannot be sent")
    return _nested(Tag.SCALAR, [value.dtype.str, value.tobytes()])


def _array_memory(value: np.ndarray) -> tuple[Tag, str, memoryview]:
    if value.dtype.kind not in NUMBER_KINDS:
        raise TypeError(f"an array of dtype {value.dtype} cannot be sent")
    return Tag.ARRAY, value.dtype.str, _memory_of(np.ascontiguousarray(value).reshape(-1))


def _tensor_memory(value: Tensor) -> tuple[Tag, str, memoryview]:
    if value.layout != torch.strided or value.is_nested or value.dtype not in DTYPE_NAMES:
        raise TypeError(f"a {value.layout} tensor of {value.dtype} cannot be sent")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return Tag.TENSOR, DTYPE_NAMES[value.dtype], _memory_of(plain.view(-1).view(torch.uint8).numpy())


def _memory_of(flat: np.ndarray) -> memoryview:
    return memoryview(flat.view(np.uint8)) if flat.nbytes else memoryview(b"")  # pyrefly: ignore


def decode(body: Buffer, buffers: Sequence[Buffer], message: type[M], *, aliased: str = "") -> M:
    """The message over the memory of `buffers`, copied if read-only; WireError unless both fit `message` exactly.

    `message` may be a union of tagged Structs. Its field `aliased`, a dict of Ext, becomes one of tensors over the
    memory as it is: who writes to them must have made sure that it can be written.
    """
    try:
        reader = _Reader(buffers)
        value = Decoder(message, ext_hook=reader.read).decode(body)
        if aliased:
            reader.copies = False
            tensors = {key: reader.read(ext.code, ext.data) for key, ext in getattr(value, aliased).items()}
            setattr(value, aliased, msgspec.convert(tensors, dict[str, Tensor]))
    except WireError:
        raise
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a valid message: {error}") from error
    if reader.num_unused:
        raise WireError(f"{reader.num_unused} buffers are not named by the message")
    return value


class _Reader:
    """Reads the extensions of one message."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.copies = True
        self._views = [memoryview(buffer).cast("B") for buffer in buffers]
        self._restored: dict[tuple[Tag, _Memory, bool], Tensor | np.ndarray] = {}

    @property
    def num_unused(self) -> int:
        return len(self._views) - len({memory.index for _, memory, _ in self._restored})

    def read(self, code: int, data: Buffer) -> Any:
        try:
            return self._read(Tag(code), data)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            if isinstance(error, WireError):
                raise
            name = Tag(code).name if code in list(Tag) else f"extension {code}"
            raise WireError(f"a malformed {name}: {error}") from error

    def _read(self, tag: Tag, data: Buffer) -> Any:
        match tag:
            case Tag.TUPLE:
                return tuple(self._decode(data, list[Any]))
            case Tag.PAIRS:
                return dict(self._decode(data, list[tuple[Any, Any]]))
            case Tag.SURROGATES:
                return bytes(data).decode("utf-8", "surrogatepass")
            case Tag.LONG:
                return int.from_bytes(data, "little", signed=True)
            case Tag.NP_STR:
                return np.str_(bytes(data).decode("utf-8", "surrogatepass"))
            case Tag.NP_BYTES:
                return np.bytes_(bytes(data))
            case Tag.SCALAR:
                return _read_scalar(*self._decode(data, tuple[str, bytes]))
            case Tag.OBJECTS:
                return _read_objects(*self._decode(data, tuple[Shape, list[Any]]))
            case Tag.RECORD:
                return _read_record(*self._decode(data, tuple[str, dict[str, Any]]))
            case Tag.ARRAY | Tag.TENSOR:
                return self._read_memory(tag, self._decode(data, _Memory))

    def _decode(self, data: Buffer, kind: Any) -> Any:
        return Decoder(kind, ext_hook=self.read).decode(data)

    def _read_memory(self, tag: Tag, memory: _Memory) -> Tensor | np.ndarray:
        key = tag, memory, self.copies
        if key not in self._restored:
            if memory.index >= len(self._views):
                raise WireError(f"{memory.index} is not the number of a buffer")
            view = self._views[memory.index]
            view = memoryview(bytearray(view)) if self.copies and view.readonly else view
            self._restored[key] = (_tensor if tag == Tag.TENSOR else _array)(memory, view)
        return self._restored[key]


def _tensor(memory: _Memory, view: memoryview) -> Tensor:
    if memory.dtype not in DTYPES:
        raise WireError(f"{memory.dtype[:32]!r} is not the dtype of a tensor")
    dtype = DTYPES[memory.dtype]
    _check_size(memory, view, dtype.itemsize)
    if not view.nbytes:
        return torch.empty(memory.shape, dtype=dtype)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    if dtype == torch.bool and int(tensor.max()) > 1:
        raise WireError("a tensor of bool has bytes other than 0 and 1")
    if tensor.data_ptr() % dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(dtype).view(memory.shape)


def _array(memory: _Memory, view: memoryview) -> np.ndarray:
    dtype = _read_dtype(memory.dtype)
    _check_size(memory, view, dtype.itemsize)
    if not view.nbytes:
        return np.empty(memory.shape, dtype)
    array = np.frombuffer(view, dtype)
    limit = {"b": (np.uint8, 1), "U": (np.dtype(np.uint32).newbyteorder(dtype.byteorder), 0x10FFFF)}.get(dtype.kind)
    if limit and array.view(limit[0]).max() > limit[1]:
        raise WireError(f"an array of {dtype} has bytes that are not of this dtype")
    return array.reshape(memory.shape)


def _check_size(memory: _Memory, view: memoryview, itemsize: int) -> None:
    if math.prod(max(size, 1) for size in memory.shape) >= 1 << 48:
        raise WireError(f"{memory.shape} is too large a shape")
    if math.prod(memory.shape) * itemsize != view.nbytes:
        raise WireError(f"{view.nbytes} bytes for shape {memory.shape} of {memory.dtype}")


def _read_dtype(text: str) -> np.dtype[Any]:
    """A numpy dtype of plain memory by its `str`."""
    dtype = np.dtype(text) if len(text) <= 32 and text[:1] in "<>|=" and text[1:2] in set(NUMBER_KINDS) else None
    if dtype is None or dtype.str != text or not dtype.itemsize:
        raise WireError(f"{text[:32]!r} is not the dtype of a number array")
    return dtype


def _read_scalar(dtype: str, data: bytes) -> np.generic:
    (value,) = np.frombuffer(data, dtype=_read_dtype(dtype))
    return value


def _read_objects(shape: tuple[int, ...], items: list[Any]) -> np.ndarray:
    if math.prod(shape) != len(items):
        raise WireError(f"an object array of shape {shape} came with {len(items)} entries")
    return object_array(items).reshape(shape)


def object_array(values: Iterable[object]) -> np.ndarray:
    """One entry per value whatever the values are: lists of equal length stay lists, shape (len(values),)."""
    return np.fromiter(values, dtype=object)


def _read_record(name: str, values: dict[str, Any]) -> Any:
    if name not in _records:
        raise WireError(f"a record '{name[:64]}' may not cross between processes")
    return msgspec.convert(values, _records[name])
