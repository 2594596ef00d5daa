"""The header of a safetensors file, for files that are written piece by piece."""

import json
from collections.abc import Iterable, Sequence

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The format's names of dtypes by torch's."""


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The first bytes of a file of tensors (name, the format's dtype, shape, bytes), which follow one after another.

    It is padded so that the data are aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, num_bytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text
