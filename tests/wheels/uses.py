"""Every name of vLLM and SGLang that rlsys uses, and where the record of what their versions have comes from.

`python -m tests.wheels.uses vllm==0.26.0 sglang==0.5.23 ...` (all of VERSIONS without arguments) downloads each wheel
with pip, reads it, deletes it, and writes tests/golden/engine_names.json.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

from rlsys.fleet.external.backends import SGLangBackend, VLLMBackend
from rlsys.fleet.external.server import HEALTH
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.types import ModelRequest, SamplingParams, WeightUpdateMeta
from tests.wheels.sources import Sources

RECORD = Path(__file__).parents[1] / "golden" / "engine_names.json"
VERSIONS = {
    "vllm": (
        *("0.8.5.post1", "0.10.0", "0.10.1", "0.11.0", "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0", "0.18.1"),
        *("0.19.1", "0.20.2", "0.22.1", "0.24.0", "0.26.0", "0.29.0", "0.32.0", "0.33.0"),
    ),
    "sglang": (
        *(
            "0.4.4",
            "0.4.6",
            "0.4.8",
            "0.4.9",
            "0.4.10",
            "0.5.1",
            "0.5.3",
            "0.5.5",
            "0.5.6",
            "0.5.9",
            "0.5.10",
            "0.5.12",
        ),
        *("0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    ),
}
ROUTES = {"vllm": "vllm.entrypoints", "sglang": "sglang.srt.entrypoints"}

Uses = Mapping[str, Sequence[str]]
"""Symbol -> the parameters that a callable is given, the fields that are set or read of a class."""

Found = dict[str, dict[str, list[str]]]
"""What `names_of` returns."""

_RUNNER, _ENGINE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.engine.llm_engine:LLMEngine"
_RUNNER_2, _SCHEDULED = "vllm.v1.worker.gpu.model_runner:GPUModelRunner", "vllm.v1.core.sched.output"
_SCHEDULER_READS = ("num_spec_tokens", "use_v2_model_runner", "log_stats", "connector", "has_mamba_layers")
_PROCESSORS = "vllm.v1.sample.logits_processor"
_INVARIANT = "model_executor.layers.batch_invariant|vllm.model_executor.determinism.batch_invariant"
_BATCH_INVARIANT = f"vllm.{_INVARIANT}:init_batch_invariance"
_HEAD_DTYPE = "vllm.model_executor.layers.logits_processor:LogitsProcessor._apply_head"
VLLM: Uses = {
    "vllm:EngineArgs": (
        *("model", "load_format", "dtype", "seed", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
        *("enforce_eager", "gpu_memory_utilization", "enable_sleep_mode", "enable_chunked_prefill"),
        *("enable_prefix_caching", "skip_tokenizer_init", "distributed_executor_backend", "worker_extension_cls"),
        *("max_cudagraph_capture_size", "cudagraph_capture_sizes"),
        *("logits_processors", "async_scheduling", "disable_log_stats", "tensor_parallel_size"),
        *("disable_custom_all_reduce", "hf_overrides", "data_parallel_size", "enable_expert_parallel"),
    ),
    "vllm:SamplingParams": (
        *("temperature", "max_tokens", "stop_token_ids", "ignore_eos", "detokenize", "prompt_logprobs", "output_kind"),
        "extra_args",
    ),
    "vllm.sampling_params:RequestOutputKind.FINAL_ONLY": (),
    "vllm.v1.engine:FINISH_REASON_STRINGS": ("stop", "length", "abort"),
    f"{_ENGINE}.from_engine_args": ("engine_args",),
    f"{_ENGINE}.add_request": ("request_id", "prompt", "params"),
    f"{_ENGINE}.abort_request": ("request_ids",),
    f"{_ENGINE}.step": (),
    f"{_ENGINE}.collective_rpc": ("method", "args"),
    f"{_ENGINE}.reset_prefix_cache": (),
    f"{_ENGINE}.sleep": ("level",),
    f"{_ENGINE}.wake_up": ("tags",),
    f"{_ENGINE}.engine_core": (),
    f"{_ENGINE}.output_processor": (),
    f"{_ENGINE}.model_executor": (),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine:EngineCoreOutput": ("request_id", "new_token_ids", "finish_reason"),
    "vllm.v1.engine.output_processor:OutputProcessor.request_states": (),
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": ("engine_core_outputs",),
    "vllm.v1.engine.output_processor:OutputProcessorOutput": ("request_outputs",),
    "vllm.v1.engine.output_processor:RequestState.detokenizer": (),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.token_ids": (),
    "vllm.v1.engine.core_client:InprocClient.get_output": (),
    "vllm.v1.engine.core_client:InprocClient.shutdown": (),
    "vllm.v1.engine.core_client:InprocClient.engine_core": (),
    "vllm.v1.engine.core_client:InprocClient.execute_dummy_batch": (),
    "vllm.v1.engine.core:EngineCore.scheduler": (),
    "vllm.v1.core.sched.interface:SchedulerInterface.has_requests": (),
    "vllm.v1.executor.abstract:UniProcExecutor.driver_worker": (),
    "vllm.v1.executor.abstract:ExecutorWithExternalLauncher": (),
    "vllm.v1.worker.worker_base|vllm.worker.worker_base:WorkerWrapperBase.worker": (),
    "vllm.v1.worker.gpu_worker:Worker.model_runner": (),
    "vllm.v1.worker.gpu_worker:Worker._sleep_saved_buffers": (),
    "vllm.distributed:GroupCoordinator.destroy": (),
    "vllm.distributed.parallel_state:destroy_model_parallel": (),
    "vllm.distributed.parallel_state:destroy_distributed_environment": (),
    "vllm.inputs:TokensPrompt": ("prompt_token_ids",),
    "vllm.outputs:RequestOutput": ("request_id", "prompt_logprobs", "outputs", "finished"),
    "vllm.outputs:CompletionOutput": ("finish_reason",),
    f"{_PROCESSORS}:LogitsProcessor.__init__": ("vllm_config", "device", "is_pin_memory"),
    f"{_PROCESSORS}:LogitsProcessor.is_argmax_invariant": (),
    f"{_PROCESSORS}:LogitsProcessor.update_state": ("batch_update",),
    f"{_PROCESSORS}:LogitsProcessor.apply": ("logits",),
    f"{_PROCESSORS}:BatchUpdate": ("removed", "added", "moved"),
    f"{_PROCESSORS}:MoveDirectionality.SWAP": (),
    f"{_PROCESSORS}:LogitsProcessors.all": (),
    "vllm.v1.worker.gpu_input_batch:InputBatch.logitsprocs": (),
    "vllm.v1.worker.gpu_input_batch:InputBatch.logitsprocs_need_output_token_ids": (),
    f"{_RUNNER}.input_batch": (),
    f"{_RUNNER}.sampler": (),
    f"{_RUNNER}.get_model": (),
    f"{_RUNNER}.reload_weights": ("weights_iterator",),
    "vllm.v1.sample.sampler:Sampler.compute_logprobs": ("logits",),
    f"{_RUNNER_2}.execute_model": ("scheduler_output",),
    f"{_RUNNER_2}.sample_tokens": ("grammar_output",),
    f"{_RUNNER_2}.req_states": (),
    "vllm.v1.worker.gpu.states:RequestState.prefill_len": (),
    "vllm.v1.worker.gpu.states:RequestState.num_computed_prefill_tokens": (),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (),
    **{f"vllm.v1.core.sched.scheduler:Scheduler.{name}": () for name in _SCHEDULER_READS},
    f"{_SCHEDULED}:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
        "scheduled_spec_decode_tokens",
    ),
    f"{_SCHEDULED}:SchedulerOutput.make_empty": (),
    f"{_SCHEDULED}:CachedRequestData": ("req_ids", "new_block_ids", "num_computed_tokens"),
    f"{_SCHEDULED}:CachedRequestData.make_empty": (),
    f"{_SCHEDULED}:NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_output": (),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "req_id_to_index", "sampled_token_ids"),
    _BATCH_INVARIANT: (),
    _HEAD_DTYPE: ("lm_head", "hidden_states", "embedding_bias"),
}

_TOKENS, _SCHEDULER = "sglang.srt.managers.tokenizer_manager:TokenizerManager", "sglang.srt.managers.scheduler"
_SGLANG_ENGINE = "sglang.srt.entrypoints.engine:Engine"
SGLANG: Uses = {
    "sglang.srt.server_args:ServerArgs": (
        *("attention_backend", "disable_cuda_graph", "disable_overlap_schedule", "max_total_tokens"),
        *("mem_fraction_static", "enable_memory_saver", "enable_weights_cpu_backup", "nnodes", "node_rank"),
        *("dist_init_addr", "model_path", "load_format", "dtype", "device", "random_seed", "max_running_requests"),
        *("chunked_prefill_size", "max_prefill_tokens", "context_length", "disable_radix_cache", "tp_size"),
        *("skip_tokenizer_init", "grammar_backend", "sampling_backend", "sleep_on_idle", "log_level"),
        *("disable_custom_all_reduce", "enable_deterministic_inference", "enable_fp32_lm_head"),
        *("nccl_port", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode"),
        *("pp_max_micro_batch_size", "ep_size", "dp_size", "enable_dp_attention", "enable_dp_lm_head"),
    ),
    f"{_SGLANG_ENGINE}.run_scheduler_process_func": (),
    f"{_SGLANG_ENGINE}._launch_detokenizer_subprocesses": (),
    f"{_SGLANG_ENGINE}._scheduler_init_result": (),
    f"{_SGLANG_ENGINE}.get_all_child_pids": (),
    f"{_SGLANG_ENGINE}.loop": (),
    f"{_SGLANG_ENGINE}.tokenizer_manager": (),
    f"{_SGLANG_ENGINE}.server_args": (),
    f"{_SCHEDULER}:run_scheduler_process": (),
    f"{_SCHEDULER}:Scheduler.run_event_loop": (),
    f"{_SCHEDULER}:Scheduler.run_batch": ("batch",),
    f"{_SCHEDULER}:Scheduler.flush_cache": (),
    f"{_SCHEDULER}:Scheduler.pause_generation": (),
    f"{_SCHEDULER}:Scheduler._engine_paused": (),
    f"{_SCHEDULER}:Scheduler.is_fully_idle": (),
    f"{_SCHEDULER}:Scheduler.tp_worker": (),
    f"{_SCHEDULER}:Scheduler.model_config": (),
    f"{_SCHEDULER}_components.idle_sleeper:IdleSleeper.maybe_sleep": (),
    f"{_SCHEDULER}_components.request_receiver:SchedulerRequestReceiver._split_work_and_control_reqs": ("recv_reqs",),
    "sglang.srt.distributed.parallel_state:get_tp_group": (),
    "sglang.srt.managers.tp_worker:TpModelWorker.model_runner": (),
    "sglang.srt.model_executor.model_runner:ModelRunner.model": (),
    "sglang.srt.managers.schedule_batch:Req.reset_for_retract": (),
    "sglang.srt.managers.schedule_batch:ScheduleBatch": ("chunked_req", "forward_mode"),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_decode": (),
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_extend": (),
    "sglang.srt.model_executor.model_runner:ModelRunner.sample": ("logits_output", "forward_batch"),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": ("rids", "positions", "seq_lens", "forward_mode"),
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": ("next_token_logits",),
    "sglang.srt.layers.logits_processor:LogitsProcessor._get_logits": (),
    f"{_TOKENS}.abort_request": ("abort_all",),
    f"{_TOKENS}.generate_request": ("obj", "request"),
    f"{_TOKENS}.pause_generation": ("obj",),
    f"{_TOKENS}.continue_generation": ("obj",),
    f"{_TOKENS}.flush_cache": (),
    f"{_TOKENS}.release_memory_occupation": ("obj",),
    f"{_TOKENS}.resume_memory_occupation": ("obj",),
    "sglang.srt.managers.io_struct:GenerateReqInput": (
        *("input_ids", "sampling_params", "rid", "extra_key", "return_logprob", "logprob_start_len"),
    ),
    "sglang.srt.managers.io_struct:AbortReq": (),
    "sglang.srt.managers.io_struct:PauseGenerationReqInput": ("mode",),
    "sglang.srt.managers.io_struct:ContinueGenerationReqInput": ("torch_empty_cache",),
    "sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput": ("tags",),
    "sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput": ("tags",),
    "sglang.srt.utils:kill_process_tree": (),
}
USES: Mapping[str, Uses] = {"vllm": VLLM, "sglang": SGLANG}
SERVER_ARGS, SERVER_FIELDS = "sglang.srt.server_args:ServerArgs", "sglang.srt.arg_groups.fields"
SAMPLING = "sglang.srt.sampling.sampling_params:SamplingParams"
"""What the field `sampling_params` of /generate is made of."""


def calls_of(package: str) -> dict[str, list[str]]:
    """Route -> the names in body and query of all that our remote engine of this kind asks."""
    backend = SGLangBackend() if package == "sglang" else VLLMBackend()
    request = ModelRequest((1, 2), SamplingParams(max_new_tokens=4))
    calls = [HEALTH, *backend.identity, *backend.version, backend.pause, backend.resume]
    calls += [call for call in (backend.probe, backend.about) if call]
    calls += [backend.generate(request, RemoteSettings((), send_seeds=True), adapter="a", salt="1")]
    calls += [backend.score([1, 2], model="m", adapter="a"), backend.unload_adapter("a")]
    for about in ({}, {"lora_name": "a"}):
        calls += backend.update(WeightUpdateMeta(version=1, weights_path="/w", metadata=about))
    by_path: dict[str, set[str]] = {}
    for call in calls:
        path, _, query = call.path.partition("?")
        names = by_path.setdefault(path, set())
        names |= {*(call.body or {}), *(part.split("=")[0] for part in query.split("&") if part)}
        if package == "sglang" and "sampling_params" in names:
            names |= {f"sampling_params.{name}" for name in (call.body or {}).get("sampling_params", {})}
    return {path: sorted(names) for path, names in by_path.items()}


def names_of(package: str, root: Traversable) -> Found:
    """What one version has of the used symbols and names, and of the routes that we ask and the names in them."""
    sources = Sources(root)
    symbols: dict[str, list[str]] = {}
    for symbol, used in USES[package].items():
        names = sources.signature(symbol)
        if names == [] and symbol == SERVER_ARGS:
            names = sources.fields_under(SERVER_FIELDS)
        if names is not None:
            symbols[symbol] = [name for name in names if name.rstrip("=") in used] if _is_class(symbol) else names
    theirs, routes = sources.routes(ROUTES[package]), {}
    for route, asked in calls_of(package).items():
        if route in theirs:
            known = set(theirs[route])
            if "sampling_params" in known:
                known |= {f"sampling_params.{name.rstrip('=')}" for name in sources.signature(SAMPLING) or ()}
            routes[route] = [name for name in asked if name in known]
    return {"symbols": symbols, "routes": routes}


def lacking(package: str, symbols: Mapping[str, Sequence[str]]) -> list[str]:
    """The used symbols and names that a version does not have, and the required parameters that it is not given."""
    missing = []
    for symbol, used in USES[package].items():
        if symbol not in symbols:
            missing.append(symbol)
            continue
        names = symbols[symbol]
        known = {name.rstrip("=") for name in names}
        if not any(name.startswith("**") for name in names):
            missing += [f"{symbol}({name})" for name in used if name not in known]
        if used and not _is_class(symbol):
            required = [name for name in names if not name.endswith("=") and not name.startswith("*")]
            missing += [f"{symbol} needs {name}" for name in required if name not in used]
    return missing


def lacking_routes(package: str, routes: Mapping[str, Sequence[str]]) -> list[str]:
    """The routes that a version's server does not have, and the names that it does not read."""
    asked = calls_of(package)
    missing = [route for route in asked if route not in routes]
    return missing + [f"{r}({n})" for r in routes for n in asked.get(r, ()) if n not in routes[r]]


def _is_class(symbol: str) -> bool:
    return "." not in symbol.partition(":")[2] and symbol.partition(":")[2][0].isupper()


@contextmanager
def wheel(requirement: str) -> Iterator[Traversable]:
    """The inside of a wheel of pip's index, which is deleted in the end."""
    with tempfile.TemporaryDirectory(prefix="rlsys-wheel-") as folder:
        words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", *words, requirement], check=True, timeout=900)
        (file,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            yield zipfile.Path(archive)


def read_record() -> dict[str, dict[str, Found]]:
    """Package -> version -> what `names_of` found there."""
    record = json.loads(RECORD.read_text())
    by_package: dict[str, dict[str, Found]] = {}
    for package, about in record.items():
        versions = about["versions"]
        by_package[package] = {version: {"symbols": {}, "routes": {}} for version in versions}
        for kind in ("symbols", "routes"):
            for name, runs in about[kind].items():
                for run, names in runs.items():
                    first, _, last = run.partition(" to ")
                    for version in versions[versions.index(first) : versions.index(last or first) + 1]:
                        by_package[package][version][kind][name] = names
    return by_package


def write_record(by_package: Mapping[str, Mapping[str, Found]]) -> None:
    """Each list of names stands once for all the versions in a row that have it."""
    record: dict[str, Any] = {}
    for package, by_version in by_package.items():
        versions = sorted(by_version, key=Version)
        record[package] = {"versions": versions}
        for kind in ("symbols", "routes"):
            names = sorted({name for version in versions for name in by_version[version][kind]})
            record[package][kind] = {
                name: _runs([(version, by_version[version][kind].get(name)) for version in versions]) for name in names
            }
    text = json.dumps(record, indent=1)
    RECORD.write_text(re.sub(r"\[\s+([^\]]*?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text) + "\n")


def _runs(entries: Sequence[tuple[str, list[str] | None]]) -> dict[str, list[str]]:
    """("0.1 to 0.3" -> names) of neighbours with the same names; without those that have none."""
    runs = [list(run) for _, run in groupby(entries, key=lambda entry: entry[1])]
    return {
        run[0][0] + (f" to {run[-1][0]}" if len(run) > 1 else ""): names
        for run in runs
        if (names := run[0][1]) is not None
    }


def main(requirements: Sequence[str]) -> None:
    wanted = requirements or [f"{package}=={version}" for package, of in VERSIONS.items() for version in of]
    by_package = read_record() if requirements else {package: {} for package in VERSIONS}
    for requirement in wanted:
        package, _, version = requirement.partition("==")
        with wheel(requirement) as root:
            by_package[package][version] = names_of(package, root)
        print(requirement, *lacking(package, by_package[package][version]["symbols"]), sep="\n  ")
    write_record(by_package)


if __name__ == "__main__":
    main(sys.argv[1:])
