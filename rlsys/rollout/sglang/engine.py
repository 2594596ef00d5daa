"""SGLangRollout: SGLang behind the RolloutEngine protocol, its scheduler in a process of its own.

SGLang schedules, batches and runs the model; tokens are drawn by us inside its scheduler process
(`rlsys.rollout.sglang.sampler`), so that equal requests give equal tokens in any batch and on any engine.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from rlsys.ipc.rpc import Method, RpcClient
from rlsys.protocol.columns import tensors_of
from rlsys.rollout.base import SLEEP_TAGS, STEP_WAIT_S, Deliver, Pull, ServingEngine, Ticket
from rlsys.rollout.hf.engine import LoadFormat
from rlsys.rollout.hf_files import eos_of, model_length, vocabulary
from rlsys.rollout.sampling.hook import DrawParams
from rlsys.rollout.sampling.log import answers_of
from rlsys.rollout.sglang.arguments import Replica, server_arguments
from rlsys.rollout.sglang.launch import Running
from rlsys.rollout.sglang.sampler import request_name
from rlsys.rollout.sglang.scheduler_hooks import Inside, InsideEngine
from rlsys.rollout.sglang.version import SGLANG
from rlsys.types import Finish, ModelRequest, ModelResponse, WeightLayout
from rlsys.utils.errors import ConfigError, RolloutError, WeightTransferError

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

TICK_S = 0.02
"""How often new requests, finished ones and a call to stop are looked for."""
CALL_WAIT_S = 300.0
GREEDY = (0, 0.0, 1.0, -1, 0, ())
"""A draw that nobody looks at: seed, temperature, top_p, top_k, min_new_tokens, stop_ids."""
Asked = Future[Mapping[str, Any]]


def no_methods(inside: InsideEngine) -> Mapping[str, Method]:
    """Nobody transfers weights but by `load`."""
    return {}


class SGLangRollout(ServingEngine):
    """A RolloutEngine over SGLang's Engine, one rank of a replica.

    Parameters live in the scheduler process: `methods` run there and are called by `remote.call`; `weight_layout` and
    `local_tensors` are refused here. Ranks after the first answer every request with nothing, since the first one
    serves. `kv_cache_gib` is a CPU's cache, `gpu_memory_utilization` bounds what a GPU holds; `engine_kwargs` are
    SGLang's own arguments. `full_determinism` asks for log-probabilities as near the trainer's as SGLang can.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        load_format: LoadFormat = "auto",
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gib: float = 1,
        enforce_eager: bool = False,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        cuda_graph_max_bs: int | None = None,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        disable_log_stats: bool = True,
        full_determinism: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
        replica: Replica | None = None,
        keep_asleep: bool = True,
        methods: Callable[[InsideEngine], Mapping[str, Method]] = no_methods,
        start_s: float = 900.0,
        version: int = 0,
        rank: int = 0,
        host: str = "",
    ) -> None:
        super().__init__(
            vocab_size=vocabulary(path),
            max_model_len=max_model_len or model_length(path),
            eos_token_ids=eos_of(path) if eos_token_ids is None else eos_token_ids,
            device="cpu" if device == "cpu" else "cuda",
            quarantined=load_format == "dummy",
            keep_asleep=(engine_kwargs or {}).get("enable_weights_cpu_backup", keep_asleep),
            version=version,
            rank=rank,
            host=host,
        )
        self.replica, self._numbers = replica or Replica(), itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="rlsys-sglang-")
        socket = Path(self._folder.name) / "scheduler"
        arguments = server_arguments(
            str(path),
            load_format=load_format,
            dtype=dtype,
            device=self.device,
            seed=seed,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            max_cache_tokens=_cache_tokens(path, dtype, kv_cache_gib),
            enforce_eager=enforce_eager,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            cuda_graph_max_bs=cuda_graph_max_bs,
            cudagraph_capture_sizes=cudagraph_capture_sizes,
            disable_log_stats=disable_log_stats,
            full_determinism=full_determinism,
            replica=self.replica,
            adapter=SGLANG.chosen(),
            engine_kwargs={"enable_weights_cpu_backup": keep_asleep and self.device == "cuda", **(engine_kwargs or {})},
        )
        inside = Inside(str(socket), str(path), dtype, seed, self.leads, methods)
        self._running = Running(arguments, inside, socket=socket, deadline_s=start_s)
        callbacks = {"begin_update": self.begin_update, "finish_update": self._taken}
        peer = f"SGLang's scheduler of rollout rank {rank}"
        self.remote = RpcClient(socket, peer, callbacks, error=RolloutError)
        self._check_room()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that serves its replica's requests."""
        return self.replica.rank == 0

    @property
    def server_args(self) -> Any:
        """SGLang's own view of its arguments."""
        return self._running.engine.server_args

    def _decode(self, pull: Pull, deliver: Deliver) -> int:
        running: dict[Asked, tuple[Ticket, int]] = {}
        num_tokens, stop_by_s = 0, 0.0
        try:
            while True:
                for ticket in pull():
                    if not self.leads or self._stopped():
                        deliver(ticket.number, _nothing(ticket.request))
                    else:
                        asked, number = self._ask_for(ticket)
                        running[asked] = ticket, number
                if not running:
                    return num_tokens
                if self._stopped():
                    stop_by_s = stop_by_s or time.monotonic() + STEP_WAIT_S
                    self._abort_all(stop_by_s)
                done, _ = wait(running, timeout=TICK_S, return_when=ALL_COMPLETED)
                self.remote.check_alive()
                num_tokens += self._deliver({asked: running.pop(asked) for asked in done}, deliver)
        finally:
            if running:
                self._abort_all(time.monotonic() + STEP_WAIT_S)

    def _ask_for(self, ticket: Ticket) -> tuple[Asked, int]:
        draw = DrawParams.of(ticket, next(self._numbers))
        return self._ask(ticket.request.input_ids, draw, ticket.max_new_tokens, ticket.stop_ids), draw.number

    def _ask(
        self, ids: Sequence[int], draw: DrawParams, max_tokens: int, stop_ids: Sequence[int], *, score_from: int = -1
    ) -> Asked:
        """Hand a request to SGLang, which takes the tokens that we draw; log-probabilities from `score_from` on."""
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": max_tokens}
        params |= {"stop_token_ids": list(stop_ids)} if stop_ids else {"ignore_eos": True}
        scored = {"return_logprob": True, "logprob_start_len": score_from} if score_from >= 0 else {}
        return self._running.submit(
            self._running.engine.async_generate(
                input_ids=list(ids), sampling_params=params, rid=request_name(draw), **scored
            )
        )

    def _abort_all(self, stop_by_s: float) -> None:
        """Asked again at every tick, since a request may be on its way."""
        if time.monotonic() > stop_by_s:
            raise RolloutError(f"SGLang did not abort its requests within {STEP_WAIT_S:g} s: it hangs in a step")
        manager = self._running.engine.tokenizer_manager
        self._running.loop.call_soon_threadsafe(lambda: manager.abort_request(abort_all=True))

    def _deliver(self, done: Mapping[Asked, tuple[Ticket, int]], deliver: Deliver) -> int:
        """Pair what SGLang answers with what was drawn; returns the number of tokens."""
        if not done:
            return 0
        numbers = [number for _, number in done.values()]
        drawn = answers_of(*self.remote.call("take_draws", numbers, deadline_s=CALL_WAIT_S))
        num_tokens = 0
        for (asked, (ticket, _)), found in zip(done.items(), drawn, strict=True):
            answer = asked.result()
            tokens = tuple(answer["output_ids"])
            response = self._answered(ticket.request, found.first(len(tokens)), _finish(answer))
            if response.output_tokens != tokens:
                raise RolloutError(f"SGLang took other tokens than were drawn for request {ticket.request.rid}")
            num_tokens += len(tokens)
            deliver(ticket.number, response)
        return num_tokens

    def _score(self, batch: DataProto, temperature: float) -> Tensor:
        rows = tensors_of(batch.batch)
        attention, num_columns = rows["attention_mask"].cpu(), rows["responses"].shape[1]
        sequences = [ids[mask.bool()].tolist() for ids, mask in zip(rows["input_ids"].cpu(), attention, strict=True)]
        lengths = attention[:, -num_columns:].sum(1).tolist()
        scores = torch.zeros(len(sequences), num_columns)
        if not self.leads:
            return scores
        self.remote.call("score_at", temperature, deadline_s=CALL_WAIT_S)
        try:
            asked = [
                self._ask(ids, DrawParams(next(self._numbers), len(ids), *GREEDY), 1, (), score_from=len(ids) - n - 1)
                for ids, n in zip(sequences, lengths, strict=True)
            ]
            for row, (future, n) in enumerate(zip(asked, lengths, strict=True)):
                found = self._result(future)["meta_info"]["input_token_logprobs"]
                scores[row, :n] = torch.tensor([entry[0] for entry in found[len(found) - n :]])
        finally:
            self.remote.call("score_at", 1.0, deadline_s=CALL_WAIT_S)
        counted = rows.get("response_mask", attention[:, -num_columns:]).cpu()
        return torch.where(counted > 0, scores, 0.0)

    def _result(self, asked: Asked) -> Mapping[str, Any]:
        """Wait for an answer as long as the scheduler lives."""
        while True:
            wait([asked], timeout=1.0)
            if asked.done():
                return asked.result()
            self.remote.check_alive()

    def check_weights_awake(self) -> None:
        """WeightTransferError while the weights are given back: nobody may touch them."""
        self._awake_weights()

    def begin_update(self) -> None:
        """Abort what runs, clear the cache that the old weights made, and wait until no rank computes."""
        self._awake_weights()
        super().begin_update()
        if self.leads:
            end_s = time.monotonic() + STEP_WAIT_S
            while not self._flush():
                if time.monotonic() > end_s:
                    raise WeightTransferError(f"SGLang did not come to rest within {STEP_WAIT_S:g} s")
                time.sleep(TICK_S)
        self.remote.call("wait_quiet", deadline_s=CALL_WAIT_S)

    def _flush(self) -> bool:
        manager = self._running.engine.tokenizer_manager
        return self._running.wait(manager.flush_cache(), "flush_cache", STEP_WAIT_S).success

    def finish_update(self, version: int) -> None:
        self.remote.call("finish", deadline_s=CALL_WAIT_S)
        super().finish_update(version)

    def _taken(self, version: int) -> None:
        """A weight transfer in the scheduler process has come to its end there."""
        super().finish_update(version)

    def weight_layout(self) -> WeightLayout:
        raise WeightTransferError("SGLang's parameters are in its scheduler process: ask for their layout there")

    def local_tensors(self) -> Mapping[str, Tensor]:
        raise WeightTransferError("SGLang's parameters are in its scheduler process and cannot be reached from here")

    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._awake_weights()
        self.remote.call("load", list(bucket), deadline_s=CALL_WAIT_S)

    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None:
        due = [tag for tag in SLEEP_TAGS if tag in tags and (tag in self._asleep) != asleep]
        if not self.leads or not due:
            return
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        manager = self._running.engine.tokenizer_manager
        if asleep:
            move = manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=due))
        else:
            move = manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=due))
        self._running.wait(move, "sleep" if asleep else "wake", CALL_WAIT_S)

    def _free(self) -> None:
        self.remote.close()
        self._running.stop()
        self._folder.cleanup()

    def _check_room(self) -> None:
        """ConfigError where the cache is too small for the longest request: SGLang would cut answers short."""
        room = self._running.num_cache_tokens
        if room is not None and room < self.max_model_len:
            self.close()
            raise ConfigError(
                f"SGLang's cache has room for {room} tokens, the longest request has {self.max_model_len}: raise "
                "actor_rollout_ref.rollout.gpu_memory_utilization (on CPU kv_cache_gib) or set a max_model_len"
            )


def _nothing(request: ModelRequest) -> ModelResponse:
    return ModelResponse(request.rid, request.input_ids, (), (), (), (), Finish.ABORT)


def _finish(answer: Mapping[str, Any]) -> Finish:
    kind = answer["meta_info"]["finish_reason"]["type"]
    return Finish(kind) if kind in ("stop", "length") else Finish.ABORT


def _cache_tokens(path: str | Path, dtype: str, gib: float) -> int:
    """How many tokens' keys and values fit into so much memory."""
    text: Any = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head
    return int(gib * 2**30) // (2 * text.num_hidden_layers * width * getattr(torch, dtype).itemsize)
