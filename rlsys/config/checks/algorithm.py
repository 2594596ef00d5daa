"""Whether estimator, critic, KL terms, losses, corrections, filters and rewards fit together."""

from collections.abc import Iterator

from rlsys.config.bounds import rejection_bounds, weight_bounds
from rlsys.config.checks.findings import ACTOR, Note, note, wrong
from rlsys.config.pools import resolve_pools
from rlsys.config.schema.jobs import PPOConfig

OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"


def check_algorithm(cfg: PPOConfig) -> Iterator[str]:
    """Weights of reward keys, the reference, policy loss, correction and rewards."""
    for check in (_weights, _adapter, _policy_loss, _correction, _overlong, _input_tokenizer, _teachers):
        yield from check(cfg)
    if cfg.reward.has_judge:
        yield from _judge(cfg)


def _weights(cfg: PPOConfig) -> Iterator[str]:
    keys, weights = cfg.algorithm.gdpo_reward_keys, cfg.algorithm.gdpo_reward_weights
    if keys and weights is not None and len(weights) != len(keys):
        yield wrong(cfg, "algorithm.gdpo_reward_weights", f"{len(weights)} weights for {len(keys)} keys; set as many")


def _adapter(cfg: PPOConfig) -> Iterator[str]:
    policy = cfg.actor_rollout_ref
    if cfg.use_reference and policy.model.lora_adapter_path and not policy.has_reference_weights:
        why = "the reference is the model without adapters, not the adapter that training starts from"
        yield note(cfg, "actor_rollout_ref.model.lora_adapter_path", why)


def _policy_loss(cfg: PPOConfig) -> Iterator[str]:
    actor, loss = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.actor.policy_loss
    if actor.clip_ratio_low > 1 and loss.loss_mode in ("vanilla", "gspo", "clip_cov", "kl_cov"):
        yield wrong(cfg, f"{ACTOR}.clip_ratio_low", "ratios are not below 0, so it never clips; set 0 to 1")
    if loss.clip_cov_lb > loss.clip_cov_ub:
        yield wrong(cfg, f"{ACTOR}.policy_loss.clip_cov_lb", f"set at most clip_cov_ub={loss.clip_cov_ub:g}")


def _correction(cfg: PPOConfig) -> Iterator[str]:
    correction = cfg.algorithm.rollout_correction
    try:
        weight_bounds(correction)
        if correction.rollout_rs and correction.rollout_rs_threshold:
            rejection_bounds(correction)
    except ValueError as error:
        yield str(error)


def _input_tokenizer(cfg: PPOConfig) -> Iterator[str]:
    policy, given = cfg.actor_rollout_ref.model, cfg.reward.reward_model.input_tokenizer
    key = "reward.reward_model.input_tokenizer"
    if given is not None and given not in (policy.path, policy.tokenizer_path):
        yield wrong(cfg, key, "answers are decoded by the policy's tokenizer", policy.tokenizer_path or policy.path)


def _judge(cfg: PPOConfig) -> Iterator[str]:
    pools = resolve_pools(cfg)
    if not pools.reward_model_ranks and not pools.colocated:
        why = "the training processes are busy while answers are graded; it needs processes of its own"
        yield wrong(cfg, "reward.reward_model.enable_resource_pool", why, True)
    ranks = pools.reward_model_ranks or pools.train_ranks
    if ranks % cfg.reward.reward_model.rollout.tensor_model_parallel_size:
        yield wrong(cfg, "reward.reward_model.rollout.tensor_model_parallel_size", f"does not divide {ranks} processes")


def _teachers(cfg: PPOConfig) -> Iterator[str]:
    teachers, key = cfg.distillation.teacher_models if cfg.distillation.enabled else {}, "distillation.teacher_models"
    keys, is_single = [teacher.key for teacher in teachers.values()], len(teachers) == 1
    for name, teacher in teachers.items():
        if teacher.model_path is None:
            yield wrong(cfg, key, f"no model; set {key}.{name}.model_path=<model>", value=name)
        elif name == "teacher_model" and not is_single:
            yield wrong(cfg, key, "verl drops this name beside others; give the teacher another one", value=name)
        elif not is_single and (teacher.key is None or keys.count(teacher.key) > 1):
            why = f"several teachers need different keys, values of the column {cfg.distillation.teacher_key}"
            yield wrong(cfg, key, f"{why}; set {key}.{name}.key=<value>", value=name)
    if any(teacher.inference.model_fields_set or teacher.num_replicas for teacher in teachers.values()):
        why = "of inference only Megatron's sizes count, with nnodes > 0; actor_rollout_ref.ref sets the rest"
        yield Note(wrong(cfg, key, why, value=list(teachers)))


def _overlong(cfg: PPOConfig) -> Iterator[str]:
    reward, longest = cfg.reward, cfg.data.max_response_length
    overlong, limit = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len or longest
    if overlong.enable and not 0 < overlong.len <= limit:
        yield wrong(cfg, f"{OVERLONG}.len", f"must be from 1 to the longest response, {limit} tokens", 1)
    if overlong.enable and reward.reward_manager.name == "naive" and reward.reward_manager.source == "register":
        yield wrong(cfg, f"{OVERLONG}.enable", "only the dapo manager applies it; set reward.reward_manager.name=dapo")
    if overlong.enable and limit > longest:
        why = f"responses end at data.max_response_length={longest}; set {longest} or remove it"
        yield wrong(cfg, "reward.reward_kwargs.max_resp_len", why)
