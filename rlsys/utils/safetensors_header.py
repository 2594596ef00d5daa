"""The header of a safetensors file, for files that are written piece by piece."""

import json
from collections.abc import Iterable, Sequence

_TORCH = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2"
_STORED = "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL F8_E4M3 F8_E5M2"
DTYPES: dict[str, str] = dict(zip(_TORCH.split(), _STORED.split(), strict=True))
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
