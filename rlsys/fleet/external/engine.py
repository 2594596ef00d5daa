"""Engines over external SGLang and vLLM servers: a RolloutEngine, with AReaL's names beside the protocol's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rlsys.fleet.external.backends import Backend, SGLangBackend, VLLMBackend, WeightGroupSpec
from rlsys.fleet.external.client import ServerPool
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.fleet.external.workflow import Workflow, run_workflow
from rlsys.protocol.columns import tensors_of
from rlsys.rollout.base import SLEEP_TAGS, check_sampling, check_tags
from rlsys.types import ModelRequest, ModelResponse, ResponseDelta, SamplingParams, WeightLayout, WeightUpdateMeta
from rlsys.utils.errors import RolloutError, WeightTransferError

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

T = TypeVar("T")
CLOSE_S = 10.0
FILES_ONLY = "external servers take weights from files: write them where the servers can read, and call update_weights"


class RemoteEngine:
    """Completes requests on external servers; all methods may be called from any thread.

    `generate` and `sample` keep to the RolloutEngine protocol: what `pause` or an update cuts off comes back with
    Finish.ABORT. `complete` and `agenerate` wait until the servers continue, maybe with new weights, and finish it.
    Log-probabilities are the server's one kind, given as output_logprobs and sampled_logprobs alike; `health` names it.
    """

    def __init__(self, backend: Backend, settings: RemoteSettings, *, version: int = 0) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"remote-{backend.kind}", daemon=True)
        self._thread.start()
        self._open: dict[str, Future[list[ModelResponse]]] = {}
        self._service: ServerPool = self._do(_made(backend, settings, version))

    # ---- answers -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait until a server is up; DeadlineError after `start_s`. Every other call does this first, too."""
        self._do(self._service.connect())

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete the requests; answers in their order."""
        return self._do(self._all(requests, patient=False))

    def complete(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete the requests across pauses and weight updates; answers in their order."""
        return self._do(self._all(requests, patient=True))

    def exchange(
        self, new: Sequence[ModelRequest] = (), *, wait_s: float, cancel: Collection[str] = ()
    ) -> list[ResponseDelta]:
        """Hand in requests and take those that are complete; weight updates do not end them."""
        if self._service.quarantined:
            raise WeightTransferError("the servers are quarantined: their weights are not whole until the next update")
        for rid in cancel:
            if rid in self._open:
                self._open.pop(rid).cancel()
        self._open |= {request.rid: self._start(self._all([request], patient=True)) for request in new}
        wait(self._open.values(), timeout=wait_s)
        done = {rid: answer for rid, answer in self._open.items() if answer.done()}
        deltas = []
        for rid, answer in done.items():
            del self._open[rid]
            error = answer.exception()
            if error is not None:
                refused = isinstance(error, ValueError)
                deltas.append(ResponseDelta(rid, error=f"{type(error).__name__}: {error}", refused=refused))
                continue
            [made] = answer.result()
            full, sampled = made.output_logprobs, made.sampled_logprobs
            deltas.append(ResponseDelta(rid, made.output_tokens, full, sampled, made.output_versions, made.stop_reason))
        return deltas

    async def sample(self, token_ids: Sequence[int], params: SamplingParams, session: str = "") -> ModelResponse:
        """Complete one prompt; requests of one session go to the same server as long as it serves."""
        request = ModelRequest(tuple(token_ids), params, session=session)
        return (await asyncio.wrap_future(self._start(self._all([request], patient=False))))[0]

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Complete one request across pauses and weight updates; each token has the version that made it."""
        return (await asyncio.wrap_future(self._start(self._all([req], patient=True))))[0]

    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: Workflow) -> DataProto:
        """Run the workflow on every row at once; the trajectories of those it did not reject, as one batch.

        To be called outside of an event loop; inside one, await `run_workflow(engine, data, workflow)`.
        """
        return asyncio.run(run_workflow(self, data, workflow))

    def compute_log_prob(self, batch: DataProto, *, temperature: float = 1.0) -> Tensor:
        """Log-probabilities (B, R) of the responses; servers score prompts at temperature 1 only."""
        if temperature != 1.0:
            raise ValueError(f"servers score given tokens at temperature 1 only, not {temperature:g}")
        rows = tensors_of(batch.batch)
        width = rows["responses"].shape[1]
        mask = rows["attention_mask"].bool()
        counted = rows.get("response_mask", rows["attention_mask"][:, -width:])
        lines = [ids[kept].tolist() for ids, kept in zip(rows["input_ids"], mask, strict=True)]
        scores = torch.zeros(mask.shape)
        scores[mask] = torch.tensor([value for line in self._do(self._scores(lines)) for value in (0.0, *line)])
        return torch.where(counted > 0, scores[:, -width:], 0.0)

    async def _all(self, requests: Sequence[ModelRequest], *, patient: bool) -> list[ModelResponse]:
        for request in requests:
            if not request.input_ids or min(request.input_ids) < 0:
                raise ValueError(f"request {request.rid}: a prompt is one token id from 0 up, or more")
            try:
                check_sampling(request.gconfig)
            except ValueError as error:
                raise ValueError(f"request {request.rid}: {error}") from error
        if not patient and self._service.quarantined:
            raise WeightTransferError("the servers are quarantined: their weights are not whole until the next update")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._service.complete(request, patient=patient)) for request in requests]
        return [task.result() for task in tasks]

    async def _scores(self, lines: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*(self._service.score(line) for line in lines)))

    # ---- weights -----------------------------------------------------------------------------------------------

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Bring all servers to `meta.version` from the folder `meta.weights_path`, which they must be able to read.

        A full model interrupts what runs: `complete` and `agenerate` continue with the new weights. With metadata
        `lora_name` the folder holds an adapter; it is loaded beside the older ones as `<lora_name>-v<version>`
        and nothing is interrupted, or with `in_place` under the name itself. The future raises WeightTransferError when
        no server took it; a server that failed alone is out until it has taken it.

        With metadata `group`, `names`, `dtypes` and `shapes` (SGLang only) the tensors come over a process group that
        `init_weights_update_group` made: broadcast them from rank 0 in that order while the future is open.
        """
        return self._start(self._service.update(meta))

    def init_weights_update_group(self, group: WeightGroupSpec) -> Future[None]:
        """Let all servers join a process group; the future is done when the trainer has joined as rank 0, too."""
        return self._start(self._service.join_group(group))

    def set_version(self, version: int) -> None:
        """Say that the servers' present weights are this version."""
        self._do(self._service.set_version(version))

    def get_version(self) -> int:
        return self._service.version

    def pause(self) -> None:
        """Interrupt what runs and start nothing until `resume`."""
        self._do(self._service.stop())

    def resume(self) -> None:
        self._do(self._service.go())

    def begin_update(self) -> None:
        """Interrupt what runs; `generate` and `sample` refuse until `finish_update`."""
        self._do(self._service.stop(quarantine=True))

    def finish_update(self, version: int) -> None:
        self.set_version(version)
        self._do(self._service.go())

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        raise WeightTransferError(FILES_ONLY)

    def weight_layout(self) -> WeightLayout:
        raise WeightTransferError(FILES_ONLY)

    def local_tensors(self) -> Mapping[str, Tensor]:
        raise WeightTransferError(FILES_ONLY)

    # ---- life --------------------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Let the servers give memory back, where they were started for that."""
        check_tags(tags)
        self._do(self._service.call_all(self._service.backend.sleep(tags), "sleep"))

    def wake(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        check_tags(tags)
        self._do(self._service.call_all(self._service.backend.wake(tags), "wake"))

    def health(self) -> dict[str, Any]:
        """What is known of the servers, without asking them."""
        service = self._service
        return {
            "version": service.version,
            "adapter": service.adapter,
            "quarantined": service.quarantined,
            "paused": not service.gate.is_set(),
            "running": service.num_running,
            "servers": {
                server.url: {
                    "admitted": server.admitted,
                    "load": server.load,
                    "served": server.served,
                    "trips": server.trips,
                    "weights": server.identity,
                    "version": server.version,
                    "logprobs": server.logprobs,
                    "cause": server.cause,
                }
                for server in service.router.servers
            },
        }

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the number of servers that serve."""
        admitted = sum(server.admitted for server in self._service.router.servers)
        counts = {**self._service.counts, "servers_ready": admitted}
        return {f"rollout/remote/{name}": float(count) for name, count in counts.items()}

    def close(self) -> None:
        """Give up what waits; the servers stay as they are."""
        if self._loop.is_closed():
            return
        self._do(self._service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RolloutError("the remote engine is closed")
        return asyncio.run_coroutine_threadsafe(_first_error(work), self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        waiting = self._start(work)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise


class SGLangRemoteEngine(RemoteEngine):
    """RemoteEngine over SGLang servers."""

    def __init__(self, settings: RemoteSettings, *, version: int = 0) -> None:
        super().__init__(SGLangBackend(), settings, version=version)


class VLLMRemoteEngine(RemoteEngine):
    """RemoteEngine over vLLM's OpenAI servers."""

    def __init__(self, settings: RemoteSettings, *, version: int = 0) -> None:
        super().__init__(VLLMBackend(), settings, version=version)


async def _made(backend: Backend, settings: RemoteSettings, version: int) -> ServerPool:
    return ServerPool(backend, settings, version=version)


async def _first_error(work: Coroutine[Any, Any, T]) -> T:
    """The result, or of several errors at once the first."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
