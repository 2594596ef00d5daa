"""From a configuration to a running trainer: start assets, tokenizer, rows, backend and workers."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.algorithms.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from rlsys.config import PPOConfig, plan_batches
from rlsys.config.engines import worker_class
from rlsys.config.plan import BatchPlan
from rlsys.config.pools import min_nodes, process_pools
from rlsys.config.schema.model import ServedModelConfig
from rlsys.data.dataset import PromptDataset
from rlsys.fleet.external.settings import settings_of
from rlsys.rewards.manager import reward_manager_class
from rlsys.utils.errors import ConfigError, raised_as
from trainer.backend import WorkerBackend, import_external_libs, running_backend, start_backend
from trainer.checkpoint import CheckpointStore
from trainer.episodes import load_agents, without_episodes
from trainer.groups import Role
from trainer.local_files import load_tokenizer, with_local_files, with_start_assets
from trainer.loop import completed
from trainer.ppo import RayPPOTrainer, num_checkpoints
from trainer.prompts import load_processor, num_steps, prompt_datasets
from trainer.rewards import check_data_sources
from trainer.run_folder import run_folder
from trainer.steps import teacher_numbers
from trainer.weight_push import drops_weights_on_sleep
from workers.actor import ActorWorker
from workers.build import EngineRun, check_models
from workers.critic import CriticWorker
from workers.megatron import MegatronPPOWorker
from workers.reference import ReferenceWorker, TeacherWorker
from workers.reward_model import RewardModelWorker


def train(config: PPOConfig) -> str | None:
    """The job of main_ppo: the remaining steps; returns a message where an earlier run completed them all."""
    start, run = prepare(config), config.trainer
    keep = num_checkpoints(run, has_critic=start.plan.critic is not None)
    store = CheckpointStore(Path(run.default_local_dir), keep=keep, remote=run.default_hdfs_dir)
    if not run.val_only and (message := completed(store, run, start.num_steps)):
        return message
    with running_backend(run, config.ray_kwargs, num_ranks=start.num_ranks) as backend:
        _build(start, backend).fit()
    return None


def build_trainer(
    config: PPOConfig, backend: WorkerBackend | None = None, *, trainer_cls: type[RayPPOTrainer] = RayPPOTrainer
) -> RayPPOTrainer:
    """The trainer of a configuration, of a class of your own if given; its workers start with `init_workers()`.

    Without a `backend` one is started: on the running Ray cluster, on a new one, or in this process for
    trainer.backend=local. Until the trainer is closed it holds the run's folder, as a job does.
    """
    with ExitStack() as stack:
        stack.enter_context(run_folder(config))
        start, run = prepare(config), config.trainer
        backend = backend or start_backend(run, config.ray_kwargs, num_ranks=start.num_ranks)
        trainer = _build(start, backend, trainer_cls)
        trainer.folder, trainer.open_folder = stack.pop_all(), partial(run_folder, config)  # with the names given
    return trainer


@dataclass(frozen=True)
class PreparedRun:
    """What a run needs before any process of it starts."""

    config: PPOConfig
    plan: BatchPlan
    external_libs: tuple[tuple[str, str], ...]
    tokenizer: Tokenizer
    train_rows: PromptDataset
    val_rows: PromptDataset | None
    num_steps: int

    @property
    def num_ranks(self) -> int:
        """The processes that share the cores. Bits depend on the threads of each, so those of a reproducible run are as
        many as beside one replica."""
        pools = self.plan.pools
        one = min(pools.rollout_ranks, self.config.actor_rollout_ref.rollout.replica_size)
        return (replace(pools, rollout_ranks=one) if self.config.trainer.reproducible else pools).total_ranks


def prepare(config: PPOConfig) -> PreparedRun:
    """Start assets, external libraries, tokenizer, agents and rows; ConfigError for servers without an address."""
    config = with_local_files(with_start_assets(config))
    plan, policy = plan_batches(config), config.actor_rollout_ref
    if plan.pools.external:
        settings_of(policy.rollout, config.trainer.deadlines, max_staleness=config.trainer.max_staleness)
    critic_model = {"critic.model": config.critic.model} if plan.critic is not None else {}
    libraries = import_external_libs({"actor_rollout_ref.model": policy.model, **critic_model})
    with raised_as(ConfigError, "actor_rollout_ref.model.external_lib", ValueError):
        get_adv_estimator_fn(config.algorithm.adv_estimator)
        get_policy_loss_fn(policy.actor.policy_loss.loss_mode)
    reward_manager_class(config.reward)
    check_models(config)
    tokenizer = load_tokenizer(policy.model, policy.rollout.padding)
    check_vocabularies(config, tokenizer)
    agents = load_agents(config, tokenizer)
    train_rows, val_rows = prompt_datasets(config, tokenizer, load_processor(config, tokenizer))
    config = without_episodes(config, agents, train_rows, val_rows)
    sources = train_rows.data_sources + (val_rows.data_sources if val_rows else ())
    may_score, filters = bool(agents and agents.workflow.may_score), config.algorithm.filter_groups.enable
    check_data_sources(config.reward, sources, may_score=may_score, filters_groups=filters)
    if len(config.teachers) > 1:
        columns = ({"data_source": row.data_source, "ability": row.ability, **row.fields} for row in train_rows)
        teacher_numbers(config, [row.get(config.distillation.teacher_key) for row in columns])
    return PreparedRun(config, plan, libraries, tokenizer, train_rows, val_rows, num_steps(config, train_rows))


def _build(run: PreparedRun, backend: WorkerBackend, trainer_cls: type[RayPPOTrainer] = RayPPOTrainer) -> RayPPOTrainer:
    config, plan, policy = run.config, run.plan, run.config.actor_rollout_ref
    mapping, pools = place_roles(config, plan, backend.node_size)
    for_workers = EngineRun(
        device=backend.device,
        nccl_timeout_s=policy.nccl_timeout,
        rollout_n=policy.rollout.n,
        actor_steps=max(1, run.num_steps - config.trainer.critic_warmup),
        critic_steps=run.num_steps,
        actor_updates=plan.actor.optimizer_steps,
        critic_updates=plan.critic.optimizer_steps if plan.critic else 1,
        offload_on_sleep=not drops_weights_on_sleep(config),
        external_libs=run.external_libs,
    )
    actor = MegatronPPOWorker if policy.actor.strategy == "megatron" else ActorWorker
    rollout, reward_model = policy.rollout, config.reward.reward_model
    judge = (reward_model.model, reward_model.rollout.generation, replace(for_workers, offload_on_sleep=True), "auto")
    loss = config.distillation.distillation_loss if config.distillation.enabled else None
    teachers = (tuple(config.teachers.values()), config.teacher_policy, loss.topk if loss and loss.is_topk else 0)
    worker_args: dict[Role, tuple[object, ...]] = {
        Role.Actor: (actor, policy, config.algorithm, for_workers, loss),
        Role.Critic: (CriticWorker, config.critic, for_workers),
        Role.RefPolicy: (ReferenceWorker, policy, for_workers),
        Role.Teacher: (TeacherWorker, *teachers, for_workers),
        Role.RewardModel: (RewardModelWorker, reward_model, for_workers),
        Role.Rollout: (None if plan.pools.external else worker_class(rollout.name), policy.model, rollout, for_workers),
        Role.Judge: (reward_model.rollout.name and worker_class(reward_model.rollout.name), *judge),
    }
    return trainer_cls(
        config,
        run.tokenizer,
        {role: backend.worker_cls(*worker_args[role]) for role in mapping},
        backend.make_manager(pools, mapping, min_nodes=min_nodes(config)),
        backend.group_cls,
        train_dataset=run.train_rows,
        val_dataset=run.val_rows,
        device_name=backend.device,
    )


def check_vocabularies(config: PPOConfig, tokenizer: Tokenizer) -> None:
    """ConfigError for a reference, a teacher or a reward model that reads the policy's token ids as other tokens."""
    policy = config.actor_rollout_ref
    if config.use_reference and (reference := policy.reference_model) is not policy.model:
        _check_vocabulary("actor_rollout_ref.ref.model.path", reference, tokenizer, "set one that shares it")
    for teacher in config.teachers.values():
        _check_vocabulary("distillation.teacher_models", teacher, tokenizer, "set teachers that share it")
    if config.reward.has_head and config.reward.reward_model.input_tokenizer is None:
        fix = f"set reward.reward_model.input_tokenizer={policy.model.tokenizer_path or policy.model.path}"
        _check_vocabulary("reward.reward_model.model_path", config.reward.reward_model.model, tokenizer, fix)


def _check_vocabulary(key: str, model: ServedModelConfig, tokenizer: Tokenizer, fix: str) -> None:
    if not (Path(model.path or "") / "tokenizer_config.json").is_file():
        return
    theirs = load_tokenizer(model).get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if theirs.get(token) != number:
            why = f"its tokenizer differs from the policy's: {token!r} is {theirs.get(token)}, not {number}"
            raise ConfigError(f"{key}={model.path}: {why}; {fix}")


def place_roles(config: PPOConfig, plan: BatchPlan, node_size: int) -> tuple[dict[Role, str], dict[str, list[int]]]:
    """Each role's pool, and each pool's processes by node; roles the algorithm does not need are left out."""
    pools = plan.pools
    grading = "reward_model" if pools.reward_model_ranks else "train"
    roles = (
        (Role.Actor, "train", True),
        (Role.Critic, "train", plan.critic is not None),
        (Role.RefPolicy, "train", config.use_reference and config.actor_rollout_ref.has_reference_weights),
        (Role.Teacher, "teacher" if pools.teacher_ranks else "train", config.distillation.enabled),
        (Role.RewardModel, grading, config.reward.has_head),
        (Role.Rollout, "train" if pools.colocated else "rollout", not pools.external),
        (Role.Judge, grading, config.reward.has_judge),
    )
    return {role: pool for role, pool, is_played in roles if is_played}, process_pools(config, node_size)
