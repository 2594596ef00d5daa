"""No loss of a policy or a critic makes the host wait for the GPU, in any micro-batch of any mode."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.value_loss import compute_value_loss
from rlsys.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.vocabulary import LOSS_AGG_MODES, POLICY_LOSSES, REJECTION_MODES
from rlsys.protocol import DataProto
from tests.host_waits import HOST, host_waits

REJECTING = {
    "rollout_rs": ",".join(REJECTION_MODES),
    "rollout_rs_threshold": "2.0",
    "rollout_token_veto_threshold": 1e-4,
}
CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2", "rollout_is_batch_normalize": True},
    REJECTING,
]


@dataclass(frozen=True)
class OneRank:
    device: torch.device


def waits(function: Any, config: Any, names: str, **given: Any) -> list[str]:
    """Where the host waits in a loss of (4, 6) and its gradient, all of it on a device."""
    draw, mask = torch.Generator().manual_seed(0), torch.ones(4, 6)
    mask[1, 3:] = 0
    tensors = {name: torch.randn(4, 6, generator=draw) for name in names.split()}
    own = tensors[names.split()[0]].requires_grad_()
    selected = {"selected": mask > 2} if function is actor_loss else {}
    with host_waits(
        SimpleNamespace(ranks=OneRank(HOST)), DataProto.from_dict(tensors={"none": torch.zeros(4)})
    ) as seen:
        if function is actor_loss:
            loss = function(config, **tensors, response_mask=mask, **selected, **given)
        else:
            loss = function(config=config, **tensors, response_mask=mask)
        loss.total.backward()
    assert own.grad is not None
    return seen


POLICY = "log_prob old_log_prob advantages ref_log_prob entropy"


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "bypass_mode"])
def test_policy_losses(name: str) -> None:
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.1 if name == "dro" else None))
    assert waits(actor_loss, config, POLICY) == []


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregations_with_entropy_and_kl(mode: str) -> None:
    config = ActorConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True)
    assert waits(actor_loss, config, POLICY, batch_rows=8) == []


@pytest.mark.parametrize("settings", CORRECTIONS, ids=str)
def test_correction_within_the_loss(settings: dict[str, Any]) -> None:
    correction = RolloutCorrectionConfig(bypass_mode=True, **settings)
    assert waits(actor_loss, ActorConfig(), POLICY, rollout_correction=correction) == []


def test_the_critics_loss() -> None:
    assert waits(compute_value_loss, CriticConfig(), "vpreds returns values") == []
