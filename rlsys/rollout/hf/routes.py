"""The experts that tokens take in a transformers model. Letters: N rows, C columns of the passes, k experts a token."""

import re
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlsys.utils.errors import ConfigError


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
