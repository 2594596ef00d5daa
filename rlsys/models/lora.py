"""Low-rank adapters through peft: which layers get one, their first values, switching them off, merging them.

An adapted linear layer is W + scale * B @ A with W (out, in), A (rank, in), B (out, rank) (Hu et al. 2021).
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlsys.config.schema.model import ModelConfig
from rlsys.models.hf import TensorInMemory, TensorSource, check_names, open_model_dir
from rlsys.types import Shapes
from rlsys.utils.errors import CheckpointError, ConfigError, raised_as

ADAPTER = "default"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSettings:
    """What holds of a model's adapters, those of the peft directory `adapter_path` included."""

    rank: int
    alpha: float = 16.0
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] = ()
    init: str = "kaiming"
    adapter_path: str | None = None
    seed: int = 0


def lora_settings(model: ModelConfig, *, seed: int) -> LoraSettings | None:
    """The adapters that `model` asks for, None without any; rank, alpha and targets of `lora_adapter_path` take
    precedence, alpha such that alpha / rank is the adapter's scale, also with peft's `use_rslora`. CheckpointError if
    its adapter_config.json cannot be read, or has a DoRA or ranks or scales by layer."""
    targets = model.target_modules
    if model.lora_adapter_path is None:
        if not model.lora_rank:
            return None
        names = "all-linear" if targets == ("all-linear",) else targets
        excluded, init = model.exclude_modules, model.lora_A_init_method
        return LoraSettings(model.lora_rank, model.lora_alpha, names, excluded, init, seed=seed)
    file = Path(model.lora_adapter_path) / "adapter_config.json"
    with raised_as(CheckpointError, f"cannot read the adapter's {file}", OSError, ValueError, KeyError):
        saved = json.loads(file.read_text())
        targets = saved["target_modules"]
        targets = targets if isinstance(targets, str) else tuple(sorted(targets))
        if used := [name for name in ("use_dora", "rank_pattern", "alpha_pattern") if saved.get(name)]:
            raise ValueError(f"adapters with {' and '.join(used)} are not supported: merge it into the model")
        alpha = saved["lora_alpha"] * (math.sqrt(saved["r"]) if saved.get("use_rslora") else 1.0)
        return LoraSettings(saved["r"], alpha, targets, adapter_path=model.lora_adapter_path, seed=seed)


@dataclass(frozen=True)
class AdaptedWeight:
    """One adapted weight by HF name: the names of its A and B and the scale of their product."""

    a: str
    b: str
    scale: float


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters into `model` in place and freeze the rest but a scalar head; ConfigError for unknown targets."""
    from peft import LoraConfig, inject_adapter_in_model

    targets, excluded = settings.target_modules, settings.exclude_modules
    heads = ("lm_head", "score")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # pyrefly: ignore
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules="|".join((excluded, *heads)) if isinstance(excluded, str) else [*heads, *excluded],
    )
    with raised_as(ConfigError, f"target_modules={targets}", ValueError):
        inject_adapter_in_model(config, model, ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.startswith("score."))


def targeted(layers: Collection[str], settings: LoraSettings) -> list[str]:
    """Those of the linear layers' names that get an adapter, by peft's rules; ConfigError if none does."""
    targets = settings.target_modules
    chosen = layers if targets == "all-linear" else [layer for layer in layers if _matches(layer, targets)]
    chosen = [layer for layer in chosen if not _matches(layer, settings.exclude_modules)]
    if not chosen:
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        raise ConfigError(f"target_modules={targets}: the model has no linear layer of that name; it has {known}")
    return chosen


def _matches(layer: str, names: str | tuple[str, ...]) -> bool:
    """Whether a regular expression matches a layer's whole name, or one of several names its last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return layer in names or layer.endswith(tuple(f".{name}" for name in names))


def adapter_of(layer: str, scale: float) -> AdaptedWeight:
    """The adapter of a linear layer."""
    return AdaptedWeight(f"{layer}.lora_A.{ADAPTER}.weight", f"{layer}.lora_B.{ADAPTER}.weight", scale)


def is_adapter(name: str) -> bool:
    """Whether a parameter is a factor of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def hf_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """The adapted weights of `model` by HF name."""
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {f"{name}.weight": adapter_of(name, layer.scaling[ADAPTER]) for name, layer in layers.items()}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before the adapters, within the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trainable = {parameter: parameter.requires_grad for layer in layers for parameter in layer.parameters()}
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad_(requires_grad)


def adapter_weights(settings: LoraSettings, shapes: Shapes) -> TensorSource:
    """The adapters' first values: from `adapter_path`, else A drawn per tensor from the seed and B zero.

    CheckpointError unless the adapter at `adapter_path` has exactly these shapes.
    """
    if settings.adapter_path is None:
        return {name: _FirstValue(name, shape, settings.seed, settings.init) for name, shape in shapes.items()}
    saved = {to_model_name(name): tensor for name, tensor in open_model_dir(Path(settings.adapter_path)).items()}
    check_names(shapes, saved)
    return saved


@dataclass(frozen=True)
class _FirstValue:
    """The first value of a factor, drawn as it is read: B zero; A by `init` as Megatron-Bridge's adapters."""

    name: str
    shape: tuple[int, ...]
    seed: int
    init: str
    dtype: str = "F32"

    def read(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return TensorInMemory(self._draw()).read(start, shape)

    def _draw(self) -> Tensor:
        if ".lora_B." in self.name:
            return torch.zeros(self.shape)
        own_seed = int.from_bytes(blake2b(f"{self.seed}:{self.name}".encode(), digest_size=8).digest()) >> 1
        values, generator = torch.empty(self.shape), torch.Generator().manual_seed(own_seed)
        if self.init == "kaiming":
            return nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        if self.init == "xavier":
            return nn.init.xavier_normal_(values, generator=generator)
        return values.normal_(std=0.2, generator=generator)


def to_model_name(saved: str) -> str:
    """`base_model.model.X.lora_A.weight` in a peft file is `X.lora_A.default.weight` in the model."""
    return re.sub(r"\.(lora_[AB])\.weight$", rf".\1.{ADAPTER}.weight", saved.removeprefix(_PREFIX))


def to_saved_name(name: str) -> str:
    """The name in a peft file of a factor in the model: the inverse of `to_model_name`."""
    return _PREFIX + name.replace(f".{ADAPTER}.weight", ".weight")


def adapter_config(settings: LoraSettings, layers: Collection[str], base_model: str) -> dict[str, object]:
    """What peft's adapter_config.json needs to load the adapter of these linear layers again."""
    targets = settings.target_modules
    every = sorted({name.rpartition(".")[2] for name in layers})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": every if targets == "all-linear" else targets if isinstance(targets, str) else list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
    }
