"""The rollout workers: engines that complete prompts with the weights that were pushed last."""

import gc
from collections.abc import Callable

import torch

from rlsys.config.schema.model import ModelFolderConfig
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.engines.mesh import ensure_process_group
from rlsys.interfaces import RolloutEngine
from rlsys.protocol import DataProto
from rlsys.rollout.base import EngineContext, LoadFormat
from rlsys.rollout.batch import generate_sequences
from rlsys.single_controller.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlsys.types import ModelRequest, ResponseDelta
from rlsys.utils.errors import ConfigError
from rlsys.utils.hub import ensure_downloaded
from rlsys.utils.plugins import import_libraries
from rlsys.weights.endpoints import WeightReceiver
from workers.base import ProfiledWorker
from workers.build import EngineRun
from workers.colocated import learn_engine_layout, set_local_rollout
from workers.sglang import WEIGHTS_WAIT_S, RemoteReceiver, replica_of, weight_methods

MESH, MANY_OBJECTS = "rollout", 50_000
BY_REPLICA = make_nd_compute_dataproto_dispatch_fn(MESH)


def freeze_objects() -> None:
    """Exclude the objects of a built engine from garbage collections, of which vLLM makes one whenever it sleeps.

    One over the objects of a compiled 7B model took 0.18 s (H200).
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


class RolloutWorker(ProfiledWorker, WeightReceiver):
    """One rank of a replica: an engine on this process's device, which a subclass builds.

    A replica is `rollout.replica_size` consecutive ranks. All of them get the same rows at the same time.
    """

    def __init__(
        self, model: ModelFolderConfig, rollout: GenerationConfig, run: EngineRun, load_format: LoadFormat = "dummy"
    ) -> None:
        """With `load_format` "dummy" the weights come with the first push, with "auto" from the model's folder."""
        self.model_cfg, self.cfg, self.run, self.load_format = model, rollout, run, load_format

    def build_engine(self, path: str, context: EngineContext) -> RolloutEngine:
        """The engine over the model in `path`, configured by `self.cfg`."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine."""
        import_libraries(self.run.external_libs)
        assert self.model_cfg.path is not None, "the start model is resolved before workers start"
        ensure_downloaded(self.model_cfg.path)
        size = self.cfg.replica_size
        if self.cfg.expert_parallel_size > 1 and self.run.device == "cpu":
            raise ConfigError("the engines' kernels for CPUs need all experts: set rollout.expert_parallel_size=1")
        if size > 1:
            ensure_process_group(self.run.device, timeout_s=self.run.nccl_timeout_s)
        self._register_dispatch_collect_info(MESH, self.rank // size, self.rank % size == 0)
        context = EngineContext(self.run.device, self.load_format, self.run.offload_on_sleep, self.rank)
        gc.disable()  # looking for garbage among all that an engine imports takes a tenth of its start
        try:
            self.engine = self.build_engine(self.model_cfg.path, context)
        finally:
            gc.enable()
        freeze_objects()
        if self.load_format == "dummy":
            set_local_rollout(self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exchange(self, new: list[ModelRequest], wait_s: float, cancel: list[str]) -> list[ResponseDelta]:
        """Hand in requests and take what was sampled (see RolloutEngine); the first rank of a replica answers."""
        return self.engine.exchange(new, wait_s=wait_s, cancel=cancel)

    @register(dispatch_mode=BY_REPLICA)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The rows completed by this engine alone, outside of a fleet (see `rlsys.rollout.batch`)."""
        return generate_sequences(self.engine, prompts)

    @register(dispatch_mode=BY_REPLICA)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`rollout_log_probs` (B, R) of given responses under the served weights."""
        log_probs = self.engine.compute_log_prob(data, temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"rollout_log_probs": log_probs})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, tags: tuple[str, ...]) -> None:
        freeze_objects()
        self.engine.sleep(tags)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self, tags: tuple[str, ...]) -> None:
        torch.cuda.empty_cache()  # what training in this process has freed, which the engine cannot use otherwise
        self.engine.wake(tags)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def health(self) -> dict[str, object]:
        return self.engine.health()

    def close(self) -> None:
        """Close the engine if it was built."""
        gc.unfreeze()
        if "engine" in vars(self):
            self.engine.close()


class HFRolloutWorker(RolloutWorker):
    """A transformers model."""

    def build_engine(self, path: str, context: EngineContext) -> RolloutEngine:
        from rlsys.rollout.hf.engine import HFRollout

        return HFRollout.from_path(path, self.cfg, context)


class VLLMRolloutWorker(RolloutWorker):
    """vLLM in the worker's process."""

    def build_engine(self, path: str, context: EngineContext) -> RolloutEngine:
        from rlsys.rollout.engine_weights import EngineWeights
        from rlsys.rollout.vllm.engine import VLLMRollout

        engine = VLLMRollout(path, self.cfg, context)
        if isinstance(engine.weights, EngineWeights):
            learn_engine_layout(engine.weights, keep=context.load_format == "auto")
        return engine


class SGLangRolloutWorker(RolloutWorker, RemoteReceiver):
    """SGLang: its engine in this process, its scheduler in a child process that holds the weights."""

    def build_engine(self, path: str, context: EngineContext) -> RolloutEngine:
        from rlsys.rollout.sglang.engine import SGLangRollout

        replica = replica_of(self.rank, self.cfg.replica_size, ranks_per_host=self.local_world_size)
        engine = SGLangRollout(path, self.cfg, context, replica=replica, methods=weight_methods)
        engine.remote.call("learn", context.load_format == "auto", deadline_s=WEIGHTS_WAIT_S)
        return engine

    def on_profile(self, method: Callable[..., None], *args: str) -> None:
        self._call(method.__name__, *args)
