"""Episodes of a free-running asynchronous run."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlsys.agent.collate import collate_episodes
from rlsys.agent.presets import Workflow
from rlsys.agent.runner import EpisodeResult, EpisodeRunner
from rlsys.agent.session import Row, Session, SessionSettings
from rlsys.config import load_config
from rlsys.config.schema.trainer import TrainerConfig
from rlsys.protocol import DataProto, object_array
from rlsys.types import SamplingParams
from rlsys.utils.errors import RolloutError
from tests.timing import scaled_s
from tests.unit.agent.engine import tool_pool
from tests.unit.trainer.asynchronous import CountedPrompts, LengthReplica, fleet_over, prompt_groups
from trainer.async_source import AsyncSource
from trainer.episodes import EpisodeRollout, OpenEpisodes
from trainer.generation import meta_of_all_calls
from trainer.staleness_window import StalenessWindow


class Conversations(CountedPrompts):
    """Prompts that have messages."""

    def next(self) -> DataProto:
        rows = super().next()
        rows.non_tensor_batch["raw_prompt"] = object_array([[{"role": "user", "content": "hello"}]] * len(rows))
        return rows


def test_an_episode_whose_workflow_raises_cancelled_error_has_failed() -> None:
    runs = Counter[str]()

    async def cancels(row: Row, session: Session) -> float:
        runs[session.name] += 1
        if runs[session.name] == 1:
            raise asyncio.CancelledError
        await asyncio.sleep(1000)  # a second time
        return 0.0

    sampling, one_fails = SamplingParams(8), TrainerConfig(max_failed_in_a_row=1, max_failed_share=0.0)
    nothing = cast(Any, None)
    settings = SessionSettings(nothing, nothing, sampling, 8, 8)
    runner = EpisodeRunner(settings, Workflow(cancels), tool_pool())
    rollout = cast(EpisodeRollout, SimpleNamespace(runner=runner, sampling=sampling, keep=lambda *_: None))
    window = StalenessWindow(groups_per_step=1, max_staleness=1)
    groups = prompt_groups(window, max_tokens=8, failures=one_fails, prompts=Conversations())
    with fleet_over([LengthReplica("replica", lambda n: 8)]) as fleet:
        source = AsyncSource(OpenEpisodes(groups, fleet, rollout), deadline_s=scaled_s(1.0))
        source.published(0)
        with pytest.raises(RolloutError, match="the last error: no episode has an answer: CancelledError"):
            source.next()
        source.close()
        runner.close()
    assert set(runs.values()) == {1}


def test_an_episode_whose_request_fails_is_skipped_and_counted() -> None:
    replica, sampling, nothing = LengthReplica("replica", lambda n: 8 * (n != 1)), SamplingParams(8), cast(Any, None)

    async def draws(row: Row, session: Session) -> float:
        await session.draw_ids((2, int(row["uid"][1:]) + 3))
        return 1.0

    with fleet_over([replica]) as fleet:
        runner = EpisodeRunner(SessionSettings(fleet.sample, nothing, sampling, 8, 8), Workflow(draws), tool_pool())
        collate = partial(collate_episodes, pad_token_id=0, prompt_length=8, response_length=8)
        parts = {"runner": runner, "sampling": sampling, "keep": lambda *_: None, "collate": collate}
        rollout = cast(EpisodeRollout, SimpleNamespace(**parts, cfg=load_config([])))
        window = StalenessWindow(groups_per_step=2, max_staleness=1)
        groups = prompt_groups(window, max_tokens=8, prompts=Conversations())
        source = AsyncSource(OpenEpisodes(groups, fleet, rollout), deadline_s=scaled_s(20.0))
        source.published(0)
        batch = source.next()
        assert batch.non_tensor_batch["uid"].tolist() == ["p0", "p2"]
        assert batch.meta_info["source_metrics"]["rollout/groups_skipped_failed"] == 1
        source.close()
        runner.close()


@pytest.mark.parametrize("rejects_all", [False, True])
def test_prompts_that_the_workflow_rejects_are_no_failures_unless_a_whole_step_is(rejects_all: bool) -> None:
    replica, sampling, nothing = LengthReplica("replica", lambda n: 8), SamplingParams(8), cast(Any, None)

    async def rejects(row: Row, session: Session) -> float | None:
        await session.draw_ids((2, int(row["uid"][1:]) + 3))
        return None if rejects_all or row["uid"] in ("p0", "p2") else 1.0

    def collate(results: Sequence[EpisodeResult], rows: DataProto) -> DataProto:
        rows = DataProto(rows.batch, rows.non_tensor_batch, meta_of_all_calls(rows.meta_info))
        return collate_episodes(results, rows, pad_token_id=0, prompt_length=8, response_length=8)

    with fleet_over([replica]) as fleet:
        runner = EpisodeRunner(SessionSettings(fleet.sample, nothing, sampling, 8, 8), Workflow(rejects), tool_pool())
        parts = {"runner": runner, "sampling": sampling, "keep": lambda *_: None, "collate": collate}
        rollout = cast(EpisodeRollout, SimpleNamespace(**parts, cfg=load_config([])))
        window = StalenessWindow(groups_per_step=1, max_staleness=1)
        one_fails = TrainerConfig(max_failed_in_a_row=1, max_failed_share=0.0)
        groups = prompt_groups(window, max_tokens=8, failures=one_fails, prompts=Conversations())
        source = AsyncSource(OpenEpisodes(groups, fleet, rollout), deadline_s=scaled_s(20.0))
        source.published(0)
        if rejects_all:
            with pytest.raises(RolloutError, match="the last error: no episode has an answer: rejected"):
                source.next()
        else:
            assert source.next().non_tensor_batch["uid"].tolist() == ["p1"]
            source.published(1)
            batch = source.next()
            assert batch.non_tensor_batch["uid"].tolist() == ["p3"]
            assert batch.meta_info["source_metrics"]["rollout/groups_skipped_unanswered"] == 2
        source.close()
        runner.close()


def test_more_failed_episodes_of_a_step_than_allowed_end_the_run() -> None:
    runs, sampling, nothing = Counter[str](), SamplingParams(8), cast(Any, None)

    async def mostly_fails(row: Row, session: Session) -> float:
        runs[str(row["uid"])] += 1
        if runs[str(row["uid"])] > 1:
            raise ValueError("the tool is gone")
        await session.draw_ids((2, 3))
        return 1.0

    with fleet_over([LengthReplica("replica", lambda n: 8)]) as fleet:
        runner = EpisodeRunner(
            SessionSettings(fleet.sample, nothing, sampling, 8, 8), Workflow(mostly_fails), tool_pool()
        )
        collate = partial(collate_episodes, pad_token_id=0, prompt_length=8, response_length=8)
        parts = {"runner": runner, "sampling": sampling, "keep": lambda *_: None, "collate": collate}
        rollout = cast(EpisodeRollout, SimpleNamespace(**parts, cfg=load_config([])))
        window = StalenessWindow(groups_per_step=2, max_staleness=1)
        groups = prompt_groups(window, max_tokens=8, num_answers=4, prompts=Conversations())
        source = AsyncSource(OpenEpisodes(groups, fleet, rollout), deadline_s=scaled_s(20.0))
        source.published(0)
        with pytest.raises(RolloutError, match=r"(6 of 8|9 of 12) episodes failed .*share=0\.5.*the tool is gone"):
            source.next()
        source.close()
        runner.close()
