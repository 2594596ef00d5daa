"""HFRollout: a transformers causal language model behind the RolloutEngine protocol, on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.models.logprobs import wide_product
from rlsys.models.stacked import Part, part_of, saved_parts
from rlsys.rollout.base import Deliver, Pull, ServingEngine
from rlsys.rollout.hf.decode import Decoder, Limits
from rlsys.rollout.hf.kv_cache import ATTENTION
from rlsys.rollout.hf.logprobs import score_responses
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import RolloutError, WeightTransferError

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

LoadFormat = Literal["auto", "dummy"]


def load_causal_lm(path: str | Path, *, load_format: LoadFormat, dtype: str, device: str) -> Any:
    """A causal language model from an HF directory, or with random weights of its config.json for "dummy".

    Reads safetensors only and runs no code from the directory.
    """
    kind = getattr(torch, dtype)
    if load_format == "dummy":
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=False).to(device)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=kind, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).to(device)


class HFRollout(ServingEngine):
    """A RolloutEngine over a transformers model.

    With `load_format="dummy"` the engine is quarantined until the first weights are pushed. `max_model_len` bounds
    prompt and completion together; by default it is what the model's positions allow. With `full_determinism` logits
    are not rounded to the model's type.
    """

    def __init__(
        self,
        model: Any,
        *,
        load_format: LoadFormat = "auto",
        seed: int = 0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        full_determinism: bool = False,
        version: int = 0,
        rank: int = 0,
        host: str = "",
    ) -> None:
        text = model.config.get_text_config()
        super().__init__(
            vocab_size=text.vocab_size,
            max_model_len=max_model_len or getattr(text, "max_position_embeddings", 0) or 1 << 30,
            eos_token_ids=_eos_of(model) if eos_token_ids is None else eos_token_ids,
            device=str(model.device),
            quarantined=load_format == "dummy",
            version=version,
            rank=rank,
            host=host,
        )
        self.model = model.eval().requires_grad_(False)
        if full_determinism:
            _unrounded_logits(model)
        self.limits = Limits(max_num_seqs, max_num_batched_tokens)
        self.seed = seed
        _use_grouped_attention(model, self.max_model_len)

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        load_format: LoadFormat = "auto",
        dtype: str = "float32",
        device: str = "cpu",
        **options: Any,
    ) -> HFRollout:
        """The engine over the model in an HF directory; `dtype` is torch's name, `options` are the constructor's."""
        model = load_causal_lm(path, load_format=load_format, dtype=dtype, device=device)
        return cls(model, load_format=load_format, **options)

    def weight_layout(self) -> WeightLayout:
        """Every tensor whole, under the name it is saved by; tied names are aliases."""
        return whole_layout(self.local_tensors(), self._aliases(), rank=self.rank, host=self.host)

    def local_tensors(self) -> Mapping[str, Tensor]:
        """The live parameters and persistent buffers by the names they are saved by, each once, stacked experts one by
        one; ask again after `wake`."""
        self._awake_weights()
        aliases = self._aliases()
        held = {name: t.detach() for name, t in self.model.state_dict(keep_vars=True).items() if name not in aliases}
        apart = {saved: part_of(held[part.held], part) for saved, part in self._parts.items()}
        whole = set(held) - {part.held for part in self._parts.values()}
        return {name: tensor for name, tensor in held.items() if name in whole} | apart

    @cached_property
    def _parts(self) -> dict[str, Part]:
        return saved_parts(self.model)

    def _aliases(self) -> dict[str, str]:
        first: dict[int, str] = {}
        state = self.model.state_dict(keep_vars=True)
        return {name: held for name, t in state.items() if (held := first.setdefault(id(t), name)) != name}

    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        copy_by_name(self.local_tensors(), self._aliases(), bucket)

    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None:
        if "weights" in tags:
            self.model.to("cpu" if asleep else self.device)
        torch.cuda.empty_cache()

    def _free(self) -> None:
        self.model = None

    def _score(self, batch: DataProto, temperature: float) -> Tensor:
        return score_responses(
            self.model, batch, temperature=temperature, max_tokens=self.limits.max_num_batched_tokens
        )

    def _decode(self, pull: Pull, deliver: Deliver) -> int:
        decoder = Decoder(self.model, limits=self.limits, seed=self.seed, version=self.version, stopped=self._stopped)
        decoder.run(pull, deliver)
        return decoder.num_tokens


def whole_layout(tensors: Mapping[str, Tensor], aliases: Mapping[str, str], *, rank: int, host: str) -> WeightLayout:
    """The layout of HF tensors that are held whole under their own names."""
    return WeightLayout(
        rank=rank,
        host=host,
        shards=tuple(
            Shard(Box(name, (0,) * t.ndim, tuple(t.shape)), name, (0,) * t.ndim) for name, t in tensors.items()
        ),
        full_shapes={name: tuple(t.shape) for name, t in tensors.items()},
        dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
        aliases=aliases,
    )


@torch.no_grad()
def copy_by_name(held: Mapping[str, Tensor], aliases: Mapping[str, str], bucket: Sequence[tuple[str, Tensor]]) -> None:
    """Copy full HF tensors into the held ones; WeightTransferError for an unknown name or a wrong shape."""
    for name, tensor in bucket:
        target = held.get(aliases.get(name, name))
        if target is None:
            raise WeightTransferError(f"the rollout model has no tensor '{name}'")
        if target.shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)} for {tuple(target.shape)}"
            raise WeightTransferError(f"tensor '{name}' has the wrong shape: {shapes}")
        target.copy_(tensor)


def _eos_of(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _unrounded_logits(model: Any) -> None:
    """Let the head of a half-precision model give logits in float32, as the trainer's does."""
    head = model.get_output_embeddings()
    if head.weight.dtype in (torch.bfloat16, torch.float16) and head.bias is None:
        head.forward = lambda hidden: wide_product(hidden.flatten(0, -2), head.weight.t()).unflatten(
            0, hidden.shape[:-1]
        )


def _use_grouped_attention(model: Any, max_model_len: int) -> None:
    """Let the model attend through our cache; refuse what it cannot hold."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise RolloutError(f"HFRollout has no cache for layers of type {sorted(kinds)}: use another rollout engine")
    if "sliding_attention" in kinds and window and window < max_model_len:
        raise RolloutError(
            f"HFRollout does not slide its cache: set max_model_len to at most the model's window of {window}, "
            "or use another rollout engine"
        )
    capped = getattr(text, "attn_logit_softcapping", None)
    model.set_attn_implementation("eager" if capped or not model._supports_sdpa else ATTENTION)
