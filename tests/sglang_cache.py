"""SGLang with a cache that is too small for its requests, so that it retracts some; and with equal prompts in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.ipc.rpc import Method
from rlsys.rollout.base import EngineContext
from rlsys.types import SamplingParams
from tests.contracts.rollout_engine import Driver, requests_of


def shaken(engine: Any) -> Mapping[str, Method]:
    """Logits differ each time they are computed, and by much more than a GPU's; retractions are counted."""
    force, retract, retracted = engine.sampler.force, engine.sampler.retract, list[object]()

    def shake(logits: Tensor, *args: Any) -> None:
        force(logits.add_(torch.randn_like(logits)), *args)

    def count(*args: Any) -> None:
        retracted.append(args)
        retract(*args)

    engine.sampler.force, engine.sampler.retract = shake, count
    return {"num_retracted": lambda: len(retracted)}


def check_retracted(model: Path, context: EngineContext, *, wait_s: float, updates: int = 0) -> None:
    """14 requests, of which the cache holds 6 at their longest, are answered with what was sampled.

    What is sampled is reported every `wait_s`, and in `updates`, which keep the cache. A step runs ahead of its
    outputs, on a CPU too: SGLang drops the token of a request that it retracts meanwhile.
    """
    from rlsys.rollout.sglang.engine import SGLangRollout

    options = {"max_total_tokens": 400, "schedule_conservativeness": 0.02, "disable_overlap_schedule": False}
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 128, "enforce_eager": True}
    config = GenerationConfig(seed=11, on_update="keep", engine_kwargs={"sglang": options}, **sizes)
    engine = SGLangRollout(model, config, context, methods=shaken)
    try:
        driver = Driver(engine)
        driver.exchange(requests_of(14, SamplingParams(60, min_new_tokens=58), shortest=20), wait_s=wait_s)
        for version in range(1, updates + 1):
            driver.exchange(wait_s=wait_s)
            engine.begin_update()
            engine.finish_update(version)
        responses = driver.finish(wait_s=wait_s)
        assert max(version for response in responses for version in response.output_versions) >= updates // 2
        assert engine.remote.call("num_retracted", deadline_s=30.0) > 0
        assert all(59 <= len(response.output_tokens) <= 60 for response in responses)
    finally:
        engine.close()


def count_read(engine: Any) -> Mapping[str, Method]:
    """How many tokens of prompts are read, cached ones not."""
    run_batch, num_read = engine._scheduler.run_batch, list[int]()

    def run(batch: Any, *args: object, **kwargs: object) -> object:
        num_read.append(batch.extend_num_tokens if batch.forward_mode.is_extend() else 0)
        return run_batch(batch, *args, **kwargs)

    engine._scheduler.run_batch = run
    return {"num_read": lambda: sum(num_read)}
