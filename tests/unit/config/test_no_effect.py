"""Settings that have no effect beside other ones are refused or noted before the start."""

from pathlib import Path

import pytest

from rlsys.config import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.config.arguments import parse_arguments
from rlsys.config.load import load
from rlsys.config.schema.base import Section
from rlsys.data.start_assets import START_MODEL, TRAIN_ROWS
from rlsys.utils.errors import ConfigError

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REF, CORRECTION, GRADER = "actor_rollout_ref.ref", "algorithm.rollout_correction", "reward.reward_model"
LOSS, EPISODES = f"{A}.policy_loss.loss_mode", f"{R}.workflow=MultiTurnWorkflow"
GROUPS = ("--config-name=quickstart", "algorithm.adv_estimator=grpo", f"{R}.n=2")
GDPO = "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[a]"
TEACHER = f"distillation.enabled=true distillation.teacher_models.t.model_path={START_MODEL}"
SERVERS = f"{R}.name=sglang_remote {R}.servers.urls=[http://127.0.0.1:1]"


def notes(*settings: str, schema: type[Section] = PPOConfig) -> str:
    argv = [word for text in settings for word in text.split()]
    return "\n".join(load(parse_arguments(argv), schema).notes)


@pytest.mark.parametrize(
    ("setting", "without", "beside"),
    [
        (f"{A}.clip_ratio=0.1", f"{LOSS}=gpg", f"{LOSS}=gspo"),
        (f"{A}.clip_ratio_high=0.28", f"{LOSS}=kl_cov", f"{LOSS}=clip_cov"),
        (f"{A}.clip_ratio_low=0.1", f"{CORRECTION}.bypass_mode=true {CORRECTION}.loss_type=reinforce", ""),
        (f"{A}.clip_ratio_c=4.0", f"{LOSS}=gspo", f"{LOSS}=dppo_tv"),
        (f"{CORRECTION}.rollout_is_threshold=3.0", "", f"{CORRECTION}.rollout_is=token"),
        (f"{CORRECTION}.rollout_is_batch_normalize=true", "", f"{CORRECTION}.rollout_is=token"),
        ("algorithm.reward_scaling=2.0", GDPO, ""),
        ("algorithm.reward_norm.mean_level=batch", GDPO, ""),
        ("algorithm.mask_no_eos_with_zero=true", GDPO, ""),
        ("algorithm.adv_norm.eps=0.1", "algorithm.adv_norm.mean_level=batch", "algorithm.adv_norm.std_level=batch"),
        ("algorithm.pf_ppo.weight_pow=3.0", "algorithm.use_pf_ppo=true algorithm.pf_ppo.reweight_method=max_min", ""),
        (f"{A}.ppo_micro_batch_size_per_gpu=2", f"{A}.use_dynamic_bsz=true", f"{A}.use_dynamic_bsz=false"),
        (f"{A}.ppo_max_token_len_per_gpu=5000", f"{A}.use_dynamic_bsz=false", f"{A}.use_dynamic_bsz=true"),
        (f"{R}.log_prob_micro_batch_size_per_gpu=2", "", f"{R}.log_prob_use_dynamic_bsz=false"),
        (f"{A}.optim.min_lr_ratio=0.1", "", f"{A}.optim.lr_scheduler_type=cosine"),
        (f"{A}.optim.lr_decay_steps=9", "", f"{A}.optim.lr_scheduler_type=linear"),
        (f"{A}.optim.lr_warmup_steps_ratio=0.1", f"{A}.optim.lr_warmup_steps=2", ""),
        (f"{REF}.fsdp_config.param_offload=true", f"{M}.lora_rank=4 {A}.use_kl_loss=true", f"{A}.use_kl_loss=true"),
        (f"{REF}.fsdp_config.param_offload=true", f"{M}.lora_rank=4", f"{M}.lora_rank=4 {TEACHER}"),
        (f"{R}.top_p=0.9", f"{R}.do_sample=false {R}.n=1", f"{R}.do_sample=true"),
        (f"{R}.servers.timeout_s=3", "", SERVERS),
        (f"{R}.servers.model=own", SERVERS, SERVERS.replace("sglang", "vllm")),
        (f"{R}.servers.weights_dir=shared", f"{SERVERS} {R}.checkpoint_engine.backend=nccl", SERVERS),
        ("distillation.n_gpus_per_node=1", TEACHER, f"{TEACHER} distillation.nnodes=1"),
        ("reward.custom_reward_function.name=mine", "", ""),
        ("reward.reward_manager.module.name=Mine", "", ""),
        ("reward.sandbox_fusion.max_concurrent=4", "", "reward.sandbox_fusion.url=http://127.0.0.1:1/run_code"),
        ("reward.sandbox_fusion.memory_limit_mb=99", "reward.custom_reward_function.path=grade.py", ""),
        ("reward.timeout_s=4", "reward.num_workers=0 trainer.backend=local", "reward.num_workers=1"),
        (f"{GRADER}.use_dynamic_bsz=true", "", f"{GRADER}.enable=true {GRADER}.model_path=org/grader"),
        (f"{GRADER}.rollout.response_length=9", f"{GRADER}.enable=true {GRADER}.model_path=org/grader", ""),
        (f"{GRADER}.n_gpus_per_node=2", f"{GRADER}.enable=true {GRADER}.model_path=org/grader", ""),
        ("trainer.resume_changed=true", "trainer.resume_mode=disable", "trainer.resume_mode=auto"),
        ("data.validation_shuffle=true", "", "data.val_max_samples=8"),
        (
            f"{GRADER}.dtype=float32",
            f"{GRADER}.enable=true {GRADER}.model_path=org/grader {GRADER}.rollout.name=hf "
            "reward.custom_reward_function.path=grade.py",
            f"{GRADER}.enable=true {GRADER}.model_path=org/grader",
        ),
        ("trainer.total_epochs=3", "trainer.total_training_steps=5", "trainer.total_training_steps=null"),
        ("trainer.rollout_data_freq=2", "trainer.rollout_data_dir=null", ""),
        ("ray_kwargs.ray_init.num_cpus=3", "trainer.backend=local", "trainer.backend=ray"),
    ],
)
def test_what_has_no_effect_is_noted(
    setting: str, without: str, beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grade.py").write_text("def compute_score(*args): ...")

    def is_ignored(other: str) -> bool:
        ignored = (line for line in notes(*GROUPS, other, setting).splitlines() if line.startswith("ignored: "))
        return any(setting.partition("=")[0] in line for line in ignored)

    assert is_ignored(without)
    assert not (beside and is_ignored(beside))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (f"{LOSS}=sapo", f"{LOSS} = sapo: all terms of this loss are averaged by seq-mean-token-mean, not by"),
        (f"{LOSS}=gspo {A}.loss_agg_mode=token-mean", f"{LOSS} = gspo: it is averaged by loss_agg_mode=token-mean as"),
        (
            f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=token",
            f"{CORRECTION}.bypass_mode = true: the weights of rollout_is=token are only used by loss_type=reinforce",
        ),
        (
            f"{GDPO} {GRADER}.enable=true {GRADER}.model_path=org/grader",
            "algorithm.adv_estimator = gdpo: it takes its reward keys as the reward function gives them, so the score",
        ),
        (
            f"algorithm.filter_groups.enable=true algorithm.filter_groups.metric=score {GRADER}.enable=true "
            f"{GRADER}.model_path=org/grader",
            "algorithm.filter_groups.enable = true: groups are filtered by the reward function's scores, before",
        ),
        (f"{EPISODES} reward.reward_manager.name=dapo", "reward.reward_manager.name = dapo: episodes are scored by"),
        (f"{EPISODES} {R}.print_outputs=true", f"{R}.print_outputs = true: answers of episodes are not printed"),
        (
            f"{EPISODES} trainer.backend=local trainer.device=cpu trainer.max_staleness=1 trainer.reproducible=true "
            f"{R}.name=hf {R}.agent.episode_timeout_s=9",
            "trainer.reproducible = true: its episodes have no time limit, so agent.episode_timeout_s=9.0 has no",
        ),
        (
            f"{EPISODES} trainer.backend=local trainer.device=cpu trainer.max_staleness=1 {R}.name=hf "
            f"{R}.agent.max_failed_share=1.0",
            "trainer.max_staleness = 1: prompts whose episodes all failed also end the run, by trainer.max_failed",
        ),
        (f"{M}.lora_rank=4 {M}.lora_adapter_path=org/adapter", f"{M}.lora_rank = 4: the adapter of lora_adapter_path"),
        (f"+{M}.override_config.attention_dropout=0", "the rollout reads config.json alone; edit a copy"),
        (
            f"data.val_files={TRAIN_ROWS} {GRADER}.enable=true {GRADER}.model_path=org/grader",
            f"{GRADER}.enable = true: validation answers are graded by the reward function alone",
        ),
        (
            f"{EPISODES} {R}.multi_turn.interaction_config_path=talk.yaml",
            f"{R}.multi_turn.interaction_config_path = talk.yaml: only rows with agent_name=tool_agent use it",
        ),
        (f"{SERVERS} {R}.seed=7", f"{R}.seed = 7: external servers draw by seeds of their own"),
        (f"{SERVERS} {R}.max_num_seqs=7", f"{R}.max_num_seqs = 7: it cannot be changed on external servers"),
        (
            f"{TEACHER} distillation.distillation_loss.use_task_rewards=false {A}.entropy_coeff=0.1",
            "distillation.distillation_loss.use_task_rewards = false: the teacher's loss takes the place of all others",
        ),
    ],
)
def test_what_changes_less_than_it_says_is_noted(settings: str, says: str) -> None:
    assert says in notes(*GROUPS, settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (f"{GDPO} algorithm.use_kl_in_reward=true", "gdpo takes its reward keys as the reward function gives them"),
        (
            f"{CORRECTION}.rollout_rs=token_k3 {CORRECTION}.rollout_rs_threshold=0.5 "
            f"{CORRECTION}.rollout_rs_threshold_lower=0.5",
            f"{CORRECTION}.rollout_rs_threshold_lower = 0.5: token_k3 has an upper bound only",
        ),
        (
            f"algorithm.adv_estimator=remax {GRADER}.enable=true {GRADER}.model_path=org/grader",
            "algorithm.adv_estimator = remax: its baselines, the rewards of greedy answers, lack the score",
        ),
        *(
            (
                f"algorithm.adv_estimator=remax algorithm.{key}={value}",
                f"greedy answers, are without {key.split('.')[0]}",
            )
            for key, value in {
                "reward_scaling": 2.0,
                "reward_bias": -0.5,
                "reward_clip": 1.0,
                "reward_norm.mean_level": "batch",
                "mask_no_eos_with_zero": "true",
            }.items()
        ),
        ("algorithm.adv_unit=turn", "each prompt is answered by one draw, which has no turns"),
        ("data.streaming=true data.train_max_samples=999", "data.train_max_samples = 999: a stream is read to its end"),
        (
            "data.streaming=true data.sampler.class_path=pkg://own data.sampler.class_name=Own",
            "data.sampler.class_path = 'pkg://own': a stream has the order of its files",
        ),
        (f"{EPISODES} {R}.agent.default_agent_loop=tool_agent", "rollout.workflow is the agent of rows without"),
        (f"{EPISODES} {R}.agent.path=own.py:run", "set one of actor_rollout_ref.rollout.workflow, agent.command and"),
        (f"{R}.agent.command=cat {R}.agent.path=own.py:run", "agent.path = 'own.py:run': agent.command answers the"),
        (
            "algorithm.adv_estimator=optimal_token_baseline algorithm.rollout_correction.bypass_mode=true",
            "algorithm.adv_estimator = optimal_token_baseline: it needs sum_pi_squared, which bypass mode does not",
        ),
        (
            "algorithm.filter_groups.enable=true algorithm.filter_groups.metric=seq_final_reward "
            "algorithm.use_kl_in_reward=true",
            "algorithm.filter_groups.metric = seq_final_reward: groups are filtered before the KL penalty",
        ),
    ],
)
def test_what_would_change_results_but_has_no_effect_is_refused(settings: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        notes(*GROUPS, settings)


def test_dpo_from_an_adapter_notes_which_model_it_is_held_to() -> None:
    job = f"data.train_files={TRAIN_ROWS} model.path=org/model"
    assert "the reference" not in notes(f"{job} model.lora_rank=4", schema=DPOConfig)
    noted = notes(f"{job} model.lora_adapter_path=org/adapter", schema=DPOConfig)
    assert "the reference is the model without adapters, not the adapter org/adapter that training starts from" in noted


def test_a_judge_grades_the_baselines_of_remax_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def compute_score(*args, **kwargs):\n    return 0.0\n")
    judge = f"{GRADER}.enable=true {GRADER}.model_path=org/grader {GRADER}.rollout.name=vllm"
    function = "reward.custom_reward_function.path=own.py reward.custom_reward_function.name=compute_score"
    assert "baselines" not in notes(*GROUPS, f"algorithm.adv_estimator=remax {judge} {function}")


@pytest.mark.parametrize("schema", [SFTConfig, RMConfig])
def test_a_supervised_job_notes_sizes_that_it_does_not_use(
    schema: type[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    common = f"model.path={START_MODEL} data.train_files=rows.jsonl data.max_length=64 optim.lr_scheduler_type=cosine"
    rows, tokens = "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"
    fixed = "data.use_dynamic_bsz=false"
    assert f"ignored: {rows} (only used with data.use_dynamic_bsz=false)" in notes(common, f"{rows}=2", schema=schema)
    assert f"ignored: {tokens} (" in notes(common, fixed, f"{tokens}=99", schema=schema)
    assert not notes(common, f"{tokens}=99", schema=schema) + notes(common, fixed, f"{rows}=2", schema=schema)
    steps = "trainer.total_training_steps=2 trainer.total_epochs=3"
    assert "ignored: trainer.total_epochs (total_training_steps is the length" in notes(common, steps, schema=schema)


def test_an_evaluation_notes_a_manager_that_episodes_do_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    common = f"{M}.path={START_MODEL} data.val_files=rows.jsonl data.max_prompt_length=64 data.max_response_length=8"
    manager = "reward.reward_manager.name=dapo"
    assert "episodes are scored by their workflow" in notes(common, manager, EPISODES, schema=EvalConfig)
    assert "episodes" not in notes(common, manager, schema=EvalConfig)
