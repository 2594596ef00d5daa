"""The rollout: an engine that completes prompts with the weights it was last given."""

from __future__ import annotations

from typing import Any

import torch

from rlsys.config.schema.model import ModelConfig
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.engines.mesh import ensure_process_group
from rlsys.interfaces import RolloutEngine
from rlsys.protocol import DataProto
from rlsys.rollout.batch import generate_sequences
from rlsys.rollout.hf.engine import HFRollout, LoadFormat
from rlsys.single_controller.base import Worker
from rlsys.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlsys.weights.endpoints import WeightReceiver
from workers.build import EngineRun
from workers.colocated import learn_engine_layout, set_local_rollout
from workers.sglang import WEIGHTS_WAIT_S, RemoteReceiver, replica_of, serve_weights

MESH = "rollout"
BY_REPLICA: Any = make_nd_compute_dataproto_dispatch_fn(MESH)


class RolloutWorker(Worker, WeightReceiver):
    """One rank of a replica: an engine on this process's device; a backend says how it is built.

    A replica is `rollout.tensor_model_parallel_size` ranks that follow each other. All of them are asked for the same
    rows at the same time, and the first one answers for them.
    """

    def __init__(
        self, model: ModelConfig, rollout: GenerationConfig, run: EngineRun, load_format: LoadFormat = "dummy"
    ) -> None:
        """With `load_format` "dummy" the weights come with the first push, with "auto" from the model's folder."""
        self.model_cfg, self.cfg, self.run, self.load_format = model, rollout, run, load_format

    def build_engine(self, path: str, common: dict[str, Any]) -> RolloutEngine:
        """The engine over the model in `path`; `common` are the arguments that every backend takes."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine."""
        if self.run.num_threads:
            torch.set_num_threads(self.run.num_threads)
        assert self.model_cfg.path is not None, "the start model is resolved before workers start"
        size = self.cfg.tensor_model_parallel_size
        if size > 1:
            ensure_process_group(self.run.device, timeout_s=self.run.nccl_timeout_s)
        self._register_dispatch_collect_info(MESH, self.rank // size, self.rank % size == 0)
        common = {
            "load_format": self.load_format,
            "dtype": self.run.compute_dtype(self.cfg.dtype),
            "device": self.run.device,
            "seed": self.cfg.seed,
            "max_num_seqs": self.cfg.max_num_seqs,
            "max_num_batched_tokens": self.cfg.max_num_batched_tokens,
            "max_model_len": self.cfg.max_model_len,
            "full_determinism": self.cfg.full_determinism,
            "rank": self.rank,
        }
        self.engine = self.build_engine(self.model_cfg.path, common)
        set_local_rollout(self.engine)

    @register(dispatch_mode=BY_REPLICA)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Complete prompts as their meta_info says (see rlsys.rollout.batch)."""
        return generate_sequences(self.engine, prompts)

    @register(dispatch_mode=BY_REPLICA)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`rollout_log_probs` (B, R) of given responses under the served weights."""
        found = self.engine.compute_log_prob(data, temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"rollout_log_probs": found})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, tags: tuple[str, ...]) -> None:
        self.engine.sleep(tags)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self, tags: tuple[str, ...]) -> None:
        self.engine.wake(tags)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def health(self) -> dict[str, Any]:
        return self.engine.health()

    def close(self) -> None:
        """End the engine, if it was ever built."""
        if "engine" in vars(self):
            self.engine.close()


class HFRolloutWorker(RolloutWorker):
    """A transformers model."""

    def build_engine(self, path: str, common: dict[str, Any]) -> RolloutEngine:
        return HFRollout.from_path(path, **common)


class VLLMRolloutWorker(RolloutWorker):
    """vLLM in the worker's process."""

    def build_engine(self, path: str, common: dict[str, Any]) -> RolloutEngine:
        from rlsys.rollout.engine_weights import LiveWeights
        from rlsys.rollout.vllm.engine import VLLMRollout

        cfg = self.cfg
        engine = VLLMRollout(
            path,
            tensor_parallel_size=cfg.tensor_model_parallel_size,
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            kv_cache_gib=cfg.kv_cache_gib,
            enforce_eager=cfg.enforce_eager,
            engine_kwargs={
                "enable_chunked_prefill": cfg.enable_chunked_prefill,
                "enable_prefix_caching": cfg.enable_prefix_caching,
                "disable_log_stats": cfg.disable_log_stats,
                **_graphs(cfg),
                **cfg.engine_kwargs.vllm,
            },
            keep_asleep=self.run.keep_asleep,
            **common,
        )
        if isinstance(engine.weights, LiveWeights):
            learn_engine_layout(engine.weights, keep=self.load_format == "auto")
        return engine


def _graphs(cfg: GenerationConfig) -> dict[str, Any]:
    """vLLM's arguments for its CUDA graphs, where it is not to choose itself."""
    most, sizes = cfg.cuda_graph_max_bs, cfg.cudagraph_capture_sizes
    named = {"max_cudagraph_capture_size": most, "cudagraph_capture_sizes": sizes and sorted(sizes)}
    return {name: value for name, value in named.items() if value is not None}


class SGLangRolloutWorker(RolloutWorker, RemoteReceiver):
    """SGLang: its engine in this process, its scheduler in a child process that holds the weights."""

    def build_engine(self, path: str, common: dict[str, Any]) -> RolloutEngine:
        from rlsys.rollout.sglang.engine import SGLangRollout

        cfg = self.cfg
        engine = SGLangRollout(
            path,
            replica=replica_of(self.rank, cfg.tensor_model_parallel_size, ranks_per_host=self.local_world_size),
            gpu_memory_utilization=cfg.gpu_memory_utilization,
            kv_cache_gib=cfg.kv_cache_gib,
            enforce_eager=cfg.enforce_eager,
            enable_chunked_prefill=cfg.enable_chunked_prefill,
            enable_prefix_caching=cfg.enable_prefix_caching,
            cuda_graph_max_bs=cfg.cuda_graph_max_bs,
            cudagraph_capture_sizes=cfg.cudagraph_capture_sizes,
            disable_log_stats=cfg.disable_log_stats,
            engine_kwargs=cfg.engine_kwargs.sglang,
            keep_asleep=self.run.keep_asleep,
            methods=serve_weights,
            **common,
        )
        engine.remote.call("learn", self.load_format == "auto", deadline_s=WEIGHTS_WAIT_S)
        return engine


ROLLOUT_WORKERS: dict[str, type[RolloutWorker]] = {
    "hf": HFRolloutWorker,
    "vllm": VLLMRolloutWorker,
    "sglang": SGLangRolloutWorker,
}
