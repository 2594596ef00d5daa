"""Small real HTTP servers that speak SGLang's and vLLM's routes on 127.0.0.1, and misbehave on demand."""

import asyncio
import hashlib
import json
import math
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from rlsys.types import Finish, ModelRequest, ResponseDelta, SamplingParams
from rlsys.utils.errors import WeightTransferError

GROUP_ROUTES = (
    *("/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"),
    *("/destroy_weights_update_group", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/shutdown_weight_transfer_engine", "/update_weight_version"),
)


@dataclass(frozen=True)
class Token:
    """One drawn token; `finish` where it is the last."""

    id: int
    logprob: float
    finish: str | None = None


class Brain(Protocol):
    """What makes the tokens of a server."""

    def tokens(self, prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[Token]: ...
    def score(self, ids: Sequence[int]) -> list[float]: ...
    def reload(self, path: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class RuleBrain:
    """Each token depends on the tokens before it and on the weights, so a stitched answer differs from any other.

    `weights` is the path they were loaded from. Token 1 never comes; with `stop_token_ids` the first of them ends.
    While `most_tokens` is set, an answer waits after so many tokens.
    """

    def __init__(self, *, delay_s: float = 0.0, vocabulary: int = 1000) -> None:
        self.weights, self.delay_s, self.vocabulary = "", delay_s, vocabulary
        self.most_tokens: int | None = None
        self.aborts = asyncio.Event()

    def follow(self, before: Sequence[int]) -> Token:
        digest = hashlib.blake2b(f"{self.weights}|{list(before)}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        return Token(2 + number % (self.vocabulary - 2), -math.log(1 + number % 97))

    async def tokens(self, prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[Token]:
        ids = list(prompt)
        for number in range(params.max_new_tokens):
            await asyncio.sleep(self.delay_s)
            while self.most_tokens is not None and number >= self.most_tokens and not self.aborts.is_set():
                await asyncio.sleep(0.005)
            if self.aborts.is_set():
                return
            token = self.follow(ids)
            ids.append(token.id)
            last = number + 1 == params.max_new_tokens
            stops = token.id in params.stop_token_ids and number >= params.min_new_tokens
            yield Token(token.id, token.logprob, "stop" if stops else "length" if last else None)
            if stops:
                return

    def score(self, ids: Sequence[int]) -> list[float]:
        return [self.follow(ids[:at]).logprob for at in range(1, len(ids))]

    def reload(self, path: str) -> None:
        self.weights = path

    def pause(self) -> None:
        self.aborts.set()

    def resume(self) -> None:
        self.aborts.clear()


class EngineBrain:
    """A RolloutEngine behind HTTP; a pause ends its answers with the tokens so far."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.paused = engine, False
        self.new: list[ModelRequest] = []
        self.gone: list[str] = []
        self.open: dict[str, asyncio.Queue[ResponseDelta | None]] = {}
        self.pump: asyncio.Task[None] | None = None

    async def tokens(self, prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[Token]:
        request = ModelRequest(tuple(prompt), params)
        self.open[request.rid] = asyncio.Queue()
        self.new.append(request)
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self.run())
        try:
            while not self.paused and (delta := await self.open[request.rid].get()) is not None:
                if delta.refused:
                    raise ValueError(delta.error)
                for at, (token, value) in enumerate(zip(delta.tokens, self.values(delta, params), strict=True), 1):
                    is_last = at == len(delta.tokens) and delta.finish not in (None, Finish.ABORT)
                    yield Token(token, value, delta.finish.value if is_last and delta.finish else None)
                if delta.finish is not None:
                    return
        finally:
            del self.open[request.rid]
            self.new = [one for one in self.new if one.rid != request.rid]
            self.gone.append(request.rid)

    async def run(self) -> None:
        """Exchange with the engine while there are requests."""
        while self.open or self.gone:
            new, self.new, gone, self.gone = self.new, [], self.gone, []
            try:
                exchange = partial(self.engine.exchange, new, wait_s=0.02, cancel=gone)
                deltas = await asyncio.get_running_loop().run_in_executor(None, exchange)
            except WeightTransferError:
                self.new, self.gone = new + self.new, gone + self.gone
                await asyncio.sleep(0.01)
                continue
            for delta in deltas:
                if delta.rid in self.open:
                    self.open[delta.rid].put_nowait(delta)

    def values(self, delta: ResponseDelta, params: SamplingParams) -> Sequence[float]:
        return delta.logprobs

    def score(self, ids: Sequence[int]) -> list[float]:
        import torch

        with torch.inference_mode():
            logits = self.engine.model(torch.tensor([ids[:-1]])).logits[0]
        return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()

    def reload(self, path: str) -> None:
        from safetensors.torch import load_file

        self.engine.begin_update()
        self.engine.load(list(load_file(f"{path}/model.safetensors").items()))
        self.engine.finish_update(0)

    def pause(self) -> None:
        self.paused = True
        for queue in self.open.values():
            queue.put_nowait(None)

    def resume(self) -> None:
        self.paused = False


class SampledBrain(EngineBrain):
    """As vLLM with processed log-probabilities."""

    def values(self, delta: ResponseDelta, params: SamplingParams) -> Sequence[float]:
        return delta.logprobs if params.greedy else delta.sampled_logprobs


class Server:
    """One server in a thread of its own. `faults` holds what goes wrong with the next generations, "" for nothing:

    a status as "500", "429" or "307"; "cut:3", "hang:3" or "die:3" after so many tokens; "garbage", "length",
    "missing", "nan", "huge", "text"; "abort:3" and "unfinished:3" end an answer, with and without saying so.
    """

    def __init__(self, kind: str, brain: Any, *, token: str = "", dev: bool = True, incremental: bool = False) -> None:
        self.kind, self.brain, self.token, self.dev, self.incremental = kind, brain, token, dev, incremental
        self.faults: deque[str] = deque()
        self.seen: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.version, self.port, self.mode, self.device = "default", 0, "processed", "cuda"
        self.release, self.group_fault = "", ""
        self.group: Any = None
        self.is_updating, self.weights = False, dict[str, Any]()
        self.update_status, self.health_status, self.redirect_url = 200, 200, "http://127.0.0.1:9"
        self.open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        self._run(self._start())
        return self

    def stop(self) -> None:
        """Die: all connections are cut and the port is closed."""
        self._run(self._stop())

    def restart(self) -> None:
        """Come back as freshly started: first weights, no adapters."""
        self.version, self.is_updating = "default", False
        self.brain.reload("")
        self.adapters.clear()
        self.start()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.seen[path] += 1
        if self.token and path != "/health" and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        body = await request.json() if request.can_read_body else {}
        if path == "/health":
            return web.Response(status=self.health_status)
        if self.release and path == ("/get_server_info" if self.kind == "sglang" else "/version"):
            return web.json_response({"version": self.release})
        routes = self._sglang if self.kind == "sglang" else self._vllm
        return await routes(request, path, body)

    async def _sglang(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        if path == "/generate":
            if not body.get("stream"):
                scores = self.brain.score(body["input_ids"])
                pairs = [[value, token, None] for value, token in zip([None, *scores], body["input_ids"], strict=True)]
                return web.json_response({"meta_info": {"input_token_logprobs": pairs}})
            if (name := body.get("lora_path")) and name not in self.adapters:
                error = {"message": f"The following requested LoRA adapters are not loaded: {name}", "code": 400}
                return web.Response(body=_data({"error": error}), content_type="text/event-stream")
            return await self._generate(request, body, body["input_ids"], _sglang_params(body["sampling_params"]))
        if path == "/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return web.json_response({"success": True})
        if path == "/server_info":
            return web.json_response({"tp_size": 1, "version": self.release})
        if path in GROUP_ROUTES:
            return await self._receive(path, body)
        if path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if path == "/update_weights_from_disk":
            if self.update_status != 200:
                return web.json_response({"success": False, "message": "no such folder"}, status=self.update_status)
            self.brain.reload(body["model_path"])
            self.version = body["weight_version"]
            return web.json_response({"success": True, "message": ""})
        return self._common(path, body, pause="/pause_generation", resume="/continue_generation")

    async def _vllm(self, request: web.Request, path: str, body: Any) -> web.StreamResponse:
        if path == "/v1/completions":
            model = body.get("model") or "base"
            if model != "base" and model not in self.adapters:
                return web.json_response({"error": {"message": f"no model {model}"}}, status=404)
            if not body.get("stream"):
                return self._whole_completion(body)
            return await self._generate(request, body, body["prompt"], _vllm_params(body))
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return web.Response(text="Success")
        if path == "/v1/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            return web.Response(text="Success", status=200 if known else 404)
        if path == "/server_info" and self.dev:
            return web.json_response({"vllm_config": {"device_config": {"device": self.device}}})
        if path == "/weight_info" and self.dev:
            return web.json_response({"weight_version": self.version})
        if path == "/get_world_size" and self.dev:
            return web.json_response({"world_size": 1})
        if path in GROUP_ROUTES and self.dev:
            return await self._receive(path, body)
        if path == "/collective_rpc" and self.dev:
            assert body["method"] == "reload_weights"
            self.brain.reload(body["kwargs"]["weights_path"])
            return web.json_response({"results": [None]}, status=self.update_status)
        return self._common(path, body, pause="/pause", resume="/resume")

    async def _receive(self, path: str, body: Any) -> web.Response:
        """Weights over a real process group. `group_fault` names a route that is answered by 500 or, after "die:", by
        the death of the server."""
        self.calls.append((path, body))
        fault = self.group_fault
        if fault in (path, f"die:{path}"):
            if fault != path:
                self._loop.create_task(self._stop())
                self.group = None
            return web.Response(status=500, text="fault requested by the test")
        if fault == f"hang:{path}":
            await asyncio.sleep(60)
        loop = asyncio.get_running_loop()
        body = body.get("init_info") or body.get("update_info") or body
        if path in ("/init_weights_update_group", "/init_weight_transfer_engine"):
            self.group = await loop.run_in_executor(None, _joined, body)
        elif path in ("/begin_weight_update", "/start_weight_update"):
            if self.is_updating:
                return web.Response(status=500, text="an update is under way")
            self.is_updating = True
        elif path in ("/update_weights_from_distributed", "/update_weights"):
            self.weights |= await loop.run_in_executor(None, _received, self.group, body)
        elif path in ("/end_weight_update", "/finish_weight_update"):
            self.is_updating = False
        self.version = body.get("new_version") or body.get("weight_version") or self.version
        return web.json_response({"success": True})

    def _whole_completion(self, body: Any) -> web.Response:
        if "prompt_logprobs" in body:
            scores = self.brain.score(body["prompt"])
            prompt_logprobs = [{str(t): {"logprob": v}} for t, v in zip(body["prompt"][1:], scores, strict=True)]
            return web.json_response({"choices": [{"prompt_logprobs": [None, *prompt_logprobs]}]})
        value = 0.0 if self.mode == "processed" else -1.5
        return web.json_response({"choices": [{"logprobs": {"token_logprobs": [value]}}]})

    def _common(self, path: str, body: Any, *, pause: str, resume: str) -> web.Response:
        if not self.dev or path not in (pause, resume, "/reset_prefix_cache", "/sleep", "/wake_up",
                                        "/release_memory_occupation", "/resume_memory_occupation"):  # fmt: skip
            return web.Response(status=404)
        if path == pause:
            self.brain.pause()
        elif path == resume:
            self.brain.resume()
        return web.json_response({})

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], params: SamplingParams
    ) -> web.StreamResponse:
        self.requests.append(body)
        fault, _, at = (self.faults.popleft() if self.faults else "").partition(":")
        if fault.isdecimal():
            headers = {"Retry-After": "0", "Location": self.redirect_url + request.path}
            return web.Response(status=int(fault), text="fault requested by the test", headers=headers)
        if fault == "text":
            return web.Response(text="<html>a proxy's page</html>")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._stream(request, response, body, prompt, params, fault, int(at or -1))
        except ValueError as error:
            await response.write(_data({"error": {"message": str(error), "code": 400}}))
        finally:
            self.open -= 1
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        prompt: list[int],
        params: SamplingParams,
        fault: str,
        at: int,
    ) -> None:
        if fault in ("garbage", "huge"):
            junk = b"data: {not json}\n\n" if fault == "garbage" else b"data: " + b"x" * (3 << 20)
            await response.write(junk)
            return
        write = self._event_writer(body, fault)
        num = 0
        finished = False
        async for token in self.brain.tokens(prompt, params):
            num += 1
            finished = token.finish is not None
            await response.write(_data(write(token, token.finish)))
            if num == at and fault in ("abort", "unfinished"):
                break
            if num == at and fault == "hang":
                await asyncio.sleep(60)
            if num == at and fault in ("cut", "die"):
                if fault == "die":
                    self._loop.create_task(self._stop())
                assert request.transport is not None
                request.transport.abort()
                return
        if not finished and fault != "unfinished":
            await response.write(_data(write(None, "abort")))
        await response.write(b"data: [DONE]\n\n")

    def _event_writer(self, body: dict[str, Any], fault: str) -> Any:
        tokens: list[int] = []
        values: list[Any] = []
        version, model = self.version, body.get("model") or "base"

        def write(token: Token | None, finish: str | None) -> dict[str, Any]:
            if token is not None:
                tokens.append(token.id)
                values.append({"nan": math.nan, "missing": None}.get(fault, token.logprob))
            if fault == "length":
                values.append(-1.0)
            new = slice(len(tokens) - (token is not None), None)
            if self.kind == "sglang":
                shown = new if self.incremental else slice(0, None)
                pairs = [[v, t, None] for v, t in zip(values, tokens, strict=False)][shown]
                pairs += [[-1.0, 3, None]] * (fault == "length")
                about = {"completion_tokens": len(tokens), "output_token_logprobs": pairs, "weight_version": version}
                return {"meta_info": about | {"finish_reason": finish and {"type": finish}}}
            logprobs = {"token_logprobs": values[new] if fault != "length" else values}
            choice = {"token_ids": tokens[new], "logprobs": logprobs, "finish_reason": finish}
            return {"model": model, "choices": [choice]}

        return write


def _joined(body: dict[str, Any]) -> Any:
    """Join as SGLang does, by torch's own subgroup, or as our part of a vLLM server."""
    import torch.distributed as dist

    address = body.get("address") or f"{body['master_address']}:{body['master_port']}"
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    name, gloo = body.get("group_name") or body["name"], dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timedelta(seconds=30)
    assert (body["backend"], body["world_size"]) == ("gloo", 2)
    nested = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    return gloo(nested, 1, 2, options)


def _received(group: Any, body: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dtypes = [getattr(torch, name) for name in body.get("dtypes") or body["dtype_names"]]
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
    for work in [group.broadcast([tensor], dist.BroadcastOptions()) for tensor in tensors]:
        work.wait()
    return dict(zip(body["names"], tensors, strict=True))


def _data(value: Any) -> bytes:
    return b": keep-alive\n\ndata: " + json.dumps(value).encode() + b"\n\n"


def _sglang_params(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        given["max_new_tokens"],
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given["top_k"],
        min_new_tokens=given["min_new_tokens"],
        stop_token_ids=tuple(given["stop_token_ids"]),
        ignore_eos=given["ignore_eos"],
        seed=given.get("sampling_seed", 0),
    )


def _vllm_params(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        given["max_tokens"],
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given["top_k"],
        min_new_tokens=given["min_tokens"],
        stop_token_ids=tuple(given["stop_token_ids"]),
        ignore_eos=given["ignore_eos"],
        seed=given.get("seed", 0) - len(given["prompt"]),
    )
