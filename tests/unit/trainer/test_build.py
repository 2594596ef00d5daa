"""Which processes of a run go together on a node, and what is checked of rows before a process starts."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from rlsys.config import load_config, plan_batches
from rlsys.data.start_assets import START_MODEL
from rlsys.telemetry.jsonl import read_jsonl
from rlsys.utils.errors import ConfigError, DataError
from trainer.build import build_trainer, place_roles, prepare
from trainer.episodes import load_agents

TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(("tensor", "nodes"), [(2, [2] * 16), (8, [8] * 4), (16, [8, 8, 8, 8]), (12, [8, 4, 8, 4])])
def test_a_copy_of_an_engine_is_spread_over_nodes_only_if_it_is_larger_than_one(tensor: int, nodes: list[int]) -> None:
    config = load_config(
        [
            "actor_rollout_ref.rollout.name=vllm",
            f"{TENSOR}={tensor}",
            "trainer.n_gpus_per_node=8",
            f"trainer.rollout_workers={sum(nodes)}",
        ]
    )
    _, pools = place_roles(config, plan_batches(config), node_size=8)
    assert pools == {"train": [8], "rollout": nodes}


def test_the_threads_of_a_reproducible_run_do_not_depend_on_its_replicas(tmp_path: Path) -> None:
    """Kernels on the CPU give other bits on another number of threads."""
    on_ray = ["--config-name=quickstart", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}"]
    on_ray += ["trainer.max_staleness=2"]
    replicas = [f"trainer.rollout_workers={number}" for number in (1, 3)]
    ahead = [prepare(load_config([*on_ray, number])).num_ranks for number in replicas]
    repeated = [prepare(load_config([*on_ray, number, "trainer.reproducible=true"])).num_ranks for number in replicas]
    assert (ahead, repeated) == ([2, 4], [2, 2])
    on_ray += ["rollout.name=sglang", "rollout.tensor_model_parallel_size=2", "rollout.full_determinism=true"]
    two_each = [f"trainer.rollout_workers={number}" for number in (2, 6)]
    repeated = [prepare(load_config([*on_ray, number, "trainer.reproducible=true"])).num_ranks for number in two_each]
    assert repeated == [3, 3], "as many as beside one replica, of two processes"


def test_a_reproducible_run_without_processes_that_only_generate_counts_all_that_train(tmp_path: Path) -> None:
    on_ray = ["--config-name=quickstart", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}"]
    on_ray += ["trainer.n_gpus_per_node=4"]
    runs = [prepare(load_config([*on_ray, f"trainer.reproducible={given}"])) for given in ("false", "true")]
    assert [run.num_ranks for run in runs] == [4, 4]


def write_rows(path: Path, *rows: dict[str, str]) -> list[str]:
    """Settings of a run on rows without `data_source`, four of each."""
    row = {"prompt": "1+1=", "ground_truth": "2"}
    path.write_text("".join(json.dumps({**row, **more}) + "\n" for more in rows for _ in range(4)))
    sizes = [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
    ]
    here = ["trainer.backend=local", "trainer.device=cpu", f"trainer.default_local_dir={path.parent}/out"]
    return ["--config-name=quickstart", f"data.train_files={path}", *sizes, *here]


def test_a_row_that_no_teacher_has_a_key_for_is_refused_before_the_start(tmp_path: Path) -> None:
    teachers = [f"+distillation.teacher_models.{name}.key={name}" for name in ("sums", "chess")]
    teachers += [f"+distillation.teacher_models.{name}.model_path={START_MODEL}" for name in ("sums", "chess")]
    teachers += ["distillation.enabled=true", "distillation.teacher_key=domain", "data.reward_fn_key=task"]
    same = {"task": "rlsys/arithmetic"}
    taught = write_rows(tmp_path / "taught.jsonl", {**same, "domain": "sums"}, {**same, "domain": "chess"})
    assert len(prepare(load_config([*taught, *teachers])).train_rows) == 8
    other = write_rows(tmp_path / "other.jsonl", {**same, "domain": "sums"}, {**same, "domain": "go"})
    with pytest.raises(DataError, match="teacher_key=domain: no teacher has the key 'go', only sums, chess"):
        prepare(load_config([*other, *teachers]))


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("algorithm.adv_estimator=gropo", "unknown advantage estimator 'gropo': did you mean 'grpo'"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=none", "unknown policy loss 'none': known: bypass_mode, "),
    ],
)
def test_a_name_that_external_lib_does_not_register_is_refused_before_the_start(
    setting: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("")
    argv = write_rows(tmp_path / "rows.jsonl", {"data_source": "rlsys/arithmetic"})
    library = f"actor_rollout_ref.model.external_lib={tmp_path}/mine.py"
    with pytest.raises(ConfigError, match=f"external_lib: {what}"):
        prepare(load_config([*argv, library, setting]))


def test_a_run_grades_by_the_column_that_reward_fn_key_names(tmp_path: Path) -> None:
    argv = write_rows(tmp_path / "rows.jsonl", {"task": "rlsys/arithmetic"})
    trainer = build_trainer(load_config([*argv, "data.reward_fn_key=task", "trainer.total_training_steps=1"]))
    trainer.init_workers()
    trainer.push_weights()
    assert trainer.next_batch().non_tensor_batch["reward_status"].tolist() == ["ok"] * 8
    trainer.close()


def test_steps_by_hand_are_reported_with_the_next_one_or_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = write_rows(tmp_path / "rows.jsonl", {"data_source": "rlsys/arithmetic"})
    trainer = build_trainer(load_config([*argv, "trainer.total_training_steps=4"]))
    with closing(trainer):
        trainer.init_workers()
        trainer.resume()
        trainer.push_weights()
        for step in (1, 2):
            trainer.step(trainer.next_batch())
            assert [record["step"] for record in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [*range(1, step)]
        trainer.finish_step()
        trainer.step(trainer.next_batch())
    records = list(read_jsonl(tmp_path / "out" / "metrics.jsonl"))
    assert [record["step"] for record in records if "critic/score/mean" in record] == [1, 2, 3]
    assert " 3/4 " in capsys.readouterr().out.splitlines()[-1]


def test_an_agent_of_ones_own_answers_rows_that_name_none_where_tools_are_on_too(tmp_path: Path) -> None:
    loops, rollout = tmp_path / "loops.yaml", "actor_rollout_ref.rollout"
    loops.write_text("[{name: own, _target_: MultiTurnWorkflow}]")
    tools = ["--config-name=quickstart", f"{rollout}.multi_turn.enable=true"]
    own = [f"{rollout}.agent.agent_loop_config_path={loops}", f"{rollout}.agent.default_agent_loop=own"]
    chosen = [load_agents(load_config([*tools, *more])) for more in (own, own[:1])]
    names = [
        next(name for name, one in agents.by_name.items() if one is agents.workflow) for agents in chosen if agents
    ]
    assert names == ["own", "tool_agent"]
