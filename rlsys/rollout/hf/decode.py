"""The batched decode loop: admit requests, sample one token for every running row, release finished rows.

Letters: N running rows, V vocabulary, C cache columns. All rows share the cache's current column; a row that ends is
replaced by the last running row, so that the batch is always dense, and waiting requests take the free rows. Prompts
(N, P) are padded on the left, with the features of their images (hidden size H), and read a few columns a pass.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlsys.models.vision import Embedded, PackedImages, embed, has_images, pack_images
from rlsys.protocol import ImageInputs
from rlsys.rollout.base import RunningRequest
from rlsys.rollout.hf.kv_cache import ColumnCache, causal_mask
from rlsys.rollout.sampling.hook import RowSampler, SampleSpec
from rlsys.utils.grouping import group_by

if TYPE_CHECKING:
    from rlsys.rollout.hf.engine import HFRollout

COLUMN_STEP = 256


class Prompt(NamedTuple):
    """Requests with the same prompt are prefilled once."""

    ids: tuple[int, ...]
    images: tuple[ImageInputs, ...]


class RunningRows:
    """Dense rows: new ones are appended, and the last ones replace removed ones.

    Tensors (N,): last_tokens and positions (the last token of each sequence and its absolute position), starts (its
    first cache column), shifts (what the model's position has beside the absolute one), num_left (tokens that it may
    still get). `mask` (N, 1, 1, C) hides the columns before starts.
    """

    def __init__(self, sampler: RowSampler, device: torch.device) -> None:
        self.sampler, self.device = sampler, device
        self.requests: list[RunningRequest] = []
        self.tensors: dict[str, Tensor] = {}
        self.mask = torch.empty(0)
        self._sampled: list[RunningRequest] = []

    @property
    def count(self) -> int:
        return len(self.requests)

    def add(self, requests: Sequence[RunningRequest], starts: Tensor, shifts: Tensor) -> None:
        """Append rows whose prompts are in the cache and whose first token is not sampled yet."""
        columns = {
            "last_tokens": [0] * len(requests),
            "positions": [len(one.request.input_ids) - 1 for one in requests],
            "num_left": [one.max_new_tokens for one in requests],
        }
        new = {name: torch.tensor(values, device=self.device) for name, values in columns.items()}
        new |= {"starts": starts, "shifts": shifts}
        self.tensors = {name: torch.cat([self.tensors[name], new[name]]) for name in new} if self.requests else new
        self.requests += requests

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Remove rows; returns the (from, to) moves by which the last rows replaced them."""
        gone = set(rows)
        left = self.count - len(gone)
        movers = [row for row in range(left, self.count) if row not in gone]
        moves = list(zip(movers, sorted(row for row in gone if row < left), strict=True))
        for source, target in moves:
            self.requests[target] = self.requests[source]
            self.mask[target] = self.mask[source]
            for value in self.tensors.values():
                value[target] = value[source]
        del self.requests[left:]
        self.tensors = {name: value[:left] for name, value in self.tensors.items()}
        return moves

    def set_mask(self, num_columns: int, dtype: torch.dtype) -> None:
        columns = slice(0, num_columns)
        self.mask = causal_mask(self.tensors["starts"], slice(num_columns - 1, num_columns), columns, dtype)

    def sample(self, logits: Tensor, which: slice) -> list[int]:
        """Sample a token for each of these rows from logits (N, V); returns the rows that end with it."""
        if self._sampled != self.requests[which]:
            self._sampled = self.requests[which]
            self.sampler.set_rows([SampleSpec.of(one) for one in self._sampled])
        t = {name: value[which] for name, value in self.tensors.items()}
        t["positions"] += 1
        t["num_left"] -= 1
        t["last_tokens"].copy_(self.sampler.force(logits, t["positions"])[:, 1])
        drawn = zip(self._sampled, *torch.stack([t["last_tokens"], t["num_left"]]).tolist(), strict=True)
        ends = [left == 0 or token in one.stop_ids for one, token, left in drawn]
        return [row for row, ended in enumerate(ends, start=which.start) if ended]


class DecodeLoop:
    """Decoding with an engine's model, from the first request until nothing is left."""

    def __init__(self, engine: "HFRollout") -> None:
        self.engine, self.model, self.config = engine, engine.model, engine.config
        self.device, self.dtype = self.model.device, self.model.dtype
        self.waiting: deque[RunningRequest] = deque()
        engine.sampler = RowSampler(self.config.seed, self.device)
        self.rows = RunningRows(engine.sampler, self.device)
        self.cache = ColumnCache(self.model.config.get_text_config().num_hidden_layers)

    @torch.inference_mode()
    def run(self) -> bool:
        """Decode until nothing is left, or until the engine stops (then True)."""
        engine = self.engine
        if engine.routes is not None:
            engine.routes.clear()
        while True:
            new, cancelled = engine._pull()
            self.waiting.extend(new)
            if cancelled:
                self.waiting = deque(one for one in self.waiting if not one.is_cancelled)
                self._remove([row for row, one in enumerate(self.rows.requests) if one.is_cancelled])
            if engine._stopped():
                self._stop()
                return True
            if engine._report_due():
                engine._report()
            # Prefill delays the running rows: it starts once all that wait fit, or a quarter of all rows is free.
            free = self.config.max_num_seqs - self.rows.count
            if 0 < min(len(self.waiting), max(1, self.config.max_num_seqs // 4)) <= free:
                self._admit(free)
            elif self.rows.count:
                self._step()
            elif not self.waiting:
                return False

    def _stop(self) -> None:
        """Deliver all that was sampled; running requests are kept with their cache, or given back."""
        self.engine._put_back(self.waiting)
        self.waiting.clear()
        if self.engine.config.on_update == "keep":
            self.engine._report(stops=True)
        else:
            self.engine._end(self.rows.requests)
            self._remove(range(self.rows.count))

    def _admit(self, free: int) -> None:
        """Start as many of the requests that wait as there are free rows."""
        taken = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        groups = group_by(taken, lambda queued: Prompt(queued.request.input_ids, queued.request.images))
        prompts = sorted(groups, key=lambda prompt: len(prompt.ids))
        self._reserve(len(taken), front=len(prompts[-1].ids), back=max(t.max_new_tokens for t in taken))
        for some in _prefill_batches(prompts, self.config.max_num_batched_tokens):
            self._prefill({prompt: groups[prompt] for prompt in some})

    def _reserve(self, num_new: int, *, front: int, back: int) -> None:
        """Make room for more rows, with prompts of up to `front` and completions of up to `back` tokens."""
        cache, num_rows = self.cache, self.rows.count + num_new
        back = min(back, COLUMN_STEP)
        if not self.rows.count:
            cache.column = front
        if num_rows > cache.window.num_rows or front > cache.column or cache.column + back > cache.window.num_columns:
            wanted = min(self.config.max_num_seqs, num_rows + len(self.waiting))
            self._relayout(max(wanted, cache.window.num_rows), front=front, back=back)

    def _relayout(self, num_rows: int, *, front: int, back: int) -> None:
        """Move the running rows into new buffers of `num_rows` rows, without the columns that none of them uses.

        Prompts of `front` tokens can end at the current column then, and at least `back` columns follow it.
        """
        cache, rows = self.cache, self.rows
        first = int(rows.tensors["starts"].min()) if rows.count else cache.column
        kept = cache.column - first
        column = max(front, kept)
        num_columns = column + max(back, kept // 2)
        cache.relayout(rows.count, first=first, column=column, num_rows=num_rows, num_columns=num_columns)
        if rows.count:
            rows.tensors["starts"] += column - kept - first
            rows.set_mask(cache.window.num_columns, self.dtype)

    def _prefill(self, groups: dict[Prompt, list[RunningRequest]]) -> None:
        """Run each distinct prompt once, copy its row for every further request, and sample the first tokens.

        Of the requests of a prompt the first one gets the row that was run; `source` is the prompt of each new row.
        """
        cache, first_row = self.cache, self.rows.count
        prompts = LeftPadded(self.model, [prompt.ids for prompt in groups], [prompt.images for prompt in groups])
        width = prompts.ids.shape[1]
        starts = (cache.column - prompts.lengths).to(self.device)
        rows = slice(first_row, first_row + len(groups))
        limit = self.config.max_num_batched_tokens
        *_, (_, last) = prompt_passes(self.model, cache, prompts, rows, max_tokens=limit, keep=1)
        readers = [(i, queue[0]) for i, queue in enumerate(groups.values())]
        if self.engine.routes is not None:
            for routes, (prompt, queue) in zip(self.engine.routes.take(len(groups)), groups.items(), strict=True):
                for queued in queue:
                    queued.routes = [routes[width - len(prompt.ids) :]]
        copies = [(i, queued) for i, queue in enumerate(groups.values()) for queued in queue[1:]]
        source = torch.tensor([i for i, _ in readers + copies], device=self.device)
        if copies:
            targets = slice(rows.stop, rows.stop + len(copies))
            cache.copy_rows(source[len(readers) :] + first_row, targets, cache.column - width)
        self.rows.add([queued for _, queued in readers + copies], starts[source], prompts.shifts[source])
        self.rows.set_mask(cache.window.num_columns, self.dtype)
        self._sample(last[source, -1], slice(first_row, self.rows.count))

    def _step(self) -> None:
        """One token for every running row."""
        cache, rows = self.cache, self.rows
        if cache.column == cache.window.num_columns:
            self._relayout(cache.window.num_rows, front=0, back=min(int(rows.tensors["num_left"].max()), COLUMN_STEP))
        # the columns where rows begin; a GPU would have to be waited for, so there all columns are read
        begins = rows.tensors["starts"].tolist() if self.device.type == "cpu" else [0]
        live, read = slice(0, rows.count), slice(min(begins), cache.column + 1)
        seen = cache.look(live, read, slice(cache.column, cache.column + 1))
        ids, positions = rows.tensors["last_tokens"], rows.tensors["positions"] + rows.tensors["shifts"]
        given: dict[str, object] = {"input_ids": ids[:, None], "position_ids": positions[:, None]}
        if sum(begins) > (read.start + COLUMN_STEP) * rows.count:  # rows differ so much that one by one is faster
            given["first_columns"] = [begin - read.start for begin in begins]
        logits = next_logits(self.model, 1, rows.mask[live, :, :, read], seen, **given)
        cache.column += 1
        if self.engine.routes is not None:
            for one, routes in zip(rows.requests, self.engine.routes.take(rows.count), strict=True):
                one.routes.append(routes)
        self._sample(logits[:, -1], live)

    def _sample(self, logits: Tensor, which: slice) -> None:
        """Sample a token for these rows, and release those that end with it."""
        if ended := self.rows.sample(logits, which):
            self.engine._end([self.rows.requests[row] for row in ended])
            self._remove(ended)

    def _remove(self, gone: Sequence[int]) -> None:
        for source, target in self.rows.remove(gone):
            self.cache.copy_rows(torch.tensor([source], device=self.device), slice(target, target + 1), 0)


def _prefill_batches(prompts: Sequence[Prompt], max_tokens: int) -> Iterator[list[Prompt]]:
    """Batches of prompts sorted by length, whose padded size is at most `max_tokens` or that are a single prompt."""
    batch: list[Prompt] = []
    for prompt in prompts:
        if batch and (len(batch) + 1) * len(prompt.ids) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


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
    # transformers 5.24 has both names
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    given |= {"attention_mask": mask, name: cache, "use_cache": True}
    if not has_images(model.config):
        return model(**given, logits_to_keep=keep).logits
    return model.get_output_embeddings()(model.get_decoder()(**given).last_hidden_state[:, -keep:])


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
