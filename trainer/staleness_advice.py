"""The advice on `trainer.max_staleness` after the first steps of a run whose rollout has processes of its own."""

from pathlib import Path

from rlsys.config import PPOConfig
from rlsys.fleet.fleet import RolloutFleet
from rlsys.planning.staleness_forecast import MeasuredRun, fitted_pace, staleness_advice
from rlsys.protocol import DataProto
from rlsys.telemetry.log import get_logger
from rlsys.utils.atomic import write_whole
from rlsys.utils.grouping import group_by

log = get_logger(__name__)

NUM_STEPS = 4
"""Number of steps measured, excluding the first, which builds caches and fills the window."""


class StalenessAdvisor:
    """Measures the first steps, then prints once what each `max_staleness` would give and writes staleness.txt."""

    def __init__(self, cfg: PPOConfig, fleet: RolloutFleet) -> None:
        self._cfg, self._fleet = cfg, fleet
        self._groups: list[list[int]] = []
        self._num_steps, self._train_s = 0, 0.0

    def add(self, batch: DataProto, train_s: float) -> None:
        """Add a batch that was trained in `train_s`, the push included."""
        self._num_steps += 1
        if not 1 < self._num_steps <= NUM_STEPS:
            return
        lengths = batch.tensors["response_mask"].sum(1).tolist()
        groups = group_by(range(len(batch)), batch.non_tensor_batch["uid"].__getitem__)
        self._groups += ([lengths[row] for row in rows] for rows in groups.values())
        self._train_s += train_s
        if self._num_steps == NUM_STEPS and self._fleet.pace:
            self._advise()

    def _advise(self) -> None:
        num_prompts, num_rows = self._cfg.data.train_batch_size, self._cfg.actor_rollout_ref.rollout.max_replica_seqs
        replicas = max(1, int(self._fleet.metrics()["rollout/replicas_ready"]))
        pace = fitted_pace(list(self._fleet.pace.values()))
        train_s_per_token = self._train_s / max(1, sum(map(sum, self._groups)))
        run = MeasuredRun(self._groups, num_prompts, replicas, num_rows, *pace, train_s_per_token)
        text = staleness_advice(run, self._cfg.trainer.max_staleness)
        log.info("what max_staleness would give, simulated from the first %d steps:\n%s", NUM_STEPS, text)
        write_whole(Path(self._cfg.trainer.default_local_dir) / "staleness.txt", f"{text}\n".encode())
