"""Fleets over external SGLang and vLLM servers, with AReaL's names beside a fleet's own."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlsys.fleet.external.backends import Backend, SGLangBackend, VLLMBackend
from rlsys.fleet.external.server_pool import SendWeights, ServerPool
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.fleet.fleet import RolloutFleet
from rlsys.fleet.requests import FleetDeadlines, Replica
from rlsys.protocol import DataProto
from rlsys.rollout.batch import score_sequences
from rlsys.rollout.partial import PartialResponse
from rlsys.types import (
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    ModelRequest,
    ModelResponse,
    WeightUpdateMeta,
)
from rlsys.utils.errors import WeightTransferError

MAX_RESTARTS = 1_000_000
RESTART_S = 30.0
PADS = {"versions": -1, "turn_ids": -1}
Trajectory = Mapping[str, Tensor]


class RemoteEngine(RolloutFleet):
    """A fleet whose replicas are servers; all methods may be called from any thread.

    A request that a weight update interrupts continues with the new weights. Log-probabilities are the server's one
    kind, given as output_logprobs and sampled_logprobs alike; `health` names it. A server that is out does not hold up
    weight updates; it gets the weights before it serves again.
    """

    recovers_before_push = False
    backend_cls: type[Backend]
    tokenizer: Any = None

    def __init__(self, settings: RemoteSettings, *, version: int = 0) -> None:
        servers = settings.servers
        self.settings, self.pool = settings, ServerPool(self.backend_cls(), settings, version=version)
        self._connected = False
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="update-weights")
        super().__init__(
            self.pool.servers,
            chunk_rows=None,
            deadlines=FleetDeadlines(generate_s=settings.request_s, restart_s=RESTART_S),
            on_restart=self._bring,
            max_attempts=servers.max_retries + 1,
            max_restarts=MAX_RESTARTS,
            max_in_flight=-(-servers.max_concurrent // len(settings.urls)),
            max_failures=settings.breaker_failures,
            affinity=servers.policy == "affinity",
        )
        self.version, self.server_urls, self.session = version, list(settings.urls), self.pool.session

    def connect(self) -> None:
        """Wait until a server is up; DeadlineError after `start_s`. The first call does this, too."""
        if not self._connected:
            self.pool.do(self.pool.connect())
            self._connected = True

    def submit(
        self, work: Sequence[ModelRequest | PartialResponse], *, together: bool = False
    ) -> list[Future[ModelResponse]]:
        self.connect()
        if self.pool.quarantined:
            raise WeightTransferError("the servers are quarantined: their weights are not whole until the next update")
        return super().submit(work, together=together)

    async def agenerate(self, req: ModelRequest | LLMRequest) -> ModelResponse | LLMResponse:
        """Complete one request across weight updates; each token has the version that made it.

        A request in text needs `tokenizer` to be set; ValueError without it, or if the answer should be streamed.
        """
        if isinstance(req, ModelRequest):
            return await self.sample(req)
        if self.tokenizer is None or req.stream:
            raise ValueError("requests in text need engine.tokenizer and stream=False: an answer is given as a whole")
        params = GenerationHyperparameters(**req.generation_config)
        response = await self.sample(ModelRequest(self.tokenizer.encode(req.text), params, rid=req.request_id))
        text = self.tokenizer.decode(list(response.output_tokens), skip_special_tokens=True)
        usage = {"prompt_tokens": len(response.input_tokens), "completion_tokens": len(response.output_tokens)}
        return LLMResponse(text, response.logprobs, response.stop_reason.value, usage)

    def rollout_batch(self, data: Sequence[Mapping[str, object]], workflow: object) -> DataProto:
        """Run the workflow on every row at once; the trajectories of those it did not reject, as one batch.

        To be called outside of an event loop; inside one, await `run_workflow(engine, data, workflow)`.
        """
        return asyncio.run(run_workflow(self, data, workflow))

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`rollout_log_probs` (B, R) as the servers score the responses, which they do at temperature 1 only."""
        temperature = data.meta_info.get("temperature", 1.0)
        if temperature != 1.0:
            raise ValueError(f"servers score given tokens at temperature 1 only, not {temperature:g}")

        def scored(sequences: list[list[int]], lengths: list[int]) -> list[tuple[int, list[float]]]:
            pending = [self.pool.start(self.pool.scores(ids)) for ids in sequences]
            values = zip((scores.result() for scores in pending), lengths, strict=True)
            return [(row, scores[len(scores) - length :]) for row, (scores, length) in enumerate(values)]

        self.connect()
        return DataProto.from_dict({"rollout_log_probs": torch.as_tensor(score_sequences(data, scored))})

    # ---- weights -----------------------------------------------------------------------------------------------

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Bring all servers to `meta.version` from the folder `meta.weights_path`, which they must be able to read.

        A full model interrupts what runs, which continues with the new weights. With metadata `lora_name` the folder
        holds an adapter; it is loaded beside the older ones as `<lora_name>-v<version>` and nothing is interrupted.
        The future raises WeightTransferError when no server took it; a server that failed alone is out until it has
        taken it.
        """

        def update() -> None:
            with self.pushing(meta.version):
                self.load_weights(meta)

        self.connect()
        return self._updates.submit(update)

    def load_weights(
        self, meta: WeightUpdateMeta, deadline_s: float | None = None, send: SendWeights | None = None
    ) -> None:
        """As `update_weights`, for a caller that holds the fleet in `pushing`; with `send` without a folder."""
        self.connect()
        self.pool.do(self.pool.update(meta, send), deadline_s, "the external servers", "update_weights")

    def set_version(self, version: int) -> None:
        """Say that the servers' present weights are this version."""
        self.pool.version = self.version = version

    def get_version(self) -> int:
        return self.pool.version

    def _bring(self, replica: Replica) -> None:
        server = next(server for server in self.pool.servers if server is replica)
        if not server.is_admitted:
            self.pool.do(server.admit(), self.settings.update_s, server.url, "update_weights")

    def pause(self) -> None:
        """Interrupt all servers, which keep their tokens, and hand them nothing until `resume` or `update_weights`."""
        self._is_pushing = True
        self.settle()
        self.pool.do(self.pool.stop())

    def resume(self) -> None:
        """Let the servers continue."""
        with self.pushing(self.get_version()):
            self.pool.do(self.pool.resume())

    # ---- life --------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, object]:
        """What is known of the servers, without asking them."""
        servers = {server.url: server.about() for server in self.pool.servers}
        return {"version": self.version, "adapter": self.pool.adapter, "servers": servers}

    def close(self) -> None:
        """Give up what waits; the servers stay as they are."""
        super().close()
        self._updates.shutdown(wait=True)
        self.pool.close()


class SGLangRemoteEngine(RemoteEngine):
    """RemoteEngine over SGLang servers."""

    backend_cls = SGLangBackend


class VLLMRemoteEngine(RemoteEngine):
    """RemoteEngine over vLLM's OpenAI servers."""

    backend_cls = VLLMBackend


async def run_workflow(engine: object, data: Sequence[Mapping[str, object]], workflow: Any) -> DataProto:
    """Run AReaL's `arun_episode(engine, row)`, or a function like it, on every row at once.

    It gives tensors (n, T) or (n,) by name, or None to reject the row. Returns the trajectories of the other rows in
    their order; meta_info counts `accepted` and `rejected`. The first error of a row ends the others and is raised with
    the row's number; ValueError where all are rejected.
    """
    run = workflow if callable(workflow) else workflow.arun_episode

    async def episode(number: int, row: Mapping[str, object]) -> Trajectory | None:
        try:
            return await run(engine, row)
        except Exception as error:
            error.add_note(f"rollout_batch: row {number}")
            raise

    tasks = [asyncio.ensure_future(episode(number, row)) for number, row in enumerate(data)]
    try:
        trajectories = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    kept = [trajectory for trajectory in trajectories if trajectory is not None]
    if not kept:
        raise ValueError(f"the workflow rejected all {len(trajectories)} rows")
    meta = {"accepted": len(kept), "rejected": len(trajectories) - len(kept)}
    return DataProto.from_dict(padded(kept), meta_info=meta)


def padded(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """All trajectories below each other, padded on the right: with 0, versions and turn_ids with -1."""
    names = trajectories[0].keys()
    if any(trajectory.keys() != names for trajectory in trajectories):
        raise ValueError("the workflow's trajectories have different fields")
    rows = {name: [row for trajectory in trajectories for row in trajectory[name]] for name in names}
    return {
        name: pad_sequence(of, batch_first=True, padding_value=PADS.get(name, 0)) if of[0].ndim else torch.stack(of)
        for name, of in rows.items()
    }
