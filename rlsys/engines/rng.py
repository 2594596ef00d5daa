"""The states of all random generators of a process, as JSON."""

import os
import random
from base64 import b64decode, b64encode
from hashlib import blake2b
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed every generator, so that two starts of one run draw the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture() -> dict[str, Any]:
    """States of torch (CPU and the current CUDA device), python's random and numpy's legacy generator."""
    version, internal, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Continue exactly where `capture` was called."""
    torch.set_rng_state(_tensor(state["torch"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def derive(state: dict[str, object], rank: int) -> None:
    """Seed every generator from another rank's state and this rank's number: for a changed number of ranks."""
    seed_all(int.from_bytes(blake2b(f"{state['torch']}:{rank}".encode(), digest_size=8).digest()) >> 1)


def _text(state: torch.Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)


def repeat_bitwise() -> None:
    """Have all kernels of this process from now on give the same digits for the same work; a warning where one cannot.

    To be called before the first product on CUDA, since cuBLAS looks at its settings then: little room for splits of
    the summed dimension, which is also what makes vLLM's and SGLang's products independent of the batch.
    """
    os.environ |= {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]
