"""Facts about the model in an HF directory, read without building it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.models import hf
from rlsys.models.stacked import saved_aliases, saved_stacks


def text_config(path: str | Path) -> Any:
    """The configuration of the language model."""
    return hf.saved_config(path).get_text_config()


def is_quantised(path: str | Path) -> bool:
    """Whether config.json says that weights are quantised. They are trained, and pushed, as bfloat16."""
    return bool(getattr(text_config(path), "quantization_config", None))


def eos_ids_of(path: str | Path) -> tuple[int, ...]:
    """The ids that end a completion, from generation_config.json or else config.json."""
    return hf.end_ids(hf.saved_generation(path), text_config(path))


def hf_tensors(
    path: str | Path, *, dtype: str, has_values: bool = False, has_memory: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's HF tensors by the names they are saved under, and the names that are tied to others.

    Without `has_memory` they are meta tensors; with `has_values` they hold the checkpoint's values.
    """
    config = hf.saved_config(path)
    with torch.device("meta"):
        model = hf.auto_model(config).from_config(config, trust_remote_code=False)
    aliases = saved_aliases(hf.shared_names(model.state_dict(keep_vars=True).items()), saved_stacks(model))
    kind, device = getattr(torch, dtype), "cpu" if has_memory else "meta"
    saved = hf.saved_names(model, {n: t.detach() for n, t in hf.saved_tensors_of(model).items()})
    tensors = {n: torch.zeros(t.shape, dtype=kind, device=device) for n, t in saved.items()}
    for name, stored in hf.open_model_dir(Path(path)).items() if has_values else ():
        if (held := tensors.get(aliases.get(name, name))) is not None:
            held.copy_(hf.read_whole(stored))
    return tensors, aliases
