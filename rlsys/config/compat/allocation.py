"""AReaL's allocation grammar: the processes of each engine, e.g. `hf:d2+fsdp:d2` or `hf[r]:d4|fsdp[a]:d4`.

`+` separates engines with their own processes, `|` (which binds tighter) engines that share processes; dimensions are
d(ata), t(ensor), p(ipeline), c(ontext) and e(xpert). This only parses; rlsys/config/pools.py checks what is supported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlsys.config.engines import rollout_backends
from rlsys.utils.errors import ConfigError

_ENGINES = {backend.name: backend.dims for backend in rollout_backends() if not backend.is_external}
TRAINING = ("fsdp", "megatron", "archon")
_DIMS = {**_ENGINES, "fsdp": "dtc", "megatron": "dtpce", "archon": "dtpce"}
_NAMES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"(?P<backend>[A-Za-z_]\w*)?(\[(?P<name>[^\]]*)\])?(?P<colon>:)?(?P<dims>.*)", re.DOTALL)


@dataclass(frozen=True)
class Dims:
    """Parallel sizes; `world` is the number of processes. Expert parallelism needs no additional processes."""

    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1

    @property
    def world(self) -> int:
        return self.d * self.t * self.p * self.c

    def __str__(self) -> str:
        sizes = [(letter, getattr(self, letter)) for letter in "dtpce"]
        return "".join(f"{letter}{size}" for letter, size in sizes if size > 1) or "d1"


@dataclass(frozen=True)
class Part:
    """One engine. `ffn` holds the sizes of expert layers if they differ (t is then their tensor size)."""

    backend: str
    name: str
    dims: Dims
    ffn: Dims | None = None

    @property
    def world(self) -> int:
        return self.dims.world

    @property
    def trains(self) -> bool:
        return self.backend in TRAINING

    def __str__(self) -> str:
        sizes = str(self.dims) if self.ffn is None else f"(attn:{self.dims}|ffn:{self.ffn})"
        return f"{self.backend}{f'[{self.name}]' if self.name else ''}:{sizes}"


@dataclass(frozen=True)
class Allocation:
    """Groups of parts: the parts of one group share its processes."""

    groups: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for group in self.groups for part in group)

    @property
    def world(self) -> int:
        return sum(group[0].world for group in self.groups)

    def __str__(self) -> str:
        return "+".join("|".join(str(part) for part in group) for group in self.groups)


def parse_allocation(text: str) -> Allocation:
    """Parse an allocation; ConfigError names the wrong part and the right form."""
    squeezed = re.sub(r"\s+", "", text)
    if not squeezed:
        raise ConfigError("empty; an allocation is e.g. hf:d2+fsdp:d2")
    allocation = Allocation(
        tuple(tuple(_part(part, text) for part in _split(group, "|")) for group in _split(squeezed, "+"))
    )
    _check_names(allocation, text)
    for group in allocation.groups:
        sizes = {part.world for part in group}
        if len(sizes) > 1:
            each = " and ".join(f"{part} has {part.world}" for part in group)
            raise ConfigError(f"'{text}': engines joined by | share processes, so they need equal numbers, but {each}")
    return allocation


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator that is outside parentheses."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _part(text: str, whole: str) -> Part:
    match = _PART.fullmatch(text)
    if match is None or not match["backend"] or not match["colon"]:
        raise ConfigError(_unreadable(text, whole))
    backend, name, dims = match["backend"], match["name"], match["dims"]
    if backend not in _DIMS:
        raise ConfigError(f"'{whole}': unknown engine '{backend}'; choose from {', '.join(_DIMS)}")
    if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"'{whole}': '{name}' is not a valid name; use e.g. {backend}[actor]:d2")
    if dims.startswith("("):
        return _hybrid(backend, name or "", dims, whole)
    part = Part(backend, name or "", _dims(backend, dims, whole, _DIMS[backend]))
    stage = part.world // part.dims.p
    if stage % part.dims.e:
        raise ConfigError(f"'{whole}': e{part.dims.e} does not divide the {stage} ranks of a pipeline stage")
    return part


def _unreadable(text: str, whole: str) -> str:
    legacy = re.fullmatch(r"([a-z]+)\.([dtpce\d]+)", text)
    if legacy:
        return f"'{whole}': '{text}' is the old form; use {legacy[1]}:{legacy[2]}"
    if re.fullmatch(r"(\[\w*\]:?)?[dtpce\d]*", text):
        return f"'{whole}': '{text or 'nothing'}' has no engine; use e.g. fsdp:{text.rpartition(':')[2] or 'd2'}"
    return f"'{whole}': '{text}' cannot be parsed; use engine:sizes, e.g. fsdp:d2 or hf[rollout]:d4"


def _dims(backend: str, text: str, whole: str, letters: str) -> Dims:
    sizes: dict[str, int] = {}
    for letter, digits in re.findall(r"([a-z])([^a-z]*)", text):
        if letter not in _NAMES:
            raise ConfigError(f"'{whole}': '{letter}' is not a dimension; choose from {_listed(letters)}")
        if letter not in letters:
            raise ConfigError(f"'{whole}': {backend} has no {_NAMES[letter]} parallelism; it takes {_listed(letters)}")
        if letter in sizes:
            raise ConfigError(f"'{whole}': {letter} is given twice in {backend}:{text}; give it once")
        if not re.fullmatch(r"[1-9][0-9]{0,6}", digits):
            raise ConfigError(f"'{whole}': the size of '{letter}' in {backend}:{text} must be an integer of at least 1")
        sizes[letter] = int(digits)
    if not sizes or not text[:1].isalpha():
        raise ConfigError(f"'{whole}': {backend} needs sizes, e.g. {backend}:d2; it takes {_listed(letters)}")
    return Dims(**sizes)


def _hybrid(backend: str, name: str, text: str, whole: str) -> Part:
    match = re.fullmatch(r"\(attn:([^|()]*)\|ffn:([^|()]*)\)", text)
    if match is None or backend != "megatron":
        raise ConfigError(
            f"'{whole}': separate sizes of attention and experts have the form megatron:(attn:d4t2|ffn:d2t2e2)"
        )
    attn = _dims(backend, match[1], whole, "dtpc")
    ffn = _dims(backend, match[2], whole, "dtpe")
    pipeline = ffn.p if "p" in match[2] else attn.p
    if pipeline != attn.p:
        raise ConfigError(f"'{whole}': attn has p{attn.p} but ffn has p{pipeline}; they must be equal")
    shared = ffn.t * ffn.e * pipeline
    data = ffn.d if "d" in match[2] else max(attn.world // shared, 1)
    if data * shared != attn.world:
        raise ConfigError(
            f"'{whole}': attn:{match[1]} has {attn.world} processes and ffn:{match[2]} has {data * shared}; "
            "they must be equal"
        )
    return Part(backend, name, attn, Dims(d=data, t=ffn.t, p=pipeline, e=ffn.e))


def _check_names(allocation: Allocation, text: str) -> None:
    parts = allocation.parts
    names = [part.name for part in parts]
    shared = any(len(group) > 1 for group in allocation.groups)
    if "" in names and (len(parts) > 2 or shared):
        why = "engines that share processes" if shared else "three or more engines"
        part = parts[names.index("")]
        raise ConfigError(f"'{text}': {why} need names; use e.g. {part.backend}[actor]:{part.dims}")
    doubled = sorted({name for name in names if name and names.count(name) > 1})
    if doubled:
        raise ConfigError(f"'{text}': the name {doubled[0]} is used twice; names must differ")


def _listed(letters: str) -> str:
    return ", ".join(f"{letter} ({_NAMES[letter]})" for letter in letters)
