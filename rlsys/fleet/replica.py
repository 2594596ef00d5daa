"""What a fleet asks of a replica, and what it reads off work and answers, be they requests or batches."""

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
        """Complete the rows, in their order: requests to responses, or a DataProto as `generate_sequences` does."""
        ...

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        """What the engine's `health` says; raises when the replica does not live."""
        ...

    def restart(self, deadline_s: float) -> None:
        """Replace the process, alive or not, by a fresh one that has loaded its model."""
        ...


def session_of(work: Work) -> str:
    """The session that all requests share, or none."""
    sessions = set() if isinstance(work, DataProto) else {request.session for request in work}
    return sessions.pop() if len(sessions) == 1 else ""


def responses_of(answers: Answers) -> Sequence[ModelResponse]:
    assert not isinstance(answers, DataProto), "a replica answered requests with a DataProto"
    return answers


def rows_of(answers: Answers) -> DataProto:
    assert isinstance(answers, DataProto), "a replica answered a DataProto with responses"
    return answers


def belong_together(work: Work, answers: Answers) -> bool:
    """Whether the answers are to these rows: by request ids, or by the prompts that a batch gives back."""
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
    if isinstance(answers, DataProto):
        return sum(reason == Finish.ABORT for reason in answers.non_tensor_batch.get("finish_reason", ()))
    return sum(response.stop_reason is Finish.ABORT for response in answers)
