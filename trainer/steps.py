"""The verbs of one training step: each takes the trainer and the batch and returns the batch with more on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rlsys.batching import balance_rows, seqlen_metrics
from rlsys.protocol import DataProto
from trainer.estimate import estimate
from trainer.residency import Holder

if TYPE_CHECKING:
    from trainer.ppo import RayPPOTrainer

LOG_PROB_FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "prompts", "response_mask"]
UPDATE_FIELDS = [*LOG_PROB_FIELDS, "old_log_probs", "advantages"]
OPTIONAL_UPDATE_FIELDS = ["ref_log_prob", "rollout_log_probs", "rollout_is_weights", "selected_tokens"]
VALUE_UPDATE_FIELDS = [*LOG_PROB_FIELDS, "values", "returns"]


def balance(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """Order rows so that each rank gets as many tokens as the others and mini-batches do not depend on the ranks."""
    trainer.reporter.add(batch.meta_info.pop("source_metrics", {}))
    lengths = batch.tensors["attention_mask"].sum(-1).tolist()
    batch.meta_info["global_token_num"] = lengths
    batch.meta_info["global_steps"] = trainer.global_step
    batch.meta_info["temperature"] = trainer.cfg.actor_rollout_ref.rollout.temperature
    ranks, rows = trainer.plan.actor.dp_size, trainer.plan.actor.mini_batch_samples
    parts = np.array_split(np.arange(len(batch)), ranks)
    if trainer.cfg.trainer.balance_batch and ranks > 1:
        order = balance_rows(lengths, num_ranks=ranks, mini_batch_rows=rows)
        batch.reorder(torch.from_numpy(order))
        parts = np.array_split(order, ranks)
    trainer.reporter.add(seqlen_metrics(lengths, parts))
    return batch


def old_log_probs(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """Log-probabilities under the weights that are about to be trained, or the rollout's own in bypass mode."""
    if trainer.cfg.algorithm.rollout_correction.bypass_mode:
        batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
        return batch
    trainer.runtime.residency.enter(Holder.ACTOR)
    with trainer.stage("old_log_prob"):
        found = trainer.groups.actor.compute_log_prob(
            batch.select(batch_keys=LOG_PROB_FIELDS, non_tensor_batch_keys=[])
        )
    trainer.reporter.add_lists(found.meta_info.pop("metrics", {}))
    if "entropys" in set(found.tensors.keys()):
        trainer.reporter.add_entropy(found.tensors.pop("entropys"), batch.tensors["response_mask"])
    return batch.union(found)


def reference_log_probs(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """Log-probabilities under the frozen policy, where a KL term asks for them."""
    if not trainer.plan.use_reference:
        return batch
    rows = batch.select(batch_keys=LOG_PROB_FIELDS, non_tensor_batch_keys=[])
    if trainer.groups.ref is None:
        trainer.runtime.residency.enter(Holder.ACTOR)
        with trainer.stage("ref"):
            return batch.union(trainer.groups.actor.compute_ref_log_prob(rows))
    trainer.runtime.residency.enter(Holder.REFERENCE)
    with trainer.stage("ref"):
        return batch.union(trainer.groups.ref.compute_ref_log_prob(rows))


def reward_model_scores(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """Add the reward model's score to the graders', where there is one."""
    if trainer.groups.rm is None:
        return batch
    trainer.runtime.residency.enter(Holder.REWARD_MODEL)
    with trainer.stage("reward_model"):
        rows = batch.select(batch_keys=LOG_PROB_FIELDS, non_tensor_batch_keys=[])
        scores = trainer.groups.rm.compute_rm_score(rows).tensors["rm_scores"]
    batch.tensors["token_level_scores"] = batch.tensors["token_level_scores"] + scores
    return batch


def values(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """The critic's values, where the estimator uses them."""
    if trainer.groups.critic is None:
        return batch
    trainer.runtime.residency.enter(Holder.CRITIC)
    with trainer.stage("values"):
        rows = batch.select(batch_keys=LOG_PROB_FIELDS, non_tensor_batch_keys=[])
        return batch.union(trainer.groups.critic.compute_values(rows))


def advantages(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """Shape rewards, correct for the rollout's own distribution, and estimate advantages; all on the controller."""
    with trainer.stage("adv"):
        batch, metrics = estimate(batch, trainer.runtime.advantages, trainer.runtime.kl_ctrl)
    trainer.reporter.add(metrics)
    return batch


def update_critic(trainer: RayPPOTrainer, batch: DataProto) -> None:
    if trainer.groups.critic is None:
        return
    trainer.runtime.residency.enter(Holder.CRITIC)
    with trainer.stage("update_critic"):
        done = trainer.groups.critic.update_critic(_fields(batch, VALUE_UPDATE_FIELDS))
    trainer.reporter.add_lists(done.meta_info["metrics"])


def update_actor(trainer: RayPPOTrainer, batch: DataProto) -> None:
    trainer.runtime.residency.enter(Holder.ACTOR)
    with trainer.stage("update_actor"):
        done = trainer.groups.actor.update_actor(_fields(batch, UPDATE_FIELDS))
    trainer.reporter.add_lists(done.meta_info["metrics"])


def _fields(batch: DataProto, names: list[str]) -> DataProto:
    optional = [name for name in OPTIONAL_UPDATE_FIELDS if name in set(batch.tensors.keys()) and name not in names]
    return batch.select(batch_keys=[*names, *optional], non_tensor_batch_keys=[])
