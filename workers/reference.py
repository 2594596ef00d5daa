"""Frozen policies: the reference that KL terms compare with, and teachers."""

from collections.abc import Sequence

import torch

from rlsys.config.schema.actor import ActorRolloutRefConfig
from rlsys.config.schema.model import PolicyModelConfig
from rlsys.interfaces import Output, Part
from rlsys.protocol import DataProto
from rlsys.single_controller.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.base import BY_MESH, MESH, EngineWorker
from workers.build import EngineRun, build_reference_engine


class ReferenceWorker(EngineWorker):
    """One rank of the reference."""

    def __init__(self, config: ActorRolloutRefConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the frozen model."""
        self.use_engine(build_reference_engine(self.cfg, self.run))

    @register(dispatch_mode=BY_MESH)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` (B, R) at the sampling temperature."""
        outputs = self.engine.forward(data, ("log_probs",), temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})


class TeacherWorker(EngineWorker):
    """One rank of the teachers; `topk` is the number of most likely tokens to score, 0 for the sampled ones."""

    def __init__(
        self, models: Sequence[PolicyModelConfig], config: ActorRolloutRefConfig, topk: int, run: EngineRun
    ) -> None:
        self.models, self.cfg, self.topk, self.run = models, config, topk, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the frozen models."""
        self.engines = [build_reference_engine(self.cfg, self.run, model) for model in self.models]
        self.use_engine(self.engines[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, parts: tuple[Part, ...], device: str) -> None:
        """Move the parameters of all teachers to another device."""
        for engine in self.engines:
            engine.move(parts, device)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH, auto_padding=True))
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """`teacher_log_probs` (B, R) at the sampling temperature, each row's by the engine of its number in `teacher`.

        Of the K most likely tokens they are (B, R, K), beside `teacher_ids`, int32.
        """
        topk = min(self.topk, *(engine.config.get_text_config().vocab_size for engine in self.engines))
        names: tuple[Output, ...] = ("topk_log_probs", "topk_ids") if topk else ("log_probs",)
        shape = (*data.tensors["responses"].shape, topk) if topk else data.tensors["responses"].shape
        scored = {name: torch.zeros(shape) for name in names}
        for number, engine in enumerate(self.engines):
            rows = (data.tensors["teacher"] == number).nonzero()[:, 0]
            temperature = data.meta_info["temperature"]
            outputs = engine.forward(data.select_idxs(rows), names, temperature=temperature, topk=topk)
            for name, values in scored.items():
                values[rows] = outputs[name].cpu()
        columns = {"teacher_log_probs": scored[names[0]]}
        if topk:
            columns["teacher_ids"] = scored["topk_ids"].int()
        return DataProto.from_dict(columns)
