"""The calls of one training step: each takes the batch and returns it with more columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlsys.algorithms import stages
from rlsys.algorithms.kl import KLController
from rlsys.algorithms.masked import at_last_token, masked_mean
from rlsys.algorithms.mismatch import probs_diff_metrics
from rlsys.batching import balance_rows, seqlen_metrics
from rlsys.config import PPOConfig
from rlsys.config.plan import BatchPlan
from rlsys.protocol import IMAGES, DataProto
from rlsys.protocol.rows import compute_response_mask
from rlsys.utils.errors import DataError
from trainer.groups import Role, WorkerGroups
from trainer.reporting import Reporter
from trainer.residency import Residency

ROWS = ["input_ids", "attention_mask", "position_ids", "responses", "prompts", "response_mask"]
ACTOR_ROWS = [*ROWS, "old_log_probs", "advantages"]
CRITIC_ROWS = [*ROWS, "values", "returns"]
OPTIONAL = ["ref_log_prob", "rollout_log_probs", "rollout_is_weights", "selected_tokens"]
ACTOR_OPTIONAL = [*OPTIONAL, "teacher_log_probs", "teacher_ids", "routed_experts"]


@dataclass(frozen=True)
class Steps:
    """The calls of one step on the worker groups; those on roles that the algorithm does not use change nothing."""

    cfg: PPOConfig
    plan: BatchPlan
    groups: WorkerGroups
    residency: Residency
    reporter: Reporter
    kl_ctrl: KLController
    reward_rows: Callable[[DataProto], DataProto] | None = None
    """What the reward model reads of a batch, where its tokens are not the policy's."""

    def balance(self, batch: DataProto, step: int) -> DataProto:
        """Order rows so that ranks get about as many tokens and mini-batches do not depend on the number of ranks."""
        self.reporter.add(batch.meta_info.pop("source_metrics", {}))
        versions = batch.tensors["weight_versions"][batch.tensors["response_mask"].bool()]
        if versions.numel():
            self.reporter.add({"training/staleness": float(step - 1 - versions.double().mean())})
        lengths = batch.tensors["attention_mask"].sum(-1).tolist()
        batch.meta_info |= {"global_token_num": lengths, "global_steps": step}
        ranks, rows = self.plan.actor.dp_size, self.plan.actor.mini_batch_samples
        size, order = stages.rows_per_episode(batch), np.arange(len(batch))
        if self.cfg.trainer.balance_batch and ranks > 1:
            order = balance_rows(np.reshape(lengths, (-1, size)).sum(1).tolist(), num_ranks=ranks, mini_batch_rows=rows)
            order = (order[:, None] * size + np.arange(size)).ravel()
            batch.reorder(torch.from_numpy(order))
        self.reporter.add(seqlen_metrics(lengths, np.array_split(order, ranks)))
        return batch

    def old_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probabilities under the weights about to be trained, or the rollout's own in bypass mode."""
        if self.cfg.algorithm.rollout_correction.bypass_mode:
            batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
            return batch
        with self.residency.hold(Role.Actor, "old_log_prob"):
            scored = self.groups.actor.compute_log_prob(_only(batch, ROWS, ["routed_experts"]))
        self.reporter.add_lists(scored.meta_info.pop("metrics", {}))
        if "entropys" in scored.tensors:
            entropy = masked_mean(scored.tensors["entropys"].double(), batch.tensors["response_mask"])
            self.reporter.add({"actor/entropy": float(entropy)})
            del scored.tensors["entropys"]
        return batch.union(scored)

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probabilities under the frozen policy, where a KL term needs them."""
        if not self.cfg.use_reference:
            return batch
        with self.residency.hold(Role.Actor if self.groups.ref is None else Role.RefPolicy, "ref"):
            return batch.union((self.groups.ref or self.groups.actor).compute_ref_log_prob(_only(batch, ROWS)))

    def teacher_log_probs(self, batch: DataProto) -> DataProto:
        """Log-probabilities under each row's teacher, in a distillation; DataError for a row without one."""
        if self.groups.teacher is None:
            return batch
        keys = batch.non_tensor_batch.get(self.cfg.distillation.teacher_key, [None] * len(batch))
        rows = _only(batch, ROWS)
        rows.tensors["teacher"] = torch.tensor(teacher_numbers(self.cfg, list(keys)))
        with self.residency.hold(Role.Teacher, "teacher"):
            return batch.union(self.groups.teacher.compute_teacher_log_prob(rows))

    def reward_model_scores(self, batch: DataProto) -> DataProto:
        """Add the reward model's score to the graders', where there is one."""
        if self.groups.rm is not None:
            with self.residency.hold(Role.RewardModel, "reward_model"):
                rows = _only(batch, ROWS) if self.reward_rows is None else self.reward_rows(batch)
                scores = self.groups.rm.compute_rm_score(rows).tensors["rm_scores"].sum(dim=1)
            scores = at_last_token(scores, compute_response_mask(batch))
            batch.tensors["token_level_scores"] = batch.tensors["token_level_scores"] + scores
        return batch

    def values(self, batch: DataProto) -> DataProto:
        """The critic's values, where the estimator uses them."""
        if self.groups.critic is None:
            return batch
        with self.residency.hold(Role.Critic, "values"):
            return batch.union(self.groups.critic.compute_values(_only(batch, ROWS)))

    def advantages(self, batch: DataProto) -> DataProto:
        """Shape rewards, correct for the rollout's own distribution, and estimate advantages; all on the controller."""
        with self.reporter.stage("adv"):
            batch, metrics = rewards_to_advantages(batch, self.cfg, self.kl_ctrl)
        self.reporter.add(metrics)
        return batch

    def update_critic(self, batch: DataProto) -> None:
        if self.groups.critic is not None:
            with self.residency.hold(Role.Critic, "update_critic"):
                updated = self.groups.critic.update_critic(_only(batch, CRITIC_ROWS, OPTIONAL))
            self.reporter.add_lists(updated.meta_info["metrics"])

    def update_actor(self, batch: DataProto) -> None:
        with self.residency.hold(Role.Actor, "update_actor"):
            updated = self.groups.actor.update_actor(_only(batch, ACTOR_ROWS, ACTOR_OPTIONAL))
        self.reporter.add_lists(updated.meta_info["metrics"])


def teacher_numbers(cfg: PPOConfig, keys: Sequence[object]) -> list[int]:
    """The number of each row's teacher by its key; a single teacher takes all. DataError for a key that none has."""
    teachers = list(cfg.teachers)
    if unknown := [key for key in keys if len(teachers) > 1 and key not in teachers]:
        where = f"distillation.teacher_key={cfg.distillation.teacher_key}"
        raise DataError(f"{where}: no teacher has the key {unknown[0]!r}, only {', '.join(teachers)}")
    return [teachers.index(str(key)) if len(teachers) > 1 else 0 for key in keys]


def _only(batch: DataProto, names: Sequence[str], optional: Sequence[str] = ()) -> DataProto:
    """The columns that a role needs, so that no others travel, those of `optional` that the batch has, and images."""
    columns = [*names, *(name for name in optional if name in batch.tensors)]
    return batch.select(batch_keys=columns, non_tensor_batch_keys=[IMAGES])


def rewards_to_advantages(batch: DataProto, cfg: PPOConfig, kl: KLController) -> tuple[DataProto, dict[str, float]]:
    """Rewards, corrections and advantages of a whole batch, and their metrics.

    `kl` holds the weight of the KL penalty in the reward, which this updates.
    """
    algorithm, actor, rollout_n = cfg.algorithm, cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.n
    metrics: dict[str, float] = {}
    if {"rollout_log_probs", "old_log_probs"} <= set(batch.tensors.keys()):
        metrics = probs_diff_metrics(**stages.columns(batch, ("old_log_probs", "rollout_log_probs", "response_mask")))
    batch, kl_metrics = stages.shaped_rewards(batch, algorithm, kl, num_repeat=rollout_n)
    batch, correction_metrics = stages.apply_rollout_correction(batch, algorithm.rollout_correction)
    metrics |= kl_metrics | correction_metrics
    step = int(batch.meta_info.get("global_steps", 0))
    batch = stages.compute_advantage(batch, algorithm, num_repeat=rollout_n, seed=actor.data_loader_seed + step)
    return stages.add_selected_tokens(batch, actor, seed=actor.data_loader_seed), metrics
