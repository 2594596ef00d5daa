"""The batched decode loop: admit requests, sample one token for every running row, release finished rows.

Letters: N rows, V vocabulary. All rows share the cache's current column; a row that ends is replaced by the last
running row, so that the batch is always dense, and waiting requests take the free rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlsys.rollout.base import QueuedRequest
from rlsys.rollout.hf.kv_cache import ColumnCache, causal_mask, hidden_score
from rlsys.rollout.hf.running import RunningRows
from rlsys.rollout.sampling.sample import sample_tokens
from rlsys.types import Finish
from rlsys.utils.errors import RolloutError

if TYPE_CHECKING:
    from rlsys.rollout.hf.engine import HFRollout

COLUMN_STEP = 256

Prompt = tuple[int, ...]


class DecodeLoop:
    """One run of an engine's model, from the first request until nothing is left or the engine stops."""

    def __init__(self, engine: HFRollout) -> None:
        self.engine, self.model, self.config = engine, engine.model, engine.config
        self.device, self.dtype = self.model.device, self.model.dtype
        self.waiting: deque[QueuedRequest] = deque()
        self.rows = RunningRows(self.config.seed, self.device)
        self.cache = ColumnCache(self.model.config.get_text_config().num_hidden_layers)

    @torch.inference_mode()
    def run(self) -> bool:
        """Decode until nothing is left, or until the engine stops (then True) and gets the running requests back."""
        engine = self.engine
        while True:
            new, cancelled = engine._pull()
            self.waiting.extend(new)
            if cancelled:
                self.waiting = deque(queued for queued in self.waiting if queued.rid not in cancelled)
                self._remove([row for row, queued in enumerate(self.rows.queue) if queued.rid in cancelled])
            if engine._stopped():
                engine._put_back(self.waiting)
                self._release(dict.fromkeys(range(self.rows.count), Finish.ABORT))
                return True
            if engine._report_due():
                engine._deliver(self.rows.take({}, engine.version), reports=True)
            if self._may_admit():
                self._admit()
            elif self.rows.count:
                self._step()
            elif not self.waiting:
                return False

    def _may_admit(self) -> bool:
        """Prefill delays the running rows, so it waits until a quarter of the rows is free or all requests fit."""
        free = self.config.max_num_seqs - self.rows.count
        return 0 < min(len(self.waiting), max(1, self.config.max_num_seqs // 4)) <= free

    def _admit(self) -> None:
        free = self.config.max_num_seqs - self.rows.count
        taken = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        groups: dict[Prompt, list[QueuedRequest]] = {}
        for queued in taken:
            groups.setdefault(queued.request.input_ids, []).append(queued)
        prompts = sorted(groups, key=len)
        self._reserve(len(taken), front=len(prompts[-1]), back=max(t.max_new_tokens for t in taken))
        for some in _prefill_batches(prompts, self.config.max_num_batched_tokens):
            self._prefill({prompt: groups[prompt] for prompt in some})

    def _reserve(self, num_new: int, *, front: int, back: int) -> None:
        """Make room for more rows, with prompts of up to `front` and completions of up to `back` tokens."""
        cache, num_rows = self.cache, self.rows.count + num_new
        back = min(back, COLUMN_STEP)
        if not self.rows.count:
            cache.column = front
        if num_rows > cache.num_rows or front > cache.column or cache.column + back > cache.num_columns:
            wanted = min(self.config.max_num_seqs, num_rows + len(self.waiting))
            self._relayout(max(wanted, cache.num_rows), front=front, back=back)

    def _relayout(self, num_rows: int, *, front: int, back: int) -> None:
        """Drop the columns that no running row uses, and leave `front` free columns before and `back` behind."""
        cache, rows = self.cache, self.rows
        first = int(rows.tensors["starts"].min()) if rows.count else cache.column
        kept = cache.column - first
        column = max(front, kept)
        cache.relayout(
            rows.count, first=first, column=column, num_rows=num_rows, num_columns=column + max(back, kept // 2)
        )
        if rows.count:
            rows.tensors["starts"] += column - kept - first
            rows.set_mask(cache.num_columns, hidden_score(self.dtype), self.dtype)

    def _prefill(self, groups: dict[Prompt, list[QueuedRequest]]) -> None:
        """Run each distinct prompt once, copy its row for every further request, and sample the first tokens."""
        cache, first_row = self.cache, self.rows.count
        lengths = torch.tensor([len(prompt) for prompt in groups])
        width = int(lengths.max())
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in groups])
        starts = (cache.column - lengths).to(self.device)
        rows = slice(first_row, first_row + len(groups))
        logits = self._forward_prompts(ids.to(self.device), starts, rows)
        firsts = [(i, queue[0]) for i, queue in enumerate(groups.values())]
        copies = [(i, queued) for i, queue in enumerate(groups.values()) for queued in queue[1:]]
        source = torch.tensor([i for i, _ in firsts + copies], device=self.device)
        if copies:
            targets = slice(rows.stop, rows.stop + len(copies))
            cache.copy_rows(source[len(firsts) :] + first_row, targets, cache.column - width)
        self.rows.add([queued for _, queued in firsts + copies], starts[source])
        self.rows.set_mask(cache.num_columns, hidden_score(self.dtype), self.dtype)
        self._sample(logits[source], slice(first_row, self.rows.count))

    def _forward_prompts(self, ids: Tensor, starts: Tensor, rows: slice) -> Tensor:
        """Logits (N, V) after left-padded prompts (N, P), in passes of at most max_num_batched_tokens."""
        end = self.cache.column
        begin = end - ids.shape[1]
        logits = torch.empty(0)
        step = max(1, self.config.max_num_batched_tokens // ids.shape[0])
        for at in range(begin, end, step):
            write, read = slice(at, min(at + step, end)), slice(begin, min(at + step, end))
            positions = torch.arange(write.start, write.stop, device=self.device) - starts[:, None]
            mask = causal_mask(starts, write, read, self.dtype)
            logits = self._forward(
                ids[:, at - begin : write.stop - begin], positions.clamp(min=0), mask, rows, read, write
            )
        return logits

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, rows: slice, read: slice, write: slice) -> Tensor:
        """Logits (N, V) after the last of the given tokens."""
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache.look(rows, read, write),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _step(self) -> None:
        """One token for every running row."""
        cache, rows = self.cache, self.rows
        if cache.column == cache.num_columns:
            self._relayout(cache.num_rows, front=0, back=min(rows.most_left(), COLUMN_STEP))
        live, read = slice(0, rows.count), slice(0, cache.column + 1)
        ids, positions = rows.tensors["last_tokens"][:, None], rows.tensors["positions"][:, None]
        mask = rows.mask[live, :, :, read]
        logits = self._forward(ids, positions, mask, live, read, slice(cache.column, cache.column + 1))
        cache.column += 1
        self._sample(logits, live)

    def _sample(self, logits: Tensor, which: slice) -> None:
        rows = self.rows
        sampled = sample_tokens(logits, rows.tensors["positions"][which] + 1, rows.sampling(which), rows.banned(which))
        stopped, full = rows.append(sampled, which)
        finite, ended = torch.stack([sampled.finite.all(), (stopped | full).any()]).tolist()
        if not finite:
            bad = (~sampled.finite).nonzero().flatten().tolist()
            rids = ", ".join(rows.queue[which.start + i].request.rid for i in bad)
            raise RolloutError(f"logits are not finite for request {rids}: check the weights that were loaded")
        if ended:
            flags = enumerate(zip(stopped.tolist(), full.tolist(), strict=True), start=which.start)
            self._release({row: Finish.STOP if stop else Finish.LENGTH for row, (stop, over) in flags if stop or over})

    def _release(self, ended: Mapping[int, Finish]) -> None:
        self.engine._deliver(self.rows.take(ended, self.engine.version))
        self._remove(list(ended))

    def _remove(self, gone: Sequence[int]) -> None:
        for source, target in self.rows.remove(gone):
            place = slice(target, target + 1)
            self.cache.copy_rows(torch.tensor([source], device=self.device), place, 0)


def _prefill_batches(prompts: Sequence[Prompt], max_tokens: int) -> Iterator[list[Prompt]]:
    """Batches of prompts sorted by length, whose padded size is at most `max_tokens` or that are a single prompt."""
    batch: list[Prompt] = []
    for prompt in prompts:
        if batch and (len(batch) + 1) * len(prompt) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
