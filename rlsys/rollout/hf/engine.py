"""HFRollout: a transformers causal language model behind the RolloutEngine protocol, on CPU or CUDA.

Letters: N rows, C columns of the passes, k experts a token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.models.hf import auto_model, dtype_name, end_ids, saved_config, saved_tensors_of, shared_names
from rlsys.models.host_offload import HostOffload, free_device_memory
from rlsys.models.logprobs import wide_product
from rlsys.models.stacked import Stacks, as_saved, saved_aliases, saved_stacks
from rlsys.models.vision import has_images
from rlsys.protocol import DataProto, images_of
from rlsys.rollout.base import DEFAULT_CONFIG, DEFAULT_CONTEXT, BaseRolloutEngine, EngineContext, LoadFormat
from rlsys.rollout.batch import score_sequences
from rlsys.rollout.engine_weights import copy_by_name, whole_layout
from rlsys.rollout.hf.decode import DecodeLoop, LeftPadded, prompt_passes
from rlsys.rollout.hf.kv_cache import ATTENTION, ColumnCache
from rlsys.rollout.sampling.hook import RowSampler
from rlsys.types import WeightLayout
from rlsys.utils.errors import ConfigError, RolloutError

MAX_LOGITS = 1 << 26
"""Logits of one scoring pass."""


def load_causal_lm(path: str | Path, *, load_format: LoadFormat, dtype: str, device: str) -> Any:
    """A language or vision-language model from an HF directory, or with random weights of its config.json for "dummy".

    Runs no code from the directory: other weights than safetensors are read as tensors only.
    """
    kind = getattr(torch, dtype)
    config = saved_config(path)
    auto = auto_model(config)
    if load_format == "dummy":
        return auto.from_config(config, dtype=kind, trust_remote_code=False).to(device)
    own = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    model, loaded = auto.from_pretrained(path, config=config, dtype=kind, **own)
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(f"{path} is not the whole model: {len(missing)} tensors are missing ({missing[0]}, ...)")
    return model.to(device)


class RouteRecorder:
    """Records the experts of each token of the model's passes; ConfigError for a model without experts."""

    def __init__(self, model: Any) -> None:
        self.num_layers, self._taken = model.config.get_text_config().num_hidden_layers, dict[int, list[Tensor]]()
        for name, module in model.named_modules():
            if layer := re.search(r"layers\.(\d+)\..*experts$", name):
                self._taken[int(layer[1])] = []
                module.register_forward_pre_hook(partial(self._record, int(layer[1])))
        if not self._taken:
            raise ConfigError("actor_rollout_ref.actor.router_replay.mode: the model has no experts; set disabled")

    def clear(self) -> None:
        """Forget the passes since the last `take`."""
        for passes in self._taken.values():
            passes.clear()

    def _record(self, layer: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._taken[layer].append(args[1])

    def take(self, num_rows: int) -> np.ndarray:
        """The experts (N, C, layers, k) of the passes since the last call, -1 in layers without experts; int16."""
        parts = {n: [part.view(num_rows, -1, part.shape[-1]) for part in passes] for n, passes in self._taken.items()}
        taken = {layer: torch.cat(passes, 1) for layer, passes in parts.items()}
        self.clear()
        some = next(iter(taken.values()))
        whole = some.new_full((*some.shape[:2], self.num_layers, some.shape[2]), -1, dtype=torch.int16)
        for layer, experts in taken.items():
            whole[:, :, layer] = experts.to(whole)
        return whole.cpu().numpy()


class HFRollout(BaseRolloutEngine):
    """A RolloutEngine over a transformers model, which decides the device.

    With `full_determinism` logits are not rounded to the model's type.
    """

    def __init__(
        self, model: Any, config: GenerationConfig = DEFAULT_CONFIG, context: EngineContext = DEFAULT_CONTEXT
    ) -> None:
        text = model.config.get_text_config()
        super().__init__(
            replace(context, device=str(model.device)),
            model.config,
            max_model_len=config.max_model_len or getattr(text, "max_position_embeddings", 0) or 1 << 30,
            eos_token_ids=end_ids(getattr(model, "generation_config", None), text),
        )
        self.model, self.config, self._offload = model.eval().requires_grad_(False), config, HostOffload()
        self.sampler: RowSampler
        self._loop: DecodeLoop | None = None
        """What runs on after a stop."""
        self.routes = RouteRecorder(model) if config.enable_rollout_routing_replay else None
        if config.full_determinism:
            _unrounded_logits(model)
        _use_grouped_attention(model, self.max_model_len)

    @classmethod
    def from_path(
        cls, path: str | Path, config: GenerationConfig = DEFAULT_CONFIG, context: EngineContext = DEFAULT_CONTEXT
    ) -> "HFRollout":
        """The engine over the model in an HF directory."""
        dtype = dtype_name(config.dtype, context.device)
        model = load_causal_lm(path, load_format=context.load_format, dtype=dtype, device=context.device)
        return cls(model, config, context)

    def weight_layout(self) -> WeightLayout:
        """Every tensor whole, under the name it is saved under; tied names are aliases."""
        return whole_layout(self.local_tensors(), self._aliases(), rank=self.rank, host=self.host)

    def local_tensors(self) -> Mapping[str, Tensor]:
        """The live parameters and persistent buffers by the names they are saved under, each once, stacked experts one
        by one; call it again after `wake`."""
        self.check_weights_awake()
        held = saved_tensors_of(self.model).items()
        return {saved: part for name, t in held for saved, part in as_saved(name, t.detach(), self._stacks).items()}

    @cached_property
    def _stacks(self) -> Stacks:
        return saved_stacks(self.model)

    def _aliases(self) -> dict[str, str]:
        return saved_aliases(shared_names(self.model.state_dict(keep_vars=True).items()), self._stacks)

    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        copy_by_name(self.local_tensors(), self._aliases(), bucket)

    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None:
        if "weights" in tags and asleep:
            self._offload.offload("weights", [*self.model.parameters(), *self.model.buffers()])
        elif "weights" in tags:
            self._offload.restore("weights")
        free_device_memory()

    def _free(self) -> None:
        self.model = self._loop = None

    @torch.inference_mode()
    def _score(self, batch: DataProto, temperature: float) -> Tensor:
        """One sequence after another, in passes of bounded size."""
        text, images = self.model.config.get_text_config(), images_of(batch)
        step = max(1, min(self.config.max_num_batched_tokens, MAX_LOGITS // text.vocab_size))

        def log_probs(sequences: list[list[int]], lengths: list[int]) -> Iterator[tuple[int, list[float]]]:
            for row, length in enumerate(lengths):
                ids = torch.tensor([sequences[row]], device=self.model.device)
                prompts = LeftPadded(self.model, [sequences[row][:-1]], [images[row]])
                last, scores = ids.shape[1] - 1, list[float]()
                cache = ColumnCache(text.num_hidden_layers, num_rows=1, num_columns=last)
                cache.column = last
                for write, logits in prompt_passes(self.model, cache, prompts, slice(0, 1), max_tokens=step, keep=0):
                    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
                    scores += scaled.gather(2, ids[:, write.start + 1 : write.stop + 1, None]).flatten().tolist()
                yield row, scores[last - length :]

        return score_sequences(batch, log_probs)

    def _decode(self) -> bool:
        loop, self._loop = self._loop or DecodeLoop(self), None
        is_stopped = loop.run()
        self._loop = loop if loop.rows.count else None
        return is_stopped

    def _take_samples(self, numbers: list[int], starts: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        return self.sampler.log.take(numbers, starts)


def _unrounded_logits(model: Any) -> None:
    """Make the head of a half-precision model return float32 logits, as the trainer's does."""
    head = model.get_output_embeddings()
    if head.weight.dtype in (torch.bfloat16, torch.float16) and head.bias is None:
        head.forward = lambda x: wide_product(x.flatten(0, -2), head.weight.t()).unflatten(0, x.shape[:-1])


def _use_grouped_attention(model: Any, max_model_len: int) -> None:
    """Make the model attend through our cache; RolloutError for attention that the cache does not support."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise RolloutError(f"HFRollout has no cache for layers of type {sorted(kinds)}; use another rollout engine")
    if "sliding_attention" in kinds and window and window < max_model_len:
        how = f"set max_model_len to at most the model's window of {window}, or use another rollout engine"
        raise RolloutError(f"HFRollout has no sliding cache; {how}")
    ours = "eager" if getattr(text, "attn_logit_softcapping", None) or not model._supports_sdpa else ATTENTION
    model.set_attn_implementation({"text_config": ours, "vision_config": "sdpa"} if has_images(model.config) else ours)
