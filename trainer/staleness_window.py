"""Which prompts may start and which a step trains on, so that no token is older than `max_staleness` versions.

Step s trains from version s - 1 on P groups, the answers to one prompt each. A group may start while fewer than
(v + 1 + k) P groups precede it, v being the served version and k = max_staleness - lookahead: then it belongs to step
v + 1 + k or an earlier one, and its tokens are of version v or later. A step takes the next P groups in the order of
the data, so its age is at most k. With `lookahead` w it may also take a finished group that is up to w P places behind
the oldest unfinished one; that one then waits for at most w more steps. A group that is skipped moves all later ones
one place up, which only makes them younger, and its place is filled by the next prompt.

Below that limit `lead` says how many steps ahead groups start. It follows from how long the trainer waits.
"""

from collections import Counter

from rlsys.interfaces import State
from rlsys.planning.staleness_forecast import next_lead


class StalenessWindow:
    """The groups between their start and their training, by number in the order of the data.

    Has neither clock nor threads: the same calls give the same answers. `version` is the one that engines serve.
    """

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, lookahead: int = 0, num_steps: int | None = None
    ) -> None:
        """No group starts that only a step after `num_steps` would need."""
        self.groups_per_step, self.max_staleness, self.lookahead = groups_per_step, max_staleness, lookahead
        self.num_steps = num_steps
        self.most_ahead = max_staleness - lookahead
        self.lead, self._num_early = float(self.most_ahead), 0
        self._leads: list[float] = []
        self.version = self.issued = self.trained = 0
        self.skipped: Counter[str] = Counter()
        self._order: list[int] = []  # from the oldest open group on, with those that were trained ahead of it
        self.finished: set[int] = set()  # those that wait for their step
        self._trained_ahead: set[int] = set()

    @property
    def open(self) -> list[int]:
        """Numbers of the groups that have started and are neither trained nor skipped, in their order."""
        return [number for number in self._order if number not in self._trained_ahead]

    @property
    def step(self) -> int:
        """The step that the next `take` is for, from 1."""
        return self.trained // self.groups_per_step + 1

    @property
    def room(self) -> int:
        """How many more groups may start under the served version."""
        due = (self.version + 1) * self.groups_per_step
        limit = due + self.most_ahead * self.groups_per_step
        limit = min(limit, max(due, self.trained) + int(max(1.0, self.lead) * self.groups_per_step))
        if self.num_steps is not None:
            limit = min(limit, self.num_steps * self.groups_per_step)
        return max(0, limit - self.trained - len(self.open))

    def adapt_lead(self, waited_steps: float) -> None:
        """Start groups earlier, or a little later; the trainer waited `waited_steps` step times for its batch."""
        coming = self.open[: self.groups_per_step]
        is_early = len(coming) == self.groups_per_step and self.finished.issuperset(coming)
        self._num_early = self._num_early + 1 if is_early else 0
        self._leads.append(self.lead)
        self.lead = next_lead(self._leads, waited_steps, most=self.most_ahead, num_early=self._num_early)

    def start(self) -> int:
        """The number of the next group, which starts now."""
        assert self.room > 0, "a group that starts now might become older than max_staleness"
        self._order.append(self.issued)
        self.issued += 1
        return self.issued - 1

    def finish(self, number: int) -> None:
        """A group can be trained on."""
        self.finished.add(number)

    def skip(self, number: int, reason: str) -> None:
        """A group will not be trained on; `reason` is counted."""
        self._order.remove(number)
        self.finished.discard(number)
        self.skipped[reason] += 1
        self._drop_trained(self._order, self._trained_ahead)

    def take(self) -> list[int] | None:
        """The groups of the next step in their order, or None while some of them are unfinished."""
        if len(self.finished) < self.groups_per_step:
            return None
        order, trained = list(self._order), set(self._trained_ahead)
        taken: list[int] = []
        while len(taken) < self.groups_per_step:
            ready = self.finished.difference(taken)
            number = next((n for n in order[: self.lookahead * self.groups_per_step + 1] if n in ready), None)
            if number is None:
                return None
            taken.append(number)
            trained.add(number)
            self._drop_trained(order, trained)
        self._order, self._trained_ahead = order, trained
        self.finished.difference_update(taken)
        self.trained += len(taken)
        return sorted(taken)

    @staticmethod
    def _drop_trained(order: list[int], trained: set[int]) -> None:
        """The oldest group in `order` is one that is still open."""
        while order and order[0] in trained:
            trained.discard(order.pop(0))

    def check_age(self, oldest_version: int) -> int:
        """The age of the step just taken, whose oldest token is of this version; AssertionError above the limit."""
        step = self.step - 1
        age = step - 1 - oldest_version
        what = f"step {step} got a token of version {oldest_version}, {age} versions old"
        assert age <= self.max_staleness, f"{what}; the limit is trainer.max_staleness={self.max_staleness}"
        return age

    def counts(self) -> dict[str, int]:
        """The ledger; AssertionError unless issued = trained + skipped + open."""
        num_open = len(self.open)
        lost = self.issued - self.trained - self.skipped.total() - num_open
        assert not lost, f"{lost} groups are lost: {self.state_dict()}"
        by_reason = {f"skipped_{reason}": count for reason, count in sorted(self.skipped.items())}
        return {"issued": self.issued, "trained": self.trained, "open": num_open, **by_reason}

    def state_dict(self) -> dict[str, object]:
        """Plain values, from which `load_state_dict` continues; the served version is not among them."""
        sizes = {"groups_per_step": self.groups_per_step, "max_staleness": self.max_staleness}
        counts = {"issued": self.issued, "trained": self.trained, "skipped": dict(self.skipped)}
        groups = {"order": list(self._order), "finished": sorted(self.finished)}
        ahead = {"lookahead": self.lookahead, "trained_ahead": sorted(self._trained_ahead)}
        return {**sizes, **counts, **groups, **ahead}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`."""
        self.issued, self.trained, self.skipped = state["issued"], state["trained"], Counter(state["skipped"])
        self._order, self.finished = list(state["order"]), set(state["finished"])
        self._trained_ahead = set(state["trained_ahead"])
