"""Where new weights for vLLM go on a CPU: into host tensors that its loader packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlsys.rollout.hf.engine import copy_by_name, whole_layout
from rlsys.types import WeightLayout


class HostWeights:
    """Every HF tensor whole in host memory, for engines whose layers keep their weights in a form of their own."""

    def __init__(
        self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], give: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        self._tensors, self._aliases, self._give = tensors, aliases, give

    def layout(self, *, rank: int, host: str) -> WeightLayout:
        return whole_layout(self._tensors, self._aliases, rank=rank, host=host)

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        copy_by_name(self._tensors, self._aliases, bucket)

    def finish(self) -> None:
        """Let the engine take all of them over."""
        self._give(self._tensors)
