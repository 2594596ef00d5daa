"""Fleets over external SGLang and vLLM servers, with AReaL's names beside a fleet's own."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlsys.fleet.external.backends import Backend, SGLangBackend, VLLMBackend, adapter_of
from rlsys.fleet.external.http import ServerFault, open_session
from rlsys.fleet.external.server import ServerReplica
from rlsys.fleet.external.settings import KEY, RemoteSettings
from rlsys.fleet.fleet import RolloutFleet, Work
from rlsys.fleet.requests import FleetDeadlines, Replica
from rlsys.protocol import DataProto
from rlsys.rollout.batch import score_sequences
from rlsys.types import LLMRequest, LLMResponse, ModelRequest, ModelResponse, WeightUpdateMeta
from rlsys.utils.daemon_threads import LoopThread, cancel_others
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError

T = TypeVar("T")
SendWeights = Callable[[Sequence[ServerReplica], int], Awaitable[Sequence[ServerReplica]]]
"""Sends a version to servers; returns those that have received it."""
MAX_RESTARTS = 1_000_000
RESTART_S, CLOSE_S, POLL_S = 30.0, 10.0, 0.5
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

    def __init__(self, settings: RemoteSettings) -> None:
        servers = settings.servers
        self.settings, self.backend = settings, self.backend_cls()
        self.adapter, self.quarantined, self._connected = "", False, False
        self.job = secrets.token_hex(8)  # a server may still know images by the weights of another job
        self.weights: WeightUpdateMeta | None = None
        self._adapters: list[str] = []
        self._thread = LoopThread(f"remote-{self.backend.kind}")
        self.servers = [ServerReplica(url, self) for url in settings.urls]
        self.session, self.updating = self.do(open_session(settings.token)), asyncio.Lock()
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="update-weights")
        super().__init__(
            self.servers,
            chunk_rows=None,
            deadlines=FleetDeadlines(generate_s=settings.request_s, restart_s=RESTART_S),
            on_restart=self._bring,
            max_attempts=servers.max_retries + 1,
            max_restarts=MAX_RESTARTS,
            max_in_flight=-(-servers.max_concurrent // len(settings.urls)),
            max_failures=settings.breaker_failures,
            affinity=servers.policy == "affinity",
        )
        self.version, self.server_urls = 0, list(settings.urls)

    def _start(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        if self._thread.loop.is_closed():
            work.close()
            raise RolloutError("the remote engine is closed")
        return self._thread.start(work)

    def do(self, work: Coroutine[object, None, T], limit_s: float | None = None, who: str = "", stage: str = "") -> T:
        """The coroutine's result; DeadlineError after `limit_s`."""
        waiting = self._start(work)
        try:
            if not wait([waiting], limit_s).done:
                cause = next((server.cause for server in self.servers if server.url == who), "")
                raise DeadlineError(who, stage, limit_s or 0.0, cause)
            return waiting.result()
        finally:
            waiting.cancel()

    def connect(self) -> None:
        """Wait until a server is up; DeadlineError after `start_s`. The first call does this, too."""
        if not self._connected:
            self.do(self._first_admitted())
            self._connected = True

    async def _first_admitted(self) -> None:
        """Wait until a server is up; the others are admitted when they come up."""
        end_s = time.monotonic() + self.settings.start_s
        while not any(server.is_admitted for server in self.servers):
            await asyncio.gather(*(server.admit() for server in self.servers), return_exceptions=True)
            if time.monotonic() > end_s and not any(server.is_admitted for server in self.servers):
                states = "; ".join(server.cause for server in self.servers)
                who = " and ".join(self.settings.urls)
                raise DeadlineError(who, "start", self.settings.start_s, f"start the servers first. {states}")
            await asyncio.sleep(0 if any(server.is_admitted for server in self.servers) else POLL_S)

    def submit(self, work: Work, *, together: bool = False) -> list[Future[ModelResponse]]:
        self.connect()
        if self.quarantined and not self._is_pushing:  # in a push they wait for it
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
        response = await self.sample(ModelRequest(self.tokenizer.encode(req.text), req.gconfig, rid=req.request_id))
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
            pending = [self._start(self._scores(ids)) for ids in sequences]
            values = zip((scores.result() for scores in pending), lengths, strict=True)
            return [(row, scores[len(scores) - length :]) for row, (scores, length) in enumerate(values)]

        self.connect()
        return DataProto.from_dict({"rollout_log_probs": torch.as_tensor(score_sequences(data, scored))})

    async def _scores(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of every token but the first, by the first server that gives them."""
        error: Exception = RolloutError("no server is up")
        for server in sorted(self.servers, key=lambda s: not s.is_admitted) * (1 + self.settings.servers.max_retries):
            try:
                return await server.score(token_ids)
            except ServerFault as fault:
                error = fault
        raise error

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
                self.load_weights(meta, None)

        self.connect()
        return self._updates.submit(update)

    def load_weights(self, meta: WeightUpdateMeta, deadline_s: float | None, send: SendWeights | None = None) -> None:
        """As `update_weights`, for a caller that holds the fleet in `pushing`; with `send` without a folder."""
        self.connect()
        self.do(self._update(meta, send), deadline_s, "the external servers", "update_weights")

    async def _update(self, meta: WeightUpdateMeta, send: SendWeights | None = None) -> None:
        """Bring every server to new weights, which it loads or `send` sends; those that fail are out until they have
        them."""
        adapter = adapter_of(meta)
        async with self.updating:
            if not adapter:
                self.quarantined = True
                await self._stop()
            servers = [server for server in self.servers if server.logprobs]
            reached = await send(servers, meta.version) if send else servers
            await asyncio.gather(*(server.attempt(server.take(meta)) for server in reached))
            if not any(server.is_admitted for server in self.servers):
                causes = "\n  ".join(server.cause for server in self.servers)
                needs = f"(they must see {meta.weights_path}: {KEY}.weights_dir; vLLM needs VLLM_SERVER_DEV_MODE=1)"
                hint = f"\n{needs}" if meta.weights_path else ""
                raise WeightTransferError(f"no server took version {meta.version}:\n  {causes}{hint}")
            self.weights, self.version, self.adapter = meta, meta.version, adapter
            if not adapter:
                await self._resume()
                self.quarantined = False
            await self._forget_adapters()

    async def _forget_adapters(self) -> None:
        if self.adapter and self.adapter not in self._adapters:
            self._adapters.append(self.adapter)
        while len(self._adapters) > self.settings.keep_adapters:
            call = self.backend.unload_adapter(self._adapters.pop(0))
            unloaded = (server.send("unload", call) for server in self.servers if server.is_admitted)
            await asyncio.gather(*unloaded, return_exceptions=True)

    def set_version(self, version: int) -> None:
        """Say that the servers' present weights are this version."""
        self.version = version

    def get_version(self) -> int:
        assert self.version is not None
        return self.version

    def _bring(self, replica: Replica) -> None:
        if isinstance(replica, ServerReplica) and not replica.is_admitted:
            self.do(replica.admit(), self.settings.update_s, replica.url, "update_weights")

    def pause(self) -> None:
        """Interrupt all servers, which keep their tokens, and hand them nothing until `resume` or `update_weights`."""
        self._is_pushing = True
        self.settle()
        self.do(self._stop())

    def resume(self) -> None:
        """Let the servers continue."""
        with self.pushing(self.get_version()):
            self.do(self._resume())

    async def _stop(self) -> None:
        """Interrupt running requests, keeping their tokens."""
        await asyncio.gather(*(server.interrupt() for server in self.servers if server.is_admitted))

    async def _resume(self) -> None:
        await asyncio.gather(*(s.attempt(s.send("resume", self.backend.resume)) for s in self.servers if s.is_admitted))

    # ---- life --------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, object]:
        """What is known of the servers, without asking them."""
        servers = {server.url: server.about() for server in self.servers}
        return {"version": self.version, "adapter": self.adapter, "servers": servers}

    def close(self) -> None:
        """Give up what waits; the servers stay as they are."""
        super().close()
        self._updates.shutdown(wait=True)
        if not self._thread.loop.is_closed():
            self._thread.close(self._close(), wait_s=CLOSE_S)

    async def _close(self) -> None:
        await cancel_others()
        await self.session.close()


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
    if not (kept := [trajectory for trajectory in trajectories if trajectory is not None]):
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
        name: pad_sequence(own, batch_first=True, padding_value=PADS.get(name, 0)) if own[0].ndim else torch.stack(own)
        for name, own in rows.items()
    }
