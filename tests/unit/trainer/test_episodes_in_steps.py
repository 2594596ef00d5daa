"""Episodes that a step or a validation waits for."""

from contextlib import ExitStack
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.config import load_config
from rlsys.data.start_assets import START_MODEL
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.requests import Replica
from rlsys.telemetry.metrics import StageTimer
from rlsys.utils.errors import WeightTransferError
from tests.timing import scaled_s
from tests.unit.trainer.asynchronous import LengthReplica
from tests.unit.trainer.test_open_episodes import Conversations
from trainer.episodes import graded_rollout
from trainer.local_files import with_start_assets

WORKFLOW = """
async def run(row, session):
    await session.draw_ids((2, 3))
    return 1.0
"""


class LostOnce(LengthReplica):
    """A replica whose process is lost with its first requests; a new one has no weights before the next push."""

    num_restarts = 0

    def exchange(self, new, **options):
        if not self.num_restarts:
            raise ConnectionError("the process is lost")
        return super().exchange(new, **options)

    def health(self, deadline_s: float):
        if not self.num_restarts:
            raise ConnectionError("the process is lost")
        return super().health(deadline_s)

    def restart(self, deadline_s: float) -> None:
        self.num_restarts += 1


def no_weights(replica: Replica) -> None:
    raise WeightTransferError("push again")


def test_weights_are_pushed_where_all_replicas_wait_for_them_before_episodes_continue(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(WORKFLOW)
    workflow, sizes = f"actor_rollout_ref.rollout.workflow={tmp_path}/agent.py:run", "data.max_prompt_length=8"
    cfg = with_start_assets(load_config(["--config-name=quickstart", workflow, sizes, "data.max_response_length=8"]))
    replica = LostOnce("replica", lambda n: 1 << 20)
    deadlines = FleetDeadlines(generate_s=scaled_s(30.0), health_s=scaled_s(2.0), restart_s=scaled_s(5.0))
    fleet, pushed = RolloutFleet([replica], chunk_rows=4, deadlines=deadlines, on_restart=no_weights), list[int]()

    def push() -> None:
        pushed.append(replica.num_restarts)
        with fleet.pushing(3):
            replica.version = 3

    with ExitStack() as stack:
        stack.callback(fleet.close)
        push()
        fleet.push = push
        rollout = graded_rollout(cfg, fleet, AutoTokenizer.from_pretrained(START_MODEL), stack, StageTimer())
        prompts = Conversations().next()
        batch, metrics = rollout.make(prompts, step=1)
    assert pushed == [0, 1]
    assert batch.tensors["weight_versions"][batch.tensors["response_mask"] == 1].unique().tolist() == [3]
    assert metrics["agent/end/stop"] == len(batch) == len(prompts) * cfg.actor_rollout_ref.rollout.n
