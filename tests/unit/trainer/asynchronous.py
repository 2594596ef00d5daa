"""What tests of asynchronous sources share: counted prompts, a grader of lengths, replicas that make given lengths."""

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from rlsys.algorithms.masked import at_last_token
from rlsys.config.schema.trainer import TrainerConfig
from rlsys.fleet.fleet import RolloutFleet
from rlsys.fleet.requests import FleetDeadlines
from rlsys.protocol import DataProto, object_array, response_lengths
from rlsys.rewards.manager import Graded
from rlsys.telemetry.metrics import StageTimer
from rlsys.types import Finish, ModelRequest, ResponseDelta, SamplingParams
from tests.timing import scaled_s
from trainer.generation import GradedRollout
from trainer.prompt_groups import PromptGroups
from trainer.source import GroupFilter
from trainer.staleness_window import StalenessWindow

FEW_FAILURES = TrainerConfig(max_failed_in_a_row=8, max_failed_share=0.05)
DEADLINES = FleetDeadlines(generate_s=scaled_s(20.0), health_s=scaled_s(2.0), restart_s=scaled_s(5.0))


class CountedPrompts:
    """Prompts of two tokens, the second of which counts from 3; four at a time."""

    def __init__(self, vocabulary: int = 1 << 20) -> None:
        self.position, self.vocabulary = 0, vocabulary

    def next(self) -> DataProto:
        numbers = torch.arange(self.position, self.position + 4)
        self.position += 4
        prompts = torch.stack([torch.full_like(numbers, 2), numbers % (self.vocabulary - 3) + 3], 1)
        uids = object_array([f"p{number}" for number in numbers.tolist()])
        return DataProto.from_dict({"prompts": prompts, "attention_mask": torch.ones_like(prompts)}, {"uid": uids})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class LengthManager:
    """The score of an answer is its length; one that is longer than `longest` is an error."""

    def __init__(self, longest: int = 1 << 30) -> None:
        self.longest = longest

    def grade(self, data: DataProto) -> Graded:
        lengths = response_lengths(data)
        if int(lengths.max()) > self.longest:
            raise ValueError(f"an answer of {int(lengths.max())} tokens")
        return Graded(at_last_token(lengths.float(), data.tensors["response_mask"]), {})


BY_LENGTH = LengthManager()


def prompt_groups(
    window: StalenessWindow,
    *,
    max_tokens: int,
    num_answers: int = 1,
    vocabulary: int = 1 << 20,
    group_filter: GroupFilter | None = None,
    failures: TrainerConfig = FEW_FAILURES,
    manager: LengthManager = BY_LENGTH,
    prompts: CountedPrompts | None = None,
) -> PromptGroups:
    """Groups over counted prompts, graded by their length."""
    rollout = GradedRollout(
        generate=lambda rows: (rows, {}),
        manager=manager,
        sampling=SamplingParams(max_tokens),
        num_answers=num_answers,
        greedy_baseline=False,
        pad_token_id=0,
        stage=StageTimer(),
        print_by=None,
    )
    prompts = prompts or CountedPrompts(vocabulary)
    return PromptGroups(window, prompts, rollout, group_filter=group_filter, failures=failures)


class LengthReplica:
    """A replica in this process that makes tokens of its version, as many for a prompt as `length_of` says.

    `speed` tokens an answer and exchange, `limit` tokens of an answer at most; a length of 0 is an error of that
    request.
    """

    def __init__(self, name: str, length_of: Callable[[int], int], *, speed: int = 8) -> None:
        self.name, self.length_of, self.speed = name, length_of, speed
        self.version, self.limit = 0, 1 << 30
        self.running: dict[str, tuple[ModelRequest, int]] = {}
        self.lock = threading.Lock()

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        time.sleep(0.0005)
        with self.lock:
            for request in new:
                self.running[request.rid] = request, self.length_of(request.input_ids[1] - 3)
            for rid in cancel:
                self.running.pop(rid, None)
            return [self._advance(rid) for rid in list(self.running)]

    def _advance(self, rid: str) -> ResponseDelta:
        request, length = self.running[rid]
        drawn = len(request.input_ids) - 2
        if not length:
            del self.running[rid]
            return ResponseDelta(rid, error="a prompt that no engine likes")
        count = min(self.speed, length - drawn, request.gconfig.max_new_tokens, max(0, self.limit - drawn))
        finish = Finish.STOP if drawn + count == length else None
        if finish is None and count == request.gconfig.max_new_tokens:
            finish = Finish.LENGTH
        del self.running[rid]
        if finish is None:
            params = SamplingParams(request.gconfig.max_new_tokens - count)
            rest = ModelRequest(request.input_ids + (5,) * count, params, rid)
            self.running[rid] = rest, length
        zeros = (0.0,) * count
        return ResponseDelta(rid, (5,) * count, zeros, zeros, (self.version,) * count, finish)

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return {"version": self.version}

    def restart(self, deadline_s: float) -> None:
        raise AssertionError("nothing here needs a restart")


@contextmanager
def fleet_over(replicas: Sequence[Any], *, chunk_rows: int = 4) -> Iterator[RolloutFleet]:
    fleet = RolloutFleet(replicas, chunk_rows=chunk_rows, deadlines=DEADLINES)
    try:
        yield fleet
    finally:
        fleet.close()


def lognormal_lengths(*, mean: float, longest: int, seed: int = 0) -> Callable[[int], int]:
    """Lengths by prompt number, long-tailed."""

    def length_of(number: int) -> int:
        return min(longest, 1 + int(random.Random(f"{seed}/{number}").lognormvariate(0.0, 1.2) * mean))

    return length_of


def exit_code_after(work: Callable[[], object]) -> int | None:
    """How a process ends after this work; None if it does not end."""
    process = get_context("fork").Process(target=work)
    process.start()
    process.join(scaled_s(10.0))
    code = process.exitcode
    process.kill()
    return code
