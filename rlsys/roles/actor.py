"""The actor: log-probabilities of responses, and policy updates by any registered loss."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.distillation import TeacherScores
from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.stages import add_selected_tokens
from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.algorithm import DistillationLossConfig, RolloutCorrectionConfig
from rlsys.interfaces import LossFn, LossSum, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import global_step, mini_batches, run_updates, with_scale
from rlsys.types import WeightUpdateMeta
from rlsys.utils.errors import DataError


@dataclass(eq=False)
class PPOActor:
    """A policy on an engine. Every method is collective over the engine's ranks and takes this rank's rows.

    `rollout_n` are the rows of a prompt, for the size of mini-batches; `rollout_correction` is used in bypass mode;
    with `distillation` it is trained towards a teacher.
    meta_info["temperature"] of a batch divides the logits; 1 where it is missing.
    """

    engine: TrainEngine
    config: ActorConfig
    _: KW_ONLY
    rollout_n: int = 1
    rollout_correction: RolloutCorrectionConfig | None = None
    distillation: DistillationLossConfig | None = None
    version: int = field(default=0, init=False)

    def compute_logp(
        self, batch: DataProto, *, name: str = "old_log_probs", entropy: bool = False, sum_pi_squared: bool = False
    ) -> DataProto:
        """Log-probabilities (B, R) of the responses as column `name`, on request `entropys` and `sum_pi_squared`; with
        router_replay.mode=R2 also `routed_experts`, for the update."""
        columns: dict[Output, str] = {"log_probs": name}
        if entropy:
            columns["entropy"] = "entropys"
        if sum_pi_squared:
            columns["sum_pi_squared"] = "sum_pi_squared"
        if self.config.router_replay.mode == "R2" and name == "old_log_probs":
            columns["routed_experts"] = "routed_experts"
        outputs = self.engine.forward(batch, tuple(columns), temperature=_temperature(batch))
        return DataProto.from_dict(tensors={columns[output]: outputs[output] for output in columns})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """Train on the rows in mini-batches; returns verl's `actor/*` metrics, means over the optimizer steps.

        Needs old_log_probs, advantages, response_mask; ref_log_prob with use_kl_loss; teacher_log_probs with
        `distillation`, and teacher_ids for forward_kl_topk. Uses rollout_is_weights and selected_tokens if there.
        """
        parts = mini_batches(batch, self.config, rollout_n=self.rollout_n, dp_size=self.engine.dp_size)
        return self._update(batch, parts)

    grpo_update = ppo_update

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Write the weights in Hugging Face format to `meta.weights_path`, for `RemoteEngine.update_weights(meta)`."""
        self.engine.save(Path(meta.weights_path), "export")
        self.set_version(meta.version)

    def set_version(self, version: int) -> None:
        """Say which version of the weights this is."""
        self.version = version

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows."""
        return self._update(batch, [batch])

    def _update(self, batch: DataProto, parts: Iterable[DataProto]) -> dict[str, float]:
        config, distillation = with_scale(self.config, batch), self.distillation
        if (mode := config.router_replay.mode) != "disabled" and batch.tensors.get("routed_experts", None) is None:
            raise DataError(f"the batch has no routed_experts, which actor.router_replay.mode={mode} replays")
        taught: Output = "topk_log_probs" if distillation is not None and distillation.is_topk else "log_probs"
        wanted: dict[Output, bool] = {"log_probs": True, taught: True}
        wanted["entropy"] = config.calculate_entropy or config.entropy_coeff != 0
        first_seed = config.data_loader_seed * 1_000_003 + global_step(batch) * 1009

        def loss(part: DataProto, outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
            teacher = None
            if distillation is not None:
                teacher = TeacherScores(distillation, outputs[taught], rows["teacher_log_probs"])
            return actor_loss(
                config,
                log_prob=outputs["log_probs"],
                old_log_prob=rows["old_log_probs"],
                advantages=rows["advantages"],
                response_mask=rows["response_mask"],
                rollout_is_weights=rows.get("rollout_is_weights", None),
                rollout_correction=self.rollout_correction,
                selected=rows.get("selected_tokens", None),
                ref_log_prob=rows.get("ref_log_prob", None),
                entropy=outputs.get("entropy"),
                batch_rows=len(part) * self.engine.dp_size,
                teacher=teacher,
            )

        def losses() -> Iterator[tuple[DataProto, LossFn]]:
            for index, part in enumerate(parts):
                if "selected_tokens" not in part.tensors.keys():  # noqa: SIM118
                    part = add_selected_tokens(part, config, seed=first_seed + index)
                yield part, partial(loss, part)

        outputs = [name for name in wanted if wanted[name]]
        metrics = run_updates(self.engine, losses(), outputs=outputs, prefix="actor", temperature=_temperature(batch))
        if config.use_kl_loss:
            metrics["actor/kl_coef"] = config.kl_loss_coef
        return metrics


def _temperature(batch: DataProto) -> float:
    return float(batch.meta_info.get("temperature", 1.0))
