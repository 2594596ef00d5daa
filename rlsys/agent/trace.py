"""The tokens of an episode: an append-only tree of spans, in which a prompt is always a path from the root.

A span is either given (prompts, tool results, what the chat template writes between turns) or drawn by the engine. What
the engine was given when it drew a span is the path before it, so a training row, which is a path too, has the very
same ids before every drawn token: nothing is tokenised a second time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from rlsys.types import Finish, ModelResponse

if TYPE_CHECKING:  # the processes of tools import this module, and must not wait for torch
    from rlsys.protocol import ImageInputs


@dataclass(frozen=True, eq=False)
class Span:
    """Token ids after `parent`. Drawn spans have log-probs and weight versions for each id, a finish and a turn >= 0;
    given ones may have images.

    `num_tokens` counts the path up to the end of this span; `next_turn` is the turn of a draw after it.
    """

    ids: tuple[int, ...]
    parent: "Span | None" = None
    turn: int = -1
    log_probs: tuple[float, ...] = ()
    sampled_log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: Finish | None = None
    images: "tuple[ImageInputs, ...]" = ()
    num_tokens: int = field(init=False)
    next_turn: int = field(init=False)

    def __post_init__(self) -> None:
        before, turn = (self.parent.num_tokens, self.parent.next_turn) if self.parent else (0, 0)
        object.__setattr__(self, "num_tokens", before + len(self.ids))
        object.__setattr__(self, "next_turn", turn + self.is_drawn)

    @property
    def is_drawn(self) -> bool:
        return self.finish is not None

    @property
    def path(self) -> "list[Span]":
        """All spans from the root to this one."""
        spans: list[Span] = []
        span: Span | None = self
        while span is not None:
            spans.append(span)
            span = span.parent
        return spans[::-1]

    @property
    def context(self) -> tuple[int, ...]:
        """The token ids from the root to the end of this span: what the engine is given to draw after it."""
        return tuple(chain.from_iterable(span.ids for span in self.path))

    @property
    def all_images(self) -> "tuple[ImageInputs, ...]":
        """The images from the root to the end of this span."""
        return tuple(chain.from_iterable(span.images for span in self.path))


@dataclass(frozen=True)
class TraceRow:
    """A path as a training row: `prompt_ids` up to the first drawn span, then R response tokens.

    All but the first tuple have R entries: `mask` is 1 on tokens drawn and not trained in an earlier row, `turn_ids`
    and `versions` are -1 on given tokens, log-probs 0. `rewards` are on the last token of a turn or of the row;
    `weight` is what they count in the episode's reward.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    sampled_log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    turn_ids: tuple[int, ...]
    rewards: tuple[float, ...]
    weight: float
    finish: Finish
    images: "tuple[ImageInputs, ...]" = ()


class Trace:
    """The spans of one episode, in the order in which they were made."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def give(self, ids: Sequence[int], parent: Span | None = None, images: "Sequence[ImageInputs]" = ()) -> Span:
        """Add tokens that the model did not draw, and the images in them."""
        return self._add(Span(tuple(ids), parent, images=tuple(images)))

    def draw(self, parent: Span, response: ModelResponse) -> Span:
        """Add what the engine drew after `parent`. ValueError if it was given other tokens than that path."""
        if tuple(response.input_tokens) != parent.context:
            raise ValueError(f"response {response.rid} continues other tokens than the path of its episode")
        drawn = (response.output_logprobs, response.sampled_logprobs, response.output_versions, response.stop_reason)
        return self._add(Span(response.output_tokens, parent, parent.next_turn, *drawn))

    def _add(self, span: Span) -> Span:
        self.spans.append(span)
        return span

    @property
    def num_turns(self) -> int:
        return sum(span.is_drawn for span in self.spans)

    def rows(self, reward: float = 0.0, turn_rewards: Sequence[float] | None = None) -> list[TraceRow]:
        """One row for every path that ends in a drawn span without drawn spans after it.

        They are sorted by their token ids, as parallel conversations are drawn in the order of their requests, which is
        not the same in each run. A drawn span counts in the first row that contains it. `reward` is put on the last
        drawn token of each row, of weight 1/rows; `turn_rewards`, one for each draw in the order of the draws, go to
        the last tokens of their turns instead, in rows of weight 1.
        """
        drawn = [span for span in self.spans if span.is_drawn and span.ids]
        if turn_rewards is not None and len(turn_rewards) != self.num_turns:
            raise ValueError(f"{len(turn_rewards)} rewards for {self.num_turns} turns")
        inner = {id(before) for span in drawn for before in span.path[:-1]}
        leaves = sorted((span for span in drawn if id(span) not in inner), key=lambda span: span.context)
        by_turn = dict(zip([id(span) for span in self.spans if span.is_drawn], turn_rewards or ()))
        trained: set[int] = set()
        rows = []
        for leaf in leaves:
            share = ({id(leaf): reward}, 1.0 / len(leaves)) if turn_rewards is None else (by_turn, 1.0)
            rows.append(_row(leaf.path, trained, *share))
            trained |= {id(span) for span in leaf.path}
        return rows


def _row(path: list[Span], trained: set[int], rewards: dict[int, float], weight: float) -> TraceRow:
    first = next(at for at, span in enumerate(path) if span.is_drawn)
    columns = defaultdict[str, list](list)
    for span in (span for span in path[first:] if span.ids):
        size = len(span.ids)
        counts = span.is_drawn and id(span) not in trained
        zeros = (0.0,) * size
        columns["response_ids"] += span.ids
        columns["mask"] += [int(counts)] * size
        columns["log_probs"] += span.log_probs or zeros
        columns["sampled_log_probs"] += span.sampled_log_probs or zeros
        columns["versions"] += span.versions or [-1] * size
        columns["turn_ids"] += [span.turn] * size
        columns["rewards"] += [*zeros[1:], rewards.get(id(span), 0.0) if counts else 0.0]
    response = {name: tuple(values) for name, values in columns.items()}
    prompt = tuple(token for span in path[:first] for token in span.ids)
    last = path[-1]
    assert last.finish is not None
    return TraceRow(prompt, **response, weight=weight, finish=last.finish, images=last.all_images)
