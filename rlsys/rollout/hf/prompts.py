"""Prompts as the model reads them: padded on the left, with the features of their images, a few columns a pass.

N prompts, P columns, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlsys.models.vision import Embedded, PackedImages, embed, has_images, pack_images
from rlsys.protocol import ImageInputs
from rlsys.rollout.hf.kv_cache import ColumnCache, causal_mask


class LeftPadded:
    """The ids (N, P) of prompts, their lengths (N,) and positions (N, P), or (3, N, P).

    `shifts` (N,) is what the position of a token behind its prompt has beside its number in the row: below 0 where
    images take fewer positions than tokens.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], images: Sequence[tuple[ImageInputs, ...]]) -> None:
        lengths = list(map(len, prompts))
        self.lengths, width = torch.tensor(lengths), max(lengths)
        real = torch.arange(width) >= width - self.lengths[:, None]
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        positions = torch.cat([torch.arange(length) for length in lengths])
        packed: PackedImages | None = None
        if has_images(model.config):
            packed, positions = pack_images(model.config, ids, lengths, images)
        self.ids, self.positions = (
            x.new_zeros(*x.shape[:-1], *real.shape).masked_scatter(real, x).to(model.device) for x in (ids, positions)
        )
        last = self.positions.amax(-1)
        self.shifts = (last if last.ndim == 1 else last.amax(0)) + 1 - self.lengths.to(model.device)
        self._embedded: Embedded | None = None
        if packed is not None:
            places = real.flatten().nonzero()[:, 0][packed.places]
            self._embedded = embed(model, self.ids.flatten(), replace(packed, places=places).to(model.device))

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """Those of the model for columns `start` to `stop` of all rows."""
        given = {"position_ids": self.positions[..., start:stop]}
        if self._embedded is None:
            return {"input_ids": self.ids[:, start:stop], **given}
        return self._embedded.arguments((self.ids.shape[0], self.ids.shape[1]), slice(start, stop)) | given


def next_logits(model: Any, keep: int, mask: Tensor, cache: ColumnCache, **given: object) -> Tensor:
    """The logits of the last `keep` columns, all with 0; the images of a vision-language model are in `given`."""
    given |= {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
    if not has_images(model.config):
        return model(**given, logits_to_keep=keep).logits
    hidden = model.get_decoder()(**given).last_hidden_state
    return model.get_output_embeddings()(hidden[:, -keep:])


def prompt_passes(
    model: Any, cache: ColumnCache, prompts: LeftPadded, rows: slice, *, max_tokens: int, keep: int
) -> Iterator[tuple[slice, Tensor]]:
    """Run prompts that end at the cache's column, a few columns a pass.

    Yields the columns written and the logits of the last `keep` of them (all with 0); a pass has at most `max_tokens`.
    """
    num_rows, width = prompts.ids.shape
    begin, step = cache.column - width, max(1, max_tokens // num_rows)
    starts = (cache.column - prompts.lengths).to(model.device)
    for at in range(begin, cache.column, step):
        write = slice(at, min(at + step, cache.column))
        read, given = slice(begin, write.stop), prompts.arguments(at - begin, write.stop - begin)
        mask = causal_mask(starts, write, read, model.dtype)
        yield write, next_logits(model, keep, mask, cache.look(rows, read, write), **given)
