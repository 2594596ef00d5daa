"""Reward managers: decoding, placing, the overlong penalty, extra columns, managers from files."""

import textwrap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.masked import at_last_token
from rlsys.config import load_config
from rlsys.config.schema.algorithm import (
    GradingConfig,
    ModuleConfig,
    OverlongConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
)
from rlsys.config.schema.data import PromptsConfig
from rlsys.config.schema.jobs import EvalConfig
from rlsys.config.schema.trainer import EvalRunConfig, GradingDeadlinesConfig
from rlsys.protocol import DataProto, object_array
from rlsys.rewards.manager import RewardManager, build_reward_manager, register
from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool, RewardResult, failed
from rlsys.utils.errors import ConfigError, DeadlineError, RewardError
from tests.timing import scaled_s

EOS, PAD = 11, 10


class Digits:
    """Tokens 0-9 are digits, EOS and PAD are special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(str(t) if t < EOS - 1 else "" if skip_special_tokens else "?" for t in token_ids)


DIGITS: Any = Digits()


def batch(responses: list[list[int]], truths: list[object], **columns: list[object]) -> DataProto:
    num_tokens = 6
    rows = [r + [PAD] * (num_tokens - len(r)) for r in responses]
    mask = [[0, 1] + [1] * len(r) + [0] * (num_tokens - len(r)) for r in responses]
    non_tensors = {
        "data_source": object_array(["rlsys/arithmetic"] * len(rows)),
        "reward_model": object_array([{"style": "rule", "ground_truth": t} for t in truths]),
        "extra_info": object_array([{"index": i} for i in range(len(rows))]),
        **{name: object_array(values) for name, values in columns.items()},
    }
    tensors = {"prompts": torch.ones(len(rows), 2, dtype=torch.int64), "responses": torch.tensor(rows)}
    return DataProto.from_dict({**tensors, "attention_mask": torch.tensor(mask)}, non_tensors)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(num_workers=1) as pool:
        yield pool


def manager(
    pool: RewardPool,
    name: str = "naive",
    *,
    overlong: OverlongConfig | None = None,
    max_failed: float = 0.5,
    reward_fn_key: str = "data_source",
) -> RewardManager:
    """A registered manager for responses of up to 6 tokens."""
    reward = GradingConfig(
        max_failed=max_failed,
        reward_manager=RewardManagerConfig(name=name),
        reward_kwargs=RewardKwargsConfig(overlong_buffer_cfg=overlong or OverlongConfig()),
    )
    data = PromptsConfig(max_response_length=6, reward_fn_key=reward_fn_key)
    return build_reward_manager(EvalConfig(data=data, reward=reward), DIGITS, pool)


def manager_of_file(pool: RewardPool, path: str, name: str, *, reward_s: float = 1800.0) -> RewardManager:
    """A manager class of a file, with `reward_s` seconds for a batch."""
    module = ModuleConfig(path=path, name=name)
    reward = GradingConfig(reward_manager=RewardManagerConfig(source="importlib", module=module))
    run = EvalRunConfig(deadlines=GradingDeadlinesConfig(reward_s=reward_s))
    cfg = EvalConfig(data=PromptsConfig(max_response_length=6), reward=reward, trainer=run)
    return build_reward_manager(cfg, DIGITS, pool)


ROWS = batch([[4, 2, EOS], [4, 1, EOS], [4, 2, 4, 2, 4, 2], [EOS], []], ["42", "42", "424242", "0", "1"])


def test_scores_lie_on_the_last_token(pool: RewardPool) -> None:
    graded = manager(pool).grade(ROWS)
    expected = torch.zeros(5, 6)
    expected[0, 2] = expected[2, 5] = 1.0
    assert torch.equal(graded.rm_scores, expected)
    assert graded.rm_scores.dtype == torch.float32
    assert graded.extra["acc"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert graded.extra["pred"].tolist() == ["42", "41", "424242", "", ""]
    assert graded.extra["reward_status"].tolist() == ["ok"] * 5
    assert graded.metrics["reward/zeros"] == 3


def test_the_cause_of_a_missing_score_is_a_warning(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    rows = batch([[1], [2]], ["1", "2"])
    rows.non_tensor_batch["data_source"][1] = "my/data"
    graded = manager(pool).grade(rows)
    assert graded.metrics["reward/errors"] == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "rlsys.rewards.manager"]
    assert warning.startswith("1 of 2 answers could not be graded (0 timed out). First: ConfigError: no built-in")
    assert "'my/data'" in warning


def test_a_missing_score_adds_no_accuracy_where_the_grader_gives_none(tmp_path: Path) -> None:
    """Validation would take it, of the failed answers alone, for its headline."""
    path = tmp_path / "r.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1 / (int(solution_str) - 2), 'judge': 1}"
    )
    with RewardPool(Grader(path=str(path)), num_workers=1) as pool:
        extra = manager(pool).grade(batch([[3], [2], [3]], ["1", "2", "3"])).extra
    assert {name: list(column) for name, column in extra.items()} == {
        "judge": [1.0, 0.0, 1.0],
        "reward_status": ["ok", "error", "ok"],
    }


def test_more_failures_than_allowed_end_the_run_with_the_first_cause(pool: RewardPool) -> None:
    rows = batch([[1], [2], [3]], ["1", "2", "3"])
    rows.non_tensor_batch["data_source"][1:] = "my/data"
    with pytest.raises(RewardError, match=r"2 of 3 answers .*'my/data'(.|\n)*reward.max_failed=0.5"):
        manager(pool).grade(rows)
    assert manager(pool, max_failed=0.7).grade(rows).metrics["reward/errors"] == 2


def test_failures_of_prompts_graded_as_they_end_count_among_those_of_a_step(pool: RewardPool) -> None:
    sizes = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.rollout_workers=1")
    cfg = load_config(["trainer.max_staleness=1", "actor_rollout_ref.rollout.n=2", *sizes])
    rows, failing = (batch([[1], [2]], ["1", "2"]) for _ in range(2))
    failing.non_tensor_batch["data_source"][:] = "my/data"
    graders = build_reward_manager(cfg, DIGITS, pool)
    for one in (failing, rows, rows, failing, failing):
        graders.grade(one)
    with pytest.raises(RewardError, match="4 of 4 answers"):
        graders.grade(failing)


def test_dapo_takes_from_long_responses(pool: RewardPool) -> None:
    overlong = OverlongConfig(enable=True, len=4, penalty_factor=2.0, log=True)
    graded = manager(pool, "dapo", overlong=overlong).grade(ROWS)
    assert graded.rm_scores.sum(-1).tolist() == [0.5, -0.5, -1.0, 0.0, 0.0]
    assert graded.extra["overlong"].tolist() == [True, True, True, False, False]
    assert graded.extra["overlong_reward"].tolist() == [-0.5, -0.5, -2.0, 0.0, 0.0]
    assert graded.extra["acc"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 7)), min_size=1, max_size=9))
def test_placing_keeps_the_sum_and_touches_one_token(rows: list[tuple[float, int]]) -> None:
    rewards, lengths = torch.tensor([r for r, _ in rows]), torch.tensor([n for _, n in rows])
    placed = at_last_token(rewards, torch.arange(7) < lengths[:, None])
    assert torch.equal(placed.sum(-1), torch.where(lengths > 0, rewards, 0.0))
    assert all(set(row.nonzero().flatten().tolist()) <= {n - 1} for row, (_, n) in zip(placed, rows))


def test_graders_with_different_values_share_columns(tmp_path: Path) -> None:
    source = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "1": return {"score": 1, "acc": True, "part": 2, "turns": extra_info["num_turns"]}
        if solution_str == "2": return {"score": 0, "part": 3, "note": [1]}
        if solution_str == "3": raise ValueError("bad")
        return {"score": extra_info["index"], "acc": 3.0, "answer": 10**400}
    """
    (tmp_path / "r.py").write_text(textwrap.dedent(source))
    data = batch([[1, EOS], [2, EOS], [3, EOS], [4, EOS]], [0] * 4, __num_turns__=[2, 3, 4, 5])
    with RewardPool(Grader(path=str(tmp_path / "r.py")), num_workers=1) as pool:
        graded = manager(pool).grade(data)
    assert graded.rm_scores[:, 1].tolist() == [1.0, 0.0, 0.0, 3.0]
    assert graded.extra["part"].tolist() == [2, 3, 0.0, None]
    assert graded.extra["note"].tolist() == [None, [1], None, None]
    assert graded.extra["turns"][0] == 2
    assert graded.extra["answer"][3] == "1" + "0" * 400
    assert graded.extra["reward_status"].tolist() == ["ok", "ok", "error", "ok"]
    assert graded.metrics["reward/errors"] == 1


def test_rows_without_the_routing_column_are_a_config_error(pool: RewardPool) -> None:
    with pytest.raises(ConfigError, match="reward_fn_key=source"):
        manager(pool, reward_fn_key="source").grade(ROWS)


def test_unknown_and_doubled_managers_are_refused(pool: RewardPool) -> None:
    with pytest.raises(ConfigError, match="dapo, naive"):
        manager(pool, "prime")
    with pytest.raises(ValueError, match="naive"):
        register("naive")(lambda **_: None)  # pyrefly: ignore[bad-argument-type]


MANAGERS = """
import threading

import torch

class Legacy:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", max_resp_len=None):
        self.tokenizer, self.compute_score = tokenizer, compute_score

    def __call__(self, data, return_dict=False):
        reward, acc = torch.zeros_like(data.batch["responses"], dtype=torch.float32), []
        for i in range(len(data)):
            item = data[i]
            text = self.tokenizer.decode(item.batch["responses"].tolist())
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            score = self.compute_score(data_source="rlsys/arithmetic", solution_str=text, ground_truth=truth)
            reward[i, 0] = score["score"]
            acc.append(score["acc"])
        return {"reward_tensor": reward, "reward_extra_info": {"acc": acc}} if return_dict else reward

class Single:
    def __init__(self, config, tokenizer, compute_score):
        self.scale = config.data.max_response_length

    async def run_single(self, data):
        return {"reward_score": self.scale * len(data), "reward_extra_info": {"acc": 1.0}}

class Nothing:
    pass

class NotANumber:
    async def run_single(self, data):
        return {"reward_score": float("nan")}

class TooLarge:
    def __call__(self, data, return_dict=False):
        return {"reward_tensor": torch.full(data.batch["responses"].shape, 1e39, dtype=torch.float64)}

class Broken:
    def __call__(self, data, return_dict=False):
        return {"reward_tensor": data.batch["responses"].float(), "reward_extra_info": {"acc": data.batch["accuracy"]}}

class BrokenForEachRow:
    async def run_single(self, data):
        return {"reward": 1.0}

class BrokenOfItsOwn:
    def grade(self, data):
        raise SystemExit("no licence")

class OneForEachRow:
    def __call__(self, data, return_dict=False):
        return {"reward_tensor": torch.ones(len(data))}

class Hangs:
    def __call__(self, data, return_dict=False):
        threading.Event().wait()
"""


def test_managers_written_for_verl_work_from_a_file(pool: RewardPool, tmp_path: Path) -> None:
    path = str(tmp_path / "managers.py")
    Path(path).write_text(MANAGERS)
    legacy = manager_of_file(pool, path, "Legacy").grade(ROWS)
    assert legacy.rm_scores[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert legacy.extra["acc"].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert legacy.metrics["reward/zeros"] == 3
    single = manager_of_file(pool, path, "Single").grade(ROWS)
    assert single.rm_scores.sum(-1).tolist() == [6.0, 6.0, 6.0, 6.0, 0.0]
    assert np.array_equal(single.extra["acc"], np.ones(5))
    with pytest.raises(ConfigError, match="none of grade"):
        manager_of_file(pool, path, "Nothing")
    with pytest.raises(ConfigError, match="does not define it"):
        manager_of_file(pool, path, "Missing")
    with pytest.raises(ConfigError, match="not a local file"):
        manager_of_file(pool, "/no/file.py", "X")


def test_what_a_manager_written_for_verl_could_not_grade_is_counted(tmp_path: Path) -> None:
    (tmp_path / "managers.py").write_text(MANAGERS)
    (tmp_path / "r.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): 1 / 0")
    with RewardPool(Grader(path=str(tmp_path / "r.py")), num_workers=1) as pool:
        legacy = manager_of_file(pool, str(tmp_path / "managers.py"), "Legacy")
        with pytest.raises(RewardError, match=r"5 of 5 answers .*ZeroDivisionError"):
            legacy.grade(ROWS)


@pytest.mark.parametrize("name", ["NotANumber", "TooLarge", "OneForEachRow"])
def test_rewards_of_a_verl_manager_that_are_not_finite_are_refused(pool: RewardPool, tmp_path: Path, name: str) -> None:
    (tmp_path / "managers.py").write_text(MANAGERS)
    with pytest.raises(RewardError, match=rf"reward.reward_manager {name} of \S+managers.py: must give finite numbers"):
        manager_of_file(pool, str(tmp_path / "managers.py"), name).grade(ROWS)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Broken", "KeyError: .*accuracy"),
        ("BrokenForEachRow", "KeyError: 'reward_score'"),
        ("BrokenOfItsOwn", "SystemExit: no licence"),
    ],
)
def test_what_a_manager_raises_names_its_class_and_file(
    pool: RewardPool, tmp_path: Path, name: str, cause: str
) -> None:
    (tmp_path / "managers.py").write_text(MANAGERS)
    with pytest.raises(RewardError, match=rf"^reward.reward_manager {name} of \S+managers.py: {cause}") as raised:
        manager_of_file(pool, str(tmp_path / "managers.py"), name).grade(ROWS)
    assert isinstance(raised.value.__cause__, KeyError | SystemExit)


def test_a_verl_manager_that_hangs_ends_at_the_deadline(pool: RewardPool, tmp_path: Path) -> None:
    (tmp_path / "managers.py").write_text(MANAGERS)
    hangs = manager_of_file(pool, str(tmp_path / "managers.py"), "Hangs", reward_s=0.1)
    with pytest.raises(DeadlineError, match=r"Hangs of \S+ did not answer within 0.1 s .*trainer\.deadlines\.reward_s"):
        hangs.grade(ROWS)


class HeldPool(RewardPool):
    """Cannot grade 1; grades 2 once 3 was graded, or after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.release = threading.Event(), threading.Event()

    def score(self, items: Sequence[RewardItem], *, deadline_s: float | None = None) -> list[RewardResult]:
        if items[0].solution == "2":
            self.is_held.set()
            self.release.wait(0.3)
        elif items[0].solution == "3":
            self.release.set()
        ok = RewardResult(1.0, {"acc": 1.0}, "ok", 0.0)
        return [failed("error", 0.0, "broken") if item.solution == "1" else ok for item in items]


def test_validation_does_not_take_the_failures_of_training_from_a_verl_manager(tmp_path: Path) -> None:
    (tmp_path / "managers.py").write_text(MANAGERS)
    pool = HeldPool()
    legacy = manager_of_file(pool, str(tmp_path / "managers.py"), "Legacy")
    with ThreadPoolExecutor() as threads:
        training = threads.submit(legacy.grade, batch([[1], [1], [2]], ["1", "1", "2"]))
        assert pool.is_held.wait(scaled_s(10))
        assert legacy.grade(batch([[3]], ["3"])).metrics["reward/errors"] == 0
        with pytest.raises(RewardError, match="2 of 3 answers could not be graded"):
            training.result(scaled_s(10))
