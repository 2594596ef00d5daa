"""Every algorithm that the configuration offers trains under the real trainer, in process: two steps of two epochs.

A setting must change what is learned: the weights move, they differ from those of the run without it, no step is
refused, every metric is a finite number, and the setting's own metric says that it acted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlsys.config.vocabulary import ADV_ESTIMATORS, POLICY_LOSSES
from tests.e2e.conftest import Toy
from tests.e2e.fork_server import ForkServer

pytestmark = pytest.mark.slow

GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(solution_str.encode())
    return {"score": total % 7 / 6, "even": total % 2, "third": total % 3}
"""
ALGORITHM, CORRECTION, ACTOR = "algorithm.", "algorithm.rollout_correction.", "actor_rollout_ref.actor."
LOSS, ROLLOUT = ACTOR + "policy_loss.", "actor_rollout_ref.rollout."
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Trained:
    """What a run left: its metrics a step, and its weights after each."""

    metrics: list[dict[str, Any]]
    weights: list[dict[str, Any]]

    def moved(self) -> bool:
        return not same(*self.weights)


@dataclass(frozen=True)
class Lab:
    """Trains by overrides; what has been trained is kept."""

    server: ForkServer
    toy: Toy
    folder: Path
    done: dict[tuple[str, ...], Trained] = field(default_factory=dict)

    def train(self, *overrides: str) -> Trained:
        if overrides not in self.done:
            out = self.folder / str(len(self.done))
            argv = self.toy.overrides(
                out,
                "trainer.backend=local",
                "trainer.save_freq=1",
                "trainer.total_training_steps=2",
                "data.max_response_length=6",
                f"reward.custom_reward_function.path={self.folder}/grader.py",
                f"{ROLLOUT}top_p=1.0",
                f"{ACTOR}ppo_epochs=2",
                f"{ACTOR}optim.lr=3e-3",
                *overrides,
            )
            ended = self.server.run(argv, self.folder / "log", deadline_s=120)
            assert ended.status == 0, ended.log
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            name = "actor/model_world_size_1_rank_0.safetensors"
            weights = [load_file(str(out / f"global_step_{step}" / name)) for step in (1, 2)]
            self.done[overrides] = Trained(lines, weights)
        return self.done[overrides]


@pytest.fixture(scope="module")
def lab(server: ForkServer, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "grader.py").write_text(GRADER)
    return Lab(server, toy, folder)


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def differs(lab: Lab, overrides: tuple[str, ...], base: tuple[str, ...] = ()) -> Metrics:
    """Train with and without; the metrics of the last step."""
    with_it, without = lab.train(*base, *overrides), lab.train(*base)
    assert with_it.moved()
    assert not same(with_it.weights[1], without.weights[1]), "the setting changes nothing"
    for line in with_it.metrics:
        assert "_non_finite" not in line
        wrong = [name for name, value in line.items() if not math.isfinite(value)]
        assert not wrong
        assert line["actor/skipped_steps"] == 0
        assert line["actor/grad_norm"] > 0
        assert line["reward/errors"] == 0
    return with_it.metrics[-1]


ESTIMATORS: dict[str, tuple[str, ...]] = {
    "gdpo": ("algorithm.gdpo_reward_keys=[even,third]",),
    "gae": ("algorithm.lam=0.9", "algorithm.gamma=0.95"),
}


@pytest.mark.parametrize("name", [name for name in ADV_ESTIMATORS if not name.startswith("grpo_vec")])
def test_advantage_estimators(lab: Lab, name: str) -> None:
    if name == "grpo":
        last, overrides = differs(lab, ("algorithm.norm_adv_by_std_in_grpo=false",)), ()
    elif name == "rloo_vectorized":
        assert same(
            lab.train("algorithm.adv_estimator=rloo").weights[1],
            lab.train(f"{ALGORITHM}adv_estimator={name}").weights[1],
        )
        return
    else:
        overrides = (f"algorithm.adv_estimator={name}", *ESTIMATORS.get(name, ()))
        last = differs(lab, overrides)
    assert last["critic/advantages/max"] > last["critic/advantages/min"]
    assert ("critic/vf_loss" in last) == (name == "gae")
    if name == "gae":
        assert last["critic/grad_norm"] > 0


@pytest.mark.parametrize("setting", ["gamma=0.5", "lam=0.5"])
def test_discounts_of_gae(lab: Lab, setting: str) -> None:
    differs(lab, (f"algorithm.{setting}",), ("algorithm.adv_estimator=gae",))


LOSSES: dict[str, tuple[str, ...]] = {
    "vanilla": (f"{ACTOR}clip_ratio=0.01", f"{ACTOR}clip_ratio_c=1.01"),
    "gspo": (f"{ACTOR}clip_ratio_low=0.0003", f"{ACTOR}clip_ratio_high=0.0004"),
    "clip_cov": (f"{LOSS}clip_cov_ratio=0.2", f"{LOSS}clip_cov_lb=0.01"),
    "kl_cov": (f"{LOSS}kl_cov_ratio=0.2",),
    "bypass_mode": (f"{CORRECTION}bypass_mode=true", f"{CORRECTION}loss_type=reinforce"),
    "sapo": (f"{ACTOR}tau_neg=1.5",),
    "dro": (f"{LOSS}dro_beta=1.0",),
}
CLIPS = ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses(lab: Lab, name: str) -> None:
    mode = () if name == "bypass_mode" else (f"{LOSS}loss_mode={name}",)
    last = differs(lab, (*mode, *LOSSES.get(name, ())))
    assert last["actor/pg_loss"] != 0
    assert last["actor/ppo_kl"] != 0
    if name in CLIPS:
        assert 0 < last["actor/pg_clipfrac"] < 1
    if name == "vanilla":
        assert 0 < last["actor/pg_clipfrac_lower"] < 1


@pytest.mark.parametrize("side", ["low=0.001", "high=0.001"])
def test_each_side_of_the_clip(lab: Lab, side: str) -> None:
    last = differs(lab, (f"{ACTOR}clip_ratio_{side}",), (f"{ACTOR}clip_ratio=0.5",))
    assert 0 < last["actor/pg_clipfrac"] < 1


KINDS = ("kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "mse+", "low_var_kl+")


@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_the_loss(lab: Lab, kind: str) -> None:
    settings = (f"{ACTOR}use_kl_loss=true", f"{ACTOR}kl_loss_coef=0.5", f"{ACTOR}kl_loss_type={kind}")
    last = differs(lab, settings)
    assert last["actor/kl_loss"] != 0
    if kind.endswith("+") and kind != "mse+":
        differs(lab, settings, (*settings[:2], f"{ACTOR}kl_loss_type={kind[:-1]}"))


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("control", ["fixed", "adaptive"])
def test_kl_in_the_reward(lab: Lab, kind: str, control: str) -> None:
    settings = (
        "algorithm.use_kl_in_reward=true",
        f"algorithm.kl_penalty={kind}",
        f"algorithm.kl_ctrl.type={control}",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.kl_ctrl.target_kl=0.001",
        "algorithm.kl_ctrl.horizon=100",
    )
    last = differs(lab, settings)
    assert last["actor/reward_kl_penalty"] != 0
    assert (last["actor/reward_kl_penalty_coeff"] == 0.5) == (control == "fixed")


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_aggregation(lab: Lab, mode: str) -> None:
    unclipped = (f"{ACTOR}grad_clip=0", f"{ACTOR}optim.weight_decay=0", f"{ACTOR}entropy_coeff=0.01")
    last = differs(lab, (f"{ACTOR}loss_agg_mode={mode}",), unclipped)
    assert last["actor/pg_loss"] != 0
    if mode == "seq-mean-token-sum-norm":
        differs(lab, (f"{ACTOR}loss_scale_factor=2.5",), (*unclipped, f"{ACTOR}loss_agg_mode={mode}"))


COARSE = (f"{ROLLOUT}dtype=bfloat16", f"{ROLLOUT}checkpoint_engine.backend=shm")
"""The rollout then samples from other probabilities than the trainer's, as other kernels would."""


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout_is=token", "rollout_is_threshold=1.0005"),
        ("rollout_is=token", "rollout_is_threshold='0.9995_1.0005'"),
        ("rollout_is=sequence", "rollout_is_threshold=1.001"),
        ("rollout_is=token", "rollout_is_batch_normalize=true"),
        *(("rollout_rs=token_k1", "rollout_rs_threshold='0.9995_1.0005'"),),
        *((f"rollout_rs={mode}", "rollout_rs_threshold=1e-7") for mode in ("token_k2", "token_k3")),
        *(
            (f"rollout_rs=seq_{how}_k1", f"rollout_rs_threshold='{bounds}'")
            for how, bounds in (("sum", "0.999_1.001"), ("mean", "0.9998_1.0002"))
        ),
        *(
            (f"rollout_rs=seq_{how}_{k}", f"rollout_rs_threshold={bound}")
            for how, bound in (("sum", "2e-6"), ("mean", "3e-7"), ("max", "3e-7"))
            for k in ("k2", "k3")
        ),
        ("rollout_is=token", "rollout_rs='token_k2,seq_mean_k3'", "rollout_rs_threshold='1e-6,1e-6'"),
        ("bypass_mode=true",),
        ("bypass_mode=true", "loss_type=reinforce", "rollout_is=token", "rollout_is_threshold=1.01"),
        ("bypass_mode=true", "loss_type=reinforce", "rollout_rs=token_k2", "rollout_rs_threshold=1e-4"),
    ],
    ids=" ".join,
)
def test_rollout_correction(lab: Lab, settings: tuple[str, ...]) -> None:
    last = differs(lab, tuple(CORRECTION + setting for setting in settings), COARSE)
    bypass = "bypass_mode=true" in settings
    assert (last["training/rollout_probs_diff_mean"] == 0) == bypass
    if any("rollout_rs=" in setting for setting in settings):
        assert 0 < last["rollout_corr/rollout_rs_masked_fraction"] < 1
    if any("rollout_is=" in setting for setting in settings):
        assert last["rollout_corr/rollout_is_mean"] > 0
        assert bypass or last["rollout_corr/rollout_is_std"] > 0


KNOBS: list[tuple[str, ...]] = [
    ("reward_bias=-0.5", "mask_no_eos_with_zero=true"),
    ("reward_clip=0.3",),
    ("reward_scaling=3.0", "norm_adv_by_std_in_grpo=false"),
    ("reward_norm.mean_level=group", "reward_norm.std_level=batch"),
    ("reward_norm.mean_level=batch", "reward_norm.std_level=group", "reward_norm.std_unbiased=false"),
    ("reward_norm.mean_level=group", "reward_norm.mean_leave1out=true", "norm_adv_by_std_in_grpo=false"),
    ("adv_norm.mean_level=batch", "adv_norm.std_level=batch"),
    ("adv_norm.mean_level=group", "adv_norm.std_level=group", "adv_norm.eps=0.1"),
    ("mask_no_eos_with_zero=true",),
    ("use_pf_ppo=true",),
    ("use_pf_ppo=true", "pf_ppo.reweight_method=max_min"),
    ("use_pf_ppo=true", "pf_ppo.reweight_method=max_random"),
]


@pytest.mark.parametrize("settings", KNOBS, ids=" ".join)
def test_knobs_of_rewards_and_advantages(lab: Lab, settings: tuple[str, ...]) -> None:
    differs(lab, tuple(ALGORITHM + setting for setting in settings))


@pytest.mark.parametrize(
    "setting",
    [
        f"{ACTOR}entropy_coeff=0.1",
        f"{ACTOR}shuffle=true",
        f"{ACTOR}grad_clip=0.05",
        f"{ROLLOUT}top_k=20",
        f"{ROLLOUT}temperature=0.7",
    ],
)
def test_settings_of_actor_and_rollout(lab: Lab, setting: str) -> None:
    last = differs(lab, (setting,))
    assert last["actor/entropy"] > 0


def test_dapo_filters_and_punishes_long_answers(lab: Lab) -> None:
    """The recipe as it is, but for its sizes."""
    sizes = (
        "--config-name",
        "dapo",
        "data.gen_batch_size=8",
        f"{ROLLOUT}n=2",
        f"{ACTOR}optim.lr_warmup_steps=0",
        f"{ACTOR}ppo_max_token_len_per_gpu=256",
        f"{ACTOR}clip_ratio_high=0.0028",
        f"{ACTOR}clip_ratio_low=0.002",
        f"{ALGORITHM}filter_groups.metric=even",
        "reward.reward_kwargs.overlong_buffer_cfg.len=3",
        "reward.reward_kwargs.overlong_buffer_cfg.log=true",
    )
    dumped = (*sizes, f"trainer.rollout_data_dir={lab.folder}/dapo")
    last = differs(lab, dumped, ("algorithm.adv_estimator=grpo",))
    assert any(line["rollout/num_gen_batches"] > 1 for line in lab.train(*dumped).metrics)
    assert 0 < last["actor/pg_clipfrac"] < 1
    for step in (1, 2):
        rows = [json.loads(line) for line in (lab.folder / "dapo" / f"{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 16
        pairs: dict[str, list[float]] = {}
        for row in rows:
            pairs.setdefault(row["input"], []).append(row["even"])
        assert all(0 < sum(values) < len(values) for values in pairs.values())
        punished = [row for row in rows if row["overlong"]]
        assert punished
        assert all(row["overlong_reward"] < 0 for row in punished)
    never = "reward.reward_kwargs.overlong_buffer_cfg.enable=false"
    differs(lab, (never,), sizes)


def test_the_steps_of_a_schedule_are_training_steps(lab: Lab) -> None:
    """Each has all its epochs and mini-batches, here four updates, of which the last is reported."""
    critic = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.optim.lr_scheduler_type=linear")
    run = lab.train(f"{ACTOR}optim.lr_warmup_steps=4", "critic.optim.lr_decay_steps=4", *critic).metrics
    assert [line["actor/lr"] for line in run] == pytest.approx([3e-3 * 3 / 16, 3e-3 * 7 / 16])
    assert [line["critic/lr"] for line in run] == pytest.approx([1e-3 * 13 / 16, 1e-3 * 9 / 16])
