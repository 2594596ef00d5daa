"""The probe at the start of a reproducible run: a fixed batch has the same bits each time and on each replica."""

from random import Random

from rlsys.fleet.fleet import RolloutFleet
from rlsys.types import ModelRequest, SamplingParams
from rlsys.utils.errors import ConfigError

NUM_ROWS, NUM_TOKENS, MAX_PROMPT_TOKENS = 16, 8, 16


def check_repeatable(fleet: RolloutFleet, vocab_size: int) -> None:
    """Complete one fixed batch twice on every replica; ConfigError unless tokens and log-probs are the same bits."""
    random, num_rows = Random(0), min(NUM_ROWS, fleet.chunk_rows or 1)
    rows = [
        ModelRequest(
            tuple(random.randrange(vocab_size) for _ in range(random.randint(1, MAX_PROMPT_TOKENS))),
            SamplingParams(NUM_TOKENS, ignore_eos=True, seed=row),
        )
        for row in range(num_rows)
    ]
    num_copies = 2 * int(fleet.metrics()["rollout/replicas_ready"])
    copies = [fleet.submit(rows, together=True) for _ in range(num_copies)]
    answers = [[row.result() for row in copy] for copy in copies]
    bits = [[(one.output_tokens, one.output_logprobs) for one in copy] for copy in answers]
    if different := sum(copy != bits[0] for copy in bits):
        raise ConfigError(
            f"trainer.reproducible=true: {different} of {num_copies} answers to the same batch have other bits, as it "
            "is repeated and completed by several replicas; set trainer.reproducible=false, or "
            "actor_rollout_ref.rollout.full_determinism=true on replicas of one kind of device"
        )
