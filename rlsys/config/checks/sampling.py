"""Whether sampling for training and validation gives answers to learn from and to compare."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.checks.findings import note, wrong
from rlsys.config.schema.jobs import PPOConfig

KEY = "actor_rollout_ref.rollout"


def check_sampling(cfg: PPOConfig) -> Iterator[str]:
    """Temperature, top-k, number of answers and the frequency of the parity probe."""
    rollout, val = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.val_kwargs
    if rollout.temperature == 0:
        yield wrong(f"{KEY}.temperature", 0.0, f"training requires sampling; set {KEY}.temperature=1.0")
    if not rollout.do_sample and rollout.n > 1:
        why = f"all {rollout.n} answers to a prompt would be the same; set {KEY}.do_sample=true"
        yield wrong(f"{KEY}.do_sample", False, why)
    for name, top_k in (("top_k", rollout.top_k), ("val_kwargs.top_k", val.top_k)):
        if top_k == 0:
            yield wrong(f"{KEY}.{name}", 0, f"no token could be sampled; set {KEY}.{name}=-1 for all tokens")
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        why = f"{val.n} equal answers; set {KEY}.val_kwargs.do_sample=true and a temperature above 0"
        yield wrong(f"{KEY}.val_kwargs.n", val.n, why)
    if val.do_sample and val.temperature == 0:
        yield note(f"{KEY}.val_kwargs.do_sample", True, "temperature=0 is greedy, so do_sample has no effect")
    sync_freq, freq = cfg.trainer.sync_freq, rollout.parity.freq
    if freq > 0 and freq % sync_freq:
        why = f"weights can only be compared after a push, and they are pushed every {sync_freq} steps"
        yield note(f"{KEY}.parity.freq", freq, why)
