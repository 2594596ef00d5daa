"""Floating-point operations of a model and the peak of a device, for model FLOPs utilisation (MFU).

Only matrix products count, a multiply-add as two; attention counts what a causal mask leaves. Recomputation for
gradient checkpointing does not count, as in Chowdhery et al. 2022 (PaLM, appendix B).
"""

from collections.abc import Iterable
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from rlsys.config.vocabulary import EXPERTS
from rlsys.models.hf import auto_model
from rlsys.models.vision import is_tower
from rlsys.utils.gpus import data_sheet_flops


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
