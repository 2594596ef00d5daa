"""DataProto: the rows that travel between the controller and its workers.

B rows. `batch` holds tensors (B, ...) in a TensorDict, `non_tensor_batch` numpy arrays (B, ...), mostly of objects,
and `meta_info` what is true of all rows. Names and semantics are verl's (verl.protocol); the implementation is ours.
"""

import copy
import itertools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.utils.data import DataLoader

from rlsys.ipc.framing import Buffer, WireError
from rlsys.protocol import columns as cols
from rlsys.protocol.columns import take_rows
from rlsys.protocol.received import OwnBatch, ReceivedBatch
from rlsys.protocol.wire import decode, encode, read_stream, write_stream
from rlsys.utils.atomic import written_whole
from rlsys.utils.errors import raised_as

Options = dict[str, Any]
Keys = Sequence[str] | None
Index = list[int] | list[bool] | np.ndarray | Tensor


class _DataProtoConfigMeta(type):
    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        names = ("RLSYS_AUTO_PADDING", "VERL_AUTO_PADDING")
        return cls._enabled or any(os.getenv(name, "").upper() in ("TRUE", "1") for name in names)

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        assert isinstance(enabled, bool), f"auto_padding must be a bool, got {enabled!r}"
        cls._enabled = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Whether batches that do not divide evenly are padded at dispatch; also by RLSYS_AUTO_PADDING=1."""


@dataclass
class DataProtoItem:
    """One row: its tensors without the batch dimension, its objects, and the meta_info of its batch."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """Rows of tensors and objects with what is common to them.

    As in verl, `select`, `slice`, `chunk` and `repeat` share `meta_info` (and tensors where no copy is needed) with
    their source. `union`, `reorder`, `rename`, `pop`, `padding` and `to` change the DataProto itself by replacing its
    references; none of them writes into a tensor's memory.

    A received DataProto belongs to its receiver, who may write to it. Its tensors stay in the memory that they came in
    until `batch` is first used, which copies them; `len`, `concat`, `select_idxs` and sending it on read them there.
    """

    batch: OwnBatch = OwnBatch()  # noqa: RUF009 a descriptor
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    @property
    def _readable(self) -> TensorDict | None:
        """The batch for those who neither write to its memory nor pass it on."""
        batch = vars(self)["batch"]
        return batch.tensors if isinstance(batch, ReceivedBatch) else batch

    def __repr__(self) -> str:
        return cols.described(len(self), self._readable, self.non_tensor_batch, self.meta_info)

    def check_consistency(self) -> None:
        """AssertionError unless there is one batch dimension and every array has as many rows as the tensors."""
        num_rows = None
        if self.batch is not None:
            assert len(self.batch.batch_size) == 1, "only support num_batch_dims=1"
            num_rows = self.batch.batch_size[0]
        for key, array in (self.non_tensor_batch or {}).items():
            assert isinstance(array, np.ndarray), f"non_tensor_batch '{key}' must be an array, got {type(array)}"
            is_full = num_rows is None or array.shape[0] == num_rows
            assert is_full, f"key {key} length {len(array)} is not equal to batch size {num_rows}"

    # ---- making one --------------------------------------------------------------------------------------------

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Tensor | np.ndarray], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> "DataProto":
        """Sort a dict of tensors and arrays into both kinds; ValueError for anything else."""
        for key, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                raise ValueError(f"Unsupported type in data: '{key}' is a {type(value)}")
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        non_tensors = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Rows out of tensors with equal leading dimensions and arrays or lists (they become object arrays)."""
        assert num_batch_dims > 0, "num_batch_dims must be greater than zero"
        assert non_tensors is None or num_batch_dims == 1, "only support num_batch_dims=1 when non_tensors is not None."
        assert non_tensors is None or isinstance(non_tensors, dict), f"non_tensors is a {type(non_tensors)}"
        sizes = {key: tensor.shape[:num_batch_dims] for key, tensor in (tensors or {}).items()}
        assert len(set(sizes.values())) <= 1, f"Not all the tensor in tensors have the same batch size: {sizes}"
        batch = TensorDict(tensors, batch_size=next(iter(sizes.values()))) if tensors else None
        columns = {
            key: value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
            for key, value in (non_tensors or {}).items()
        }
        meta_info = {} if meta_info is None else meta_info
        if auto_padding:
            meta_info = {**meta_info, DataProtoConfig.auto_padding_key: True}
        return cls(batch=batch, non_tensor_batch=columns, meta_info=meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> "DataProto":
        """Tensors become columns, NonTensorStack object columns, NonTensorData meta_info."""
        assert num_batch_dims > 0, "num_batch_dims must be greater than zero"
        batch: dict[str, Tensor] = {}
        non_tensors: dict[str, np.ndarray] = {}
        meta_info = {} if meta_info is None else meta_info
        for key in map(str, tensor_dict.keys()):
            value = tensor_dict.get(key)
            if isinstance(value, Tensor):
                batch[key] = value
            elif isinstance(value, NonTensorStack):
                non_tensors[key] = cols.object_rows([item.data for item in value])
            elif isinstance(value, NonTensorData):
                meta_info[key] = value.data
        assert not non_tensors or num_batch_dims == 1, "only support num_batch_dims=1 when there are non tensors"
        return cls.from_dict(batch, non_tensors or None, meta_info, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict with all three parts; AssertionError where a tensor and an array have the same name."""
        tensors = cols.tensors_of(self.batch)
        common = tensors.keys() & self.non_tensor_batch.keys()
        assert not common, f"tensors and non-tensors have common keys {sorted(common)}"
        output = TensorDict(tensors, batch_size=(len(self),))
        for key, array in self.non_tensor_batch.items():
            output.set(key, NonTensorStack(*[NonTensorData(item) for item in array]))
        for key, value in self.meta_info.items():
            output.set_non_tensor(key, value)
        return output

    # ---- looking at it -----------------------------------------------------------------------------------------

    @property
    def tensors(self) -> TensorDict:
        """The tensors; ValueError where there are none."""
        if self.batch is None:
            raise ValueError("this batch has no tensors")
        return self.batch

    def __len__(self) -> int:
        if (batch := self._readable) is not None:
            return batch.batch_size[0]
        return next((len(array) for array in (self.non_tensor_batch or {}).values()), 0)

    def __getitem__(self, item: int | slice | Index) -> Any:
        """A DataProtoItem for an integer, a DataProto for a slice or indices; TypeError otherwise."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, Tensor)):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = None if self.batch is None else self.batch[item]
            columns = {key: array[item] for key, array in self.non_tensor_batch.items()}
            return DataProtoItem(batch=row, non_tensor_batch=columns, meta_info=self.meta_info)
        raise TypeError(f"Indexing with {type(item)} is not supported")

    def print_size(self, prefix: str = "") -> None:
        """Print how many GiB the tensors and the arrays hold."""
        tensors = cols.tensors_of(self._readable).values()
        tensor_gib = sum(tensor.element_size() * tensor.numel() for tensor in tensors) / 1024**3
        array_gib = sum(array.nbytes for array in self.non_tensor_batch.values()) / 1024**3
        text = f"Size of tensordict: {tensor_gib} GB, size of non_tensor_batch: {array_gib} GB"
        print(f"{prefix}, {text}" if prefix else text)

    def get_data_info(self) -> str:
        """One line per tensor and array with its shape, and per meta entry with its type."""
        tensors = cols.tensors_of(self._readable)
        return "\n".join(
            [
                "batch",
                *(f"  {key}: {tuple(t.shape)} ({t.dtype}) {t.device}" for key, t in tensors.items()),
                "non_tensor_batch",
                *(f"  {key}: ndarray{a.shape} ({a.dtype})" for key, a in self.non_tensor_batch.items()),
                "meta_info",
                *(f"  {key}: {type(value).__name__}" for key, value in self.meta_info.items()),
            ]
        )

    # ---- columns -----------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """The named columns, each None meaning all; `deepcopy` copies the objects and meta_info, never the tensors."""
        batch, columns, meta_info = self.batch, self.non_tensor_batch, self.meta_info
        if batch_keys is not None and batch is not None:
            batch = batch.select(*batch_keys)
        if non_tensor_batch_keys is not None:
            columns = {key: array for key, array in columns.items() if key in non_tensor_batch_keys}
        if meta_info_keys is not None:
            meta_info = {key: value for key, value in meta_info.items() if key in meta_info_keys}
        if deepcopy:
            columns, meta_info = copy.deepcopy(columns), copy.deepcopy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=meta_info)

    def pop(
        self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None
    ) -> "DataProto":
        """Take the named columns out, in place, and return them; AssertionError where one is missing."""
        wanted = (batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        batch: TensorDict | dict[str, Tensor] = {} if self.batch is None else self.batch
        for keys, held in zip(wanted, (batch, self.non_tensor_batch, self.meta_info), strict=True):
            for key in keys:
                assert key in held.keys(), f"'{key}' is not among {list(held.keys())}"  # noqa: SIM118
        return DataProto.from_dict(
            tensors={key: batch.pop(key) for key in wanted[0]},  # pyrefly: ignore
            non_tensors={key: self.non_tensor_batch.pop(key) for key in wanted[1]},
            meta_info={key: self.meta_info.pop(key) for key in wanted[2]},
        )

    def rename(self, old_keys: str | list[str] | None = None, new_keys: str | list[str] | None = None) -> "DataProto":
        """Give tensors other names, in place and all at once; ValueError unless both lists are equally long."""
        for keys in (old_keys, new_keys):
            if not isinstance(keys, (str, list)):
                raise TypeError(f"keys must be a list or a string, but got {type(keys)}")
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new):
            raise ValueError(f"new_keys and old_keys must have the same length, but got {len(new)} and {len(old)}")
        if self.batch is None or (missing := [key for key in old if key not in self.batch.keys()]):  # noqa: SIM118
            raise KeyError(f"no tensors named {old if self.batch is None else missing}")
        self.batch.update(dict(zip(new, [self.batch.pop(key) for key in old], strict=True)))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the other's columns, in place; AssertionError for another length or a common key with other values."""
        size, more = len(self), len(other)
        assert not size or not more or size == more, f"a union needs equally many rows, got {size} and {more}"
        if self.batch is None:
            self.batch = other.batch
        elif other.batch is not None:
            self.batch = cols.union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch = cols.union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = cols.union_meta(self.meta_info, other.meta_info)
        return self

    # ---- rows --------------------------------------------------------------------------------------------------

    def _with_rows(self, batch: TensorDict | None, change: Callable[[str, Any], Any], num_rows: int) -> "DataProto":
        if batch is not None:
            columns = {key: change(key, tensor) for key, tensor in cols.tensors_of(batch).items()}
            batch = TensorDict(columns, batch_size=(num_rows,), device=batch.device)
        held = {key: change(key, array) for key, array in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=held, meta_info=self.meta_info)

    def select_idxs(self, idxs: Index) -> "DataProto":
        """The rows at integer indices, or where a mask is true, as copies."""
        rows = torch.as_tensor(idxs).detach()
        if rows.ndim != 1:
            raise IndexError(f"row indices must have one dimension, got shape {tuple(rows.shape)}")
        if rows.dtype == torch.bool:
            if len(rows) != len(self):
                raise IndexError(f"a mask of {len(rows)} for {len(self)} rows")
            rows = rows.nonzero().squeeze(-1)
        rows = rows.long()
        return self._with_rows(self._readable, lambda _, values: take_rows(values, rows), len(rows))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """The rows from `start` to before `end`, without copying."""
        rows = slice(start, end, step)
        batch = None if self.batch is None else self.batch[rows]
        columns = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=self.meta_info)

    def reorder(self, indices: Index) -> None:
        """Replace the rows by those at `indices`, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: side by side when interleaved, else the whole batch one after the other."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> "DataProto":
        """Row i `repeat_times[i]` times, side by side."""
        assert isinstance(repeat_times, (list, tuple, np.ndarray, Tensor)), (
            f"repeat_times type must be in [list, torch.Tensor, np.ndarray, tuple], got {type(repeat_times)}"
        )
        times = torch.as_tensor(repeat_times)
        assert times.ndim == 1, f"repeat_times must have one dimension, got shape {tuple(times.shape)}"
        if len(times) != len(self):
            raise RuntimeError(f"{len(times)} repeat_times for {len(self)} rows")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Keys = None) -> "DataProto":
        """Cut the second dimension of `split_keys` into `n_split` rows each; repeat every other column to match."""
        keys = set(split_keys or ())
        rows = torch.arange(len(self)).repeat_interleave(n_split)

        def unfold(key: str, values: Any) -> object:
            if key not in keys:
                return take_rows(values, rows)
            return values.reshape(values.shape[0] * n_split, values.shape[1] // n_split, *values.shape[2:])

        return self._with_rows(self.batch, unfold, len(rows))

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Split into `chunks` contiguous parts without copying; AssertionError if uneven unless padding is enabled."""
        return [self.slice(start, end) for start, end in self._chunk_bounds(len(self), chunks, even=self.batch is None)]

    def _chunk_bounds(self, num_rows: int, chunks: int, *, even: bool = False) -> list[tuple[int, int]]:
        """First and last + 1 row of each chunk: cut as torch.chunk does (the last ones short or empty) or evenly."""
        divides = self.is_padding_enabled() or num_rows % chunks == 0
        assert divides, f"only support equal chunk. Got size of DataProto {num_rows} and chunk {chunks}."
        size, longer = divmod(num_rows, chunks)
        if even:
            starts = [i * size + min(i, longer) for i in range(chunks + 1)]
        else:
            starts = [min(i * (size + bool(longer)), num_rows) for i in range(chunks + 1)]
        return list(itertools.pairwise(starts))

    def split(self, split_size: int) -> "list[DataProto]":
        """Split into parts of `split_size` rows, the last one shorter, without copying."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Join rows; meta_info must agree (AssertionError) but for `metrics`, which become a dict of lists."""
        return concat_chunk(1, 0, data)

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Options | None = None
    ) -> "Iterator[DataProto]":
        """Mini-batches over `epochs` epochs in the order of a DataLoader seeded with `seed`; must divide evenly."""
        assert len(self) % mini_batch_size == 0, f"{len(self)} % {mini_batch_size} != 0"
        assert dataloader_kwargs is None or isinstance(dataloader_kwargs, dict), f"got {type(dataloader_kwargs)}"
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        options = {"batch_size": mini_batch_size, "collate_fn": self.select_idxs, "generator": generator}
        loader = DataLoader(range(len(self)), **options, **(dataloader_kwargs or {}))  # pyrefly: ignore
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    # ---- padding -----------------------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether uneven rows are padded at dispatch: by this batch's own flag, the environment or DataProtoConfig."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the "first" or else the last row, in place."""
        if padding_size == 0:
            return
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = DataProto.concat([self, self.select_idxs([row]).repeat(padding_size)])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    # ---- devices, memory, wire and disk ------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> "DataProto":
        """Move the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def to_buffers(self) -> tuple[bytes, list[memoryview]]:
        """The wire form: a typed header and the raw memory of every tensor and number array, not copied.

        TypeError naming the key of an object that has no wire form. CUDA tensors are copied to the CPU first.
        """
        header, buffers = encode(self._readable, self.non_tensor_batch, self.meta_info)
        is_received = isinstance(vars(self)["batch"], ReceivedBatch)
        return header, [buffer.toreadonly() for buffer in buffers] if is_received else buffers

    @classmethod
    def from_buffers(cls, header: Buffer, buffers: Sequence[Buffer]) -> "DataProto":
        """The inverse of `to_buffers`, over the same memory; WireError, at once and not at use, if malformed.

        Memory that is read-only must not change; it is copied: that of arrays at once, that of tensors at first use.
        """
        parts = decode(header, buffers)
        rows = cls(batch=parts.tensordict(), non_tensor_batch=parts.non_tensor_batch, meta_info=parts.meta_info)
        if parts.batch and any(memoryview(buffer).readonly for buffer in buffers):
            rows.batch = ReceivedBatch(rows.tensors)
        return rows

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        header, buffers = self.to_buffers()
        return _from_wire, (type(self), header, *map(bytearray if protocol < 5 else pickle.PickleBuffer, buffers))

    def __copy__(self) -> "DataProto":
        return type(self)(batch=self.batch, non_tensor_batch=self.non_tensor_batch, meta_info=self.meta_info)

    def __deepcopy__(self, memo: dict[int, object]) -> "DataProto":
        batch = None if self._readable is None else self._readable.clone()
        columns, meta_info = copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo)
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=meta_info)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write the wire form with checksums, beside `filepath`: the file appears whole or not at all."""
        with written_whole(Path(filepath), durable=True) as file:
            write_stream(file, *self.to_buffers())

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> "DataProto":
        """Read what `save_to_disk` wrote, writable; WireError naming the file if it is truncated or corrupt."""
        with raised_as(WireError, f"{filepath}", WireError), Path(filepath).open("rb") as file:
            return DataProto.from_buffers(*read_stream(file, os.fstat(file.fileno()).st_size))


def _from_wire(cls: type[DataProto], header: bytes, *buffers: Any) -> DataProto:
    return cls.from_buffers(header, buffers)


def concat_chunk(chunks: int, index: int, data: Sequence[DataProto]) -> DataProto:
    """`DataProto.concat(data).chunk(chunks)[index]`, without copying the rows of other chunks."""
    if not data:
        raise IndexError("cannot concat an empty list of DataProto")
    firsts = list(itertools.accumulate(map(len, data), initial=0))
    whole = DataProto(meta_info=cols.concat_meta([part.meta_info for part in data]))
    start, end = whole._chunk_bounds(firsts[-1], chunks, even=data[0]._readable is None)[index]
    cuts = [slice(max(start - first, 0), max(end - first, 0)) for first in firsts[:-1]]
    batch = cols.concat_tensors([part._readable for part in data], cuts)
    pairs = zip(data, cuts, strict=True)
    columns = cols.concat_arrays([{k: array[cut] for k, array in part.non_tensor_batch.items()} for part, cut in pairs])
    return type(data[0])(batch=batch, non_tensor_batch=columns, meta_info=whole.meta_info)
