"""Lets SGLang import on a machine without CUDA: its kernel packages, which have no CPU build, import as empty shells.

Python runs this file at the start of every process that has its folder on PYTHONPATH, children of SGLang included:

    PYTHONPATH=scripts/sglang_cpu:. python -m trainer.main_ppo actor_rollout_ref.rollout.name=sglang ...

Any name can be taken from a shell, and nothing in it does anything. Packages that are installed are left alone.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

SHELLS = (
    "cuda",
    "cutlass",
    "decord",
    "deep_ep",
    "deep_gemm",
    "flash_attn",
    "flash_attn_4",
    "flashinfer",
    "humming",
    "nvshmem",
    "quack",
    "sgl_flash_mla",
    "sgl_kernel",
    "smg_grpc_servicer",
    "tilelang",
    "torchvision",
)


class Anything(type):
    """A class whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        return shell_class(name)


def shell_class(name: str) -> Any:
    """A class that can be inherited from, instantiated, and used as a decorator that changes nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {"__init__": lambda self, *a, **k: None, "__call__": _decorate})


def _decorate(self: object, *args: Any, **kwargs: Any) -> Any:
    return args[0] if args and callable(args[0]) else None


class Shell(ModuleType):
    """A package of classes that do nothing."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        return shell_class(name)


class ShellFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the shells that are not installed, and every module below them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in SHELLS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Shell(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


sys.meta_path.append(ShellFinder())
