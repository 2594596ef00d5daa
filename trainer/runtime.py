"""What a trainer holds beside its worker groups, put together from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsys.algorithms import KLController, filter_groups
from rlsys.config.plan import total_steps
from rlsys.data.collate import collate_prompts
from rlsys.data.cursor import Cursor
from rlsys.data.dataset import PromptDataset
from rlsys.protocol import DataProto
from rlsys.rewards.manager import OverlongBuffer, RewardManager, build_reward_manager, manager_from_file
from rlsys.rewards.pool import RewardPool
from rlsys.rewards.records import Grader
from rlsys.types import SamplingParams, TransferReport
from trainer.answers import VALIDATION_SEED, Answers
from trainer.estimate import AdvantageSettings, advantage_settings, kl_controller
from trainer.evaluate import Evaluator
from trainer.groups import WorkerGroups
from trainer.residency import Holder, Moves, Residency
from trainer.source import GroupFilter, RolloutSource

if TYPE_CHECKING:
    from trainer.ppo import RayPPOTrainer


@dataclass(frozen=True)
class Runtime:
    """The parts that a step uses."""

    source: RolloutSource
    residency: Residency
    evaluator: Evaluator | None
    advantages: AdvantageSettings
    kl_ctrl: KLController
    push: Callable[[int], TransferReport]
    total_steps: int
    closers: tuple[Callable[[], None], ...]

    def close(self) -> None:
        for close in self.closers:
            close()


@dataclass(frozen=True)
class CollatedPrompts:
    """A cursor over a dataset that hands out padded batches."""

    cursor: Cursor
    dataset: PromptDataset
    max_prompt_tokens: int
    pad_token_id: int

    def next(self) -> DataProto:
        step = self.cursor.next()
        rows = [self.dataset[index] for index in step.rows]
        return collate_prompts(
            rows, max_prompt_length=self.max_prompt_tokens, pad_token_id=self.pad_token_id, epoch=step.epoch
        )

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor.load_state_dict(state)
