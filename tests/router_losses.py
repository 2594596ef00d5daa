"""Losses of routers alone: the gradients that an engine has of them, and those by transformers in float64."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.interfaces import LossSum
from rlsys.protocol import DataProto
from tests.engine_gradients import gradients

AUX, Z = 0.5, 0.1
LOSSES: dict[str, dict[str, Any]] = {
    "balance": {"moe_aux_loss_coeff": AUX, "moe_router_load_balancing_type": "aux_loss"},
    "z": {"moe_z_loss_coeff": Z},
}
"""The override_transformer_config of each."""


def no_loss(outputs: Any, rows: Any) -> LossSum:
    return LossSum(sum(values.sum() for values in outputs.values()) * 0.0, float(rows["response_mask"].sum()))


def unpadded_rows(vocab: int, num: int = 8, prompt: int = 16, response: int = 48) -> DataProto:
    """Rows of one length, which no engine pads: padding too goes through routers."""
    ids = torch.randint(1, vocab, (num, prompt + response), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    rows = {"prompts": ids[:, :prompt], "responses": ids[:, prompt:], "input_ids": ids, "attention_mask": ones}
    rows |= {"position_ids": ones.cumsum(1) - 1, "response_mask": ones[:, prompt:]}
    return DataProto.from_dict(rows)


def router_gradients(engine: Any, place: Path, loss: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the gates by name: the engine's, whose ranks take one micro-batch each, and the float64 ones."""
    rows, size = unpadded_rows(engine.chunks[0].vocabulary), engine.dp_size
    shares = [rows[len(rows) // size * rank : len(rows) // size * (rank + 1)] for rank in range(size)]
    engine.forward_backward(shares[engine.dp_rank], no_loss)
    ours = {name: gradient.cpu() for name, gradient in gradients(engine).items()}
    engine.save(place, "export")
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    for share in shares:
        logits = model(share.tensors["input_ids"], output_router_logits=True).router_logits
        kept = model.config.num_experts_per_tok
        (sum(expected_loss(layer, kept, loss) for layer in logits) / size).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if name.endswith("gate.weight")}
    return {name: ours[name] for name in theirs}, theirs


def expected_loss(logits: Tensor, kept: int, loss: str) -> Tensor:
    """Of one layer and micro-batch, from the logits (T, E) of its router."""
    if loss == "z":
        return Z * logits.logsumexp(dim=-1).square().mean()
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(kept).indices, 1.0)
    return AUX * logits.shape[1] * (chosen.mean(dim=0) / kept * logits.softmax(dim=-1).mean(dim=0)).sum()
