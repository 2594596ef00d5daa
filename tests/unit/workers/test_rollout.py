"""A group of rollout workers, called as verl's tutorials call it."""

import gc

import pytest
import torch

from rlsys.config.schema.model import PolicyModelConfig
from rlsys.config.schema.rollout import RolloutConfig
from rlsys.data.start_assets import START_MODEL
from rlsys.interfaces import RolloutEngine
from rlsys.protocol import DataProto
from rlsys.rollout.hf.engine import HFRollout
from rlsys.single_controller.base import ClassWithInitArgs
from rlsys.single_controller.local import LocalWorkerGroup
from rlsys.single_controller.resource_pool import ResourcePool
from rlsys.utils.errors import WorkerError
from workers.build import EngineRun
from workers.rollout import MANY_OBJECTS, HFRolloutWorker


class Unbuilt(HFRolloutWorker):
    def build_engine(self, *_: object) -> RolloutEngine:
        assert not gc.isenabled()
        raise RuntimeError("no such engine")


def test_a_group_generates_sequences_without_a_fleet() -> None:
    model, run = PolicyModelConfig(path=str(START_MODEL)), EngineRun(device="cpu", nccl_timeout_s=60.0)
    cls = ClassWithInitArgs(HFRolloutWorker, model, RolloutConfig(), run, "auto")
    with LocalWorkerGroup(ResourcePool([1]), cls) as group:
        group.init_model()
        ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
        meta = {"response_length": 4, "pad_token_id": 0, "temperature": 1.0, "seed": 3}
        prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": (ids > 0).long()}, meta_info=meta)
        first, again = group.generate_sequences(prompts), group.generate_sequences(prompts)
    assert first.tensors["responses"].shape == (2, 4)
    assert torch.equal(first.tensors["prompts"], ids)
    assert torch.equal(first.tensors["responses"], again.tensors["responses"])


def test_an_engine_that_sleeps_spares_collections_what_was_compiled_since() -> None:
    model, run = PolicyModelConfig(path=str(START_MODEL)), EngineRun(device="cpu", nccl_timeout_s=60.0)
    cls = ClassWithInitArgs(HFRolloutWorker, model, RolloutConfig(), run, "auto")
    frozen = gc.get_freeze_count()
    with LocalWorkerGroup(ResourcePool([1]), cls) as group:
        group.init_model()
        kept = [[number] for number in range(MANY_OBJECTS)]
        group.sleep(("weights", "kv_cache"))
        assert len(gc.get_objects()) < MANY_OBJECTS / 2
        before = gc.get_freeze_count()
        few = [[number] for number in range(100)]
        group.sleep(("weights", "kv_cache"))
        assert gc.get_freeze_count() == before, "a few are not worth it, and might be garbage one day"
    assert len(kept) + len(few) > MANY_OBJECTS
    assert gc.get_freeze_count() <= frozen, "what was frozen may be collected again"


def test_what_training_has_freed_is_given_back_before_an_engine_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = PolicyModelConfig(path=str(START_MODEL)), EngineRun(device="cpu", nccl_timeout_s=60.0)
    cls, done = ClassWithInitArgs(HFRolloutWorker, model, RolloutConfig(), run, "auto"), list[str]()
    with LocalWorkerGroup(ResourcePool([1]), cls) as group:
        group.init_model()
        group.sleep(("kv_cache",))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
        monkeypatch.setattr(HFRollout, "wake", lambda self, tags: done.append("awake"))
        group.wake(("kv_cache",))
    assert done[:2] == ["freed", "awake"]


def test_garbage_is_collected_again_in_a_process_whose_engine_failed_to_start() -> None:
    model, run = PolicyModelConfig(path=str(START_MODEL)), EngineRun(device="cpu", nccl_timeout_s=60.0)
    cls = ClassWithInitArgs(Unbuilt, model, RolloutConfig(), run, "auto")
    with LocalWorkerGroup(ResourcePool([1]), cls) as group, pytest.raises(WorkerError, match="no such engine"):
        group.init_model()
    assert gc.isenabled()
