"""The parity probe: the same tokens scored by the actor and by the rollout's engine, which serves its weights.

A few training prompts are completed by the rollout as in training (draws depend on seed, row and position only, so the
probe does not change those of the run), then scored by both sides at the sampling temperature.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from rlsys.algorithms.mismatch import Parity, compare_log_probs
from rlsys.config.schema.rollout import ParityConfig
from rlsys.data.collate import collate_prompts
from rlsys.data.dataset import PromptDataset
from rlsys.protocol import IMAGES, DataProto, DataProtoConfig
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import DeadlineError, RolloutError, WorkerError
from trainer.generation import GradedRollout, sampling_meta
from trainer.groups import ActorGroup, Role
from trainer.residency import Residency
from trainer.steps import ROWS

log = get_logger(__name__)

SEED = 1 << 41
CAUSES = (
    "Usual causes: weights that did not arrive complete (actor_rollout_ref.rollout.validate_weight=true compares "
    "every tensor), another temperature, another dtype (actor_rollout_ref.rollout.dtype against the actor's), "
    "a tokenizer or end token of another model, an engine that computes the model differently."
)


@dataclass(frozen=True)
class ParityReport:
    """`scored`: given tokens scored by both; `sampled`: the actor against the log-probs recorded while sampling.

    `scored` is None where the rollout cannot score given tokens. `problem` is empty within the limits.
    """

    version: int
    scored: Parity | None
    sampled: Parity
    problem: str

    def metrics(self) -> dict[str, float]:
        """`parity/*` of one probe."""
        metrics = {"parity/skipped": float(self.scored is None), "parity/alarm": float(bool(self.problem))}
        for prefix, parity in (("parity/", self.scored), ("parity/sampled_", self.sampled)):
            if parity is not None:
                metrics |= {f"{prefix}{name}": float(getattr(parity, name)) for name in ("mean_abs", "max_abs", "k3")}
        return metrics | {"parity/num_tokens": float(self.sampled.num_tokens)}


@dataclass
class ParityProbe:
    """The first rows of `dataset` are completed by `graded` and scored by both the rollout (`score`) and `actor`.

    Where the rollout cannot score only the log-probs recorded while sampling are compared: from then on if its servers
    do not offer it, this time only after a worker was lost, which the fleet will replace.
    """

    settings: ParityConfig
    dataset: PromptDataset
    graded: GradedRollout
    prompt_length: int
    score: Callable[[DataProto], DataProto]
    actor: ActorGroup
    residency: Residency
    cannot_score: bool = False

    def run(self, version: int) -> ParityReport:
        """Probe weights of `version`, which actor and rollout must both hold."""
        with self.residency.hold(Role.Rollout, "parity"):
            rows, _ = self.graded.generate(self._prompts())
            seen = rows.tensors["rollout_log_probs"]
            rows = rows.select(batch_keys=ROWS, non_tensor_batch_keys=[IMAGES])
            rows.meta_info[DataProtoConfig.auto_padding_key] = True
            theirs = self._engine_scores(rows)
        with self.residency.hold(Role.Actor, "parity"):
            ours = self.actor.compute_log_prob(rows).tensors["old_log_probs"]
        mask, tokens, limits = rows.tensors["response_mask"], rows.tensors["responses"], self.settings
        scored = None if theirs is None else compare_log_probs(ours, theirs, mask)
        sampled = compare_log_probs(ours, seen, mask)
        problems = [
            self._describe(parity, version, how, int(tokens[parity.row, parity.column]))
            for parity, how in ((scored, "when it scores them"), (sampled, "when it sampled them"))
            if parity and not (parity.mean_abs <= limits.mean_limit and parity.max_abs <= limits.max_limit)  # nan, too
        ]
        return ParityReport(version, scored, sampled, "\n".join([*problems, CAUSES]) if problems else "")

    def _prompts(self) -> DataProto:
        sampling = self.graded.sampling
        length = min(self.settings.max_tokens, sampling.max_new_tokens)
        probing = replace(sampling, max_new_tokens=length, seed=sampling.seed + SEED)
        rows = [self.dataset[index] for index in range(min(self.settings.rows, len(self.dataset)))]
        batch = collate_prompts(rows, prompt_length=self.prompt_length, pad_token_id=self.graded.pad_token_id)
        meta = sampling_meta(probing, pad_token_id=self.graded.pad_token_id, step=0)
        batch.meta_info |= meta | {"temperature": sampling.temperature or 1.0}
        return batch

    def _engine_scores(self, rows: DataProto) -> Tensor | None:
        if self.cannot_score:
            return None
        try:
            return self.score(rows).tensors["rollout_log_probs"]
        except (RolloutError, ValueError, WorkerError, DeadlineError) as error:
            self.cannot_score = isinstance(error, RolloutError | ValueError)
            log.warning("parity probe: rollout cannot score given tokens; comparing sampled log-probs only: %s", error)
            return None

    def _describe(self, parity: Parity, version: int, how: str, token: int) -> str:
        return (
            f"actor and rollout disagree on the same {parity.num_tokens} tokens under weights {version} {how}: "
            f"log-probs differ by {parity.mean_abs:.4g} on average (limit {self.settings.mean_limit:g}) and "
            f"{parity.max_abs:.4g} at most (limit {self.settings.max_limit:g}); worst: row {parity.row}, response "
            f"token {parity.column} (id {token}): actor {parity.trainer:.6g}, rollout {parity.engine:.6g}."
        )
