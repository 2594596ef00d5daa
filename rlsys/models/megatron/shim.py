"""Import this before any `megatron.core`: where there is no CUDA it makes Megatron-Core 0.16 run on CPU.

What it replaces, in this process only, and nothing where there is CUDA:
- in the code objects of `megatron.core.*`, as they are imported, the constants "cuda" by "cpu" and "torch.cuda.XTensor"
  by "torch.XTensor" (no file is touched);
- functions of torch.cuda by what they mean on a CPU: one device, one stream, the CPU's random generator;
- four places where 0.16 fails without Transformer Engine whatever the device.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import torch

from rlsys.utils.errors import ConfigError

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ConfigError("strategy=megatron needs Megatron-Core: pip install -e '.[megatron]'")

warnings.filterwarnings("ignore", module=r"megatron\.core")
ON_CPU = not torch.cuda.is_available()

_WORDS = {"cuda": "cpu", "cuda:0": "cpu"} | {f"torch.cuda.{t}Tensor": f"torch.{t}Tensor" for t in ("Float", "Half")}
_WORDS["torch.cuda.BFloat16Tensor"] = "torch.BFloat16Tensor"


def _on_cpu(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(_constant(value) for value in code.co_consts))


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return _on_cpu(value)
    if isinstance(value, tuple):
        return tuple(_constant(part) for part in value)
    return _WORDS.get(value, value) if isinstance(value, str) else value


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else _on_cpu(code)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Stream:
    """The one stream, and its events: all work is done when it was started."""

    _only: "_Stream | None" = None

    def __new__(cls, *args: object, **kwargs: object) -> "_Stream":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def query(self) -> bool:
        return True

    def record_event(self, *args: object) -> "_Stream":
        return self

    def wait_stream(self, *args: object) -> None: ...

    wait_event = synchronize = record = wait = wait_stream


def _stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    identity: Any = lambda self, *args, **kwargs: self  # noqa: E731
    torch.Tensor.cuda = torch.nn.Module.cuda = identity


def _mend_megatron() -> None:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as mla

    patched: Any = random
    patched._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    patched._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
    if not isinstance(mla.TELinear, type):
        mla.HAVE_TE = False
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _splits  # type: ignore[assignment]


def _splits(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Token counts as a list, which gloo's all-to-all wants; Megatron leaves tensors where they are not on CUDA."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


if ON_CPU:
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise ImportError("rlsys.models.megatron.shim must be imported before megatron.core")
    sys.meta_path.insert(0, _Finder())
    _stand_in_for_cuda()
    _mend_megatron()
