"""Transformers models: their configuration, their structure without memory, and where their weights come from."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rlsys.config.checks.files import model_facts
from rlsys.config.schema.model import ModelConfig
from rlsys.interfaces import StoredTensor
from rlsys.models import quantized
from rlsys.models.attention import ATTENTION, Packing, PackReachedError
from rlsys.models.vision import has_images
from rlsys.types import Shard
from rlsys.utils.boxes import slices
from rlsys.utils.errors import CheckpointError, ConfigError, raised_as
from rlsys.utils.safetensors_header import DTYPES

Head = Literal["lm", "scalar"]
LOGIT_CHANGERS = (
    *("logits_scaling", "logit_scale", "final_logit_scale", "lm_head_multiplier", "output_multiplier"),
    *("logits_mup_width_multiplier", "logits_soft_cap", "output_logit_soft_cap"),
)
ROUTER_NOISE = ("router_jitter_noise", "input_jitter_noise")
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
NOT_PACKED = "cannot take packed rows: set use_remove_padding=false"
UNUSED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


TensorSource = Mapping[str, StoredTensor]
"""The tensors of a model by HF name."""


def saved_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model directory, of transformers' own class: engines put others in their place."""
    # transformers does not know Kimi-K2's name for the same model
    own = CONFIG_MAPPING_NAMES.get(kind := str(model_facts(path).get("model_type")).replace("kimi_k2", "deepseek_v3"))
    if own is None or trust_remote_code:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    saved, _ = getattr(transformers, own).get_config_dict(path, local_files_only=True)
    return getattr(transformers, own).from_dict({**saved, "model_type": kind})


def saved_generation(path: str | Path) -> GenerationConfig | None:
    """The generation_config.json of a model directory, if it has one; ConfigError for one that cannot be read."""
    file = Path(path) / "generation_config.json"
    with raised_as(ConfigError, f"{file} cannot be read", OSError, ValueError):
        return GenerationConfig.from_pretrained(path, local_files_only=True) if file.is_file() else None


def end_ids(*configs: object) -> tuple[int, ...]:
    """The ids that end a completion, by the first configuration that names some."""
    eos = next((eos for one in configs if (eos := getattr(one, "eos_token_id", None)) is not None), ())
    return (eos,) if isinstance(eos, int) else tuple(eos)


def read_config(model: ModelConfig) -> PretrainedConfig:
    """The transformers configuration of `path` with `override_config` applied (nested mappings are merged).

    Without a path `override_config` is the whole configuration of a random model. ConfigError for an override the
    configuration does not have, CheckpointError without a readable config.json.
    """
    if model.path is None:
        if "model_type" not in model.override_config:
            raise ValueError("a model needs a path, or override_config with model_type and the other settings")
        return AutoConfig.for_model(**model.override_config)
    if not (Path(model.path) / "config.json").is_file():
        raise CheckpointError(f"no config.json in the model directory {model.path}")
    with raised_as(CheckpointError, f"cannot read {model.path}/config.json"):  # by classes that a model may bring
        config = saved_config(model.path, trust_remote_code=model.trust_remote_code)
    if not isinstance(config.dtype, torch.dtype | None):
        raise CheckpointError(f"{model.path}/config.json: dtype={config.dtype!r} is not a type; set one as bfloat16")
    if settings := getattr(config, "quantization_config", None):
        quantized.check_blocks(settings, model.path)
        del config.quantization_config
    for name, value in model.override_config.items():
        if not hasattr(config, name):
            raise ConfigError(f"override_config.{name}: {config.model_type} has no such setting")
        old = getattr(config, name)
        setattr(config, name, {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value)
    return config


def dtype_name(configured: str, device: str) -> str:
    """The configured type; for "auto" bfloat16 on CUDA and float32 on CPU."""
    return configured if configured != "auto" else "bfloat16" if device.startswith("cuda") else "float32"


def build(config: PretrainedConfig, *, head: Head, packed: bool, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model on the meta device, float32, with real buffers: structure without weights.

    A scalar head is `score`, Linear(hidden, 1), in the layout of transformers' token classification models.
    ConfigError if packed rows were asked of an architecture that cannot keep them apart.
    """
    text = config.get_text_config()
    if head == "lm" and (odd := [name for name in LOGIT_CHANGERS if getattr(text, name, None) not in (None, 1, 1.0)]):
        raise ConfigError(f"{config.model_type} changes its logits ({', '.join(odd)}), which this engine does not do")
    if packed and (odd := set(getattr(text, "layer_types", None) or ()) - PACKABLE_LAYERS):
        raise ConfigError(f"packed rows do not go with {', '.join(sorted(odd))} layers: set use_remove_padding=false")
    if packed and getattr(text, "attention_dropout", 0.0):
        raise ConfigError("packed rows do not go with attention_dropout: set use_remove_padding=false or dropout 0")
    if noise := [name for name in ROUTER_NOISE if getattr(config, name, None)]:
        raise ConfigError(f"{config.model_type} adds noise to its router: set override_config.{noise[0]}=0")
    # transformers leaves out a cap of attention's logits in all but its eager attention
    attention: Any = ATTENTION if packed else "eager" if getattr(text, "attn_logit_softcapping", None) else None
    if packed and has_images(config):
        attention = {"text_config": ATTENTION, "vision_config": "sdpa"}
    options = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
    try:
        with torch.device("meta"):
            model = _construct(config, head, options)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        if ATTENTION in str(error):
            raise ConfigError(f"{config.model_type} {NOT_PACKED}") from error
        why = f"config.json: {type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"transformers cannot build this {config.model_type} model, {why}") from error
    if packed and not (getattr(model, "_supports_attention_backend", False) and _passes_packs(model)):
        raise ConfigError(f"{config.model_type} {NOT_PACKED}")
    if head == "lm" and getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{config.model_type} adds a bias to its logits, which this engine does not do")
    _fill_buffers(model, model)
    return model


def _passes_packs(model: PreTrainedModel) -> bool:
    """Whether a pack given to the model, which is on the meta device, reaches its attention."""
    two = torch.arange(2, device="meta")[None]
    backbone: Any = model.get_decoder() if has_images(model.config) else getattr(model, model.base_model_prefix)
    try:
        backbone(two, position_ids=two, use_cache=False, packing=Packing([2], two.device))
    except (ConfigError, TypeError):
        return False
    except (PackReachedError, RuntimeError):  # the model may compute what has no result on the meta device
        return True
    return False


def _construct(config: PretrainedConfig, head: Head, options: Mapping[str, Any]) -> PreTrainedModel:
    if head == "scalar":
        config.num_labels, config.classifier_dropout = 1, 0.0
    return auto_model(config, head).from_config(config, dtype=torch.float32, **options)


def auto_model(config: PretrainedConfig, head: Head = "lm") -> Any:
    """transformers' auto class of a model; ConfigError for a scalar head on a vision-language model."""
    images, text = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    reads_images = has_images(config) or (type(config) in images and type(config) not in text)
    if head == "lm":
        return transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
    if has_images(config):
        raise ConfigError(f"{config.model_type} has no scalar head: use a text model, or an estimator without a critic")
    return transformers.AutoModelForTokenClassification


def _fill_buffers(module: nn.Module, model: PreTrainedModel) -> None:
    """Give buffers their values off the meta device by the initialiser of the innermost model that a module belongs
    to; ConfigError if it has none."""
    for child in module.children():
        _fill_buffers(child, child if isinstance(child, PreTrainedModel) else model)
    unknown = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
    for name, buffer in unknown.items():
        module._buffers[name] = torch.full_like(buffer, math.nan if buffer.is_floating_point() else -1, device="cpu")
    if unknown:
        model._init_weights(module)
    for name, buffer in ((name, module.get_buffer(name)) for name in unknown):
        if (buffer.isnan() if buffer.is_floating_point() else buffer == -1).any():
            raise ConfigError(f"{type(module).__name__}.{name}: a buffer whose value is not known")


def open_weights(model: ModelConfig, config: PretrainedConfig, *, head: Head, seed: int = 0) -> TensorSource:
    """The model's tensors by the names they are saved by. A scalar head that a checkpoint lacks is drawn from `seed`
    (normal, bias zero); without a path all parameters are."""
    if model.path is not None:
        return {**(_new_head(config, seed) if head == "scalar" else {}), **open_model_dir(Path(model.path))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random_model = _construct(config, head, {"trust_remote_code": model.trust_remote_code})
    tensors = {name: tensor.detach() for name, tensor in saved_tensors_of(random_model).items()}
    return in_memory(saved_names(random_model, tensors))


def saved_tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, a tied one once, and the buffers that checkpoints have, by their names in the model."""
    state = model.state_dict(keep_vars=True)
    shared = shared_names(state.items())
    return {name: tensor for name, tensor in state.items() if name not in shared}


def shared_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Each name of a tensor that came under another name before, and that name."""
    first: dict[int, str] = {}
    return {name: held for name, t in named if (held := first.setdefault(id(t), name)) != name}


def saved_names(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of `model` under the names and in the shapes in which transformers saves them."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def _new_head(config: PretrainedConfig, seed: int) -> TensorSource:
    hidden = config.get_text_config().hidden_size
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, hidden, generator=draw) * getattr(config, "initializer_range", 0.02)
    return in_memory({"score.weight": weight, "score.bias": torch.zeros(1)})


@dataclass(frozen=True)
class TensorInMemory:
    """A tensor held in this process, or mapped from a file."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return DTYPES[str(self.tensor.dtype).removeprefix("torch.")]

    def read(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self.tensor[slices(start, shape)]


def in_memory(tensors: Mapping[str, Tensor]) -> TensorSource:
    """Tensors of this process as a source."""
    return {name: TensorInMemory(tensor) for name, tensor in tensors.items()}


def read_whole(tensor: StoredTensor) -> Tensor:
    """All of a stored tensor."""
    return tensor.read((0,) * len(tensor.shape), tensor.shape)


def fill_shards(target: Tensor, shards: Sequence[Shard], source: TensorSource) -> None:
    """Fill one local tensor from its shards' boxes; what they do not cover becomes zero."""
    if sum(math.prod(shard.box.shape) for shard in shards) < target.numel():
        target.zero_()
    for shard in shards:
        box = shard.box
        target[slices(shard.local_start, box.shape)].copy_(source[box.tensor].read(box.start, box.shape))


def open_model_dir(path: Path) -> TensorSource:
    """The safetensors files of a model directory, mapped into memory; only boxes asked for are read.

    Without any, pytorch_model.bin is mapped into memory as tensors, and nothing in it is executed.
    """
    files = [open_safetensors(file) for file in sorted(path.glob("*.safetensors"))]
    if not files:
        return in_memory(_read_pickled(path))
    tensors = in_memory({name: file.get_tensor(name) for file in files for name in file.keys()})  # noqa: SIM118
    if lost := _indexed(path / "model.safetensors.index.json") - tensors.keys():
        raise CheckpointError(f"{path} lacks files: {len(lost)} tensors of its index are missing, as {min(lost)}")
    if any(name.endswith((quantized.SCALE, quantized.PACKED)) for name in tensors):
        return quantized.unscaled(tensors, json.loads((path / "config.json").read_text()))
    return tensors


def _indexed(index: Path) -> set[str]:
    """The tensors that an index names, if there is one."""
    with raised_as(CheckpointError, f"{index} is not an index of safetensors files: it has no weight_map"):
        return set(json.loads(index.read_text())["weight_map"]) if index.is_file() else set()


def _read_pickled(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    files = sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise CheckpointError(f"no weights in {path}: neither safetensors files nor pytorch_model.bin")
    for file in files:
        try:
            tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, UnpicklingError, EOFError, TypeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise CheckpointError(f"{file} cannot be read as tensors, so it is not read at all: {first}") from error
    if wrong := [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]:
        raise CheckpointError(f"{path}: {wrong[0]} in pytorch_model.bin is not a tensor")
    return tensors


def open_safetensors(file: Path) -> Any:
    """A safetensors file, of which tensors are read one by one; CheckpointError if it is missing or damaged."""
    with raised_as(CheckpointError, f"{file} cannot be read", SafetensorError, OSError):
        return safe_open(file, framework="pt")


def check_names(expected: Mapping[str, Sequence[int]], source: TensorSource, *, aliases: Collection[str] = ()) -> None:
    """CheckpointError that names the first differing tensors unless `source` holds exactly the expected ones.

    `aliases` and heads of another kind may be there unused.
    """
    spare = {"lm_head.weight", "score.weight", "score.bias", *aliases}
    there = {
        name: tensor.shape
        for name, tensor in source.items()
        if name in expected or not (name in spare or name.endswith(UNUSED))
    }
    if differences := differing_tensors(expected, there):
        raise CheckpointError(f"these weights are those of a different model: {differences}")


def differing_tensors(
    expected: Mapping[str, Sequence[int]], there: Mapping[str, Sequence[int]], *, whose: str = "the model's"
) -> str:
    """The first tensors that are missing, not the model's, or of another shape; empty where there are none."""
    missing, unknown = sorted(expected.keys() - there.keys()), sorted(there.keys() - expected.keys())
    shapes = [
        f"{name} is {tuple(there[name])}, {whose} {tuple(shape)}"
        for name, shape in sorted(expected.items())
        if name in there and tuple(there[name]) != tuple(shape)
    ]
    parts = [
        f"{len(missing)} tensors are missing ({', '.join(missing[:3])})" if missing else "",
        f"{len(unknown)} tensors are not {whose} ({', '.join(unknown[:3])})" if unknown else "",
        f"{len(shapes)} shapes differ ({'; '.join(shapes[:3])})" if shapes else "",
    ]
    return "; ".join(filter(None, parts))


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model, the units of sharding and of gradient checkpointing."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in classes]
