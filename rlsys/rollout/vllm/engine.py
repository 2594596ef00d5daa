"""VLLMRollout: vLLM in this process behind the RolloutEngine protocol.

vLLM schedules, batches and runs the model; tokens are drawn by us inside its sampler (`rollout.sampling.hook`), so that
equal requests give equal tokens in any batch and log-probabilities cost no pass over the sorted vocabulary.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.protocol.columns import tensors_of
from rlsys.rollout.base import SLEEP_TAGS, Deliver, Pull, ServingEngine, Ticket
from rlsys.rollout.engine_weights import LiveWeights
from rlsys.rollout.hf.engine import LoadFormat
from rlsys.rollout.hf_files import eos_of, hf_tensors, model_length, vocabulary
from rlsys.rollout.sampling.hook import DrawParams
from rlsys.rollout.sampling.log import Answer
from rlsys.rollout.vllm.determinism import aligned_arguments, choose_kernels, keep_gradients
from rlsys.rollout.vllm.groups import end_groups, own_shared_memory
from rlsys.rollout.vllm.version import GRAPHS, NO_RELOAD, VLLM
from rlsys.rollout.vllm.weights import HostWeights
from rlsys.types import Finish, WeightLayout
from rlsys.utils.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

DRAW = "rlsys_draw"
STEPS_AHEAD = 2
FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
numbers = itertools.count()
GREEDY = (0, 0.0, 1.0, -1, 0, ())
"""A draw that nobody looks at: seed, temperature, top_p, top_k, min_new_tokens, stop_ids."""


class VLLMRollout(ServingEngine):
    """A RolloutEngine over vLLM's engine core in this process, one device.

    With `tensor_parallel_size` above 1 that many ranks of the default process group, which follow each other, serve one
    model: each has an engine like this one, all take the same calls at the same time and find the same answers.

    On CPU vLLM packs the weights of its layers, so new weights are received into host tensors and go through its loader
    at `finish_update`. On a GPU they are written into its parameters in place, once `weights.adopt` has told what was
    learned of their layout. `kv_cache_gib` is the CPU's cache, `gpu_memory_utilization` bounds a GPU's; `engine_kwargs`
    are vLLM's own engine arguments. `full_determinism` asks for log-probabilities as near the trainer's as vLLM can:
    see `rlsys.rollout.vllm.determinism`.
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
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gib: int = 1,
        enforce_eager: bool = False,
        full_determinism: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
        keep_asleep: bool = True,
        version: int = 0,
        rank: int = 0,
        host: str = "",
    ) -> None:
        adapter = VLLM.chosen()
        if not adapter.reloads and device == "cpu":
            raise ConfigError(f"vLLM {VLLM.installed()}: {NO_RELOAD}")
        if not adapter.graphs and (named := set(GRAPHS) & set(engine_kwargs or {})):
            raise ConfigError(f"vLLM {VLLM.installed()} does not take {sorted(named)}: install 0.12 or newer")
        length = max_model_len or model_length(path)
        super().__init__(
            vocab_size=vocabulary(path),
            max_model_len=length,
            eos_token_ids=eos_of(path) if eos_token_ids is None else eos_token_ids,
            device=device,
            quarantined=load_format == "dummy",
            keep_asleep=keep_asleep,
            version=version,
            rank=rank,
            host=host,
        )
        together = tensor_parallel_size > 1
        arguments = {
            "model": str(path),
            "load_format": load_format,
            "dtype": dtype,
            "seed": seed,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_num_batched_tokens, max_num_seqs),
            "max_model_len": length,
            "enforce_eager": enforce_eager,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "external_launcher" if together else "uni",
            "disable_custom_all_reduce": True,  # it asks after devices that a worker with one visible GPU cannot see
            "disable_log_stats": True,
            "async_scheduling": adapter.ahead and device != "cpu",
            **(
                {} if device == "cpu" else {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
            ),
            **(engine_kwargs or {}),
        }
        if full_determinism:
            arguments |= aligned_arguments(arguments, device=device)
        self._shares_groups = dist.is_initialized()
        names = own_shared_memory() if together and device == "cpu" else nullcontext()
        with keep_gradients(), choose_kernels(), names:
            self.engine = _start(arguments, kv_cache_gib=kv_cache_gib)
        self._decision = torch.zeros(1, dtype=torch.uint8) if together else None
        whole = hf_tensors(path, dtype=dtype, filled=load_format == "auto" and device == "cpu", real=device == "cpu")
        self.weights = HostWeights(*whole, self._reload) if device == "cpu" else LiveWeights(*whole, self._model)

    def _decode(self, pull: Pull, deliver: Deliver) -> int:
        running: dict[str, Ticket] = {}
        num_tokens = 0

        def answer(ended: Sequence[_Ended]) -> int:
            count, names = 0, [int(end.name) for end in ended]
            drawn = self._rpc("rlsys_take_draws", names) if names else []
            for end, found in zip(ended, drawn, strict=True):
                ticket = running.pop(end.name)
                found, stopped = _until_stop(found, ticket)
                if end.tokens not in (None, found.tokens):
                    raise RolloutError(f"vLLM took other tokens than were drawn for request {ticket.request.rid}")
                deliver(ticket.number, self._answered(ticket.request, found, Finish.STOP if stopped else end.why))
                count += len(found.tokens)
            return count

        try:
            while True:
                for ticket in pull():
                    draw = DrawParams.of(ticket, next(numbers))
                    name = self._add(ticket.request.input_ids, draw, max_tokens=ticket.max_new_tokens)
                    running[name] = ticket
                if self._told_to_stop():
                    self.engine.abort_request(list(running))
                    self._drain()
                    return num_tokens + answer([_Ended(name, Finish.ABORT) for name in running])
                if not running:
                    self._drain()
                    return num_tokens
                num_tokens += answer([_ended(output) for output in self.engine.step() if output.finished])
        except BaseException:
            self.engine.abort_request(list(running))
            raise

    def _drain(self) -> None:
        """Let a step end that was begun ahead; what it drew is for requests that have ended."""
        for _ in range(STEPS_AHEAD):
            self.engine.step()

    def _told_to_stop(self) -> bool:
        """Whether to stop at this step; ranks that serve together do what the first of them was told."""
        if self._decision is None:
            return self._stopped()
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self._decision[0] = self._stopped()
        dist.broadcast(self._decision, src=group.ranks[0], group=group.cpu_group)
        return bool(self._decision[0])

    def _add(
        self, ids: Sequence[int], draw: DrawParams, *, max_tokens: int = 1, prompt_logprobs: int | None = None
    ) -> str:
        """Hand a request to vLLM, which takes the token that we draw; returns its name there, the draw's number."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=list(draw.stop_ids),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={DRAW: draw.to_dict()},
        )
        self.engine.add_request(str(draw.number), {"prompt_token_ids": list(ids)}, params)
        return str(draw.number)

    def _score(self, batch: DataProto, temperature: float) -> Tensor:
        rows = tensors_of(batch.batch)
        attention, num_columns = rows["attention_mask"].cpu(), rows["responses"].shape[1]
        sequences = [ids[mask.bool()].tolist() for ids, mask in zip(rows["input_ids"].cpu(), attention, strict=True)]
        lengths = attention[:, -num_columns:].sum(1).tolist()
        self._rpc("rlsys_score_at", temperature)
        names = {
            self._add(ids, DrawParams(next(numbers), len(ids), *GREEDY), prompt_logprobs=0): row
            for row, ids in enumerate(sequences)
        }
        scores = torch.zeros(len(sequences), num_columns)
        while names:
            for output in self.engine.step():
                if output.finished:
                    row = names.pop(output.request_id)
                    _fill(scores[row], output, sequences[row], lengths[row])
                    self._rpc("rlsys_take_draws", [int(output.request_id)])
        counted = rows.get("response_mask", attention[:, -num_columns:]).cpu()
        return torch.where(counted > 0, scores, 0.0)

    def weight_layout(self) -> WeightLayout:
        """On CPU every HF tensor whole, in host memory; on a GPU what was learned of vLLM's own parameters."""
        return self.weights.layout(rank=self.rank, host=self.host)

    def local_tensors(self) -> Mapping[str, Tensor]:
        self._awake_weights()
        return self.weights.tensors()

    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.weights.load(bucket)

    def finish_update(self, version: int) -> None:
        """Take the new weights into use and forget the cache that the old ones made."""
        self.weights.finish()
        self.engine.reset_prefix_cache()
        super().finish_update(version)

    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None:
        """vLLM sleeps as a whole and wakes by tag; what is no parameter it keeps on the host in any case."""
        if asleep and not self._asleep:
            self.engine.reset_prefix_cache()
            self.engine.sleep(level=1 if self._keep_asleep else 2)
            self._asleep |= set(SLEEP_TAGS)
        elif not asleep and (due := [tag for tag in SLEEP_TAGS if tag in tags and tag in self._asleep]):
            self.engine.wake_up(due)

    def _free(self) -> None:
        end_groups(self.engine.engine_core.shutdown, shared=self._shares_groups)
        del self.engine

    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        self._rpc("rlsys_reload", list(tensors.items()))

    def _model(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner.get_model()

    def _rpc(self, method: str, *args: Any) -> Any:
        """The first worker's result of a method of `RolloutExtension`."""
        return self.engine.collective_rpc(method, args=args)[0]


def _start(arguments: Mapping[str, Any], *, kv_cache_gib: int) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the other one has no input_batch and keeps processors elsewhere
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if arguments["disable_log_stats"] else "INFO")
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            skip_tokenizer_init=True,
            worker_extension_cls="rlsys.rollout.vllm.extension.RolloutExtension",
            logits_processors=["rlsys.rollout.vllm.sampler:DrawingProcessor"],
            **arguments,
        )
    )


def _until_stop(answer: Answer, ticket: Ticket) -> tuple[Answer, bool]:
    """The answer up to its end, and whether a stop id is that: a step begun ahead may have drawn one token more."""
    tokens, shortest = answer.tokens, ticket.request.gconfig.min_new_tokens
    stops = (n for n, token in enumerate(tokens) if n >= shortest and token in ticket.stop_ids)
    end = next(stops, None)
    return answer.first(ticket.max_new_tokens if end is None else end + 1), end is not None


@dataclass(frozen=True)
class _Ended:
    """A request by its name in vLLM, why it ended, and the tokens that vLLM says it has (None: it does not say)."""

    name: str
    why: Finish
    tokens: tuple[int, ...] | None = None


def _ended(output: Any) -> _Ended:
    [told] = output.outputs
    if told.finish_reason not in FINISH:
        raise RolloutError(f"vLLM ended request {output.request_id} by '{told.finish_reason}'")
    why = FINISH[told.finish_reason]
    return _Ended(output.request_id, why, None if why is Finish.ABORT else tuple(told.token_ids))


def _fill(scores: Tensor, output: Any, ids: Sequence[int], length: int) -> None:
    """Write the log-probabilities of the last `length` prompt tokens."""
    found = output.prompt_logprobs[len(ids) - length :]
    scores[:length] = torch.tensor([entry[i].logprob for entry, i in zip(found, ids[len(ids) - length :], strict=True)])
