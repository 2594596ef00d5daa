"""verl's metric names computed from plain tensors, and the clock that times the stages of a step.

Letters: B rows, P prompt width, R response width. Tensors are those of the batch (see the layout in docs/concepts.md);
every function returns plain floats by metric name. A statistic of nothing (no valid token) is NaN, never an exception.
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

StageListener = Callable[[str], AbstractContextManager[object]]
ALL_TOKEN_STAGES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def data_metrics(rows: "Mapping[str, Tensor] | TensorDict") -> dict[str, float]:
    """Statistics of the columns of a batch: scores, rewards, advantages, returns, values if there are any, and lengths.

    `attention_mask` is (B, P+R), all other tensors (B, R). Scores and rewards are summed per row and leave out aborted
    rows (empty responses), as in verl. `critic/vf_explained_var` is 1 - var(returns - values) / (var(returns) + 1e-5).
    """
    attention_mask, values = rows["attention_mask"], rows.get("values")
    width = rows["response_mask"].shape[-1]
    prompt_lengths = attention_mask[:, :-width].sum(-1).double()
    response_lengths = attention_mask[:, -width:].sum(-1).double()
    turns = rows.get("turn_ids")  # of episodes, which have one token where nothing was drawn
    alive = response_lengths > 0 if turns is None else (turns >= 0).any(-1)
    valid = rows["response_mask"].bool()
    returns = rows["returns"][valid].double()
    metrics = {
        **_spread("critic/score", rows["token_level_scores"].double().sum(-1)[alive]),
        **_spread("critic/rewards", rows["token_level_rewards"].double().sum(-1)[alive]),
        **_spread("critic/advantages", rows["advantages"][valid].double()),
        **_spread("critic/returns", returns),
        **_length_metrics("response_length", response_lengths, width),
        **_length_metrics("response_length_non_aborted", response_lengths[alive], width),
        "response/aborted_ratio": _mean(~alive),
        **_length_metrics("prompt_length", prompt_lengths, attention_mask.shape[-1] - width),
    }
    if values is not None:
        predicted = values[valid].double()
        unexplained = (returns - predicted).var() / (returns.var() + 1e-5) if returns.numel() > 1 else math.nan
        metrics |= {**_spread("critic/values", predicted), "critic/vf_explained_var": 1.0 - unexplained}
    return {name: float(value) for name, value in metrics.items()}


def timing_metrics(
    seconds: Mapping[str, float], *, num_prompt_tokens: int, num_response_tokens: int
) -> dict[str, float]:
    """`timing_s/*` of every stage and `timing_per_token_ms/*`: generation per response token, the others per token."""
    num_tokens = dict.fromkeys(ALL_TOKEN_STAGES, num_prompt_tokens + num_response_tokens) | {"gen": num_response_tokens}
    per_token = {stage: 1000.0 * s / num_tokens[stage] for stage, s in seconds.items() if num_tokens.get(stage)}
    metrics = {f"timing_s/{stage}": float(s) for stage, s in seconds.items()}
    return metrics | {f"timing_per_token_ms/{stage}": ms for stage, ms in per_token.items()}


def throughput_metrics(*, num_tokens: int, step_s: float, num_devices: int) -> dict[str, float]:
    """`perf/{total_num_tokens,time_per_step,throughput}`; throughput is tokens per second per device.

    Without the time of a step, as in a notebook, it is left out.
    """
    total = {"perf/total_num_tokens": float(num_tokens)}
    if not step_s:
        return total
    return total | {"perf/time_per_step": step_s, "perf/throughput": num_tokens / (step_s * max(num_devices, 1))}


def reduce_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """One number per name: lists become their mean, or their max or min if the name's last part has that word."""
    return {name: _reduce(name, value) for name, value in metrics.items()}


class StageTimer:
    """Times the stages of a step and calls the listeners, e.g. `StageTimer(tracer.span, progress.stage, ledger.stage)`.

    A listener is called with the stage name and returns a context manager that surrounds the stage. Seconds of a stage
    entered twice add up; a stage that raises is timed too.
    """

    def __init__(self, *listeners: StageListener, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._listeners, self._clock, self._lock = listeners, clock, threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Generator[None]:
        start = self._clock()
        try:
            with ExitStack() as stack:
                for listener in self._listeners:
                    stack.enter_context(listener(stage))
                yield
        finally:
            spent = self._clock() - start
            with self._lock:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    def drain(self) -> dict[str, float]:
        """The seconds by stage since the last call."""
        with self._lock:
            seconds, self.seconds = self.seconds, {}
        return seconds


def _mean(values: "Tensor") -> float:
    return values.double().mean().item() if values.numel() else math.nan


def _spread(name: str, values: "Tensor") -> dict[str, float]:
    if not values.numel():
        return dict.fromkeys((f"{name}/mean", f"{name}/max", f"{name}/min"), math.nan)
    return {f"{name}/mean": _mean(values), f"{name}/max": values.max().item(), f"{name}/min": values.min().item()}


def _length_metrics(name: str, lengths: "Tensor", width: int) -> dict[str, float]:
    return {**_spread(name, lengths), f"{name}/clip_ratio": _mean(lengths == width)}


def _reduce(name: str, value: Any) -> float:
    plain = value.tolist() if hasattr(value, "tolist") else value
    items = [float(v) for v in plain] if isinstance(plain, list | tuple) else [float(plain)]
    if not items or any(math.isnan(v) for v in items):
        return math.nan
    words = name.rsplit("/", 1)[-1].split("_")
    for word, extreme in (("max", max), ("min", min)):
        if word in words:
            return extreme(items)
    return math.fsum(items) / len(items) if all(map(math.isfinite, items)) else sum(items) / len(items)
