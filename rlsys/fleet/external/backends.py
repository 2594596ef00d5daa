"""The requests of the two server types and how their answers are read: pure functions, no I/O.

Seen in the sources of SGLang 0.5.23 (`entrypoints/http_server.py`, `managers/tokenizer_manager.py`) and vLLM 0.32.0
(`entrypoints/openai/completion`, `entrypoints/rl/online`, `entrypoints/serve/{lora,dev}`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlsys.fleet.external.http import Call
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.rollout.sglang.given_images import image_record
from rlsys.rollout.vllm.given_images import image_features
from rlsys.types import Finish, ModelRequest, SamplingParams, WeightUpdateMeta
from rlsys.weights.executors.external import SentBucket, ServerGroup

PROCESSED, RAW, FULL = "processed", "raw", "full"
"""Which log-probabilities a server gives: after temperature and truncation, before both, or after temperature only."""
ABOVE_ZERO = 1e-3
_FINISH = {None: None, "stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


@dataclass(frozen=True)
class Delta:
    """What one event of a stream adds. `stamps` are the server's names of its weights, "" if it gives none."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    stamps: Sequence[str] = ()
    finish: Finish | None = None


class BadResponseError(ValueError):
    """A server's answer is invalid."""


def check(delta: Delta, *, room: int, vocab_size: int) -> None:
    """BadResponseError unless there are at most `room` tokens, each an id with a finite log-probability."""
    if len(delta.tokens) > room:
        raise BadResponseError(f"{len(delta.tokens)} tokens where at most {room} were requested")
    if len(delta.logprobs) != len(delta.tokens):
        raise BadResponseError(f"{len(delta.tokens)} tokens with {len(delta.logprobs)} log-probabilities")
    for token in delta.tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadResponseError(f"'{str(token)[:40]}' is not a token id of the trained model, below {vocab_size}")
    for value in delta.logprobs:
        if type(value) not in (int, float) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise BadResponseError(f"'{str(value)[:40]}' is not a log-probability")


class SGLangBackend:
    """SGLang's own routes. Log-probabilities are of the full distribution at the request's temperature."""

    kind = "sglang"
    identity = (Call("/model_info", method="GET", optional=True), Call("/get_model_info", method="GET", optional=True))
    version = (Call("/server_info", method="GET", optional=True), Call("/get_server_info", method="GET", optional=True))
    probe = about = None
    pause = Call("/pause_generation", {"mode": "abort"})
    resume = Call("/continue_generation", {}, optional=True)
    num_ranks = Call("/server_info", method="GET", optional=True), "tp_size"
    begin_update = Call("/begin_weight_update", {}, optional=True)

    def generate(self, request: ModelRequest, settings: RemoteSettings, *, adapter: str, salt: str) -> Call:
        params, sampling = request.gconfig, _sampling(request.gconfig)
        sampling |= {"max_new_tokens": params.max_new_tokens, "min_new_tokens": params.min_new_tokens}
        if settings.send_seeds:
            sampling["sampling_seed"] = params.seed
        body: dict[str, object] = {"input_ids": list(request.input_ids), "sampling_params": sampling}
        body |= {"return_logprob": True, "stream": True}
        if request.images:
            body["image_data"] = [image_record(request.images, salt=salt)]
        return Call("/generate", body | {"lora_path": adapter or None})

    def read(self, event: Mapping[str, object], num_seen: int) -> Delta:
        """Events repeat everything so far, or with --incremental-streaming-output hold what is new."""
        about = _section(event, "meta_info")
        total, pairs = about.get("completion_tokens"), about.get("output_token_logprobs")
        finish = _finish(_section(about, "finish_reason").get("type") if about.get("finish_reason") else None)
        if not pairs and (finish is Finish.ABORT or not total):
            return Delta(finish=finish)
        if not isinstance(total, int) or not isinstance(pairs, list):
            raise BadResponseError("the answer lacks completion_tokens or output_token_logprobs")
        if len(pairs) not in (total, total - num_seen) or total < num_seen:
            raise BadResponseError(f"{len(pairs)} log-probabilities for {total} tokens, {num_seen} of them seen before")
        new = pairs[num_seen:] if len(pairs) == total else pairs
        if not all(isinstance(pair, list) and len(pair) >= 2 for pair in new):
            raise BadResponseError("output_token_logprobs holds something else than [log-probability, token id, text]")
        return Delta([pair[1] for pair in new], [pair[0] for pair in new], _stamps(about, num_seen, total), finish)

    def update(self, meta: WeightUpdateMeta) -> tuple[Call, ...]:
        """What brings a server to these weights: from a folder, or an adapter."""
        if adapter := adapter_of(meta):
            return (Call("/load_lora_adapter", {"lora_name": adapter, "lora_path": meta.weights_path}),)
        body = {"model_path": meta.weights_path, "weight_version": str(meta.version)}
        return (Call("/update_weights_from_disk", body),)

    def join_group(self, group: ServerGroup) -> Call:
        """Let the server's ranks join a process group after the trainer; answers when all have."""
        address, _, port = group.address.rpartition(":")
        body = {"master_address": address, "master_port": int(port), "rank_offset": 1, "world_size": group.world_size}
        return Call("/init_weights_update_group", body | {"group_name": group.name, "backend": group.backend})

    def receive(self, bucket: SentBucket, group: ServerGroup) -> Call:
        body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": group.name}
        return Call("/update_weights_from_distributed", body)

    def end_update(self, version: str) -> tuple[Call, ...]:
        name = Call("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        return (Call("/end_weight_update", {}, optional=True), name)

    def leave_group(self, group: ServerGroup) -> Call:
        return Call("/destroy_weights_update_group", {"group_name": group.name}, optional=True)

    def unload_adapter(self, name: str) -> Call:
        return Call("/unload_lora_adapter", {"lora_name": name})

    def score(self, token_ids: Sequence[int], *, model: str, adapter: str) -> Call:
        body: dict[str, object] = {"input_ids": list(token_ids), "return_logprob": True, "logprob_start_len": 0}
        body["sampling_params"] = {"max_new_tokens": 0, "temperature": 0.0}
        return Call("/generate", body | {"lora_path": adapter or None})

    def read_scores(self, answer: object) -> list[float]:
        pairs = _section(answer, "meta_info").get("input_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and pair for pair in pairs):
            raise BadResponseError("the answer lacks input_token_logprobs")
        return [pair[0] for pair in pairs[1:]]


class VLLMBackend:
    """vLLM's OpenAI routes with token ids; pausing and reloading need the server's VLLM_SERVER_DEV_MODE=1.

    Log-probabilities are those of the server's --logprobs-mode, which `probe` detects: with one token left to
    sample, processed ones are 0.
    """

    kind = "vllm"
    identity = (Call("/weight_info", method="GET", optional=True),)
    version = (Call("/version", method="GET", optional=True),)
    pause = Call("/pause?mode=abort", {})
    resume = Call("/resume", {}, optional=True)
    num_ranks = Call("/get_world_size", method="GET", optional=True), "world_size"
    begin_update = Call("/start_weight_update", {})
    about = Call("/server_info?config_format=json", method="GET", optional=True)
    probe = Call(
        "/v1/completions",
        {"prompt": [1], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True},
    )

    def generate(self, request: ModelRequest, settings: RemoteSettings, *, adapter: str, salt: str) -> Call:
        params, sampling, ids = request.gconfig, _sampling(request.gconfig), list(request.input_ids)
        sampling |= {"max_tokens": params.max_new_tokens, "min_tokens": params.min_new_tokens, "logprobs": 0}
        sampling |= {"min_p": 0.0, "repetition_penalty": 1.0}
        if settings.send_seeds:
            sampling["seed"] = (params.seed + len(ids)) % 2**63
        body: dict[str, object] = {"stream": True, "model": adapter or settings.servers.model or None}
        if request.images:
            if settings.hf_config is None:
                raise ValueError("prompts with images need RemoteSettings.hf_config")
            features = image_features(ids, settings.hf_config, request.images, salt=salt)
            images = {"token_ids": ids, "features": features, "sampling_params": sampling}
            return Call("/inference/v1/generate", body | images)
        asked = {"prompt": ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return Call("/v1/completions", body | sampling | asked)

    def read(self, event: Mapping[str, Any], num_seen: int) -> Delta:
        """Events hold what is new. Servers without return_token_ids write the ids as `token_id:17`."""
        choices = event.get("choices")
        if choices == []:
            return Delta()
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise BadResponseError("the answer lacks its one choice")
        choice = choices[0]
        finish = _finish(choice.get("finish_reason"))
        about = _section(choice, "logprobs") if choice.get("logprobs") is not None else {}
        tokens, logprobs = choice.get("token_ids"), about.get("token_logprobs")
        if isinstance(content := about.get("content"), list):
            logprobs = [entry.get("logprob", math.nan) if isinstance(entry, dict) else math.nan for entry in content]
        if tokens is None and isinstance(about.get("tokens"), list):
            tokens = [_token_id(text) for text in about["tokens"]]
        if not tokens and not logprobs:
            return Delta(finish=finish)
        if not isinstance(tokens, list) or not isinstance(logprobs, list):
            raise BadResponseError("the answer lacks token_ids or logprobs.token_logprobs")
        return Delta(tokens, logprobs, [str(event.get("model", ""))] * len(tokens), finish)

    def update(self, meta: WeightUpdateMeta) -> tuple[Call, ...]:
        """What brings a server to these weights: from a folder, or an adapter."""
        if adapter := adapter_of(meta):
            return (Call("/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": meta.weights_path}),)
        return (
            Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": meta.weights_path}}),
            Call("/reset_prefix_cache", {}, optional=True),
            Call("/update_weight_version", {"new_version": str(meta.version)}, optional=True),
        )

    def join_group(self, group: ServerGroup) -> Call:
        """Let the server's ranks join a process group after the trainer; answers when all have."""
        return Call("/init_weight_transfer_engine", {"init_info": asdict(group)})

    def receive(self, bucket: SentBucket, group: ServerGroup) -> Call:
        body = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        return Call("/update_weights", {"update_info": body})

    def end_update(self, version: str) -> tuple[Call, ...]:
        finish = Call("/finish_weight_update", {"weight_version": version})
        return (finish, Call("/reset_prefix_cache", {}, optional=True))

    def leave_group(self, group: ServerGroup) -> Call:
        return Call("/shutdown_weight_transfer_engine", optional=True)

    def unload_adapter(self, name: str) -> Call:
        return Call("/v1/unload_lora_adapter", {"lora_name": name})

    def score(self, token_ids: Sequence[int], *, model: str, adapter: str) -> Call:
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return Call("/v1/completions", body | {"model": adapter or model or None})

    def read_scores(self, answer: object) -> list[float]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        entries = choices[0].get("prompt_logprobs") if choices and isinstance(choices[0], dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry for entry in entries[1:]):
            raise BadResponseError("the answer lacks prompt_logprobs")
        return [_section(entry, next(iter(entry))).get("logprob", None) for entry in entries[1:]]


Backend = SGLangBackend | VLLMBackend
"""One kind of server. Of the `identity` routes the first that exists names the weights, of the `version` routes the
server's version."""


def adapter_of(meta: WeightUpdateMeta) -> str:
    """The served name of an adapter, with its version; empty for a full model."""
    name = meta.metadata.get("lora_name")
    return f"{name}-v{meta.version}" if name else ""


def setting_of(about: object, *keys: str) -> object:
    """A setting in vLLM's answer about itself; None where it is not there."""
    for key in ("vllm_config", *keys):
        about = about.get(key) if isinstance(about, dict) else None
    return about


def probed_mode(answer: object) -> str:
    """What the answer to vLLM's probe says of the server's log-probabilities."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    values = choices[0]["logprobs"]["token_logprobs"] if choices else [None]
    return PROCESSED if values[0] is not None and values[0] > -1e-6 else RAW


def _sampling(params: SamplingParams) -> dict[str, object]:
    """What both kinds of server call alike."""
    names = ("temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos")
    return {name: getattr(params, name) for name in names} | {"skip_special_tokens": False}


def _section(of: object, key: str) -> Mapping[str, Any]:
    section = of.get(key) if isinstance(of, dict) else None
    if not isinstance(section, dict):
        raise BadResponseError(f"the answer lacks '{key}'")
    return section


def _finish(reason: object) -> Finish | None:
    if not isinstance(reason, str | None) or reason not in _FINISH:
        raise BadResponseError(f"unknown finish reason '{str(reason)[:40]}'")
    return _FINISH[reason]


def _token_id(text: object) -> int:
    digits = text.removeprefix("token_id:") if isinstance(text, str) else ""
    if not digits.isdecimal():
        raise BadResponseError("the answer holds no token ids; the server ignores return_token_ids")
    return int(digits)


def _stamps(about: Mapping[str, object], start: int, end: int) -> list[str]:
    """The server's names of the weights of tokens start to end: by spans where it gives them."""
    stamps = [str(about.get("weight_version", ""))] * (end - start)
    spans = about.get("weight_versions")
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, dict) or not isinstance(span.get("start"), int) or not isinstance(span.get("end"), int):
            raise BadResponseError("weight_versions is not a list of spans")
        for at in range(max(span["start"], start), min(span["end"], end)):
            stamps[at - start] = str(span.get("version", ""))
    return stamps
