"""Dumps of generated samples: verl's `{step}.jsonl` and a page that shows them, `index.html`, to be opened from disk.

The page needs no server and no network: it loads `browser/{step}.js`, figures of all samples, and the texts that were
kept, `browser/{step}.texts.js`. Everything in them came from a model or a dataset and is only ever shown as text.
"""

import base64
import io
import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlsys.telemetry.jsonl import JsonObject, encode_line
from rlsys.telemetry.page import ascii_json, page
from rlsys.utils.atomic import write_whole

Rows = Sequence[Any]
_SHARE_WITH_TOKENS = 0.3  # of the room, for rows with a number per token; the others keep only their texts
_BYTES_FOR_THE_PAGE = 1.8  # what a row takes in all, for each byte of its line in the JSONL file
_EXTREMES, _PROMPT_END_CHARS, _PICTURE_SIDE = 8, 160, 256


def dump_rollouts(
    directory: str | Path,
    *,
    step: int,
    inputs: Rows,
    outputs: Rows,
    gts: Rows,
    scores: Sequence[float],
    extras: Mapping[str, Rows] | None = None,
    about: Mapping[str, Rows] | None = None,
    messages: Rows | None = None,
    token_texts: Rows | None = None,
    token_values: Mapping[str, Rows] | None = None,
    max_mb: float | None = None,
) -> Path:
    """Write the samples of one step, replacing an earlier dump of it, and bring the browser page up to date.

    `{directory}/{step}.jsonl` has one line per sample: input, output, gts, score, step, the `extras` (reward parts),
    `about` (e.g. data_source, finish_reason) and the `token_values`, lists with one number per response token, e.g.
    token_ids, log_probs, advantages. The page colours the pieces in `token_texts` by them, and shows a prompt by its
    `messages` where they are given; parts {"type": "image", "sha": ..., "image": PNG} of their contents become files of
    at most 256 x 256 pixels in `{directory}/images`. With `max_mb` the files of a step take about that much at most:
    the rows that `sampled_order` puts first are kept, 30 % of the room with values per token; the page still knows the
    scores of all. Columns may be decoded lazily: only rows that are kept are read from `outputs` and `token_texts`.
    Files appear whole or not at all. Returns the JSONL path; raises ValueError when the columns differ in length.
    """
    extras, about, token_values = extras or {}, about or {}, token_values or {}
    for name, column in {"outputs": outputs, "gts": gts, "scores": scores, **extras, **about, **token_values}.items():
        if len(column) != len(inputs):
            raise ValueError(f"'{name}' has {len(column)} values for {len(inputs)} samples")
    talks = messages if messages is not None else [()] * len(inputs)
    prompts, groups = _numbered_prompts(inputs, talks)
    columns = {"input": inputs, "output": outputs, "gts": gts, "score": scores, "step": [step] * len(inputs)}
    columns |= {**extras, **about}
    room = math.inf if max_mb is None else max_mb * 1e6 / _BYTES_FOR_THE_PAGE
    used, images = 0, Path(directory) / "images"
    lines, shown = dict[int, bytes](), dict[int, dict[str, object]]()
    for row in sampled_order(groups, scores, seed=step):
        sample = {name: column[row] for name, column in columns.items()}
        has_values = used <= room * _SHARE_WITH_TOKENS
        values = {name: column[row] for name, column in token_values.items() if has_values}
        line = encode_line(sample | _rounded(values, 6))
        if used + len(line) > room:
            break
        used += len(line) + sum(_write_picture(images, part) for part in _image_parts(talks[row]))
        pieces = token_texts[row] if values and token_texts and row < len(token_texts) else None
        lines[row] = line
        shown[row] = {"output": sample["output"], "gts": gts[row], "extras": {n: c[row] for n, c in extras.items()}}
        shown[row] |= {"values": _rounded(values, 3), "tokens": pieces}
    kept = sorted(lines)
    path = Path(directory) / f"{step}.jsonl"
    browser = path.parent / "browser"
    browser.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(lines[row] for row in kept))
    first = {group: row for row, group in reversed(list(enumerate(groups)))}
    texts = {
        "prompts": [text for text, *_ in prompts],
        "messages": {group: [_without_pixels(one) for one in talks[row]] for group, row in first.items() if talks[row]},
        "rows": [shown[row] for row in kept],
    }
    hashes = [sha256(" ".join(prompt).encode("utf-8", "backslashreplace")).hexdigest() for prompt in prompts]
    lengths, numbers = token_values.get("token_ids"), int | float | None
    index = {
        "step": step,
        "prompts": [[name[:12], text[-_PROMPT_END_CHARS:]] for name, (text, *_) in zip(hashes, prompts, strict=True)],
        "prompt": groups,
        "score": scores,
        "length": [len(lengths[row] if lengths else outputs[row]) for row in range(len(inputs))],
        "unit": "tokens" if lengths else "characters",
        "kept": kept,
        "parts": {n: c for n, c in extras.items() if all(isinstance(v, numbers) or hasattr(v, "dtype") for v in c)},
        "about": {name: [str(value) for value in column] for name, column in about.items()},
    }
    _write_page(browser, step, texts, index)
    _list_step(browser / "steps.js", step, scores, len(kept))
    return path


def _numbered_prompts(inputs: Rows, talks: Rows) -> tuple[list[tuple[str, ...]], list[int]]:
    """The different prompts, each its text and the names of its images, and the number of each row's prompt."""
    prompts = [(text, *(part["sha"] for part in _image_parts(talk))) for text, talk in zip(inputs, talks, strict=True)]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return list(numbers), [numbers[prompt] for prompt in prompts]


def _write_page(browser: Path, step: int, texts: JsonObject, index: JsonObject) -> None:
    """The page, above the folder `browser`, and a step's files in it; its texts are deflated JSON."""
    packed = base64.b64encode(zlib.compress(ascii_json(texts).encode(), 6)).decode()
    write_whole(browser / f"{step}.texts.js", f'rlsysRollouts.texts({step}, "{packed}");\n'.encode())
    write_whole(browser / f"{step}.js", f"rlsysRollouts.step({ascii_json(index)});\n".encode())
    write_whole(browser.with_name("index.html"), page("rollouts").encode())


def _image_parts(messages: Any) -> list[JsonObject]:
    """The image parts of a conversation."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content if part["type"] == "image"]


def _without_pixels(message: Any) -> Any:
    """A message whose image parts only have a name."""
    if not _image_parts([message]):
        return message
    return {**message, "content": [{k: v for k, v in part.items() if k != "image"} for part in message["content"]]}


def _write_picture(folder: Path, part: JsonObject) -> int:
    """Write a small copy of an image, whose bytes are returned; 0 where it is there."""
    path = folder / f"{part['sha']}.png"
    if path.exists():
        return 0
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    with Image.open(io.BytesIO(part["image"])) as image:
        image.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
        small = io.BytesIO()
        image.save(small, "PNG")
    write_whole(path, small.getvalue())
    return len(small.getvalue())


def sampled_order(groups: Sequence[int], scores: Sequence[float], *, seed: int) -> list[int]:
    """All rows, those first that say most about a batch; what is random follows from the seed.

    The best and worst 8, then one of every group (prompt) at random, the best and the worst of every group, the rest.
    """
    rows = range(len(groups))
    worst_first = sorted(rows, key=lambda row: scores[row] if math.isfinite(scores[row]) else -math.inf)
    best_first = worst_first[::-1]
    shuffled = random.Random(seed).sample(rows, len(rows))
    extremes = [*best_first[:_EXTREMES], *worst_first[:_EXTREMES]]
    lasts = [{groups[row]: row for row in order}.values() for order in (shuffled, worst_first, best_first)]
    return list(dict.fromkeys([*extremes, *(row for last in lasts for row in last), *shuffled]))


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


def _rounded(values: Mapping[str, Sequence[float]], digits: int) -> dict[str, list[float]]:
    """The columns of a row with so many significant digits."""
    return {name: [v if isinstance(v, int) else float(f"{v:.{digits}g}") for v in c] for name, c in values.items()}


def _list_step(path: Path, step: int, scores: Sequence[float], num_kept: int) -> None:
    text = path.read_text() if path.exists() else "([])"
    known = [entry for entry in json.loads(text[text.index("(") + 1 : text.rindex(")")]) if entry["step"] != step]
    finite = [float(s) for s in scores if math.isfinite(s)]
    entry: dict[str, Any] = {
        "step": step,
        "rows": len(scores),
        "kept": num_kept,
        "mean": math.fsum(finite) / len(finite) if finite else None,
        "min": min(finite, default=None),
        "max": max(finite, default=None),
    }
    steps = sorted([*known, entry], key=lambda one: one["step"])
    write_whole(path, f"rlsysRollouts.steps({ascii_json(steps)});\n".encode())
