"""Floating-point operations of a model and the peak of a device, for model FLOPs utilisation (MFU).

Only matrix products count, a multiply-add as two; attention counts what a causal mask leaves. Recomputation for
gradient checkpointing does not count, as in Chowdhery et al. 2022 (PaLM, appendix B).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from rlsys.config.vocabulary import EXPERTS
from rlsys.models.hf import auto_model
from rlsys.models.vision import is_tower
from rlsys.protocol import DataProto, response_lengths
from rlsys.telemetry.log import get_logger
from rlsys.utils.gpus import data_sheet_flops

log = get_logger(__name__)


class ModelFlops:
    """FLOPs of a causal language model, counted on the matrices that transformers builds for `config`.

    So latent attention, MLPs with and without gate, shared experts and dense layers count as they are, and of routed
    experts those that a token is sent to. The image encoder does not count.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            model = auto_model(config).from_config(config)
        text: Any = config.get_text_config()
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        output: Any = model.get_output_embeddings()
        experts = [getattr(text, name, None) for name in EXPERTS]
        routed = text.num_experts_per_tok / next(filter(None, experts)) if any(experts) else 1.0
        self.head = output.weight.numel()
        self.blocks = sum(
            p.numel() * (routed if ".experts." in name else 1)
            for name, p in model.named_parameters()
            if p.ndim > 1
            and not is_tower(name)
            and id(p) not in looked_up
            and p is not output.weight
            and not name.endswith("bias")
        )
        """Weights of all blocks that multiply a token."""
        self.attended = sum(map(_attended, getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers))
        """Multiplications of a token with one that it attends to."""

    def forward(self, lengths: Iterable[int], *, num_head_tokens: int | None = None) -> float:
        """FLOPs of a forward pass over sequences of these lengths; the LM head runs on `num_head_tokens` (None: all).

        Forward and backward are three times as many.
        """
        lengths = list(lengths)
        tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
        head_tokens = tokens if num_head_tokens is None else num_head_tokens
        return 2.0 * (tokens * self.blocks + pairs * self.attended + head_tokens * self.head)


@dataclass(frozen=True)
class MfuMeter:
    """Measures the MFU of a role, under verl's names; `peak` is the total FLOP/s of the ranks that share their rows."""

    model: PretrainedConfig
    peak: float
    lm_head: bool = True
    clock: Callable[[], float] = perf_counter

    @contextmanager
    def __call__(self, name: str, rows: DataProto, *, epochs: int | None = None) -> Iterator[dict[str, float]]:
        """Time the work inside; the dict that it yields has `perf/mfu/{name}` afterwards.

        `epochs` are the passes over `rows` forward and backward; None is one pass forward. The dict stays empty for
        models whose FLOPs cannot be counted.
        """
        metrics: dict[str, float] = {}
        start_s = self.clock()
        yield metrics
        seconds = self.clock() - start_s
        try:
            lengths = rows.tensors["attention_mask"].sum(1).tolist()
            num_predicted = int(response_lengths(rows).sum()) if self.lm_head else 0
            forward = ModelFlops(self.model).forward(lengths, num_head_tokens=num_predicted)
        except (AttributeError, TypeError, ValueError) as error:
            log.debug("no MFU of a %s: %s", type(self.model).__name__, error)
            return
        metrics[f"perf/mfu/{name}"] = forward * (1 if epochs is None else 3 * epochs) / (seconds * self.peak)


def _attended(text: PretrainedConfig) -> int:
    """Multiplications of a token with one that it attends to in a layer of these settings."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    query = text.qk_nope_head_dim + text.qk_rope_head_dim if getattr(text, "kv_lora_rank", None) else head_dim
    return text.num_attention_heads * (query + (getattr(text, "v_head_dim", None) or head_dim))


@cache
def peak_flops(device: torch.device) -> float:
    """FLOP/s the device can reach: the data sheet's number for a known GPU, else a measured product."""
    known = data_sheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return known or measured_flops(device)


def measured_flops(device: torch.device, *, repeats: int = 3, size: int | None = None) -> float:
    """FLOP/s of a square matrix product, the best of `repeats`: bf16 4096 on CUDA, float32 1024 on CPU."""
    cuda = device.type == "cuda"
    size, dtype = (size or 4096, torch.bfloat16) if cuda else (size or 1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):
        start = perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
