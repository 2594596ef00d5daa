"""The specs of checkpoint there are: where each keeps which Hugging Face tensor."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from rlsys.engines import checkpoint, tensor_files
from rlsys.engines.tensor_files import METADATA, PiecedTensor, StoredBox, pieced_tensors, saved_tensors
from rlsys.models.hf import differing_tensors, open_safetensors
from rlsys.models.lora import is_adapter
from rlsys.models.megatron.adapter_factors import EXPERTS
from rlsys.models.megatron.family import Family, Head, family_of
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.types import HFConfig, Shapes, Shard
from rlsys.utils.errors import CheckpointError, raised_as
from rlsys.utils.run_folders import UNMERGED, merged_model, step_folder

SPLIT = "split.json"


@dataclass(frozen=True)
class SplitLayout(ParallelSizes):
    """How a model is cut into one file a rank: Megatron's parallel sizes and naming."""

    etp: int = 1
    transformer_engine: bool = False
    head: Head = "lm"

    def files(self, family: Family) -> Iterator[tuple[str, RankPlace]]:
        """Each file with a place that holds what is in it. Experts are cut otherwise than the rest, so they have files
        of their own, and nothing but what tensor-parallel ranks share is stored twice."""
        for pp, tp in product(range(self.pp), range(self.tp)):
            yield f"tp_{tp:03d}_pp_{pp:03d}.safetensors", RankPlace(self, pp_rank=pp, tp_rank=tp)
        if family.sparse:
            for pp, ep, etp in product(range(self.pp), range(self.ep), range(self.etp)):
                place = RankPlace(self, pp_rank=pp, ep_rank=ep, etp_rank=etp)
                yield f"experts_ep_{ep:03d}_etp_{etp:03d}_pp_{pp:03d}.safetensors", place

    def content(self, family: Family, hf_config: HFConfig, file: str, place: RankPlace) -> tuple[Shapes, list[Shard]]:
        """The local tensors of a file with their shapes, and the shards in them."""
        experts = file.startswith("experts")
        shards = family.shards(hf_config, place, head=self.head, te=self.transformer_engine)
        shapes = family.local_shapes(hf_config, place, shards)
        return (
            {name: shape for name, shape in shapes.items() if (EXPERTS in name) == experts},
            [shard for shard in shards if (EXPERTS in shard.local) == experts],
        )


def find_checkpoint(path: Path) -> Path:
    """The checkpoint of the policy that a path means: a run's folder (its latest step), global_step_N, its actor/ (of a
    supervised run model/), or what `split` wrote. CheckpointError where there is none."""
    folder = step_folder(path)
    for place in (folder, folder / "actor", folder / "model"):
        if (place / SPLIT).is_file() or (place / METADATA).is_file():
            return place
    lacks = f"it has neither {METADATA} nor {SPLIT}" if folder.is_dir() else "there is no such folder"
    why = f"{lacks}; give a run's folder, global_step_N or global_step_N/actor"
    if step := next((one for one in (folder, *folder.parents) if one.name.startswith("global_step_")), None):
        files = (file for role in ("actor", "model") for file in step.parent.glob(f"global_step_*/{role}/{METADATA}"))
        kept = sorted(file.parts[-3] for file in files)
        lost = lacks if step.name in kept else "max_ckpt_to_keep may have removed its weights"
        why = f"{lost}; of the steps in {step.parent} these have theirs: {', '.join(kept) or 'none'}"
    raise CheckpointError(f"{path} is not a checkpoint: {why}")


def is_split(checkpoint: Path) -> bool:
    """Whether a checkpoint is what `split` wrote rather than training."""
    return (checkpoint / SPLIT).is_file()


def open_checkpoint(directory: Path, hf_config: HFConfig, backend: str | None = None) -> dict[str, PiecedTensor]:
    """The weights of a checkpoint of either backend; CheckpointError if it is not whole or not of this model.

    Every file of a training checkpoint is checked against its manifest first.
    """
    written_by = "fsdp" if (directory / "fsdp_config.json").is_file() else "megatron"
    if backend not in (None, written_by):
        raise CheckpointError(f"{directory} is a checkpoint of {written_by}, not of {backend}")
    return _split_weights(directory, hf_config) if is_split(directory) else _training_weights(directory, hf_config)


def _split_weights(directory: Path, hf_config: HFConfig) -> dict[str, PiecedTensor]:
    with raised_as(CheckpointError, f"{directory / SPLIT} cannot be read", OSError, msgspec.MsgspecError):
        split = msgspec.json.decode((directory / SPLIT).read_bytes(), type=SplitLayout)
    family = family_of(hf_config)
    pieces: dict[str, list[StoredBox]] = defaultdict(list)
    for file, place in split.files(family):
        shapes, shards = split.content(family, hf_config, file, place)
        _check_file(directory / file, shapes)
        for shard in shards:
            box = shard.box
            pieces[box.tensor].append(StoredBox(box.start, box.shape, directory / file, shard.local, shard.local_start))
    shapes = dict(family.hf_shapes(hf_config, head=split.head))
    carried = directory / "carried.safetensors"
    if carried.is_file():
        extra = family.carried(hf_config)
        there = _stored_shapes(carried)
        _check_file(carried, {name: extra[name] for name in there if name in extra})
        for name in there:
            shapes[name] = extra[name]
            zeros = (0,) * len(extra[name])
            pieces[name] = [StoredBox(zeros, extra[name], carried, name, zeros)]
    return pieced_tensors(shapes, pieces)


def _check_file(file: Path, expected: Shapes) -> None:
    if differences := differing_tensors(expected, _stored_shapes(file), whose="this model's"):
        raise CheckpointError(f"{file}: {differences}")


def _stored_shapes(file: Path) -> Shapes:
    stored = open_safetensors(file)
    return {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118


def _training_weights(directory: Path, hf_config: HFConfig) -> dict[str, PiecedTensor]:
    checkpoint.verify(directory)
    if not (weights := saved_tensors(directory, tensor_files.read_tensor_index(directory), "model.")):
        raise CheckpointError(f"{directory} has no weights of a model: it was saved without them")
    if any(map(is_adapter, weights)):
        merged, role = merged_model(directory), "critic" if directory.name == "critic" else "actor_rollout_ref.actor"
        how = UNMERGED.format(role) if merged is None else f"it is {merged}"
        raise CheckpointError(f"{directory} has adapters, and only training writes the merged model: {how}")
    return weights
