"""The real tokens of padded rows: found once, packed or left-aligned, and their outputs scattered into (B, R).

B rows, L = P + R columns, N real tokens of all rows, M real response tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsys.models.vision import PackedImages


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`; a copy to a GPU comes from pinned memory, and so waits for no kernel in flight."""
    is_pinned = device.type == "cuda" and not values.is_cuda
    return (values.pin_memory() if is_pinned else values).to(device, non_blocking=True)


def sequence_ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where the sequences of a pack end, after a 0, as int32 on `device`."""
    return to_device(torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


@dataclass(frozen=True)
class TokenRows:
    """Rows without their padding. `before` and `at` index the N tokens: the one that predicts each response token, and
    the response token itself; `cells` is the response tokens' place in the flattened (B, R) outputs, `columns` the N
    tokens' place in the flattened (B, L) rows, -1 for pad tokens."""

    token_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    before: Tensor
    at: Tensor
    targets: Tensor
    cells: Tensor
    columns: Tensor
    shape: tuple[int, int]
    topk_ids: Tensor | None = None
    """(M, K): the tokens beside each target whose log-probs are asked for."""
    images: PackedImages | None = None
    """Of a vision-language model, whose `position_ids` may be (3, N)."""
    on_host: "TokenRows | None" = None
    """The rows before they were moved, for what the host must know of them: it would wait for the device."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> "TokenRows":
        moved = {name: to_device(x, device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        images = None if self.images is None else self.images.to(device, non_blocking=True)
        return replace(self, images=images, on_host=self, **moved)

    def scatter(self, values: Tensor) -> Tensor:
        """(M, ...) -> (B, R, ...), zero at padding; differentiable."""
        cells = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:])
        return cells.index_put((self.cells,), values).view(*self.shape, *values.shape[1:])


def token_rows(batch: Mapping[str, Tensor]) -> TokenRows:
    """Find the real tokens of rows with input_ids, attention_mask, position_ids (B, L), responses (B, R), and if
    they have it teacher_ids (B, R, K).

    ValueError if a row has a response but no token before it, for then nothing predicts its first token.
    """
    mask = batch["attention_mask"].bool()
    response_length = batch["responses"].shape[1]
    response = mask[:, mask.shape[1] - response_length :]
    orphans = (mask[:, : mask.shape[1] - response_length].sum(dim=1) == 0) & response.any(dim=1)
    if orphans.any():
        raise ValueError(f"rows {orphans.nonzero()[:, 0].tolist()} have a response but an empty prompt")
    at = (mask.flatten().cumsum(0).view(mask.shape) - 1)[:, mask.shape[1] - response_length :][response]
    if not mask.any():
        return empty_rows(mask.device, len(mask), response_length)
    token_ids, teacher_ids = batch["input_ids"][mask], batch.get("teacher_ids")
    return TokenRows(
        token_ids=token_ids,
        position_ids=batch["position_ids"][mask],
        lengths=tuple(int(n) for n in mask.sum(dim=1).tolist() if n),
        before=at - 1,
        at=at,
        targets=token_ids[at],
        cells=response.flatten().nonzero()[:, 0],
        columns=mask.flatten().nonzero()[:, 0],
        shape=(len(mask), response_length),
        topk_ids=None if teacher_ids is None else teacher_ids[response].long(),
    )


def empty_rows(device: torch.device, num_rows: int = 0, response_length: int = 0) -> TokenRows:
    """Two tokens and no response: what a rank runs while others still have rows, so that their collectives match."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    two = torch.arange(2, device=device)
    ids, nowhere = torch.zeros_like(two), torch.full_like(two, -1)
    return TokenRows(ids, two, (2,), none, none, none, none, nowhere, (num_rows, response_length))


def padded_to(rows: TokenRows, num_tokens: int) -> TokenRows:
    """Append sequences of pad tokens, none longer than the longest row, up to `num_tokens`; they predict nothing."""
    extra, longest = num_tokens - rows.num_tokens, max(rows.lengths)
    if extra <= 0:
        return rows
    pads = tuple(min(longest, extra - at) for at in range(0, extra, longest))
    positions = torch.cat([torch.arange(pad, device=rows.position_ids.device) for pad in pads])
    return replace(
        rows,
        token_ids=torch.cat([rows.token_ids, rows.token_ids.new_zeros(extra)]),
        position_ids=torch.cat([rows.position_ids, positions.expand(*rows.position_ids.shape[:-1], -1)], -1),
        lengths=(*rows.lengths, *pads),
        columns=torch.cat([rows.columns, rows.columns.new_full((extra,), -1)]),
    )


def padded_each(rows: TokenRows, multiple: int) -> TokenRows:
    """Append pad tokens to every sequence so that its length divides by `multiple`; they predict nothing."""
    extra = [-length % multiple for length in rows.lengths]
    if not any(extra):
        return rows
    device = rows.token_ids.device
    shift = torch.tensor([0, *extra[:-1]], device=device).cumsum(0)
    lengths = torch.tensor(rows.lengths, device=device)
    place = torch.arange(rows.num_tokens, device=device) + shift.repeat_interleave(lengths)
    total, both = rows.num_tokens + sum(extra), (rows.token_ids, rows.position_ids)
    ids, positions = (x.new_zeros(*x.shape[:-1], total).index_copy(-1, place, x) for x in both)
    images = None if rows.images is None else replace(rows.images, places=place[rows.images.places])
    return replace(
        rows,
        images=images,
        token_ids=ids,
        position_ids=positions,
        lengths=tuple(length + pad for length, pad in zip(rows.lengths, extra, strict=True)),
        before=place[rows.before],
        at=place[rows.at],
        columns=rows.columns.new_full((total,), -1).index_copy(0, place, rows.columns),
    )


def left_aligned(rows: TokenRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (b, longest) padded on the right: ids, positions (also (3, b, longest)), mask, and each token's place in
    b*longest."""
    mask = torch.arange(max(rows.lengths)) < torch.tensor(rows.lengths)[:, None]
    places, shown = (to_device(x, rows.token_ids.device) for x in (mask.flatten().nonzero()[:, 0], mask.long()))
    both = ((x, x.new_zeros(*x.shape[:-1], mask.numel())) for x in (rows.token_ids, rows.position_ids))
    ids, positions = (flat.index_copy_(-1, places, x).unflatten(-1, mask.shape) for x, flat in both)
    return ids, positions, shown, places
