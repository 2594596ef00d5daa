"""The probe at the start of a reproducible run: a fixed batch has the same bits each time and on each replica."""

from __future__ import annotations

from random import Random

from rlsys.fleet.fleet import RolloutFleet
from rlsys.types import ModelRequest, SamplingParams
from rlsys.utils.errors import ConfigError

NUM_TOKENS = 8
MAX_PROMPT_TOKENS = 16


def check_repeatable(fleet: RolloutFleet, vocab_size: int) -> None:
    """Complete one fixed batch twice on every replica; ConfigError unless tokens and log-probs are the same bits."""
    random, num_rows = Random(0), fleet.chunk_rows or 1
    rows = [
        ModelRequest(
            tuple(random.randrange(vocab_size) for _ in range(random.randint(1, MAX_PROMPT_TOKENS))),
            SamplingParams(NUM_TOKENS, ignore_eos=True, seed=row),
        )
        for row in range(num_rows)
    ]
    copies = 2 * int(fleet.metrics()["rollout/replicas_ready"])
    bits = [(one.output_tokens, one.output_logprobs) for one in fleet.generate(rows * copies)]
    different = sum(one != bits[at % num_rows] for at, one in enumerate(bits))
    if different:
        raise ConfigError(
            f"trainer.reproducible=true: {different} of {len(bits)} answers have other bits when the same {num_rows} "
            "requests are repeated or completed by another replica; set trainer.reproducible=false, or "
            "actor_rollout_ref.rollout.full_determinism=true on replicas of one kind of device"
        )
