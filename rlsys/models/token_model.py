"""The model that engines shard: a transformers backbone with its head, from unpadded rows to numbers per token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlsys.models.attention import Packing
from rlsys.models.logprobs import token_stats
from rlsys.models.packing import TokenRows, left_aligned, padded_to_multiple
from rlsys.models.ulysses import sum_over
from rlsys.models.vision import embed
from rlsys.utils.errors import ConfigError

LM_OUTPUTS = ("log_probs", "entropy", "sum_pi_squared", "topk_log_probs", "topk_ids")
SCALAR_OUTPUTS = ("values", "scores")


class TokenModel(nn.Module):
    """`model` is a causal LM, or a backbone with a scalar `score` head; it is called through this module only.

    `packed` lays the rows end to end, otherwise they are padded on the right to the longest. `group` spreads the tokens
    of a pack over its ranks (Ulysses); every rank gets all results.
    """

    chunk_elements: int | None = None
    """Logits that exist at once; None: as many as `rlsys.models.logprobs` takes on the device."""

    def __init__(self, model: Any, *, packed: bool = True, group: ProcessGroup | None = None) -> None:
        super().__init__()
        if group is not None and not packed:
            raise ConfigError("sequence parallelism needs packed rows: set use_remove_padding=true")
        self.model = model
        self.packed, self.group = packed, group

    @property
    def is_lm(self) -> bool:
        return not hasattr(self.model, "score")

    def forward(
        self, rows: TokenRows, outputs: Sequence[str], temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """Numbers of the M response tokens (M,) or (M, topk), float32. `values` are of the state before each token,
        `scores` of the token itself; the head decides which outputs exist, others raise ValueError."""
        known = LM_OUTPUTS if self.is_lm else SCALAR_OUTPUTS
        if unknown := [name for name in outputs if name not in known]:
            raise ValueError(f"this model gives {', '.join(known)}, not {', '.join(unknown)}")
        hidden, local = self._hidden(rows)
        if self.is_lm:
            results = self._stats(hidden, rows, local, outputs=outputs, temperature=temperature, topk=topk)
        else:
            results = {name: self._scalars(hidden, rows, local, name) for name in outputs}
        return {name: results[name] for name in outputs}

    def _hidden(self, rows: TokenRows) -> tuple[Tensor, tuple[int, int]]:
        """Last hidden states (n, H) of this rank's tokens and their range among the N of the pack."""
        images = rows.images
        backbone = getattr(self.model, self.model.base_model_prefix) if images is None else self.model.get_decoder()
        if not self.packed:
            ids, positions, mask, places = left_aligned(rows)
            given: dict[str, Any] = {"input_ids": ids}
            if images is not None:
                whole = embed(self.model, ids.flatten(), replace(images, places=places[images.places]))
                given = whole.arguments((ids.shape[0], ids.shape[1]))
            states = backbone(**given, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
            return states.flatten(0, 1)[places], (0, rows.num_tokens)
        size, rank = (dist.get_world_size(self.group), dist.get_rank(self.group)) if self.group else (1, 0)
        whole = padded_to_multiple(rows, size)
        share = whole.num_tokens // size
        mine = slice(rank * share, (rank + 1) * share)
        packing = Packing(whole.lengths, whole.token_ids.device, self.group)
        given = {"input_ids": whole.token_ids[None, mine]}
        if images is not None:
            given = embed(self.model, whole.token_ids, images).arguments((1, whole.num_tokens), mine)
        states = backbone(
            **given,
            position_ids=whole.position_ids[..., None, mine],
            use_cache=False,
            packing=packing,
            **_flash_arguments(packing),
        ).last_hidden_state
        return states[0], (mine.start, mine.stop)

    def _stats(self, hidden: Tensor, rows: TokenRows, local: tuple[int, int], **options: Any) -> dict[str, Tensor]:
        here, states = self._select(hidden, rows.before, local)
        stats = token_stats(
            states,
            self.model.get_output_embeddings().weight,
            rows.targets if here is None else rows.targets[here],
            chunk_elements=self.chunk_elements,
            topk_ids=rows.topk_ids if here is None or rows.topk_ids is None else rows.topk_ids[here],
            **options,
        )
        return {name: self._everywhere(value, here, len(rows.targets)) for name, value in stats.items()}

    def _scalars(self, hidden: Tensor, rows: TokenRows, local: tuple[int, int], name: str) -> Tensor:
        here, states = self._select(hidden, rows.before if name == "values" else rows.at, local)
        scalars = self.model.score(states).sum(dim=-1)
        return self._everywhere(scalars, here, len(rows.targets))

    def _select(self, hidden: Tensor, index: Tensor, local: tuple[int, int]) -> tuple[Tensor | None, Tensor]:
        """States at `index`; under sequence parallelism those that lie here, and which of the M they are."""
        if self.group is None:
            return None, hidden[index]
        here = ((index >= local[0]) & (index < local[1])).nonzero()[:, 0]
        return here, hidden[index[here] - local[0]]

    def _everywhere(self, values: Tensor, here: Tensor | None, count: int) -> Tensor:
        if self.group is None or here is None:
            return values
        return sum_over(values.new_zeros(count, *values.shape[1:]).index_put((here,), values), self.group)


def _flash_arguments(packing: Packing) -> dict[str, Any]:
    """The names under which transformers' own flash attention takes a pack."""
    return {
        "cu_seq_lens_q": packing.cu_seq_lens,
        "cu_seq_lens_k": packing.cu_seq_lens,
        "max_length_q": packing.max_length,
        "max_length_k": packing.max_length,
    }
