"""Dumps of generated samples: verl's `{step}.jsonl` and a page that shows them, `index.html`, to be opened from disk.

The page needs no server and no network: it loads `browser/{step}.js` files written beside it. Everything in them came
from a model or a dataset and is only ever shown as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.telemetry.jsonl import encode_line, plain_json

if TYPE_CHECKING:
    from torch import Tensor

Ragged = Sequence[Sequence[float]]
MAX_BROWSABLE_ROWS = 512
_SIGNIFICANT_DIGITS = 6


def dump_rollouts(
    directory: str | Path,
    *,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    extras: Mapping[str, Sequence[Any]] | None = None,
    token_texts: Sequence[Sequence[str]] | None = None,
    token_values: Mapping[str, Ragged] | None = None,
    max_browsable_rows: int = MAX_BROWSABLE_ROWS,
) -> Path:
    """Write the samples of one step, replacing an earlier dump of it, and bring the browser page up to date.

    `{directory}/{step}.jsonl` has one line per sample: input, output, gts, score, step, the `extras` (reward parts)
    and the `token_values`, lists with one number per response token, e.g. token_ids, log_probs, advantages (see
    `ragged`). The page keeps the first `max_browsable_rows` samples and colours the pieces in `token_texts` (see
    `token_texts_of_rows`) by them; a sample beyond the end of `token_texts` is shown without colours. Files appear
    whole or not at all. Returns the JSONL path; raises ValueError when the columns differ in length.
    """
    extras, token_values = extras or {}, token_values or {}
    _check_lengths(len(inputs), {"outputs": outputs, "gts": gts, "scores": scores, **extras, **token_values})
    token_texts = token_texts or ()
    directory = Path(directory)
    (directory / "browser").mkdir(parents=True, exist_ok=True)
    samples = [dict(zip(("input", "output", "gts", "score"), sample)) for sample in zip(inputs, outputs, gts, scores)]
    columns = {**extras, **{name: [_short(row) for row in rows] for name, rows in token_values.items()}}
    lines = [
        encode_line(sample | {"step": step} | {name: column[i] for name, column in columns.items()})
        for i, sample in enumerate(samples)
    ]
    path = directory / f"{step}.jsonl"
    _write_whole(path, b"".join(lines))
    rows = [
        sample
        | {
            "extras": {name: column[i] for name, column in extras.items()},
            "values": {name: columns[name][i] for name in token_values},
            "tokens": list(token_texts[i]) if i < len(token_texts) else None,
        }
        for i, sample in enumerate(samples[:max_browsable_rows])
    ]
    _write_whole(directory / "browser" / f"{step}.js", _script("step", {"step": step, "rows": rows}))
    _list_step(directory, step, scores)
    _write_whole(directory / "index.html", browser_page().encode())
    return path


def browser_page() -> str:
    """The page; its only inline script is allowed by hash, so that no other could run even if markup got in."""
    page = files("rlsys.telemetry").joinpath("rollouts.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None
    digest = hashlib.sha256(script[1].encode()).digest()
    return page.replace("SCRIPT_HASH", base64.b64encode(digest).decode(), 1)


def ragged(values: Tensor, lengths: Tensor) -> list[list[float]]:
    """The first `lengths[i]` entries of each row of `values` (B, R), for `token_values`."""
    return [row[:n] for row, n in zip(values.tolist(), lengths.tolist())]


def token_texts_of_rows(
    rows: Sequence[Sequence[int]], decode: Callable[[list[int]], str], *, max_rows: int = MAX_BROWSABLE_ROWS
) -> list[list[str]]:
    """`token_texts_of` for the first `max_rows` rows; token pairs seen before are not decoded again."""
    decode_once = cache(lambda ids: decode(list(ids)))
    return [token_texts_of(row, lambda ids: decode_once(tuple(ids))) for row in rows[:max_rows]]


def token_texts_of(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text each token adds; joined they are `decode(token_ids)`.

    A token that ends inside a character adds "" and the one that completes it adds the character. Each token is decoded
    with those since the last complete piece and one piece before, so tokenizers that treat a first token specially
    (a leading space) give the same text as decoding all tokens together.
    """
    ids = list(token_ids)
    texts: list[str] = []
    prefix, read = 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[prefix:read]), decode(ids[prefix:end])
        if end < len(ids) and now.endswith("\ufffd"):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        prefix, read = read, end
    return texts


def _check_lengths(num: int, columns: Mapping[str, Sequence[Any]]) -> None:
    for name, column in columns.items():
        if len(column) != num:
            raise ValueError(f"'{name}' has {len(column)} values for {num} samples")


def _short(row: Sequence[float]) -> list[float]:
    return [v if isinstance(v, int) else float(f"{v:.{_SIGNIFICANT_DIGITS}g}") for v in row]


def _list_step(directory: Path, step: int, scores: Sequence[float]) -> None:
    path = directory / "browser" / "steps.js"
    known = [entry for entry in _listed(path) if entry["step"] != step]
    finite = [float(s) for s in scores if math.isfinite(s)]
    entry: dict[str, Any] = {
        "step": step,
        "file": f"browser/{step}.js",
        "rows": len(scores),
        "mean": math.fsum(finite) / len(finite) if finite else None,
        "min": min(finite, default=None),
        "max": max(finite, default=None),
    }
    _write_whole(path, _script("steps", sorted([*known, entry], key=lambda e: e["step"])))


def _listed(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text()
    return json.loads(text[text.index("(") + 1 : text.rindex(")")])


def _script(function: str, data: Any) -> bytes:
    """A call with data as ASCII JSON, which is also a JavaScript literal."""
    text = json.dumps(plain_json(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return f"rlsysRollouts.{function}({text});\n".encode()


def _write_whole(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_bytes(content)
    beside.replace(path)
