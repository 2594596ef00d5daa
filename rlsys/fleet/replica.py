"""What a fleet needs of a replica, and how it reads work and answers, which are requests or batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from rlsys.protocol import DataProto
from rlsys.protocol.columns import tensors_of
from rlsys.rollout.batch import prompts_of
from rlsys.types import Finish, ModelRequest, ModelResponse

Work = Sequence[ModelRequest] | DataProto
Answers = Sequence[ModelResponse] | DataProto


class Replica(Protocol):
    """One serving engine and the process it lives in. Every method answers or raises by its deadline."""

    @property
    def name(self) -> str: ...
    def generate(self, work: Work, deadline_s: float) -> Answers:
        """Complete the rows, in order: requests to responses, or a DataProto as `generate_sequences` does."""
        ...

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        """The engine's `health`; raises if the replica is not alive."""
        ...

    def restart(self, deadline_s: float) -> None:
        """Replace the process, alive or not, by a new one that has loaded its model."""
        ...


def session_of(work: Work) -> str:
    """The session that all requests share, or none."""
    sessions = set() if isinstance(work, DataProto) else {request.session for request in work}
    return sessions.pop() if len(sessions) == 1 else ""


def responses_of(answers: Answers) -> Sequence[ModelResponse]:
    """The answers to requests."""
    assert not isinstance(answers, DataProto), "a replica answered requests with a DataProto"
    return answers


def rows_of(answers: Answers) -> DataProto:
    """The answers to rows of a batch."""
    assert isinstance(answers, DataProto), "a replica answered a DataProto with responses"
    return answers


def belong_together(work: Work, answers: Answers) -> bool:
    """Whether the answers match these rows, by request ids or by the prompts of the batch."""
    if len(work) != len(answers):
        return False
    if isinstance(work, DataProto):
        return torch.equal(prompts_of(work)[0], prompts_of(rows_of(answers))[0])
    return all(a.rid == b.rid for a, b in zip(work, responses_of(answers), strict=True))


def versions_of(answers: Answers) -> set[int]:
    """The weight versions of all tokens."""
    if isinstance(answers, DataProto):
        return set(tensors_of(answers.batch)["weight_versions"].unique().tolist()) - {-1}
    return {version for response in answers for version in response.output_versions}


def num_aborted(answers: Answers) -> int:
    """The number of answers that were cut off."""
    if isinstance(answers, DataProto):
        return sum(reason == Finish.ABORT for reason in answers.non_tensor_batch.get("finish_reason", ()))
    return sum(response.stop_reason is Finish.ABORT for response in answers)
