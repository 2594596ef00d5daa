"""AReaL's allocation_mode: the processes of the engine that generates and of the one that trains.

`vllm:d2t2+fsdp:d4` gives each its own processes, `vllm:d2t2|fsdp:d4` shares them. Sizes are d(ata), t(ensor),
p(ipeline), c(ontext) and e(xpert), which needs no processes of its own. A part without an engine trains. Names,
`vllm[rollout]:d2`, are allowed and not used.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from rlsys.config.engines import rollout_backends
from rlsys.utils.errors import ConfigError

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TRAINING = {"fsdp": "dtc", "megatron": "dtpce"}
_NAMES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"((?P<engine>[A-Za-z_]\w*)?(\[\w*\])?[:.])?(?P<sizes>\(attn:(\w+)\|ffn:(\w+)\)|\w*)")
_SIZES = {"t": "tensor_model_parallel_size", "p": "pipeline_model_parallel_size", "c": "context_parallel_size"}


@dataclass(frozen=True)
class Part:
    """One engine, its processes and sizes; `expert_tensor` is set where expert layers have sizes of their own."""

    text: str
    engine: str
    world: int
    sizes: dict[str, int]
    expert_tensor: int | None = None


def allocation_settings(text: str, nnodes: int, node_size: int = 0) -> dict[str, object]:
    """The keys that an allocation sets: training processes per node, rollout workers, engine and parallel sizes.

    With a `node_size`, in processes, training takes as many nodes as it needs, not `nnodes`. ConfigError names the
    wrong part and the right form.
    """
    parts = [_part(part) for part in re.split(r"[+|](?![^(]*\))", re.sub(r"\s+", "", text))]
    train = [part for part in parts if part.engine in _TRAINING]
    generate = [part for part in parts if part.engine not in _TRAINING]
    if len(train) != 1 or len(generate) != 1:
        raise ConfigError(f"'{text}': set one engine that generates and one that trains, e.g. hf:d2+fsdp:d2")
    trains, generates = train[0], generate[0]
    is_shared = "|" in re.sub(r"\(.*\)", "", text)
    if is_shared and trains.world != generates.world:
        each = f"{generates.text} has {generates.world} and {trains.text} has {trains.world}"
        raise ConfigError(f"'{text}': engines joined by | share processes, so they need equal numbers, but {each}")
    total, room = trains.world + (0 if is_shared else generates.world), nnodes * node_size
    if total > room > 0:
        raise ConfigError(f"'{text}' needs {total} processes, and cluster.n_nodes x cluster.n_gpus_per_node are {room}")
    settings = _nodes(trains, nnodes, node_size)
    settings["trainer.rollout_workers"] = 0 if is_shared else generates.world
    settings[f"{_ROLLOUT}.name"] = generates.engine
    if generates.engine != "hf":
        settings[f"{_ROLLOUT}.tensor_model_parallel_size"] = generates.sizes.get("t", 1)
        more = {"e": "expert_parallel_size", "p": "pipeline_model_parallel_size"}
        settings |= {f"{_ROLLOUT}.{more[of]}": size for of, size in generates.sizes.items() if of in more}
    return settings | _training_settings(trains)


def supervised_settings(text: str, nnodes: int, node_size: int = 0) -> dict[str, object]:
    """The keys that the allocation of a supervised job sets, e.g. fsdp:d8. ConfigError as in `allocation_settings`."""
    part = _part(text)
    if part.engine not in _TRAINING:
        raise ConfigError(f"'{text}': set an engine that trains, e.g. fsdp:d8")
    return _nodes(part, nnodes, node_size) | _training_settings(part, "engine")


def _nodes(part: Part, nnodes: int, node_size: int) -> dict[str, Any]:
    nodes = math.ceil(part.world / node_size) if node_size else nnodes
    if part.world % nodes:
        raise ConfigError(f"'{part.text}': {part.world} processes do not divide evenly over {nodes} nodes")
    return {"trainer.n_gpus_per_node": part.world // nodes} | ({"trainer.nnodes": nodes} if node_size else {})


def _part(text: str) -> Part:
    if (match := _PART.fullmatch(text)) is None:
        raise ConfigError(f"'{text}' cannot be parsed; use engine:sizes, e.g. fsdp:d2 or hf:d4")
    letters = _TRAINING | {backend.name: backend.dims for backend in rollout_backends() if not backend.is_external}
    both, attn, ffn = match["sizes"], match[5], match[6]
    engine = match["engine"] or ("megatron" if re.search(r"[pe](?!1(?!\d))", both) else "fsdp")
    engine = "fsdp" if engine == "archon" else engine  # AReaL's FSDP2 with models of its own
    if engine not in letters:
        raise ConfigError(f"'{text}': unknown engine '{engine}'; choose from {', '.join(letters)}")
    if attn is None:
        sizes = _sizes(text, engine, both, letters[engine])
        return Part(text, engine, math.prod((sizes | {"e": 1}).values()), sizes)
    if engine != "megatron":
        raise ConfigError(f"'{text}': only megatron has separate sizes, e.g. megatron:(attn:d4t2|ffn:d2t2e2)")
    sizes, experts = _sizes(text, engine, attn, "dtpc"), _sizes(text, engine, ffn, "dtpe")
    world, stages = math.prod(sizes.values()), sizes.get("p", 1)
    if experts.setdefault("p", stages) != stages or world % math.prod(experts.values()):
        raise ConfigError(f"'{text}': attn has {world} processes, which the sizes of ffn do not divide")
    return Part(text, engine, world, sizes | {"e": experts.get("e", 1)}, experts.get("t", 1))


def _sizes(text: str, engine: str, sizes: str, letters: str) -> dict[str, int]:
    takes = ", ".join(f"{letter} ({_NAMES[letter]})" for letter in letters)
    pairs = re.findall(r"([a-z])([1-9][0-9]{0,6})", sizes)
    if not pairs or "".join(letter + size for letter, size in pairs) != sizes:
        raise ConfigError(f"'{text}': {engine} takes letters with sizes of at least 1, e.g. d2; it has {takes}")
    for letter, size in pairs:
        if letter not in letters and (letter not in _NAMES or size != "1"):
            raise ConfigError(f"'{text}': {engine} has no {_NAMES.get(letter, letter)} parallelism; it has {takes}")
    if len(pairs) != len(dict(pairs)):
        raise ConfigError(f"'{text}': a size is given twice; give it once")
    return {letter: int(size) for letter, size in pairs}


def _training_settings(part: Part, section: str = _ACTOR) -> dict[str, object]:
    sizes = part.sizes
    if part.engine == "fsdp":
        own = f"{section}.fsdp_config" if section == _ACTOR else section
        ulysses = f"{section}.ulysses_sequence_parallel_size"
        return {ulysses: sizes.get("c", 1), f"{own}.tensor_parallel_size": sizes.get("t", 1)}
    experts = sizes.get("e", 1)
    if part.world // sizes.get("p", 1) % experts:
        raise ConfigError(f"'{part.text}': e{experts} does not divide the ranks of a pipeline stage")
    return {
        f"{section}.strategy": "megatron",
        **{f"{section}.megatron.{name}": sizes.get(letter, 1) for letter, name in _SIZES.items()},
        f"{section}.megatron.expert_model_parallel_size": experts,
        **({f"{section}.megatron.expert_tensor_parallel_size": part.expert_tensor} if part.expert_tensor else {}),
    }
