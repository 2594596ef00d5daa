"""From a configuration to a running trainer: start assets, tokenizer, rows, places and workers."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from rlsys.config import PPOConfig, plan_batches
from rlsys.fleet.external.settings import settings_of
from rlsys.telemetry.log import setup_logging
from rlsys.telemetry.trackers import check_loggers
from trainer.advantages import correction_of, loss_mode_of
from trainer.backend import Place, find_place, load_tokenizer
from trainer.groups import Role
from trainer.job import exit_on_sigterm, make_root, told
from trainer.ppo import RayPPOTrainer
from trainer.prompts import prompt_datasets, steps_of
from trainer.rollouts import gives_up_weights
from trainer.start_model import with_start_assets
from workers.actor import ActorWorker
from workers.build import EngineRun, check_megatron_model
from workers.critic import CriticWorker
from workers.megatron import MegatronPPOWorker
from workers.reference import ReferenceWorker
from workers.reward_model import RewardModelWorker
from workers.rollout import ROLLOUT_WORKERS


def run_ppo(config: PPOConfig) -> int:
    """Train what is left to train and tell where everything is; exit code 0, or 1 with one clear error."""
    setup_logging()
    start = time.perf_counter()
    with told(sys.stderr) as outcome:
        check_loggers(config.trainer.logger)
        make_root(Path(config.trainer.default_local_dir))
        config = with_start_assets(config)
        with place_of(config) as place, exit_on_sigterm():
            trainer = build_trainer(config, place)
            nothing_left = trainer.nothing_left()
            try:
                if not nothing_left:
                    trainer.fit()
            finally:
                trainer.close()
        seconds = None if nothing_left else time.perf_counter() - start
        print(trainer.reporter.farewell(seconds=seconds))
    return outcome.exit_code


def place_of(config: PPOConfig) -> Place:
    """Where the workers of a PPO run live."""
    run = config.trainer
    return find_place(run.backend, run.device, config.ray_kwargs, ranks=plan_batches(config).pools.total_ranks)


def build_trainer(config: PPOConfig, place: Place | None = None) -> RayPPOTrainer:
    """The trainer of a configuration; its workers start with `init_workers()` or `fit()`.

    Without a `place` one is found: the running Ray cluster, a new one, or this process for trainer.backend=local.
    """
    config = with_start_assets(config)
    if plan_batches(config).pools.external:
        run = config.trainer
        settings_of(config.actor_rollout_ref.rollout, run.deadlines, max_staleness=run.max_staleness)
    place = place or place_of(config)
    model = config.actor_rollout_ref.model
    if model.external_lib:
        importlib.import_module(model.external_lib)
    tokenizer = load_tokenizer(model, config.actor_rollout_ref.rollout.padding)
    train, val = prompt_datasets(config, tokenizer)
    mapping, pools = place_roles(config)
    run = engine_run(config, place, num_steps=steps_of(config, train))
    check_megatron_models(config)
    actor = MegatronPPOWorker if config.actor_rollout_ref.actor.strategy == "megatron" else ActorWorker
    rollout = config.actor_rollout_ref.rollout
    worker_args: dict[Role, tuple[Any, ...]] = {
        Role.Actor: (actor, config.actor_rollout_ref, run),
        Role.Rollout: (ROLLOUT_WORKERS.get(rollout.name), model, rollout, run),
        Role.Critic: (CriticWorker, config.critic, run),
        Role.RefPolicy: (ReferenceWorker, config.actor_rollout_ref, run),
        Role.RewardModel: (RewardModelWorker, config.reward.reward_model, run),
    }
    return RayPPOTrainer(
        config,
        tokenizer,
        {role: place.make_class(*worker_args[role]) for role in mapping},
        place.make_manager(pools, mapping),
        place.group_cls,
        train_dataset=train,
        val_dataset=val,
        device_name=place.device,
    )


def check_megatron_models(config: PPOConfig) -> None:
    """ConfigError, before any worker starts, for a model that Megatron does not know or cannot cut as asked."""
    policy, critic = config.actor_rollout_ref, config.critic
    plan = plan_batches(config)
    if policy.actor.strategy == "megatron":
        check_megatron_model("actor_rollout_ref.actor.megatron", policy.model, policy.actor.megatron)
        if plan.use_reference:
            check_megatron_model("actor_rollout_ref.ref.megatron", policy.model, policy.ref.megatron)
    if plan.critic is not None and critic.strategy == "megatron":
        check_megatron_model("critic.megatron", critic.model, critic.megatron)


def place_roles(config: PPOConfig) -> tuple[dict[Role, str], dict[str, list[int]]]:
    """Each role's pool, and each pool's processes by node; roles the algorithm does not need are left out."""
    plan = plan_batches(config)
    pools = {"train": [plan.pools.train_per_node] * plan.pools.nodes}
    mapping = {Role.Actor: "train"}
    if plan.pools.colocated:
        mapping[Role.Rollout] = "train"
    elif not plan.pools.external:
        mapping[Role.Rollout], pools["rollout"] = "rollout", [plan.pools.rollout_ranks]
    if plan.critic is not None:
        mapping[Role.Critic] = "train"
    lora = config.actor_rollout_ref.model
    if plan.use_reference and not (lora.lora_rank or lora.lora_adapter_path):
        mapping[Role.RefPolicy] = "train"
    if config.reward.reward_model.enable:
        mapping[Role.RewardModel] = "reward_model" if plan.pools.reward_model_ranks else "train"
        if plan.pools.reward_model_ranks:
            grader = config.reward.reward_model
            pools["reward_model"] = [grader.n_gpus_per_node] * grader.nnodes
    return mapping, pools


def engine_run(config: PPOConfig, place: Place, *, num_steps: int) -> EngineRun:
    """What the roles need to know of the run."""
    plan = plan_batches(config)
    actor = config.actor_rollout_ref.actor
    warm = config.trainer.critic_warmup
    return EngineRun(
        device=place.device,
        nccl_timeout_s=config.actor_rollout_ref.nccl_timeout,
        temperature=config.actor_rollout_ref.rollout.temperature,
        max_response_tokens=config.data.max_response_length,
        samples=plan.samples,
        num_answers=plan.answers,
        actor_steps=max(1, (num_steps - warm) * plan.actor.optimizer_steps),
        critic_steps=num_steps * plan.critic.optimizer_steps if plan.critic else -1,
        with_entropy=actor.calculate_entropy,
        with_sum_pi_squared=config.algorithm.adv_estimator.endswith("optimal_token_baseline"),
        loss_mode=loss_mode_of(config),
        correction=correction_of(config),
        num_threads=place.threads,
        keep_asleep=not gives_up_weights(config),
    )
